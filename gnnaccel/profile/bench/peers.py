"""Other kernels for PyG's layers, which the benchmark runs beside them: cuSPARSE through torch, and
Turbo-GNN where it is installed (arXiv 2605.31500).

A peer computes what a layer does, with the layer's own maps and weights, and another kernel for
what is done with the neighbours. What it needs to know of the graph is made beforehand and not
timed: that is how cuSPARSE is at its best.
"""
from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sum(torch.autograd.Function):
    """``matrix @ x`` with cuSPARSE. Backward multiplies by the transposed matrix, which was made
    beforehand."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transposed: Tensor, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        ctx.set_materialize_grads(False)
        return matrix @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple:
        return None, None, None if grad is None else ctx.transposed @ grad.contiguous()


class Beside(torch.nn.Module):
    """A layer, called as it is, that computes by ``run(x)``."""

    def __init__(self, conv: Any, run: Callable[[Tensor], Tensor]):
        super().__init__()
        self.conv, self.run = conv, run

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.run(x)


def sparse_gcn(conv: Any, edge_index: Tensor, nodes: int) -> Beside:
    """``GCNConv`` over a matrix of its norms, self loops included."""
    src, dst = with_loops(edge_index, nodes)
    degree = torch.bincount(dst, minlength=nodes).float().rsqrt()
    matrices = both_ways(src, dst, degree[src] * degree[dst], nodes)
    return Beside(conv, lambda x: Sum.apply(*matrices, conv.lin(x)) + conv.bias)


def sparse_sage(conv: Any, edge_index: Tensor, nodes: int) -> Beside:
    """``SAGEConv`` with the mean of its neighbours, over a matrix of their shares."""
    src, dst = edge_index
    shares = 1 / torch.bincount(dst, minlength=nodes).clamp(min=1).float()
    matrices = both_ways(src, dst, shares[dst], nodes)
    return Beside(conv, lambda x: conv.lin_l(Sum.apply(*matrices, x)) + conv.lin_r(x))


def turbo_max(conv: Any, edge_index: Tensor, nodes: int) -> Beside:
    """``SAGEConv`` with the maximum of its neighbours."""
    graph, turbo = turbo_graph(edge_index, nodes), importlib.import_module("turbo_gnn")
    return Beside(conv, lambda x: (conv.lin_l(turbo.reduction_aggr(graph, x, reduce="max"))
                                   + conv.lin_r(x)))


def turbo_gatv2(conv: Any, edge_index: Tensor, nodes: int) -> Beside:
    """``GATv2Conv`` of one head of 32, 64, 128 or 256 channels."""
    graph = turbo_graph(with_loops(edge_index, nodes), nodes)
    turbo, shape = importlib.import_module("turbo_gnn"), (-1, conv.heads, conv.out_channels)

    def run(x: Tensor) -> Tensor:
        out = turbo.gatv2_aggr(graph, conv.lin_r(x).view(shape), conv.lin_l(x).view(shape),
                               conv.att.view(shape[1:]), conv.negative_slope)
        return out.reshape(x.shape[0], -1) + conv.bias

    return Beside(conv, run)


def turbo_transformer(conv: Any, edge_index: Tensor, nodes: int) -> Beside:
    """``TransformerConv`` of one head of 32, 64, 128 or 256 channels."""
    graph, turbo = turbo_graph(edge_index, nodes), importlib.import_module("turbo_gnn")
    shape = (-1, conv.heads, conv.out_channels)

    def run(x: Tensor) -> Tensor:
        q, k, v = (lin(x).view(shape) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
        # there the source asks, and the destination is asked
        out = turbo.graph_transformer_aggr(graph, x, Q=k, K=q, V=v, scale=conv.out_channels**-0.5)
        return out.reshape(x.shape[0], -1) + conv.lin_skip(x)

    return Beside(conv, run)


class Peer(NamedTuple):
    """``make(conv, edge_index, nodes)`` gives a module that is called as the layer is; ``package``:
    what has to be installed, None for torch itself."""

    name: str
    make: Callable[[Any, Tensor, int], torch.nn.Module]
    package: str | None = None

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, if it cannot."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed"


#: by the layer's name
PEERS = {
    "GCN 64": Peer("cuSPARSE", sparse_gcn),
    "SAGE 64": Peer("cuSPARSE", sparse_sage),
    "SAGE max 64": Peer("Turbo-GNN", turbo_max, "turbo_gnn"),
    "GATv2 1x64": Peer("Turbo-GNN", turbo_gatv2, "turbo_gnn"),
    "Transformer 1x64": Peer("Turbo-GNN", turbo_transformer, "turbo_gnn"),
}


def both_ways(src: Tensor, dst: Tensor, values: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """The matrix with ``values`` at (dst, src), and its transposed, in CSR."""
    return csr(dst, src, values, nodes), csr(src, dst, values, nodes)


def csr(rows: Tensor, columns: Tensor, values: Tensor, nodes: int) -> Tensor:
    order = torch.argsort(rows, stable=True)
    offsets = torch.zeros(nodes + 1, dtype=torch.int32, device=rows.device)
    offsets[1:] = torch.bincount(rows, minlength=nodes).cumsum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that these are in beta
        return torch.sparse_csr_tensor(offsets, columns[order].int(), values[order],
                                       (nodes, nodes), device=rows.device)


def with_loops(edge_index: Tensor, nodes: int) -> Tensor:
    """The edges with one self loop for each node, as PyG's attention layers and GCN have them."""
    kept = edge_index[:, edge_index[0] != edge_index[1]]
    return torch.cat([kept, torch.arange(nodes, device=kept.device).expand(2, -1)], 1)


def turbo_graph(edge_index: Tensor, nodes: int) -> Any:
    kind = importlib.import_module("turbo_gnn").AdjacencyForwardBackwardWithNodeBuckets
    return kind.from_edge_list(edge_index, nodes, is_directed=True).to(edge_index.device)
