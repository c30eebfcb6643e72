"""Sums of outer products of edges' features with neighbours' rows, as the operation of a plain
layer.

The messages are ``x[j] @ W(h[e])``, where each number of the matrix ``W(h[e])`` is linear in the
features ``h[e]`` (`NNConv`): the sum over a node's edges is linear in the sums of the outer
products of ``h[e]`` and ``x[j]``, so the matrices of the edges are never made.

``reduce`` is "outer:" and the fields of a `Form`, with colons.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.traverse import outer_sum
from gnnaccel.dispatch.ops import cuda_functions, torch_ops
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.plan.cost import constants
from gnnaccel.dispatch.run.autograd import Operation

OPERANDS = ("x", "edge")
MOST = outer_sum.MOST  # channels of a row
FORMULAS = {"outer": "out[i] = the sum or mean of h[e] x[j]^T"}


class Form(NamedTuple):
    """``mean`` or sum; ``features`` of an edge; ``ones``: a 1 counts as one more of them;
    ``results``: channels of the layer's result, for which the host makes a matrix."""

    mean: bool
    features: int
    ones: bool
    results: int

    @property
    def name(self) -> str:
        """The operation's name."""
        return ":".join(["outer", *[str(int(value)) for value in self]])

    @property
    def terms(self) -> int:
        """Rows of a node's sum."""
        return self.features + self.ones


def form_of(reduce: str) -> Form:
    """The form of an operation of this name."""
    mean, features, ones, results = map(int, reduce.split(":")[1:])
    return Form(bool(mean), features, bool(ones), results)


def by_operations(graph: OpGraph, reduce: str, x: Tensor, edge: Tensor) -> Tensor:
    """[num_dst, terms, D] of x [num_src, D] and ``edge`` [E, K], on torch operations,
    differentiable any number of times; one row of all terms for each edge is in memory."""
    form = form_of(reduce)
    terms = torch.cat([edge, edge.new_ones(edge.shape[0], 1)], 1) if form.ones else edge
    index = graph.index("v")
    total = torch_ops.added(terms.unsqueeze(2) * torch_ops.take(graph, x, "u").unsqueeze(1), index,
                            graph.num_dst)
    if not form.mean:
        return total
    count = torch.bincount(index, minlength=graph.num_dst)
    return total / count.clamp(min=1).view(-1, 1, 1)


def by_kernels(graph: OpGraph, reduce: str, x: Tensor, edge: Tensor) -> Tensor:
    """`by_operations` by the CUDA kernels."""
    return _OuterSum(graph, reduce).apply(x, edge)


def prepare(reduce: str, width: int, dtype: torch.dtype, weighted: bool) -> None:
    """Compile the kernels that `by_kernels` launches."""
    for entry in outer_sum.ENTRIES:
        outer_sum.kernels(form_of(reduce).terms, width, False)(entry)


class _OuterSum(Operation):
    __slots__ = ("graph", "reduce")

    def __init__(self, graph: OpGraph, reduce: str):
        self.graph, self.reduce = graph, reduce

    def forward(self, needs, x, edge):
        form = form_of(self.reduce)
        out = outer_sum.forward(self.graph.view().csc(), dense(x), dense(edge), form.ones,
                                form.mean)
        return out, (x, edge)

    def backward(self, needs, saved, grad):
        x, edge = saved
        form = form_of(self.reduce)
        d_x, d_edge = outer_sum.backward(self.graph.view().csc(), dense(x), dense(edge), form.ones,
                                         form.mean, dense(grad), needs)
        if d_x is not None:
            d_x = cuda_functions.edge_sum(self.graph, d_x, "u")
        return d_x, d_edge

    def reference(self, x, edge):
        return by_operations(self.graph, self.reduce, x, edge)


def seconds(request: Any, ours: bool) -> float | None:
    """An estimate of a call on a GPU, by us or natively: products and traffic, or the host's time
    if that is more. None on a CPU, where the host's own code is as good.

    request: a `PlainRequest`, whose numbers of nodes and edges are classes of magnitude.
    """
    if request.device != "cuda":
        return None
    gpu, rates = constants()["cuda"], constants()["aggregation"]["cuda"]["outer"]
    form, mode = form_of(request.reduce), "training" if request.grad else "forward"
    edges, nodes = (0.75 * (1 << bits) for bits in (request.edge_bits, request.dst_bits))
    if ours:
        rows, inner, outer = nodes, form.terms * request.width, form.results
    else:
        rows, inner, outer = edges, form.features, request.width * form.results
    factors = rates["ours" if ours else "native"][mode]
    device = (2 * rows * inner * outer * factors["products"] / rates["flops"]
              + 4 * rows * (inner if ours else outer) * factors["passes"] / rates["bandwidth"])
    launches = factors["launches"]
    if ours:
        device += factors["products"] * (2 * edges * inner / rates["kernel_flops"]
                                         + nodes * rates["row"])
        if request.fresh:
            launches += rates["structure_launches"][mode]
            device += edges * (1 + request.grad) * gpu["structure_per_edge"]
    return max(device, launches * gpu["launch"]) * (rates["margin"] if ours else 1)
