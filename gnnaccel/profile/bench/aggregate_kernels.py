"""Below the layers: weighted sums against cuSPARSE, and single operations against the bytes that
they must move.

Python, allocation of results and autograd are in the times, as in a layer.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.ops import calls, neighbours
from gnnaccel.dispatch.ops.call import Kernel, OpCall
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.multi_reduce import multi_reduce
from gnnaccel.dispatch.ops.operands import Operands, prepare
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.profile.bench import cells, peers, timing
from gnnaccel.profile.bench.cells import Pair
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.shapes import Graph
from gnnaccel.profile.bench.steps import MODES

WIDTHS = (64, 128)


# --- weighted sums --------------------------------------------------------------------------------

def ours(graph: Graph, x: Tensor, grad: Tensor, weight: Tensor) -> Pair:
    """gnnaccel's kernels; on a CPU torch operations. Training: with the gradient of x, the other
    sum, as of `cusparse`."""
    edges = OpGraph(graph.edge_index, graph.num_nodes, graph.num_nodes)
    way = neighbours.by_kernels if x.is_cuda else neighbours.by_operations
    leaf = x.clone().requires_grad_()

    def forward() -> Tensor:
        return way(edges, "sum", x, weight)

    def training() -> tuple[Tensor, Tensor]:
        return way(edges, "sum", x, weight), neighbours.gradient(edges, grad, weight)

    if x.is_cuda:
        return forward, training
    return forward, lambda: torch.autograd.grad(way(edges, "sum", leaf, weight), leaf, grad)


def cusparse(graph: Graph, x: Tensor, grad: Tensor, weight: Tensor) -> Pair:
    """``torch.sparse``'s product with a CSR matrix, cuSPARSE on a GPU. The matrix and its transpose
    are made beforehand, so the gradient is the product that a user could have at best."""
    src, dst = graph.edge_index
    across, back = peers.both_ways(src, dst, weight, graph.num_nodes)
    return lambda: across @ x, lambda: (across @ x, back @ grad)


def spmm_records(graph: Graph, effort: timing.Effort) -> Iterator[Record]:
    """One record per width, mode and way."""
    weight = torch.rand(graph.num_edges, device=graph.device)
    for width in WIDTHS:
        x, grad = (torch.randn(graph.num_nodes, width, device=graph.device) for _ in range(2))
        for impl, way in (("cusparse", cusparse), ("gnnaccel", ours)):
            yield from cells.pair_records(
                "spmm", dict(shape=graph.shape.name, layer=f"weighted {width}", impl=impl),
                lambda: way(graph, x, grad, weight), graph.device, effort,
                lambda mode: {"width": width})


# --- single operations ----------------------------------------------------------------------------

class Operation(NamedTuple):
    """``tensors`` makes what it is given, ``call`` states it; ``moved``: bytes per edge that it
    must read and write, forward and in training."""

    tensors: Callable[[], list[Tensor]]
    call: Callable[..., OpCall]
    moved: tuple[int, int]


def _operands(operation: str, left: Tensor, right: Tensor | None) -> Operands:
    found = prepare(operation, left, right)
    assert not isinstance(found, Reason)  # nothing speaks against these
    return found


def operations(edges: OpGraph) -> dict[str, Operation]:
    """By name. Ids take 4 bytes; a row that is gathered counts once per edge, what lies at nodes
    alone does not count."""
    nodes, count, device = edges.num_src, edges.num_edges, edges.edge_index.device
    scalars, row, ids = 8 * 4, 64 * 4, 4

    def random(*shapes: tuple[int, ...]) -> Callable[[], list[Tensor]]:
        return lambda: [torch.randn(shape, device=device) for shape in shapes]

    def several(*reduces: str) -> Callable[[Tensor], OpCall]:
        return lambda u: multi_reduce(edges, u, reduces)

    both = row + scalars + 2 * ids
    return {
        "edge_softmax 8": Operation(random((count, 8)), lambda x: calls.edge_softmax(edges, x, "v"),
                                    (2 * scalars + ids, 5 * scalars + 2 * ids)),
        "u_add_v 8": Operation(random((nodes, 8), (nodes, 8)),
                               lambda u, v: calls.gsddmm(edges, _operands("add", u, v), ("u", "v")),
                               (3 * scalars + 2 * ids, 5 * scalars + 4 * ids)),
        "u_dot_v 8x8": Operation(random((nodes, 8, 8), (nodes, 8, 8)),
                                 lambda u, v: calls.gsddmm(edges, _operands("dot", u, v),
                                                           ("u", "v")), (both, 3 * both)),
        "u_mul_e_sum 8x8": Operation(random((nodes, 8, 8), (count, 8, 1)),
                                     lambda u, e: calls.gspmm(edges, _operands("mul", u, e),
                                                              "sum"), (both, 3 * both)),
        "u_max 64": Operation(random((nodes, 64)),
                              lambda u: calls.gspmm(edges, _operands("copy_lhs", u, None), "max"),
                              (row + 2 * ids, 2 * row + 4 * ids)),
        "max 64, ties shared": Operation(random((nodes, 64)), several("max"),
                                         (row + ids, 2 * row + 2 * ids)),
        "mean min max std 64": Operation(random((nodes, 64)), several("mean", "min", "max", "std"),
                                         (row + ids, 5 * row + 2 * ids)),
    }


def operation_records(graph: Graph, effort: timing.Effort, bandwidth: float) -> Iterator[Record]:
    """Each operation by kernels (on a CPU by torch operations); ``floor_ms``: its bytes at
    ``bandwidth``, that of copying."""
    edges = OpGraph(graph.edge_index, graph.num_nodes, graph.num_nodes)
    for name, operation in operations(edges).items():
        yield from cells.pair_records(
            "operation", dict(shape=graph.shape.name, layer=name, impl="gnnaccel"),
            lambda: _pair(operation), graph.device, effort,
            lambda mode: {"floor_ms": graph.num_edges * operation.moved[MODES.index(mode)]
                          / bandwidth * 1e3})


def _pair(operation: Operation) -> Pair:
    tensors = operation.tensors()
    leaves = [t.clone().requires_grad_() for t in tensors]

    def run(given: list[Tensor]) -> Tensor:
        call = operation.call(*given)
        return (call.kernel.run() if given[0].is_cuda and type(call.kernel) is Kernel
                else call.plain())

    def forward() -> Tensor:
        with torch.no_grad():
            return run(tensors)

    grad = torch.randn_like(forward())
    return forward, lambda: torch.autograd.grad(run(leaves), leaves, grad)
