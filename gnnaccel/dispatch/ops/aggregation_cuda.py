"""Weighted neighbours summed by CUDA kernels, with their backward: the operations of
`aggregation`.

A backward that is itself recorded runs on torch operations.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import MAX_WIDTH, TYPES, dense
from gnnaccel.cuda.structures import bands
from gnnaccel.cuda.traverse import aggregate as sums
from gnnaccel.dispatch.generated import messages as generated
from gnnaccel.dispatch.generated.messages import Generated
from gnnaccel.dispatch.ops import (aggregation, aggregation_means as means, aggregation_messages,
                                   aggregation_softmax, multi_reduce)
from gnnaccel.dispatch.ops.aggregation import Aggregation, Reduce
from gnnaccel.dispatch.ops.aggregation_means import PowerMean, Softmax
from gnnaccel.dispatch.ops.call import Kernel
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.messages import Shifted
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import Operation, gradients, stand_in, wants_grad

_MAX_EDGES = 2**31
_NO_WEIGHTS = 0, 0, "none"  # the layout of rows that are summed as they are
_ENTRIES = ("forward", "forward_short", "merge")
_MULTI = ("max", "min", "var", "std")  # reductions by the kernels of several reduces


def kernel(graph: OpGraph, given: Aggregation) -> Kernel | Reason:
    """The way of `aggregation.plain` by kernels, or why there is none."""
    edges = graph.num_edges
    if given.x.dtype not in TYPES:
        return reason("GA203",
                      f"{given.x.dtype} features; the kernels take {', '.join(map(str, TYPES))}")
    if not all(given.shape) or edges >= _MAX_EDGES:
        return reason("GA206",
                      "rows are empty"
                      if not all(given.shape) else f"{edges} edges; int32 counts them")
    if not edges:
        return reason("GA303")
    if type(given.reduce) is Softmax:
        return aggregation_softmax.kernel(graph, given)  # type: ignore[arg-type]
    if given.more is not None:
        return aggregation_messages.kernel(graph, given)
    if type(given.reduce) is PowerMean:
        given = means.inner(given)
    if given.reduce in _MULTI:
        multi = _multi(graph, given, (given.reduce,))
        return multi._replace(run=lambda: run(graph, given)) if type(multi) is Kernel else multi
    heads, width, weight = layout_of(given)
    mean, dtype = given.reduce == "mean", given.x.dtype

    sizes = graph.num_src, graph.num_dst, edges, given.x.device
    forms = partial(_forms, (heads, width, dtype), sizes)
    grad = wants_grad(given.x, given.weight)
    shared = grad and mean and weight == "none" and _fewer_edges(graph, math.prod(given.shape))

    small = max(sizes[:2]) * math.prod(given.shape) * dtype.itemsize < bands.LEAST
    banded = not small and len(forms(False, "place", weight)) > 1
    return Kernel(f"fused {given.reduce}" + ", in bands of channels" * banded,
                  ("aggregation", heads, width, weight, dtype, mean, banded, grad, shared),
                  partial(_compile, forms, weight, mean, grad, shared), lambda: run(graph, given))


def _forms(row: tuple[int, int, torch.dtype], sizes: tuple[int, int, int, torch.device],
           averaged: bool, at: str, weight: str) -> set[sums.Variant]:
    """Kernels of a sum, with those that forward and backward take in its place over a graph of
    these ``sizes``: sources, destinations, edges, the device."""
    unbanded, (num_src, num_dst, edges, device) = _variant(*row, weight, averaged, at), sizes
    return {unbanded, *[unbanded.banded(nodes, rows, edges, device)
                        for nodes, rows in ((num_src, num_dst), (num_dst, num_src))]}


def _compile(forms: Callable[..., set[sums.Variant]], weight: str, mean: bool, grad: bool,
             shared: bool) -> None:
    """Compile the sums or means of these ``forms(averaged, at, weight)``; ``grad``, ``shared``:
    with those of backward, of a mean by shares too."""
    for averaged in {mean, mean and not grad}:  # backward never averages
        for at in ("place",) if weight == "none" else ("place", "position"):
            for form in forms(averaged, at, weight):
                for entry in _ENTRIES:
                    form.kernels(entry)
                if weight != "none" and at == "place":
                    form.kernels("edge_dot")
    if shared:  # the gradient is a weighted sum from the second time on
        for entry in _ENTRIES:
            for form in forms(False, "position", "edge"):
                form.kernels(entry)


def shares(graph: OpGraph, given: Aggregation) -> bool | None:
    """Whether `kernel` compiles the kernels of a mean's shares, its only difference between graphs.
    None where it may differ in more."""
    if type(given.reduce) is Softmax or type(given.more) is Generated:
        return False
    if type(given.reduce) is not str or given.reduce in _MULTI or type(given.more) is Shifted:
        return None
    features = math.prod(given.shape)
    if (given.more is None and bands.LEAST <= features * given.x.element_size()
        * max(graph.num_src, graph.num_dst)):
        return None
    return (given.reduce == "mean" and given.weight is None and given.x.requires_grad
            and _fewer_edges(graph, features))


def run(graph: OpGraph, given: Aggregation) -> Tensor:
    """`aggregation.plain` by kernels."""
    if type(given.reduce) is Softmax:
        return aggregation_softmax.run(graph, given)  # type: ignore[arg-type]
    if type(given.more) is Generated:
        return generated.run(graph, given.reduce, given.more)  # type: ignore[arg-type]  # named
    if given.more is not None:
        return aggregation_messages.run(graph, given)
    if type(given.reduce) is PowerMean:
        return means.around(run)(graph, given)
    if given.reduce in _MULTI:
        x, weight = _seen(given)
        return multi_reduce.run(graph, x, (given.reduce,), weight, aggregation.zero_share(graph))
    x, weight, layout = given.x, given.weight, _NO_WEIGHTS
    if weight is not None:
        layout = given.layout or layout_of(given)
    if layout[2] == "head" or x.shape[1:] != given.shape:
        x, weight = _expanded(given, layout)
    if wants_grad(x, weight):
        return _Aggregate(graph, given.reduce == "mean", layout).apply(x, weight)
    return _aggregate(graph, given.reduce == "mean", layout, x, weight)


def _expanded(given: Aggregation, layout: tuple[int, int, str]) -> tuple[Tensor, Tensor | None]:
    """Features and weights, expanded where they broadcast in a way that no kernel has."""
    weight: Tensor  # where it is read; None if the kind is "none"
    x, weight, (_, width, kind) = given.x, given.weight, layout  # type: ignore[assignment]
    if x.shape[1:] != given.shape:
        x = x.expand(-1, *given.shape)
    if kind == "head":
        tail = ((*given.shape[:-1], 1) if width > 1
                or weight.shape[-1] == given.shape[-1] == 1 else given.shape)
        weight = weight if weight.shape[1:] == tail else weight.expand(-1, *tail)
    return x, weight


def together(graph: OpGraph, given: Aggregation,
             reduces: tuple[Reduce, ...]) -> dict[tuple[str, ...], Kernel]:
    """Kernels of the aggregations ``reduces`` (`Aggregation.by`) that share a pass: rows of the
    same weights, where one is a maximum, a minimum or a variance anyway. Softmax and power means
    are of rows of their own."""
    kernels, names = {}, [reduce for reduce in reduces if type(reduce) is str]
    for weighted in (False, True):
        group = tuple(dict.fromkeys(name for name in names
                                    if given.by(name).reduce in aggregation.REDUCES
                                    and (given.by(name).weight is not None) is weighted))
        shared: tuple[str, ...] = tuple(given.by(name).reduce  # type: ignore[misc]
                                        for name in group)
        if given.more is None and len(group) > 1 and any(reduce in _MULTI for reduce in shared):
            kernel = _multi(graph, given.by(group[0]), shared)
            if type(kernel) is Kernel:
                kernels[group] = kernel
    return kernels


def run_all(graph: OpGraph, given: Aggregation, reduces: tuple[Reduce, ...],
            groups: tuple[tuple[str, ...], ...],
            alone: list[Callable[[OpGraph, Aggregation], Tensor]]) -> list[Tensor]:
    """The aggregations ``reduces``: those in one of ``groups`` in one pass, others each by its own
    function in ``alone``."""
    results: dict[str, Tensor] = {}
    for group in groups:
        first = given.by(group[0])
        x, weight = _seen(first)
        out = multi_reduce.run(graph, x, tuple(given.by(name).reduce  # type: ignore[misc]
                                               for name in group), weight,
                               aggregation.zero_share(graph))
        results.update(zip(group, out.unbind(1)))
    return [results[reduce] if type(reduce) is str
            and reduce in results else single(graph, given.by(reduce))
            for reduce, single in zip(reduces, alone)]


def _multi(graph: OpGraph, given: Aggregation, reduces: tuple[str, ...]) -> Kernel | Reason:
    heads, width, _ = layout_of(given)
    x, weight = _seen(given)
    return multi_reduce.multi_reduce(graph, x.reshape(-1, heads, width), reduces, weight,
                                     aggregation.zero_share(graph)).kernel


def _seen(given: Aggregation) -> tuple[Tensor, Tensor | None]:
    """Features and weights as `multi_reduce` takes them."""
    if given.weight is None:
        return _expanded(given, _NO_WEIGHTS)
    layout = layout_of(given)
    x, weight = _expanded(given, layout)
    return x, _as_seen(weight, layout)


def layout_of(given: Aggregation) -> tuple[int, int, str]:
    """Heads and width of a row for the kernels, and their name for the weights."""
    kind, features, last = given.kind, math.prod(given.shape), given.shape[-1]
    if kind in ("none", "edge"):
        return *sums.factored(features), kind
    return ((features // last, last, "head") if kind == "head"
            and last <= MAX_WIDTH else (features, 1, "head"))


def _variant(heads: int, width: int, dtype: torch.dtype, weight: str, mean: bool,
             at: str = "place") -> sums.Variant:
    return sums.variant(heads, width, dtype, dtype, weight, at, False, mean, False)


def _aggregate(graph: OpGraph, mean: bool, layout: tuple[int, int, str], x: Tensor,
               weight: Tensor | None) -> Tensor:
    view = graph.built or graph.view()
    if weight is None:
        return sums.total(view.csc(places=False), x, None, "place", mean)
    flat = weight.reshape(-1) if layout[2] == "edge" else weight.reshape(-1, layout[0])
    rows, placed, at = view.weighted(flat)
    return sums.total(rows, x, placed, at, mean)


class _Aggregate(Operation):
    """[num_dst, *features] of x [num_src, *features] and weights [E, ...] or None, which kernels
    see as ``layout`` says."""

    __slots__ = ("graph", "layout", "mean")

    def __init__(self, graph: OpGraph, mean: bool, layout: tuple[int, int, str]):
        self.graph, self.mean, self.layout = graph, mean, layout

    def forward(self, needs, x, weight):
        out = _aggregate(self.graph, self.mean, self.layout, x, weight)
        return out, () if weight is None else (x if needs[1] else None, weight)

    def backward(self, needs, saved, grad):
        (x, weight), graph, layout = saved or (None, None), self.graph, self.layout
        view, shares = graph.view(), None
        if self.mean:
            features = math.prod(grad.shape[1:])
            shares = (view.shares_by_src()
                      if weight is None and _fewer_edges(graph, features) else None)
            if shares is None:
                grad = (grad
                        * view.inverse_degree().view(-1, *(1,) * (grad.dim() - 1))).to(grad.dtype)
        d_x = d_weight = None
        if needs[0] and shares is not None:
            d_x = sums.total(view.csr(places=False), grad, shares, "position")
        elif needs[0]:
            rows, placed, at = view.weighted(_as_seen(weight, layout), by_src=True)
            d_x = sums.total(rows, grad, placed, at)
        if needs[1]:
            heads, width, kind = layout
            left, right = (dense(t).view(-1, heads, width) for t in (grad, x))
            variant = _variant(heads, width, grad.dtype, kind, False)
            d_weight = sums.edge_dot(variant, view.csc(), left, right)[:weight.shape[0]]
            d_weight = (d_weight.sum(1)
                        if kind == "edge" else d_weight).to(weight.dtype).view(weight.shape)
        return d_x, d_weight

    def recorded(self, needs, saved, grad):
        x, weight = saved or (None, None)
        x = stand_in(grad, self.graph.num_src) if x is None else x
        return gradients(self.reference, (x, weight), needs, (grad,))

    def reference(self, x, weight):
        call = Aggregation("mean" if self.mean else "sum", x, weight, tuple(x.shape[1:]))
        return aggregation.plain(self.graph, call)


def _fewer_edges(graph: OpGraph, features: int) -> bool:
    """Whether to read a number at each edge is less than to scale all gradients first."""
    return 2 * graph.num_edges <= graph.num_dst * features


def _as_seen(weight: Tensor | None, layout: tuple[int, int, str]) -> Tensor | None:
    """Weights [E], or [E, H]: the same memory where they are contiguous."""
    if weight is None:
        return None
    return weight.reshape(-1) if layout[2] == "edge" else weight.reshape(-1, layout[0])
