"""Tables out of a result: for the terminal by rich, for documents in Markdown. Both render the same sections."""
from __future__ import annotations

import dataclasses

from gnnaccel.profile.bench import metrics, targets
from gnnaccel.profile.bench.result import Record, Result

MISSING = "-"


@dataclasses.dataclass(frozen=True)
class Section:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...] = ()


def sections(result: Result) -> list[Section]:
    """What there is to show; sections without rows are left out."""
    made = [_layers(result), _floors(result), _small(result), _kernels(result), _targets(result)]
    return [section for section in made if section.rows]


def markdown(result: Result) -> str:
    """All sections as Markdown."""
    lines = [_headline(result), ""]
    for section in sections(result):
        lines += [f"### {section.title}", "", _line(section.columns), _line(["---"] * len(section.columns))]
        lines += [_line(row) for row in section.rows]
        lines += [""] + [f"* {note}" for note in section.notes] + ([""] if section.notes else [])
    return "\n".join(lines)


def show(result: Result, style: str = "rich") -> None:
    """Print to standard output; without rich installed, Markdown."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        style = "markdown"
    if style == "markdown":
        print(markdown(result))
        return
    console = Console()
    if not console.is_terminal:
        # Into a file, rich would wrap the columns at 80 characters.
        console = Console(width=200)
    console.print(_headline(result), markup=False)
    for section in sections(result):
        table = Table(*section.columns, title=section.title, title_justify="left")
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
        for note in section.notes:
            console.print(f"  {note}", markup=False, highlight=False)


def _layers(result: Result) -> Section:
    columns = ("shape", "layer", "mode", "native ms", "compiled ms", "gnnaccel ms", "x native", "x compiled",
               "floor ms", "x floor", "peak MiB native", "peak MiB gnnaccel", "kept MiB", "difference", "route")
    rows, notes = [], {}
    for cell in metrics.cells(result):
        if not cell.kind.startswith("layer"):
            continue
        times = [_time(cell, impl, notes) for impl in metrics.IMPLS]
        shape = f"{cell.shape} (cpu)" if cell.device == "cpu" else cell.shape
        rows.append((shape, cell.layer, cell.mode, *times, _ratio(cell.metric("vs_native")),
                     _ratio(cell.metric("vs_compiled")), number(cell.floor.ms if cell.floor else None),
                     _ratio(cell.metric("vs_floor")), number(cell.value("native", "peak_mib")),
                     number(cell.value("gnnaccel", "peak_mib")), number(cell.value("gnnaccel", "resident_mib")),
                     _difference(cell), cell.route or MISSING))
    return Section("Layers: PyG natively, under torch.compile, and through gnnaccel", columns, rows, _notes(notes))


def _floors(result: Result) -> Section:
    rows = [(r.shape, r.layer, r.impl, number(r.ms) if r.timing else r.error or MISSING)
            for r in result.find(kind="floor")]
    return Section("Floor: every edge's row gathered once", ("shape", "width", "degrees", "ms"), rows)


def _small(result: Result) -> Section:
    rows, notes = [], {}
    for cell in metrics.cells(result):
        if cell.kind in ("fresh", "structure"):
            native, ours = _time(cell, "native", notes), _time(cell, "gnnaccel", notes)
            rows.append((cell.kind, cell.shape, cell.layer, native, ours, _ratio(cell.metric("vs_native"))))
        elif cell.kind == "overhead":
            rows.append((cell.kind, cell.shape, cell.layer, MISSING, _overhead(cell.by["gnnaccel"], notes), MISSING))
    columns = ("kind", "shape", "what", "native ms", "gnnaccel ms", "x native")
    return Section("Fresh batches, structure building, overhead of a memoised call", columns, rows, _notes(notes))


def _kernels(result: Result) -> Section:
    rows, notes = [], {}
    for cell in metrics.cells(result):
        if cell.kind == "kernel":
            rows.append((cell.shape, cell.layer, cell.mode, _time(cell, "gnnaccel", notes),
                         number(cell.floor.ms if cell.floor else None), _ratio(cell.metric("vs_floor")),
                         number(cell.value("gnnaccel", "peak_mib"))))
    columns = ("shape", "attention", "mode", "ms", "floor ms", "x floor", "peak MiB")
    return Section("Raw attention kernels", columns, rows, _notes(notes))


def _targets(result: Result) -> Section:
    words = {True: "met", False: "MISSED", None: "not measured"}
    rows = [(verdict.target.text(), number(verdict.value), words[verdict.met]) for verdict in targets.judge(result)]
    if all(row[2] == words[None] for row in rows):
        rows = []
    return Section("Targets", ("target", "measured", ""), rows, tuple(r.error for r in result.find(kind="note")))


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return MISSING if value is None else f"{number(value)}x"


def _time(cell: metrics.Cell, impl: str, notes: dict[str, str]) -> str:
    """Milliseconds, or a word for the failure whose full text goes into ``notes``."""
    record = cell.by.get(impl)
    if record is None:
        return MISSING
    if record.error is None:
        return number(record.ms)
    if len(record.error) <= 16:
        return record.error
    return f"failed [{notes.setdefault(record.error, str(len(notes) + 1))}]"


def _overhead(record: Record, notes: dict[str, str]) -> str:
    if record.error:
        return f"failed [{notes.setdefault(record.error, str(len(notes) + 1))}]"
    return ", ".join(f"{name.removesuffix('_us')} {number(value)} us" for name, value in record.values.items())


def _notes(notes: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"[{mark}] {text}" for text, mark in notes.items())


def _difference(cell: metrics.Cell) -> str:
    """The largest relative L2 difference between native's and gnnaccel's output and gradient."""
    if cell.check is None:
        return MISSING
    return f"{cell.difference:.1e}" if cell.difference is not None else cell.check.error or MISSING


def _headline(result: Result) -> str:
    known = result.provenance
    versions = ", ".join(f"{name} {known[name]}" for name in ("torch", "cuda", "cupy", "torch_geometric")
                         if known.get(name))
    where, commit = known.get("gpu") or "CPU", known.get("commit") or "unknown"
    return f"{where}; {versions}; {known.get('date', '')}; commit {commit}"


def _line(cells) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"
