"""Estimates of an aggregation's time, natively and by us, and whether a new graph's structure is
worth its price.

A structure serves every later aggregation over the same edges, but nobody can know whether there
will be any. So the missed gain of faster calls is added up while calls over a graph go native,
and its structure is built once that is well beyond the price: a graph that comes once costs
nothing, one that comes many times soon gains.
"""
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.generated.messages import MOMENTS, Generated
from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.graph.edge_arrays import csc_of
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_means import Softmax
from gnnaccel.dispatch.ops.graph import OpGraph, ProductGraph
from gnnaccel.dispatch.ops.messages import Gated, Rectified, Shifted
from gnnaccel.dispatch.plan.cost import constants

# calls over a graph, not a large one, that are not looked at: layers or hops over one mini-batch
_UNREAD = 3
_MARGIN = 1.25
_NO_COPIES = {"forward": 0, "training": 0}
_PATIENCE = 2.0  # times the price of a structure that must have been missed before it is built


#: costs of messages against plain ones: rows per edge that we read, rows that the host gathers (not
#: its further passes), our launches
_MORE = {type(None): (1, 1, 1), Shifted: (1, 1, 2), Rectified: (2, 1, 1.5), Gated: (3, 2, 1)}


class Estimate(NamedTuple):
    """Seconds: gain of a call over the host's own code when the structure is there, and the price
    of the structure; time by us and natively, and over the list of edges without a structure, None
    where that does not pay."""

    gain: float
    structure: float
    ours: float | None = None
    native: float | None = None
    once: float | None = None

    @property
    def once_pays(self) -> bool:
        """Whether the list of edges had better be summed as it is, until there is a structure."""
        return self.once is not None

    def over_once(self) -> Estimate:
        """The estimate where the list of edges, not the host's code, runs without a structure."""
        return self._replace(gain=max(0.0, self.once - self.ours))  # type: ignore[operator]


    def beside(self, other: Estimate) -> Estimate:
        """The estimate of both calls, over one structure."""
        return Estimate(self.gain + other.gain, max(self.structure, other.structure),
                        self.ours + other.ours,  # type: ignore[operator]  # each has both
                        self.native + other.native)  # type: ignore[operator]


def estimate(graph: OpGraph, aggregation: Aggregation, grad: bool) -> Estimate:
    """Estimate for one call, with its backward if ``grad``."""
    mode = "training" if grad else "forward"
    return (_on_cpu if aggregation.x.device.type == "cpu" else _on_cuda)(graph, aggregation, mode)


def _on_cpu(graph: OpGraph, aggregation: Aggregation, mode: str) -> Estimate:
    rates = constants()["aggregation"]["cpu"]
    edges, numbers = graph.num_edges, graph.num_edges * math.prod(
        aggregation.shape) * aggregation.x.element_size() / 4
    native, ours = (_line(rates[side][mode], edges, numbers) for side in ("native", "torch"))
    heads = (aggregation.weight[0].numel() if aggregation.kind == "head"  # type: ignore[index]
             else 1)
    ours += (heads - 1) * edges * rates["head"]
    return Estimate(native - ours * rates["margin"], _line(rates["structure"][mode], edges, 0),
                    ours, native)


def _on_cuda(graph: OpGraph, aggregation: Aggregation, mode: str) -> Estimate:
    rates, kernels = constants()["aggregation"]["cuda"], constants()["cuda"]
    rates = rates["softmax"] if type(aggregation.reduce) is Softmax else rates
    if type(graph) is ProductGraph:
        return _against_product(graph, aggregation, mode, rates["product"])
    shape, (read, gathered, calls) = aggregation.shape, _MORE.get(type(aggregation.more), (1, 1, 1))
    if type(aggregation.more) is Generated:
        shape, (read, gathered) = aggregation.more.shape, aggregation.more.rows_read
    rows = math.prod(shape) * aggregation.x.element_size()
    read_bytes, gathered_bytes = graph.num_edges * rows * read, graph.num_edges * rows * gathered
    launch, plain = kernels["launch"], aggregation.more is None
    native = _natively(rates, gathered_bytes, mode, plain)
    rate = (kernels["gather_l2"]
            if graph.num_src * rows <= kernels["l2_bytes"] else kernels["gather_hbm"])
    launches, written = calls * rates["launches"][mode], 0.0
    copied = plain and not aggregation.x.is_contiguous()
    if copied:
        launches += rates.get("copied", _NO_COPIES)[mode]
    if type(aggregation.more) is Generated:
        more = aggregation.more
        if aggregation.reduce in MOMENTS:  # of rows that are written
            more = more._replace(before=(*more.before, (more, "rows")))
        launches += _besides(more, mode)
        made = (graph.num_edges * (more.written + rows * more.edge_kinds)
                + graph.num_src * rows * more.kinds)
        written = made * rates["generated"]["written"][mode] / kernels["native_bandwidth"]
    # the host launches while the GPU works
    ours = max(read_bytes * rates["passes"][mode] / rate + written, launches * launch)
    once = None
    if plain and "once_passes" in rates:
        once = (read_bytes * rates["once_passes"][mode] / kernels["native_bandwidth"]
                + (rates["once_launches"][mode] + copied * rates["once_copied"][mode]) * launch)
        once = once if _MARGIN * once < native else None
    by_source = (type(aggregation.more) is Generated and aggregation.more.before
                 and aggregation.more.by_source)
    directions = 1 if mode == "forward" and not by_source else 2
    grouped = csc_of(graph.edge_index) is not None
    structure = _structure(graph.num_edges, directions - grouped) + grouped * _read_in_place()
    return Estimate(native - ours, structure, ours, native, once)


def _natively(rates: dict[str, Any], gathered: float, mode: str, plain: bool) -> float:
    """Seconds of the host's operations on ``gathered`` bytes; of ``plain`` rows there are so few
    that neither their time nor that of launching them hides the other."""
    kernels = constants()["cuda"]
    passes = gathered * rates["native_passes"][mode] / kernels["native_bandwidth"]
    # without launches for autograd's own thread, in which nothing runs whatever is chosen
    thread = rates.get("thread", 0) if plain and mode == "training" else 0
    launched = (rates["native_launches"][mode] - thread) * kernels["launch"]
    return passes + launched if plain else max(passes, launched)


def _besides(more: Generated, mode: str) -> float:
    """Launches for values written for each edge before a message, for many inputs, for those
    that are computed for the call, and for several results."""
    rates = constants()["aggregation"]["cuda"]["generated"]
    inputs, before, computed = more.sizes
    return (max(0, inputs - rates["free"]) * rates["input"][mode]
            + before * rates["before"][mode] + computed * rates["made"][mode]
            + len(more.expression.others) * rates["result"][mode])


def _against_product(graph: OpGraph, aggregation: Aggregation, mode: str,
                     rates: dict[str, dict[str, float]]) -> Estimate:
    """Estimate on a GPU, against cuSPARSE's product with a matrix in CSR, whose backward makes the
    transposed matrix in each call. Ours makes it once; rows of a matrix in CSR need no sorting.
    Forward alone there is nothing to gain where the rows do not fit the L2: 0.95x to 1.1x on an
    H100."""
    kernels, edges = constants()["cuda"], graph.num_edges
    launch, row = kernels["launch"], math.prod(aggregation.shape) * aggregation.x.element_size()
    near = graph.num_src * row <= kernels["l2_bytes"]
    rate = kernels["gather_l2"] if near else kernels["gather_hbm"]
    ours, native = (max(edges * row * rates[f"{side}passes"][mode] / rate,
                        rates[f"{side}launches"][mode] * launch) for side in ("", "native_"))
    transposed = edges * kernels["structure_per_edge"]
    grouped = csc_of(graph.edge_index) is not None
    structure = _read_in_place() if grouped else _structure(edges, 1)
    if mode == "training":
        native += transposed
        structure += _structure(edges, 1)
    elif not near:
        native = min(native, ours)
    return Estimate(native - ours, structure, ours, native)


def by_index(x: Tensor, name: str, grad: bool) -> Estimate:
    """Estimate for one reduction ``name``, or "softmax", of rows ``x`` on a GPU by an index."""
    mode = "training" if grad else "forward"
    rates, kernels = constants()["aggregation"]["by_index"], constants()["cuda"]
    kind = rates["max" if name == "min" else name]
    traffic, launch = x.numel() * x.element_size(), kernels["launch"]
    native = max(traffic * kind["native_passes"][mode] / kernels["native_bandwidth"],
                 kind["native_launches"][mode] * launch)
    ours = max(traffic * kind["passes"][mode] / kernels["gather_hbm"],
               kind["launches"][mode] * launch)
    return Estimate(native - ours, _structure(x.shape[0], 1, "by_index"), ours, native)


def _structure(edges: int, directions: int, of: str = "cuda") -> float:
    """Seconds to make a new graph's structure, for so many directions. Except for large graphs
    nearly all of it is the host's time, including the decision of the call."""
    kernels, calls = constants()["cuda"], constants()["aggregation"][of]["structure_launches"]
    return directions * (edges * kernels["structure_per_edge"] + calls * kernels["launch"])


def _read_in_place() -> float:
    """Seconds for edges that are grouped already."""
    kernels = constants()["cuda"]
    return kernels["structure_launches"] * kernels["launch"]


def _line(rates: list[float], edges: float, numbers: float) -> float:
    return rates[0] + rates[1] * edges + rates[2] * numbers


def hardly_seen(edge_index: Tensor) -> bool:
    """Whether few calls over these edges are known; counts one more. Not of inference tensors."""
    entry = ledger.of(edge_index)
    entry.sightings += 1
    return entry.sightings <= _UNREAD


def patience(estimate: Estimate) -> float:
    """Seconds that may be missed over a graph before its structure is worth building, one more call
    like this one not counted."""
    return _PATIENCE * estimate.structure - estimate.gain


def pays(edge_index: Tensor, estimate: Estimate, anyway: bool = False) -> bool:
    """Whether to build the structure of these edges now; notes the missed gain if not. ``anyway``:
    it is built whatever it costs, and so no later call over these edges has to miss it."""
    if anyway:
        if not edge_index.is_inference():
            ledger.of(edge_index).seconds = math.inf
        return True
    if estimate.gain > estimate.structure:
        return not capturing(edge_index)
    if edge_index.is_inference():
        return False
    entry = ledger.of(edge_index)
    if entry.seconds > patience(estimate) and not capturing(edge_index):
        return True
    entry.seconds += estimate.gain
    return False


def capturing(edge_index: Tensor) -> bool:
    """Whether a CUDA graph is being captured, when nothing may be made to keep."""
    return edge_index.is_cuda and torch.cuda.is_current_stream_capturing()
