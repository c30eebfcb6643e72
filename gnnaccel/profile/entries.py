"""What a report adds up: one `Entry` per layer and the way it ran; and how much a kernel moves and
computes, by estimate."""
from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from gnnaccel.cuda.structure import chunk_edges
from gnnaccel.dispatch.ir import patterns
from gnnaccel.dispatch.observe.records import Record
from gnnaccel.dispatch.observe.watch import Visit
from gnnaccel.dispatch.ops.aggregation_stated import AggregationSpec
from gnnaccel.dispatch.ops.plain import PlainSpec
from gnnaccel.dispatch.plan.request import CallSpec
from gnnaccel.dispatch.policy.reasons import Reason


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
        """Of one forward."""
        return self.forward_ms / self.timed if self.timed else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_ms": self.total_ms, "own_ms": self.own_ms}

    def add(self, record: Record) -> None:
        """One more decision."""
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
    stated, given = found
    attention = patterns.attention(stated.program) if isinstance(stated, CallSpec) else None
    if entry.route != "native":
        if attention is not None:
            entry.moved, entry.flops = attention_work(stated, attention)
        elif (isinstance(stated, AggregationSpec)
              or isinstance(stated, PlainSpec) and stated.reduce in ("sum", "max")):
            entry.moved, entry.flops = sum_work(stated)
    if given.device.type == "cpu" and given.edge_index.shape[1]:
        ends = given.edge_index[1 - (isinstance(stated, CallSpec) and stated.flipped)]
        entry.histogram = degrees(ends, stated.num_dst)


def attention_work(stated: CallSpec, attention: patterns.Attention) -> tuple[float, float]:
    """(bytes, floating point operations) of one forward of fused attention over E edges: a row of
    heads * width gathered for each edge with its id, a row written for each destination; a multiply
    and an add per channel for the sum, and where the score is made of rows as well, for that."""
    edges = stated.num_edges + stated.loops
    channels = stated.heads * stated.width
    row = channels * stated.row.itemsize
    twice = 2 if attention.score == "dot" else 1
    moved = edges * (row * twice + 4 + (4 * stated.heads if attention.family == "additive" else 0))
    if attention.edge:
        moved += edges * (row if attention.family == "pairwise" else 4 * stated.heads)
    moved += stated.num_dst * channels * stated.out.itemsize
    return float(moved), float(edges * channels * (2 if attention.family == "additive" else 4))


def sum_work(stated: PlainSpec | AggregationSpec) -> tuple[float, float]:
    """As `attention_work`, of one sum over the neighbours: a row and an id for each edge, with its
    weight if it has one; a row written for each destination."""
    row = stated.width * stated.row.itemsize
    moved = stated.num_edges * (row + 4 + 4 * stated.weighted) + stated.num_dst * row
    return float(moved), float(stated.num_edges * stated.width * (1 + stated.weighted))


def degrees(dst: torch.Tensor, count: int) -> list[int]:
    """Destinations by degree: entry b counts degrees of b bits (0; 1; 2-3; 4-7; ...)."""
    found = torch.bincount(dst.clamp(0, max(0, count - 1)), minlength=count)
    bits = torch.frexp(found.double())[1]  # 0 for 0, else the number of bits
    return torch.bincount(bits).tolist()
