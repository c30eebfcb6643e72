"""Reductions of rows by groups, given by an index or the offsets of segments: PyG's ``scatter``,
``segment`` and ``softmax``.

The rows are seen as edges that enter their group, so the kernels of message passing run them:
balanced, in a fixed order, without atomics. Their structure needs no index that is sorted, and so
nobody asks whether it is; a sorted one keeps its order.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.graph import cache, ledger
from gnnaccel.dispatch.graph.tensor_ref import TensorMap
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ops import aggregation_cost, cuda_ops, multi_reduce, torch_ops
from gnnaccel.dispatch.ops.call import Kernel, OpCall
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import checkpointed
from gnnaccel.dispatch.uncompiled import uncompiled

REDUCES = ("sum", "mean", "max", "min")
_LIMIT = 256  # estimates kept; more means many configurations
_NO_GAIN = reason("GA301")
_MAY_NOT_COME_AGAIN = reason("GA301", "preparing this index costs more than is saved, unless it "
                                      "is used more often")


class IndexGraph(OpGraph):
    """Rows as edges without sources. ``given``: [E] int64, the group of each row, below ``groups``;
    or with ``offsets`` [groups + 1], where each group's rows begin, the last one being ``rows``."""

    __slots__ = ("_rows", "_offsets")

    def __init__(self, given: Tensor, rows: int, groups: int, offsets: bool = False):
        super().__init__(given, rows, groups, num_edges=rows)
        self._rows, self._offsets = rows, offsets

    def index(self, target: str) -> Tensor:
        """[E]: the group of each row, for "v"."""
        if target != "v":
            raise ValueError(
                f"target={target!r}: rows have a group, 'v', and nothing at their other end")
        if not self._offsets:
            return self.edge_index
        if self._ends is None:
            index = torch_ops.segment_index(self.edge_index, self._rows)
            self._ends = index, index
        return self._ends[1]

    def view(self) -> GraphView:
        if self.built is None:
            self.built, self.cached = cache.lookup_many((self.edge_index,), self._sizes(),
                                                        self._made)
        return self.built

    def _sizes(self) -> tuple:
        return "offsets" if self._offsets else "index", self._rows, self.num_dst

    def _made(self, own: bool) -> GraphView:
        return _View(self.edge_index, self._rows, self.num_dst, self._offsets, own)


class _View(GraphView):
    """The structure of an `IndexGraph`. Sources are the rows themselves."""

    def __init__(self, given: Tensor, rows: int, groups: int, offsets: bool, own: bool):
        super().__init__(given, rows, groups, 0, own, rows)
        self._offsets = offsets

    def _ends(self) -> tuple[Tensor, Tensor]:
        source = self._alive()[0].detach()
        index = (torch_ops.segment_index(source, self.num_src)
                 if self._offsets else source.contiguous())
        return torch.arange(self.num_src, dtype=index.dtype, device=index.device), index


# --- how many groups an index has -----------------------------------------------------------------

_tops: TensorMap[int] = TensorMap()


@uncompiled
def groups_in(index: Tensor) -> int:
    """One more than the largest index, 0 if there is none. Waits for the device once per tensor and
    version."""
    if index.is_inference() or capture.capturing():  # a capture refuses to wait
        return _count(index)
    count = _tops.get(index)
    if count is None:
        count = _count(index)
        _tops.set(index, count)
    return count


def _count(index: Tensor) -> int:
    return int(index.max()) + 1 if index.numel() else 0


# --- the operations -------------------------------------------------------------------------------

@uncompiled
def reduce(graph: IndexGraph, x: Tensor, name: str, config: Config) -> OpCall | Reason:
    """[groups, *features]: the reduction ``name``, one of `REDUCES`, of the rows ``x`` [E,
    *features] of each group; 0 where there are none. Gradients of extrema are shared as in
    `multi_reduce`."""
    against = _reason(graph, x, name, config)
    if against is not None:
        return against
    if name in ("max", "min"):
        extrema = multi_reduce.multi_reduce(graph, x, (name,), of_edges=True)
        return mapped(extrema, lambda out: out.view(-1, *x.shape[1:]))

    def plain() -> Tensor:
        return torch_ops.added(x, graph.index("v"), graph.num_dst)

    call = OpCall(x.device, x.dtype, plain, cuda_ops.edge_sum(graph, x, "v"), graph)
    return call if name == "sum" else mapped(call, lambda out: _averaged(graph, out))


def _averaged(graph: IndexGraph, total: Tensor) -> Tensor:
    share = graph.view().inverse_degree(torch.promote_types(total.dtype, torch.float32))
    return (total * share.view(-1, *(1,) * (total.dim() - 1))).to(total.dtype)


@uncompiled
def softmax(graph: IndexGraph, x: Tensor, config: Config) -> OpCall | Reason:
    """[E, *features]: the softmax of ``x`` [E, *features] over the rows of each group."""
    against = _reason(graph, x, "softmax", config)
    if against is not None:
        return against
    call = OpCall(x.device, x.dtype, lambda: torch_ops.edge_softmax(graph, x, "v"),
                  cuda_ops.edge_softmax(graph, x, "v"), graph)
    return mapped(call, _to_change)


#: (configuration, bits of the numbers of rows and of numbers, gradients) -> largest gain of such a
#: softmax, and least cost of its structure
_softmaxes: dict[tuple[int, int, int, bool], aggregation_cost.Estimate] = {}


@uncompiled
def softmax_unpaid(x: Tensor, index: Tensor, config: Config) -> bool:
    """Whether the host's own code is estimated to be no slower for a softmax of ``x`` by ``index``
    [E], since so few numbers gain nothing, or not enough yet for a structure; notes the missed gain
    then. Reads neither ``index`` nor ``x``."""
    numbers = x.numel().bit_length()
    if not numbers:
        return False
    rows = len(x).bit_length() if x.dim() else 1
    key = config.epoch, rows, numbers, torch.is_grad_enabled() and x.requires_grad
    estimate = _softmaxes.get(key)
    if estimate is None:
        if len(_softmaxes) >= _LIMIT:
            _softmaxes.clear()
        largest = torch.empty(1 << rows >> 1, 2 << numbers - rows, dtype=x.dtype, device="meta")
        estimate = _softmaxes[key] = aggregation_cost.by_index(largest, "softmax", key[3])
    if estimate.gain <= 0:
        return True
    if estimate.gain > estimate.structure or index.is_inference() or checkpointed():
        return False
    entry = ledger.of(_owner(index))
    if entry.seconds > aggregation_cost.patience(estimate):
        return False
    entry.seconds += estimate.gain
    return True


def _to_change(out: Tensor) -> Tensor:
    """Result for users, who may change it in place, as the host's: backward reads ``out``."""
    return out.clone() if out.requires_grad else out


def mapped(call: OpCall, function: Callable[[Tensor], Tensor]) -> OpCall:
    """``call`` with ``function`` of its result."""
    kernel = call.kernel
    if type(kernel) is Kernel:
        kernel = kernel._replace(
            run=lambda: function(call.kernel.run()))  # type: ignore[union-attr]
    return replace(call, plain=lambda: function(call.plain()), kernel=kernel)


def _reason(graph: IndexGraph, x: Tensor, name: str, config: Config) -> Reason | None:
    """Why no kernel computes this, or the host's own code is no slower."""
    if type(graph.num_dst) is not int or graph.num_dst < 1:
        return reason("GA206", f"{graph.num_dst!r} groups")
    if config.when != "profitable" or not x.is_cuda:  # on a CPU the host's own code runs anyway
        return None
    estimate = aggregation_cost.by_index(x, name, torch.is_grad_enabled() and x.requires_grad)
    if estimate.gain <= 0:
        return _NO_GAIN
    if (graph.known() or checkpointed()
        or aggregation_cost.pays(_owner(graph.edge_index), estimate)):
        return None
    return _MAY_NOT_COME_AGAIN


def _owner(index: Tensor) -> Tensor:
    """Base of an index that is a view, which is made anew for each call; else the index."""
    return index if index._base is None else index._base
