"""Adjacencies that are sparse matrices, users' layers over them, and what they have to give in
float64."""
from __future__ import annotations

import copy

import pytest
import torch
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

from tests.pyg import graphs
from tests.pyg.graphs import N
from tests.pyg.judge import took

INDICES = (torch.int64, torch.int32)
#: marks of a module whose tests make matrices
QUIET = [pytest.mark.filterwarnings("ignore:Sparse (CS|invariant).*:UserWarning"),
         pytest.mark.filterwarnings("ignore:Converting sparse tensor:UserWarning")]


class Weighing(MessagePassing):
    """A user's layer, which makes messages of the matrix's values."""

    def forward(self, x, edge_index, edge_weight=None):
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_j, edge_weight):
        return x_j * edge_weight.view(-1, 1)


class Typing(MessagePassing):
    """A user's layer, for which PyG takes a matrix's values for types of edges."""

    def forward(self, x, edge_index, edge_type=None):
        return self.propagate(edge_index, x=x, edge_type=edge_type)

    def message(self, x_j, edge_type):
        return x_j if edge_type is None else x_j * edge_type.view(-1, 1)


class Forgetting(MessagePassing):
    """A user's layer that gives no weight where its message takes one: PyG fails."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, edge_weight=None):
        return x_j if edge_weight is None else x_j * edge_weight.view(-1, 1)


def matrix(edges=None, values=None, sizes=(N, N), index=torch.int64, layout=torch.sparse_csr):
    """[destinations, sources] of ``edges`` [2, E], one number each, ones where there are no
    ``values``."""
    edges = graphs.square() if edges is None else edges
    values = torch.ones(edges.shape[1]) if values is None else values
    found = torch.sparse_coo_tensor(edges.flip(0), values, sizes).coalesce().to_sparse(
        layout=layout)
    pointers, ids = parts(found)
    return made(pointers.to(index), ids.to(index), found.values(), found)


def parts(found):
    return ((found.crow_indices(), found.col_indices()) if found.layout is torch.sparse_csr else
            (found.ccol_indices(), found.row_indices()))


def made(pointers, ids, values, like):
    return torch.sparse_compressed_tensor(pointers, ids, values, like.shape, layout=like.layout)


def trained(layer, x, adj, device="cpu", dtype=torch.float32):
    """The result, and the gradients of features, values and parameters, on ``device``. Of a matrix
    in CSC torch has no gradients of values."""
    layer = copy.deepcopy(layer).to(device, dtype)
    pair = x if isinstance(x, tuple) else (x,)
    xs = [t.detach().to(device, dtype).requires_grad_() for t in pair]
    values = adj.values().detach().to(device, dtype)
    values.requires_grad_(adj.layout is torch.sparse_csr)
    moved = made(*(t.to(device) for t in parts(adj)), values, adj)
    given = (tuple(xs) if isinstance(x, tuple) else xs[0])
    out = layer(given, *([xs[0]] if isinstance(layer, nn.GCN2Conv) else []), moved)
    out.square().sum().backward()
    return [t.detach().cpu().double() for t in
            (out, *(one.grad for one in (*xs, values, *layer.parameters())
                    if one.grad is not None))]


def agree(found, truth):
    assert len(found) == len(truth)
    for one, exact in zip(found, truth):
        assert (one - exact).norm() <= 3e-6 * exact.norm().clamp(min=1e-3)


def by_kernels(route, layer, x, adj, calls=None):
    truth = trained(layer, x, adj, dtype=torch.float64)
    with route.on():
        agree(trained(layer, x, adj, route.device), truth)
    if calls is not None:
        took(route, calls)


def calls(layer, x, adj, count=3):
    return [layer(x, adj) for _ in range(count)]
