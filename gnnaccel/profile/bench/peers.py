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


class SparseGCN(torch.nn.Module):
    """``GCNConv`` over a matrix of its norms, self loops included."""

    def __init__(self, conv: Any, edge_index: Tensor, nodes: int):
        super().__init__()
        self.conv = conv
        src, dst = with_loops(edge_index, nodes)
        degree = torch.bincount(dst, minlength=nodes).float().rsqrt()
        self.matrices = both_ways(src, dst, degree[src] * degree[dst], nodes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return Sum.apply(*self.matrices, self.conv.lin(x)) + self.conv.bias


class SparseSAGE(torch.nn.Module):
    """``SAGEConv`` with the mean of its neighbours, over a matrix of their shares."""

    def __init__(self, conv: Any, edge_index: Tensor, nodes: int):
        super().__init__()
        self.conv = conv
        src, dst = edge_index
        shares = 1 / torch.bincount(dst, minlength=nodes).clamp(min=1).float()
        self.matrices = both_ways(src, dst, shares[dst], nodes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv.lin_l(Sum.apply(*self.matrices, x)) + self.conv.lin_r(x)


class TurboMax(torch.nn.Module):
    """``SAGEConv`` with the maximum of its neighbours."""

    def __init__(self, conv: Any, edge_index: Tensor, nodes: int):
        super().__init__()
        self.conv, self.graph = conv, turbo_graph(edge_index, nodes)
        self.reduce = importlib.import_module("turbo_gnn").reduction_aggr

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv.lin_l(self.reduce(self.graph, x, reduce="max")) + self.conv.lin_r(x)


class TurboGATv2(torch.nn.Module):
    """``GATv2Conv`` of one head of 32, 64, 128 or 256 channels."""

    def __init__(self, conv: Any, edge_index: Tensor, nodes: int):
        super().__init__()
        self.conv, self.graph = conv, turbo_graph(with_loops(edge_index, nodes), nodes)
        self.attend = importlib.import_module("turbo_gnn").gatv2_aggr

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        conv = self.conv
        shape = (-1, conv.heads, conv.out_channels)
        out = self.attend(self.graph, conv.lin_r(x).view(shape), conv.lin_l(x).view(shape),
                          conv.att.view(shape[1:]), conv.negative_slope)
        return out.reshape(x.shape[0], -1) + conv.bias


class TurboTransformer(torch.nn.Module):
    """``TransformerConv`` of one head of 32, 64, 128 or 256 channels."""

    def __init__(self, conv: Any, edge_index: Tensor, nodes: int):
        super().__init__()
        self.conv, self.graph = conv, turbo_graph(edge_index, nodes)
        self.attend = importlib.import_module("turbo_gnn").graph_transformer_aggr

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        conv = self.conv
        shape = (-1, conv.heads, conv.out_channels)
        q, k, v = (lin(x).view(shape) for lin in (conv.lin_query, conv.lin_key, conv.lin_value))
        # there the source asks, and the destination is asked
        out = self.attend(self.graph, x, Q=k, K=q, V=v, scale=conv.out_channels**-0.5)
        return out.reshape(x.shape[0], -1) + conv.lin_skip(x)


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
    "GCN 64": Peer("cuSPARSE", SparseGCN),
    "SAGE 64": Peer("cuSPARSE", SparseSAGE),
    "SAGE max 64": Peer("Turbo-GNN", TurboMax, "turbo_gnn"),
    "GATv2 1x64": Peer("Turbo-GNN", TurboGATv2, "turbo_gnn"),
    "Transformer 1x64": Peer("Turbo-GNN", TurboTransformer, "turbo_gnn"),
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
