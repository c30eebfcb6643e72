"""The reduction of weighted neighbours, as plain layers need it: ``out[i] = reduce of w_e x_j over
edges e = (j, i)``.

Differences from `torch_ops.gspmm`: nodes without edges get 0 whatever the reduction, equal extrema
share the gradient evenly, NaN wins every comparison, and there are a mean, a variance and its
root.
Messages that are more than weighted rows are in `messages`.
"""
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.generated.messages import Generated, Part
from gnnaccel.dispatch.graph.ordered_weights import is_inexact
from gnnaccel.dispatch.ops import aggregation_means as means
from gnnaccel.dispatch.ops import messages
from gnnaccel.dispatch.ops.aggregation_means import PowerMean, Softmax
from gnnaccel.dispatch.ops.graph import OpGraph, ProductGraph
from gnnaccel.dispatch.ops.messages import More
from gnnaccel.dispatch.ops.operands import DTYPES
from gnnaccel.dispatch.policy.reasons import Reason, reason

REDUCES = ("sum", "mean", "max", "min", "var", "std")
SMALLEST_VARIANCE = 1e-5
Reduce = str | Softmax | PowerMean | Part
_UNWEIGHTED = " unweighted"
_HALF = (torch.float16, torch.bfloat16)


class Aggregation(NamedTuple):
    """``x`` [num_src, *features]; ``weight`` [E, *features] of as many dimensions, which broadcast,
    or None; ``reduce``: one of `REDUCES` or of `aggregation_means`; ``shape``: of a message;
    ``more``: further tensors of it, then of that shape, and not with a power mean; ``layout``: how
    kernels see weighted rows (`aggregation_cuda.layout_of`), None where nobody has asked
    yet."""

    reduce: Reduce
    x: Tensor
    weight: Tensor | None
    shape: tuple[int, ...]
    more: More | None = None
    layout: tuple[int, int, str] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that may want a gradient."""
        extra = () if self.more is None else tuple(t for t, _ in self.more.tensors.values())
        numbers = (()
                   if type(self.reduce) is str
                   else tuple(t for t in self.reduce[:1] if isinstance(t, Tensor)))
        return ((self.x, *extra, *numbers)
                if self.weight is None else (self.x, self.weight, *extra, *numbers))

    def by(self, reduce: Reduce) -> Aggregation:
        """The aggregation with another reduction; one named "... unweighted" leaves the weights
        out, and a `Part` takes one of several messages."""
        if type(reduce) is str and reduce.endswith(_UNWEIGHTED):
            return prepare(reduce.removesuffix(_UNWEIGHTED),  # type: ignore[return-value]
                           self.x, None, 0)
        if type(reduce) is Part:
            more: Any = self.more  # messages, as it is asked for
            message = more.only(reduce.at) if type(more) is Generated else more.parts[reduce.at]
            return self._replace(reduce=reduce.how, shape=message.out, more=message)
        return self._replace(reduce=reduce)

    def at_once(self, reduces: tuple[Reduce, ...]) -> Aggregation | None:
        """The aggregation whose result is a list of all of ``reduces``; None where there is none:
        sums or means of the messages of one expression."""
        first, more = reduces[0], self.more
        if (type(more) is not Generated or not more.expression.others
            or type(first) is not Part or first.how not in ("sum", "mean")
            or reduces != tuple([Part(first.how, at) for at in range(len(more.expression.outs))])):
            return None
        return self._replace(reduce=first.how)

    @property
    def kind(self) -> str:
        """Kind of the weights: "none", "edge", "head" (one for the last dimension), "channel"."""
        if self.weight is None:
            return "none"
        tail = self.weight.shape[1:]
        if math.prod(tail) == 1 and self.shape == self.x.shape[1:]:
            return "edge"
        return ("head" if tail[-1] == 1
                and tail[:-1] == self.shape[:-1] == self.x.shape[1:-1] else "channel")


def named(reduce: Reduce) -> str:
    """Name of the reduction."""
    return reduce if type(reduce) is str else reduce.name  # type: ignore[union-attr]


def prepare(reduce: Reduce, x: Tensor, weight: Tensor | None, edges: int) -> Aggregation | Reason:
    """The aggregation over ``edges`` edges in the dtype of its messages, or why it does not fit."""
    if x.dim() < 2 or x.layout != torch.strided or x.dtype not in DTYPES or x.is_meta or x.is_neg():
        return reason("GA206", f"features are {x.dtype}, {x.layout}, of shape {list(x.shape)}")
    why = None if type(reduce) is str else means.unfit(reduce, x, weight)
    if why is not None:
        return why
    if weight is None:
        return Aggregation(reduce, x, None, tuple(x.shape[1:]))
    if weight.layout != torch.strided or weight.device != x.device:
        return reason("GA206", f"weights are {weight.layout}, on {weight.device}")
    if weight.is_neg():
        return reason("GA206", "weights are a view that negates its numbers", "call resolve_neg()")
    if weight.dim() != x.dim() or weight.shape[0] != edges:
        return reason("GA206",
                      f"weights {list(weight.shape)} for {edges} edges and features "
                      f"{list(x.shape)}")
    if (weight.dtype is not torch.float32 and (weight.requires_grad or weight.is_inference())
        and is_inexact(weight)):
        return reason("GA203", f"{weight.dtype} weights, divided by the host's sums in that dtype")
    tails = [*zip(x.shape[1:], weight.shape[1:])]
    for a, b in tails:
        if a != b and a != 1 and b != 1:
            return reason("GA206",
                          f"weights {list(weight.shape)} and features {list(x.shape)} do "
                          "not broadcast")
    if weight.dtype != x.dtype:
        dtype = torch.promote_types(weight.dtype, x.dtype)
        if dtype not in DTYPES:
            return reason("GA203", f"weights are {weight.dtype}")
        x, weight = x.to(dtype), weight.to(dtype)
    return Aggregation(reduce, x, weight, tuple([b if a == 1 else a for a, b in tails]))


def plain(graph: OpGraph, aggregation: Aggregation) -> Tensor:
    """[num_dst, *shape] on torch operations; messages have the size of the edges. Differentiable
    any number of times."""
    if type(aggregation.reduce) is Softmax:
        return means.softmax(graph, aggregation)  # type: ignore[arg-type]
    if type(aggregation.reduce) is PowerMean:
        return means.around(plain)(graph, aggregation)
    message = messages.made(graph, aggregation.x, aggregation.weight, aggregation.more)
    index = graph.index("v")
    if aggregation.reduce in ("max", "min"):
        index = index.long().view(-1, *(1,) * (message.dim() - 1)).expand_as(message)
        if not zero_share(graph):
            return _of_product(graph, message, index, aggregation.reduce)
        zeros = message.new_zeros(graph.num_dst, *message.shape[1:])
        return zeros.scatter_reduce(0, index, message, f"a{aggregation.reduce}", include_self=False)
    wide = message.float() if message.dtype in _HALF else message
    out = _sum(graph, wide)
    if aggregation.reduce != "sum":
        degree = _sum(graph,
                      wide.new_ones(graph.num_edges)).clamp(min=1).view(-1, *(1,) * (out.dim() - 1))
        out = out / degree
    if aggregation.reduce in ("var", "std"):
        out = _sum(graph, wide * wide) / degree - out * out
        out = deviation(out) if aggregation.reduce == "std" else out
    return out.to(message.dtype)


def zero_share(graph: OpGraph) -> bool:
    """Whether an extremum of exactly 0 keeps a share of its gradient for itself, as PyG's of
    messages do; those of its products with a matrix do not."""
    return type(graph) is not ProductGraph


def _of_product(graph: OpGraph, message: Tensor, index: Tensor, reduce: str) -> Tensor:
    worst = message.new_full((graph.num_dst, *message.shape[1:]),
                             -math.inf if reduce == "max" else math.inf)
    out = worst.scatter_reduce(0, index, message, f"a{reduce}")
    empty = torch.bincount(graph.index("v"), minlength=graph.num_dst) == 0
    return out.masked_fill(empty.view(-1, *(1,) * (out.dim() - 1)), 0.0)


def deviation(variance: Tensor) -> Tensor:
    """Root of the ``variance``, 0 where it is tiny, as in PyG's ``StdAggregation``."""
    out = variance.clamp(min=SMALLEST_VARIANCE).sqrt()
    return out.masked_fill(out <= math.sqrt(SMALLEST_VARIANCE), 0.0)


def _sum(graph: OpGraph, message: Tensor) -> Tensor:
    return message.new_zeros(graph.num_dst,
                             *message.shape[1:]).index_add(0, graph.index("v"), message)
