"""Tables out of a result: for the terminal by rich, for documents in Markdown. Both render the same
sections."""
from __future__ import annotations

from gnnaccel.profile.bench import (aggregate_table, dgl_table, metrics, once_table, relation_table,
                                    script_table, targets, text)
from gnnaccel.profile.bench.result import Record, Result


def sections(result: Result) -> list[text.Section]:
    """What there is to show; sections without rows are left out."""
    made = [_layers(result), _floors(result), _small(result), _kernels(result), _quantized(result),
            _models(result), *relation_table.sections(result), once_table.section(result),
            dgl_table.section(result), *aggregate_table.sections(result),
            script_table.section(result), _targets(result), _left_out(result)]
    return [section for section in made if section.rows]


def markdown(result: Result) -> str:
    """All sections as Markdown."""
    lines = [_headline(result), ""]
    for section in sections(result):
        lines += [f"### {section.title}", "", _line(section.columns),
                  _line(["---"] * len(section.columns))]
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


def _layers(result: Result) -> text.Section:
    columns = ("shape", "layer", "mode", "native ms", "compiled ms", "gnnaccel ms", "x native",
               "x compiled", "floor ms", "x floor", "peak MiB native", "peak MiB gnnaccel",
               "kept MiB", "difference", "route")

    def row(cell: metrics.Cell, notes: dict[str, str]) -> tuple[str, ...]:
        return (text.shape(cell), cell.layer, cell.mode,
                *(text.time(cell, impl, notes) for impl in metrics.IMPLS),
                text.ratio(cell.metric("vs_native")), text.ratio(cell.metric("vs_compiled")),
                text.floor(cell), text.ratio(cell.metric("vs_floor")), *text.memory(cell),
                text.difference(cell), cell.route or text.MISSING)

    return text.table("Layers: PyG natively, under torch.compile, and through gnnaccel", columns,
                      (cell for cell in metrics.cells(result) if cell.kind.startswith("layer")),
                      row)


def _floors(result: Result) -> text.Section:
    rows = [(r.shape, r.layer, r.impl, text.number(r.ms) if r.timing else r.error or text.MISSING)
            for r in result.find(kind="floor")]
    return text.Section("Floor: every edge's row gathered once",
                        ("shape", "width", "degrees", "ms"), rows)


def _small(result: Result) -> text.Section:
    def row(cell: metrics.Cell, notes: dict[str, str]) -> tuple[str, ...]:
        place = cell.kind, cell.shape, cell.layer
        if cell.kind == "overhead":
            return (*place, text.MISSING, _overhead(cell.by["gnnaccel"], notes), text.MISSING)
        return (*place, text.time(cell, "native", notes), text.time(cell, "gnnaccel", notes),
                text.ratio(cell.metric("vs_native")))

    return text.table("Fresh batches, structure building, overhead of a memoised call",
                      ("kind", "shape", "what", "native ms", "gnnaccel ms", "x native"),
                      _of(result, "fresh", "structure", "overhead"), row)


def _kernels(result: Result) -> text.Section:
    return text.table(
        "Raw attention kernels",
        ("shape", "attention", "mode", "ms", "floor ms", "x floor", "peak MiB"),
        _of(result, "kernel"), lambda cell, notes: (
            cell.shape, cell.layer, cell.mode, text.time(cell, "gnnaccel", notes),
            text.floor(cell), text.ratio(cell.metric("vs_floor")),
            text.number(cell.value("gnnaccel", "peak_mib"))))


def _quantized(result: Result) -> text.Section:
    narrow = ("bf16", "int8")

    def row(cell: metrics.Cell, notes: dict[str, str]) -> tuple[str, ...]:
        return (cell.shape, cell.layer, cell.mode,
                *(text.time(cell, impl, notes) for impl in ("fp32", *narrow)),
                *(text.ratio(cell.metric(f"{impl}_gain")) for impl in narrow),
                *(_away(cell, impl) for impl in narrow))

    columns = ("shape", "layer", "mode", "fp32 ms", "bf16 ms", "int8 ms", "x bf16", "x int8",
               "difference bf16", "difference int8")
    return text.table("Rows in bf16 and int8, quantizing included", columns,
                      _of(result, "quantized"), row)


def _models(result: Result) -> text.Section:
    impls = ("bf16", "int8", "int8 all")

    def row(cell: metrics.Cell, notes: dict[str, str]) -> tuple[str, ...]:
        return (cell.shape, cell.layer,
                *(text.time(cell, impl, notes) for impl in ("fp32", *impls)),
                *(text.ratio(cell.metric(f"{impl}_gain")) for impl in impls), _away(cell, "int8"))

    columns = ("shape", "model", "fp32 ms", "bf16 ms", "int8 ms", "all int8 ms", "x bf16",
               "x int8", "x all int8", "difference int8")
    return text.table("Training steps of models in reduced precision (all: the layer before the "
                      "softmax too)", columns, _of(result, "quantized-model"), row)


def _of(result: Result, *kinds: str) -> list[metrics.Cell]:
    return [cell for cell in metrics.cells(result) if cell.kind in kinds]


def _away(cell: metrics.Cell, impl: str) -> str:
    """The difference of an implementation's results from those in fp32."""
    value = cell.value(impl, "rel_l2")
    return text.MISSING if value is None else f"{value:.1e}"


def _targets(result: Result) -> text.Section:
    """Verdicts of the suites of which something was measured."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    rows = []
    for wanted in targets.SUITES:
        verdicts = targets.judge(result, wanted)
        if any(verdict.met is not None for verdict in verdicts):
            rows += [(verdict.target.text(), text.number(verdict.value), words[verdict.met])
                     for verdict in verdicts]
    return text.Section("Targets", ("target", "measured", ""), rows)


def _left_out(result: Result) -> text.Section:
    rows = [(record.shape or text.MISSING, record.layer, record.error or text.MISSING)
            for record in result.find(kind="note")]
    return text.Section("What was left out", ("shape", "what", "why"), list(dict.fromkeys(rows)))


def _overhead(record: Record, notes: dict[str, str]) -> str:
    if record.error:
        return text.failure(record, notes)
    return ", ".join(f"{name.removesuffix('_us')} {text.number(value)} us"
                     for name, value in record.values.items())


def _headline(result: Result) -> str:
    known = result.provenance
    versions = ", ".join(f"{name} {known[name]}" for name in ("torch", "cuda", "cupy",
                                                              "torch_geometric", "dgl")
                         if known.get(name))
    where, commit = known.get("gpu") or "CPU", known.get("commit") or "unknown"
    return f"{where}; {versions}; {known.get('date', '')}; commit {commit}"


def _line(cells) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"
