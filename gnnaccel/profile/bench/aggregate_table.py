"""The tables of the suite over plain aggregation."""
from __future__ import annotations

from gnnaccel.profile.bench import metrics, text
from gnnaccel.profile.bench.result import Result


def sections(result: Result) -> list[text.Section]:
    """All of them; those without rows are for the caller to leave out."""
    cells = metrics.cells(result)
    return [_layers(cells), _sums(cells), _operations(cells)]


def _layers(cells: list[metrics.Cell]) -> text.Section:
    columns = ("shape", "layer", "mode", "native ms", "compiled ms", "gnnaccel ms", "10 % to 90 %",
               "x native", "x compiled", "x DGL CUDA", "x floor", "peak MiB native",
               "peak MiB gnnaccel", "kept MiB", "difference", "route")
    rows: list[tuple[str, ...]] = []
    notes: dict[str, str] = {}
    for cell in cells:
        if not cell.kind.startswith(("aggregate", "fresh-plain")):
            continue
        shape = f"{cell.shape} (cpu)" if cell.device == "cpu" else cell.shape
        ratios = (text.ratio(cell.metric(name)) for name in ("vs_native", "vs_compiled",
                                                             "vs_dgl_cuda", "vs_floor"))
        memory = (cell.value("native", "peak_mib"), cell.value("gnnaccel", "peak_mib"),
                  cell.value("gnnaccel", "resident_mib"))
        rows.append((shape, cell.layer, cell.mode,
                     *(text.time(cell, impl, notes) for impl in metrics.IMPLS), _spread(cell),
                     *ratios, *map(text.number, memory), text.difference(cell),
                     cell.route or text.MISSING))
    return text.Section("Plain layers: PyG natively, under torch.compile, and through gnnaccel",
                        columns, rows, text.notes_of(notes))


def _spread(cell: metrics.Cell) -> str:
    record = cell.by.get("gnnaccel")
    timed = record.timing if record else None
    return (f"{text.number(timed['p10_ms'])} to {text.number(timed['p90_ms'])}" if timed
            else text.MISSING)


def _sums(cells: list[metrics.Cell]) -> text.Section:
    columns = ("shape", "sum", "mode", "cuSPARSE ms", "gnnaccel ms", "x cuSPARSE", "floor ms",
               "x floor")
    rows: list[tuple[str, ...]] = []
    notes: dict[str, str] = {}
    for cell in cells:
        if cell.kind.startswith("spmm"):
            rows.append((cell.shape, cell.layer, cell.mode, text.time(cell, "cusparse", notes),
                         text.time(cell, "gnnaccel", notes), text.ratio(cell.metric("vs_cusparse")),
                         text.number(cell.floor.ms if cell.floor else None),
                         text.ratio(cell.metric("vs_floor")) if cell.mode == "forward"
                         else text.MISSING))
    return text.Section("Weighted sums of neighbours, and torch.sparse's product (cuSPARSE on a "
                        "GPU)", columns, rows,
                        text.notes_of(notes))


def _operations(cells: list[metrics.Cell]) -> text.Section:
    columns = ("shape", "operation", "mode", "ms", "ms for its bytes", "x bytes")
    rows: list[tuple[str, ...]] = []
    notes: dict[str, str] = {}
    for cell in cells:
        if cell.kind == "operation":
            rows.append((cell.shape, cell.layer, cell.mode, text.time(cell, "gnnaccel", notes),
                         text.number(cell.value("gnnaccel", "floor_ms")),
                         text.ratio(metrics.ratio(cell.ms("gnnaccel"),
                                                  cell.value("gnnaccel", "floor_ms")))))
    return text.Section("Single operations, and the time to copy the bytes that each must move",
                        columns, rows, text.notes_of(notes))
