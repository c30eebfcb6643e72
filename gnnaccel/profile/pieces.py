"""What a page is made of: tables, bars, tiles and legends as HTML. Everything given is text and is
escaped here."""
from __future__ import annotations

import html
from collections.abc import Callable, Sequence

Bar = tuple[str, float, str]  # css class, value, words behind it
# widths of a chart's two drawings; the style sheet shows the one that fits
WIDE, NARROW = 760.0, 326.0


def escape(value: object) -> str:
    return html.escape(str(value), quote=True)


def css(*classes: str) -> str:
    found = " ".join(filter(None, classes))
    return f' class="{found}"' if found else ""


def section(title: str, about: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(about)}</p>{''.join(parts)}</section>"


def tiles(found: Sequence[tuple[str, str, str, str]]) -> str:
    """(label, value, what it is of, css class of the value) each."""
    return '<div class="tiles">' + "".join(
        '<div class="tile"><div '
        f'class="soft">{escape(label)}</div><div{css("value", kind)}>{escape(value)}</div>'
        f'<div class="soft small">{escape(about)}</div></div>'
        for label, value, about, kind in found) + "</div>"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]],
          numbers: Sequence[str] = ()) -> str:
    """Cells are texts, or (text, css class) pairs. Columns in which no row has anything are left
    out. In a narrow window each row becomes a card, whose first cell is its title."""
    pairs = [[cell if isinstance(cell, tuple) else (cell, "") for cell in row] for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i][0] is not None for row in pairs)]
    kinds = ["n" if column in numbers else "" for column in columns]
    heads = "".join(f"<th{css(kinds[i])}>{escape(columns[i])}</th>" for i in kept)
    lines = []
    for row in pairs:
        cells = (
            f'<td{css(kinds[i], row[i][1], "none" if row[i][0] is None else "")} data-label="{escape(columns[i])}">'
            f'{escape("–" if row[i][0] is None else row[i][0])}</td>' for i in kept)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def bars(rows: Sequence[tuple[str, str | None, Sequence[Bar]]]) -> str:
    """Horizontal bars on one scale: ``rows`` of (name, what it is, bars)."""
    most = max((value for _, _, group in rows for _, value, _ in group), default=0.0) or 1.0
    lines = []
    for name, about, group in rows:
        below = f'<span class="soft small">{escape(about)}</span>' if about else ""
        drawn = "".join(
            f'<div class="bar"><span class="fill {kind}" '
            f'style="width:calc((100% - 11rem) * {value / most:.4f})">'
            f"</span><span>{escape(words)}</span></div>" for kind, value, words in group)
        lines.append(
            '<div class="row"><div '
            f'class="name">{escape(name)}{below}</div><div>{drawn}</div></div>')
    return f'<div class="bars">{"".join(lines)}</div>'


def chart(draw: Callable[[float], str]) -> str:
    """A drawing for wide windows and one for narrow ones, so that text is never scaled."""
    return (
        f'<div class="chart big">{draw(WIDE)}</div><div class="chart little">{draw(NARROW)}</div>')


def legend(*keys: tuple[str, str]) -> str:
    """(css class, words) each; classes that begin with "roof" are lines, others areas."""
    return '<p class="legend">' + "".join(
        '<span><span class="key '
        f'{kind}{" stroke" if kind.startswith("roof") else ""}"></span>{escape(words)}</span>'
        for kind, words in keys) + "</p>"


# --- numbers --------------------------------------------------------------------------------------

def number(value: float | None) -> str | None:
    """Three digits, never an exponent below 1e15."""
    if value is None:
        return None
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e15 else f"{value:.3g}"


def duration(ms: float) -> str:
    """Milliseconds in the unit that fits."""
    if ms >= 999.5:
        return f"{number(ms / 1e3)} s"
    return f"{ms * 1e3:.3g} µs" if 0 < ms < 0.9995 else f"{ms:.3g} ms"


def percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def metric(value: float) -> str:
    """A number with a metric prefix behind it: 39.6 G."""
    for unit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * unit:
            return f"{number(value / unit)} {letter}"
    return f"{value:.3g} "


def some(names: Sequence[str], most: int = 5) -> str:
    """Names once each, the first few of many."""
    found = list(dict.fromkeys(names))
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
