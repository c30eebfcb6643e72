"""The table of the suite over DGL."""
from __future__ import annotations

from gnnaccel.profile.bench import dgl_figures, metrics, text
from gnnaccel.profile.bench.result import Result


def section(result: Result) -> text.Section:
    """Without rows where nothing of the suite was measured."""
    columns = ("shape", "layer", "mode", "native ms", "gnnaccel ms", "10 % to 90 %", "x native",
               "DGL CUDA ms", "x DGL CUDA", "PyG ms", "x PyG", "peak MiB DGL CUDA",
               "peak MiB gnnaccel", "kept MiB", "difference", "route")

    def row(cell: metrics.Cell, notes: dict[str, str]) -> tuple[str, ...]:
        return (text.shape(cell), cell.layer, cell.mode, text.time(cell, "native", notes),
                text.time(cell, "gnnaccel", notes), text.spread(cell),
                text.ratio(cell.metric("vs_native")), *_cuda(cell),
                text.time(cell, metrics.TWIN, notes), text.ratio(cell.metric("vs_pyg")),
                text.number(_cuda_peak(cell)), *text.memory(cell)[1:], text.difference(cell),
                cell.route or text.MISSING)

    title = ("DGL's layers: natively, through gnnaccel, DGL's own CUDA build as once measured on "
             f"an {dgl_figures.GPU}, and PyG's layer of the same kind")
    return text.table(title, columns, (cell for cell in metrics.cells(result)
                                       if cell.kind in ("dgl", "dgl-cpu")), row)


def _cuda(cell: metrics.Cell) -> tuple[str, str]:
    """What DGL's CUDA build took, and how much faster gnnaccel is. Nothing of the CPU is held
    against it."""
    if cell.kind != "dgl":
        return (text.MISSING,) * 2
    return (text.number(dgl_figures.cuda_ms(cell.shape, cell.layer, cell.mode)),
            text.ratio(cell.metric("vs_dgl_cuda")))


def _cuda_peak(cell: metrics.Cell) -> float | None:
    return (dgl_figures.cuda_peak_mib(cell.shape, cell.layer)
            if cell.kind == "dgl" and cell.mode == "training" else None)
