"""What a report adds up: one `Entry` per layer and the way it ran, `Lines` of the user's code and
`EdgesSeen`. How much a kernel moves and computes, by estimate, next to what a device can do at most
as the cost model has it."""
from __future__ import annotations

import linecache
import os
import re
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.structures.structure import chunk_edges
from gnnaccel.dispatch.graph.tensor_ref import TensorMap, unversioned
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.observe.records import Record
from gnnaccel.dispatch.observe.watch import Visit
from gnnaccel.dispatch.ops.aggregation_stated import AggregationSpec
from gnnaccel.dispatch.ops.plain import PlainSpec
from gnnaccel.dispatch.plan import cost
from gnnaccel.dispatch.plan.request import CallSpec
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.profile.tables import milliseconds, table


@dataclass
class Entry:
    """Milliseconds are of all calls together. ``inside_ms``: the part of it that other entries
    account for, since layers and operations inside a native layer are measured by themselves.
    ``kept_bytes``: device memory that a call leaves in use, its result included; the most seen.
    ``moved`` and ``flops``: of one forward, estimated; None where nothing is known.
    ``overhead_us``: spent deciding, all calls together, with the records that measuring needs.
    ``cost_us``, ``native_us``: of one call, as the last record estimates what ran and the host's
    own code."""

    layer: str
    name: str
    route: str
    kernel: str | None
    device: str = "cpu"
    calls: int = 0
    timed: int = 0
    backwards: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    inside_ms: float = 0.0
    kept_bytes: int | None = None
    overhead_us: float = 0.0
    cache: dict[str, int] = field(default_factory=dict)
    reasons: tuple[dict[str, str], ...] = ()
    graph: dict[str, Any] | None = None
    histogram: list[int] | None = None
    split: int | None = None
    passes: dict[str, Any] | None = None
    dtype: str | None = None
    moved: float | None = None
    flops: float | None = None
    cost_us: float | None = None
    native_us: float | None = None

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def own_ms(self) -> float:
        return max(0.0, self.total_ms - self.inside_ms)

    @property
    def forward_each_ms(self) -> float | None:
        return self.forward_ms / self.timed if self.timed else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_ms": self.total_ms, "own_ms": self.own_ms}

    def add(self, record: Record) -> None:
        self.cache[record["cache"]] = self.cache.get(record["cache"], 0) + 1
        self.overhead_us += record["overhead_us"] or 0.0
        self.cost_us, self.native_us = record["cost_us"], record["native_us"]
        graph = record["graph"]
        # a GPU reports these a little after a graph's first call
        if graph is not None and "histogram" in graph:
            self.histogram, self.graph = (graph["histogram"],
                                          {k: v for k, v in graph.items() if k != "histogram"})
        elif self.graph is None:
            self.graph = graph
        if self.split is None and graph is not None:
            self.split = chunk_edges(graph["num_edges"])


def describe(entry: Entry, visit: Visit, record: Record) -> None:
    """What is worked out once per entry."""
    entry.dtype, entry.reasons, entry.passes = (record["dtype"], tuple(record["rejected"]),
                                                record["passes"])
    if entry.passes is not None:
        taken = entry.passes["orderings"][0]
        entry.moved, entry.flops = float(taken["bytes"]), float(taken["flops"])
    if visit.adapter is None or record["graph"] is None:
        return
    found = visit.adapter.state(visit.layer, visit.args, visit.kwargs)
    if isinstance(found, Reason) or not isinstance(found[0],
                                                   (CallSpec, PlainSpec, AggregationSpec)):
        return
    spec, given = found
    attention = programs.attention(spec.program) if isinstance(spec, CallSpec) else None
    if entry.route != "native":
        if attention is not None:
            entry.moved, entry.flops = attention_work(spec, attention)
        elif (isinstance(spec, AggregationSpec)
              or isinstance(spec, PlainSpec) and spec.reduce in ("sum", "max")):
            entry.moved, entry.flops = sum_work(spec)
    if given.device.type == "cpu" and given.edge_index.shape[1]:
        ends = given.edge_index[1 - (isinstance(spec, CallSpec) and spec.flipped)]
        entry.histogram = degrees(ends, spec.num_dst)


def attention_work(spec: CallSpec, attention: programs.Attention) -> tuple[float, float]:
    """(bytes, floating point operations) of one forward of fused attention over E edges: a row of
    heads * width gathered for each edge with its id, a row written for each destination; a multiply
    and an add per channel for the sum, and where the score is made of rows as well, for that."""
    edges = spec.num_edges + spec.loops
    channels = spec.heads * spec.width
    row = channels * spec.row.itemsize
    twice = 2 if attention.score == "dot" else 1
    moved = edges * (row * twice + 4 + (4 * spec.heads if attention.family == "additive" else 0))
    if attention.edge:
        moved += edges * (row if attention.family == "pairwise" else 4 * spec.heads)
    moved += spec.num_dst * channels * spec.out.itemsize
    return float(moved), float(edges * channels * (2 if attention.family == "additive" else 4))


def sum_work(spec: PlainSpec | AggregationSpec) -> tuple[float, float]:
    """As `attention_work`, of one sum over the neighbours: a row and an id for each edge, with its
    weight if it has one; a row written for each destination."""
    row = spec.width * spec.row.itemsize
    moved = spec.num_edges * (row + 4 + 4 * spec.weighted) + spec.num_dst * row
    return float(moved), float(spec.num_edges * spec.width * (1 + spec.weighted))


def degrees(dst: torch.Tensor, count: int) -> list[int]:
    """Destinations by degree: entry b counts degrees of b bits (0; 1; 2-3; 4-7; ...)."""
    found = torch.bincount(dst.clamp(0, max(0, count - 1)), minlength=count)
    bits = torch.frexp(found.double())[1]  # 0 for 0, else the number of bits
    return torch.bincount(bits).tolist()


# --- what a device can do at most -----------------------------------------------------------------

@dataclass(frozen=True)
class Ceilings:
    """``bandwidths``: (name, bytes per second) pairs, slowest first; ``flops``: operations per
    second; ``provenance``: where the numbers were measured."""

    bandwidths: tuple[tuple[str, float], ...]
    flops: float
    provenance: str


@dataclass(frozen=True)
class Point:
    """One kernel of one layer: operations per byte, operations per second, and its share of the
    slowest bandwidth."""

    name: str
    intensity: float
    flops: float
    bytes_per_s: float


def ceilings(device: str) -> Ceilings:
    """Of "cuda" or "cpu"."""
    rates = cost.constants()
    orderings = rates["relational"][device]["orderings"]
    if device == "cuda":
        gpu = rates["cuda"]
        found = gpu.get("ceilings", gpu)  # measured on their own, where they were
        lines = (("gathered rows, memory", found["gather_hbm"]),
                 ("gathered rows, L2", found["gather_l2"]))
        return Ceilings(lines, orderings["flops"], _machine(gpu["provenance"]))
    return Ceilings((("memory", orderings["bandwidth"]),), orderings["flops"],
                    _machine(rates["relational"]["cpu"]["provenance"]))


def _machine(provenance: str) -> str:
    """What was measured on, without how."""
    return re.split(r"[.;] ", provenance, maxsplit=1)[0]


def points(entries: list[Entry], device: str) -> list[Point]:
    """Of the entries whose bytes and operations are known and whose forward was timed."""
    found = []
    for entry in entries:
        each = entry.forward_each_ms
        if (entry.device == device and entry.route != "native" and each and entry.moved
            and entry.flops):
            flops, moved = entry.flops / each * 1e3, entry.moved / each * 1e3
            found.append(Point(f"{entry.name}: {entry.kernel}", flops / moved, flops, moved))
    return found


# --- by the line of the user's code that called ---------------------------------------------------

#: packages whose frames stand between the user's line and the layer
_BETWEEN = ("gnnaccel", "torch", "torch_geometric", "dgl", "contextlib", "functools")
_SHOWN = 20
Place = tuple[str, int]


@dataclass
class Line:
    """Milliseconds of all calls from this line, forward and backward; ``routes``: calls by route,
    ``layers``: by the layer's name."""

    file: str
    line: int
    source: str
    calls: int = 0
    ms: float = 0.0
    routes: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)


class Lines:
    """What is added up while a report measures."""

    def __init__(self) -> None:
        self._found: dict[Place, Line] = {}

    def called(self, layer: str, route: str) -> Line:
        """One call, from the line that makes it now."""
        place = _place()
        line = self._found.get(place)
        if line is None:
            source = linecache.getline(*place).strip()
            line = self._found[place] = Line(*place, source)
        line.calls += 1
        line.routes[route] = line.routes.get(route, 0) + 1
        line.layers[layer] = line.layers.get(layer, 0) + 1
        return line

    def as_dicts(self) -> list[dict[str, Any]]:
        """By the time they took, most first."""
        return [asdict(line) for line in sorted(self._found.values(), key=lambda one: -one.ms)]

    def __str__(self) -> str:
        lines = self.as_dicts()[:_SHOWN]
        total = sum(line.ms for line in self._found.values()) or 1.0
        rows = [(f"{os.path.basename(one['file'])}:{one['line']}", one["source"][:60],
                 ", ".join(one["layers"]), one["calls"], milliseconds(one["ms"]),
                 f"{one['ms'] / total:.0%}",
                 ", ".join(f"{n} {route}" for route, n in one["routes"].items())) for one in lines]
        return table("lines that call layers, forward and backward",
                     ("line", "source", "layers", "calls", "ms", "share", "ran by"), rows,
                     right=("calls", "ms", "share")) if rows else ""


def _place() -> Place:
    """File and line of the innermost frame that is the user's."""
    frame = sys._getframe(1)
    while (frame.f_back is not None
           and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


# --- whether calls come over the same edges again, or over new ones each time ---------------------

class EdgesSeen:
    """Of one layer. ``calls``: over edges that could be told apart; ``new``: over a tensor that had
    not come before, or was written to since; ``sizes``: the different numbers of edges."""

    def __init__(self) -> None:
        self.calls = self.new = 0
        self.sizes: set[int] = set()
        self._known: TensorMap[bool] = TensorMap()

    def note(self, visit: Visit) -> None:
        edges = _edges((*visit.args, *visit.kwargs.values()))
        if edges is None or unversioned((edges,)):
            return
        self.calls += 1
        self.sizes.add(edges.shape[1])
        if self._known.get(edges) is None:
            self.new += 1
            self._known.set(edges, True)


def _edges(values: Any) -> Tensor | None:
    """The first tensor of ids of shape [2, E]; of a dictionary by types of edges, its first."""
    for value in values:
        if isinstance(value, dict):
            value = _edges(value.values())
        if (isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == 2
                and not value.is_floating_point() and value.layout is torch.strided):
            return value
    return None
