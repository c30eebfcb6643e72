"""Tables for a terminal: by rich where it is installed, else in plain columns."""
from __future__ import annotations

import io
import shutil
from collections.abc import Sequence

_WIDTH = 150  # where the output is no terminal, so that lines in files are not folded early
_ENDLESS = 10**6


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]],
          right: Sequence[str] = ()) -> str:
    """``rows`` of texts under ``columns``; those in ``right`` are numbers. Ends with a newline. In
    a narrow terminal cells are folded between words; the first column, which names the row, and
    numbers stay whole."""
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    try:
        from rich.box import SIMPLE_HEAD
        from rich.cells import cell_len
        from rich.console import Console
        from rich.measure import Measurement
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # it is small, but not everywhere; the columns say the same
        return _plain(title, columns, texts, right)
    made = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for place, (column, *cells) in enumerate(zip(columns, *texts)):
        whole = place == 0 or column in right
        parts = (column, *cells) if whole else " ".join((column, *cells)).split()
        made.add_column(column, justify="right" if column in right else "left", overflow="fold",
                        no_wrap=whole, min_width=max(map(cell_len, parts), default=0))
    for row in texts:
        made.add_row(*map(Text, row))  # as it is: names may hold what rich takes for markup
    out, terminal = io.StringIO(), shutil.get_terminal_size((_WIDTH, 24)).columns
    # given a width alone, rich makes 80 of it where the environment looks like a dumb terminal's
    console = Console(file=out, width=_ENDLESS, height=24, color_system=None, force_terminal=False,
                      force_jupyter=False)
    console.print(made, width=max(terminal, Measurement.get(console, console.options,
                                                            made).minimum))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _plain(title: str, columns: Sequence[str], rows: list[list[str]], right: Sequence[str]) -> str:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows)]
    lines = [title, "  ".join(c.ljust(w) for c, w in zip(columns, widths)).rstrip(),
             "  ".join("-" * w for w in widths)]
    for row in rows:
        lines.append("  ".join(cell.rjust(w) if column in right else cell.ljust(w)
                               for column, cell, w in zip(columns, row, widths)).rstrip())
    return "\n".join(lines) + "\n"


def milliseconds(value: float | None) -> str | None:
    """Milliseconds in three digits."""
    return None if value is None else f"{value:.0f}" if 999.5 <= value < 1e7 else f"{value:.3g}"


def times(native: float | None, ours: float | None) -> str | None:
    """How often ``ours`` fits into ``native``."""
    if not native or not ours:
        return None
    return f"{native / ours:.1f}x" if native < 1e3 * ours else f"{native / ours:.3g}x"


def size(count: float | None) -> str | None:
    """Bytes in MiB."""
    return None if count is None else f"{count / 2**20:.1f}"
