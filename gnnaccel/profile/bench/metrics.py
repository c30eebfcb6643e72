"""Figures of merit out of records: the records of one cell brought together, and its ratios."""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

from gnnaccel.profile.bench.result import Record, Result

IMPLS = ("native", "compiled", "gnnaccel")
TWIN = "pyg"  # beside DGL's layers: PyG's own of the same kind
_ON_CPU_TOO = ("layer", "relation", "dgl", "aggregate", "fresh-plain", "spmm")


@dataclasses.dataclass
class Cell:
    """One row of the table: what was measured, by whom. ``kind`` has "-cpu" appended for layers on
    the CPU; ``first``: memory of a first training step on a GPU, by whom."""

    kind: str
    shape: str
    layer: str
    mode: str
    device: str
    by: dict[str, Record] = dataclasses.field(default_factory=dict)
    floor: Record | None = None
    check: Record | None = None
    first: dict[str, Record] = dataclasses.field(default_factory=dict)

    def ms(self, impl: str) -> float | None:
        record = self.by.get(impl)
        return record.ms if record else None

    def value(self, impl: str, name: str) -> float | None:
        record = self.by.get(impl)
        return record.values.get(name) if record else None

    @property
    def difference(self) -> float | None:
        """The largest relative L2 difference of gnnaccel's output and gradient from the host's."""
        values = self.check.values if self.check else {}
        return max((value for name, value in values.items() if name.endswith("rel_l2")),
                   default=None)

    @property
    def route(self) -> str:
        """The routes gnnaccel's calls took, with the reasons when it was not one of its own."""
        return self.route_of("gnnaccel")

    def route_of(self, impl: str) -> str:
        """The route of an implementation, for any way of running gnnaccel."""
        record = self.by.get(impl)
        values = record.values if record else {}
        return " ".join([*values.get("routes", {}), *values.get("reasons", {})])

    def metric(self, name: str) -> float | None:
        """A metric of targets.py; None when a measurement it needs is missing."""
        ours = self.ms("gnnaccel")
        if name == "peak_mib":
            return self.value("gnnaccel", "peak_mib")
        if name == "rel_l2":
            return self.difference
        if name == "us":
            return self.value("gnnaccel", "overhead_us")
        if name.endswith("_gain"):  # of a format over fp32
            return ratio(self.ms("fp32"), self.ms(name.removesuffix("_gain")))
        if name == "ms" or ours is None:
            return ours
        if name == "vs_floor":
            return ratio(ours, self.floor.ms if self.floor else None)
        if name == "vs_dgl_cuda":
            return (ratio(cuda_ms(self.shape, self.layer, self.mode), ours)
                    if self.device == "cuda" else None)
        return ratio(self.ms(name.removeprefix("vs_")), ours)


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def cells(result: Result) -> list[Cell]:
    """The cells of a result, in the order of their first record."""
    found: dict[tuple, Cell] = {}
    for record in result.records:
        if record.kind in ("shape", "check", "floor", "note"):
            continue
        cell = found.setdefault(_place(record), Cell(*_place(record)))
        cell.by[record.impl] = record
    for cell in found.values():
        cell.check = result.one(kind="check", shape=cell.shape, layer=cell.layer, mode=cell.mode,
                                device=cell.device)
        cell.floor = _floor(result, cell)
        if cell.device != "cpu":
            cell.first = {record.impl: record for record in result.find(
                kind="memory", shape=cell.shape, layer=cell.layer, mode=cell.mode)}
    return list(found.values())


def _place(record: Record) -> tuple:
    kind = (f"{record.kind}-cpu" if record.kind in _ON_CPU_TOO and record.device == "cpu"
            else record.kind)
    return kind, record.shape, record.layer, record.mode, record.device


def _floor(result: Result, cell: Cell) -> Record | None:
    """The uniform-degree floor for the width the cell gathers."""
    width = next((r.values["width"] for r in cell.by.values() if "width" in r.values), None)
    return result.one(kind="floor", shape=cell.shape, layer=str(width), impl="uniform",
                      device=cell.device)


# --- what DGL's own CUDA build took ---------------------------------------------------------------

# Measured once, for the layers and graph sizes of ``--suite dgl``: one NVIDIA H200, fp32, a CUDA
# build of DGL 2.x, random power-law graphs of the named sizes, forward / forward and backward.
# There is no such build for a current torch, so it cannot be measured next to gnnaccel; on another
# GPU the comparison means nothing.

CUDA_GPU = "H200"


class Figure(NamedTuple):
    """Milliseconds; ``peak_gib``: memory of a training step, None where nobody noted it."""

    forward: float
    training: float
    peak_gib: float | None = None


CUDA = {
    ("cora", "GAT 8x8"): Figure(0.74, 2.41),
    ("arxiv", "GAT 8x8"): Figure(7.1, 11.0),
    ("arxiv", "GATv2 4x16"): Figure(8.5, 14.0),
    ("arxiv", "DotGat 1x64"): Figure(2.7, 4.7),
    ("arxiv", "SAGE 64"): Figure(0.78, 1.78),
    ("proteins", "GAT 8x8"): Figure(29.6, 65.8, 14),
    ("proteins", "GATv2 4x16"): Figure(97, 191, 77),
    ("proteins", "DotGat 1x64"): Figure(29, 67),
    ("proteins", "GraphConv 64"): Figure(5.3, 10.4),
    ("proteins", "SAGE 64"): Figure(5.1, 10.0),
    ("proteins", "GCN 64"): Figure(5.3, 10.4),  # GraphConv, under PyG's name
    ("reddit", "GAT 8x8"): Figure(273, 412, 21),
    ("reddit", "SAGE 64"): Figure(9.2, 17.3),
    ("fb15k-size", "RelGraphConv 64"): Figure(9.4, 20.4),
    ("fb15k-size", "HGT 4x16"): Figure(79, 160),
    ("am-size", "RelGraphConv 64"): Figure(10.8, 21.5),
    ("mag-size", "RelGraphConv 64"): Figure(34, 61, 17),
    ("wikikg2-size", "RelGraphConv 64"): Figure(30, 60),
    ("mag-inverse-size", "HGT 4x16"): Figure(373, 5454),
}


def cuda_ms(shape: str, layer: str, mode: str) -> float | None:
    """Milliseconds of DGL's CUDA build; None where there is no figure."""
    figure = CUDA.get((shape, layer))
    return getattr(figure, mode, None)


def cuda_peak_mib(shape: str, layer: str) -> float | None:
    """MiB that a training step took with DGL's CUDA build; None where there is no figure."""
    figure = CUDA.get((shape, layer))
    return figure.peak_gib * 1024 if figure and figure.peak_gib else None
