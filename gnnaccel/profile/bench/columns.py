"""The tables with a row per cell: which cells, and what stands in each column."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gnnaccel.profile.bench import metrics, text
from gnnaccel.profile.bench.metrics import IMPLS, Cell

Notes = dict[str, str]
Column = Callable[[Cell, Notes], str]  # errors may leave notes
VARIANTS = ("none", "compaction", "reordering", "all")
WAYS = ("loop", "grouped_mm", "dense", "gnnaccel")


class Table(NamedTuple):
    """``kinds`` of cells; those of layers on the CPU are among them."""

    title: str
    kinds: tuple[str, ...]
    columns: dict[str, Column]

    def section(self, cells: list[Cell]) -> text.Section:
        """Without rows where nothing of these kinds was measured."""
        notes: Notes = {}
        rows = [tuple(column(cell, notes) for column in self.columns.values()) for cell in cells
                if cell.kind.removesuffix("-cpu") in self.kinds]
        return text.Section(self.title, tuple(self.columns), rows, text.notes_of(notes))


def _ms(impl: str) -> Column:
    return lambda cell, notes: text.time(cell, impl, notes)


def _x(metric: str) -> Column:
    return lambda cell, notes: text.ratio(cell.metric(metric))


def _over(above: str, below: str) -> Column:
    """One implementation's time over another's."""
    return lambda cell, notes: text.ratio(metrics.ratio(cell.ms(above), cell.ms(below)))


def _number(impl: str, name: str) -> Column:
    return lambda cell, notes: text.number(cell.value(impl, name))


def _away(impl: str) -> Column:
    """The difference of an implementation's results from those in fp32."""
    return lambda cell, notes: text.small(cell.value(impl, "rel_l2"))


def _first(impl: str) -> Column:
    """The peak of a first training step, in which structures are built too."""
    def column(cell: Cell, notes: Notes) -> str:
        record = cell.first.get(impl)
        if record is None:
            return text.MISSING
        return (text.failure(record, notes) if record.error
                else text.number(record.values.get("peak_mib")))

    return column


def _floor_of_bytes(cell: Cell) -> float | None:
    """Milliseconds for the bytes that have to be moved."""
    return next((record.values.get("floor_ms") for record in cell.by.values()), None)


def _over_bytes(cell: Cell, notes: Notes) -> str:
    return text.ratio(metrics.ratio(cell.ms("gnnaccel"), _floor_of_bytes(cell)))


def _overhead(cell: Cell, notes: Notes) -> str:
    """Of gnnaccel: milliseconds, or what a memoised call costs beside its work."""
    record = cell.by.get("gnnaccel")
    if cell.kind != "overhead" or record is None or record.error:
        return text.time(cell, "gnnaccel", notes)
    return ", ".join(f"{name.removesuffix('_us')} {text.number(value)} us"
                     for name, value in record.values.items())


def _cuda_ms(cell: Cell, notes: Notes) -> str:
    """What DGL's CUDA build took. Nothing of the CPU is held against it."""
    return text.number(metrics.cuda_ms(cell.shape, cell.layer, cell.mode)
                       if cell.kind == "dgl" else None)


def _cuda_peak(cell: Cell, notes: Notes) -> str:
    return text.number(metrics.cuda_peak_mib(cell.shape, cell.layer)
                       if cell.kind == "dgl" and cell.mode == "training" else None)


_LAYER: dict[str, Column] = {"layer": lambda cell, notes: cell.layer,
                             "mode": lambda cell, notes: cell.mode}
_SHAPE: dict[str, Column] = {"shape": lambda cell, notes: cell.shape}
#: of kinds that are measured on a CPU as well, and say so
_PLACE: dict[str, Column] = {"shape": lambda cell, notes: text.shape(cell), **_LAYER}
_FLOOR: dict[str, Column] = {
    "floor ms": lambda cell, notes: text.number(cell.floor.ms if cell.floor else None)}
_PEAK: dict[str, Column] = {"peak MiB native": _number("native", "peak_mib"),
                            "peak MiB gnnaccel": _number("gnnaccel", "peak_mib")}
_KEPT: dict[str, Column] = {"kept MiB": _number("gnnaccel", "resident_mib")}
_SPREAD: dict[str, Column] = {"10 % to 90 %": lambda cell, notes: text.spread(cell)}
_END: dict[str, Column] = {"difference": lambda cell, notes: text.difference(cell),
                           "route": lambda cell, notes: cell.route or text.MISSING}


def _times(*impls: str) -> dict[str, Column]:
    return {f"{impl} ms": _ms(impl) for impl in impls}


def _named(what: str, place: dict[str, Column] = _SHAPE) -> dict[str, Column]:
    """Place columns, where the layer's is called otherwise."""
    return {**place, what: _LAYER["layer"], "mode": _LAYER["mode"]}


LAYERS = Table(
    "Layers: PyG natively, under torch.compile, and through gnnaccel", ("layer",),
    {**_PLACE, **_times(*IMPLS), "x native": _x("vs_native"), "x compiled": _x("vs_compiled"),
     **_FLOOR, "x floor": _x("vs_floor"), **_PEAK, **_KEPT, **_END})
TABLES = (
    Table("Fresh batches, structure building, overhead of a memoised call",
          ("fresh", "structure", "overhead"),
          {"kind": lambda cell, notes: cell.kind, **_SHAPE, "what": _LAYER["layer"],
           "native ms": _ms("native"), "gnnaccel ms": _overhead, "x native": _x("vs_native")}),
    Table("Raw attention kernels", ("kernel",),
          {**_named("attention"), "ms": _ms("gnnaccel"), **_FLOOR, "x floor": _x("vs_floor"),
           "peak MiB": _number("gnnaccel", "peak_mib")}),
    Table("Rows in bf16 and int8, quantizing included", ("quantized",),
          {**_named("layer"), **_times("fp32", "bf16", "int8"), "x bf16": _x("bf16_gain"),
           "x int8": _x("int8_gain"), "difference bf16": _away("bf16"),
           "difference int8": _away("int8")}),
    Table("Training steps of models in reduced precision (all: the layer before the softmax too)",
          ("quantized-model",),
          {**_SHAPE, "model": _LAYER["layer"], **_times("fp32", "bf16", "int8"),
           "all int8 ms": _ms("int8 all"), "x bf16": _x("bf16_gain"), "x int8": _x("int8_gain"),
           "x all int8": _x("int8 all_gain"), "difference int8": _away("int8")}))
RELATIONS = (
    Table("Relational layers: PyG natively and through gnnaccel", ("relation",),
          {**_PLACE, **_times("native", "gnnaccel"), "x native": _x("vs_native"), **_PEAK, **_KEPT,
           "first MiB native": _first("native"), "first MiB gnnaccel": _first("gnnaccel"), **_END}),
    Table("gnnaccel with and without compaction and reordering", ("compaction",),
          {**_named("layer"), **_times(*VARIANTS),
           **{f"x by {name}": _over("none", name) for name in VARIANTS[1:]},
           "peak MiB none": _number("none", "peak_mib"), "peak MiB all": _number("all", "peak_mib"),
           "route": lambda cell, notes: cell.route_of("all") or text.MISSING}),
    Table("One matrix per segment", ("segment-gemm",),
          {"rows, width": _SHAPE["shape"], "precision": _LAYER["layer"], "mode": _LAYER["mode"],
           **_times(*WAYS), "floor ms": lambda cell, notes: text.number(_floor_of_bytes(cell)),
           **{f"x {way}": _over(way, "gnnaccel") for way in WAYS[:-1]}, "x floor": _over_bytes,
           "difference": _number("gnnaccel", "rel_l2")}))
HOSTS = (
    Table("DGL's layers: natively, through gnnaccel, DGL's own CUDA build as once measured on "
          f"an {metrics.CUDA_GPU}, and PyG's layer of the same kind", ("dgl",),
          {**_PLACE, **_times("native", "gnnaccel"), **_SPREAD, "x native": _x("vs_native"),
           "DGL CUDA ms": _cuda_ms, "x DGL CUDA": _x("vs_dgl_cuda"), "PyG ms": _ms(metrics.TWIN),
           "x PyG": _x("vs_pyg"), "peak MiB DGL CUDA": _cuda_peak,
           "peak MiB gnnaccel": _PEAK["peak MiB gnnaccel"], **_KEPT, **_END}),
    Table("Plain layers: PyG natively, under torch.compile, and through gnnaccel",
          ("aggregate", "fresh-plain"),
          {**_PLACE, **_times(*IMPLS), **_SPREAD, "x native": _x("vs_native"),
           "x compiled": _x("vs_compiled"), "x DGL CUDA": _x("vs_dgl_cuda"),
           "x floor": _x("vs_floor"), **_PEAK, **_KEPT, **_END}),
    Table("Weighted sums of neighbours, and torch.sparse's product (cuSPARSE on a GPU)", ("spmm",),
          {**_named("sum"), "cuSPARSE ms": _ms("cusparse"), "gnnaccel ms": _ms("gnnaccel"),
           "x cuSPARSE": _x("vs_cusparse"), **_FLOOR,
           "x floor": lambda cell, notes: (text.ratio(cell.metric("vs_floor"))
                                           if cell.mode == "forward" else text.MISSING)}),
    Table("Single operations, and the time to copy the bytes that each must move", ("operation",),
          {**_named("operation"), "ms": _ms("gnnaccel"),
           "ms for its bytes": lambda cell, notes: text.number(_floor_of_bytes(cell)),
           "x bytes": _over_bytes}))
