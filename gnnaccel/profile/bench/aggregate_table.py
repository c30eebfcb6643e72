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

    def row(cell: metrics.Cell, notes: dict[str, str]) -> tuple[str, ...]:
        return (text.shape(cell), cell.layer, cell.mode,
                *(text.time(cell, impl, notes) for impl in metrics.IMPLS), text.spread(cell),
                *(text.ratio(cell.metric(name)) for name in ("vs_native", "vs_compiled",
                                                             "vs_dgl_cuda", "vs_floor")),
                *text.memory(cell), text.difference(cell), cell.route or text.MISSING)

    return text.table("Plain layers: PyG natively, under torch.compile, and through gnnaccel",
                      columns, (cell for cell in cells
                                if cell.kind.startswith(("aggregate", "fresh-plain"))), row)


def _sums(cells: list[metrics.Cell]) -> text.Section:
    columns = ("shape", "sum", "mode", "cuSPARSE ms", "gnnaccel ms", "x cuSPARSE", "floor ms",
               "x floor")

    def row(cell: metrics.Cell, notes: dict[str, str]) -> tuple[str, ...]:
        floor = text.ratio(cell.metric("vs_floor")) if cell.mode == "forward" else text.MISSING
        return (cell.shape, cell.layer, cell.mode, text.time(cell, "cusparse", notes),
                text.time(cell, "gnnaccel", notes), text.ratio(cell.metric("vs_cusparse")),
                text.floor(cell), floor)

    return text.table("Weighted sums of neighbours, and torch.sparse's product (cuSPARSE on a "
                      "GPU)", columns, (cell for cell in cells if cell.kind.startswith("spmm")),
                      row)


def _operations(cells: list[metrics.Cell]) -> text.Section:
    columns = ("shape", "operation", "mode", "ms", "ms for its bytes", "x bytes")

    def row(cell: metrics.Cell, notes: dict[str, str]) -> tuple[str, ...]:
        floor = cell.value("gnnaccel", "floor_ms")
        return (cell.shape, cell.layer, cell.mode, text.time(cell, "gnnaccel", notes),
                text.number(floor), text.ratio(metrics.ratio(cell.ms("gnnaccel"), floor)))

    return text.table("Single operations, and the time to copy the bytes that each must move",
                      columns, (cell for cell in cells if cell.kind == "operation"), row)
