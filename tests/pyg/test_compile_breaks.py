"""Layers in which torch.compile breaks the graph: what gnnaccel decides there runs as plain
Python."""
from __future__ import annotations

import warnings

import pytest
import torch
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

import gnnaccel
from gnnaccel.dispatch import uncompiled
from tests.compiled_frames import frames
from tests.pyg import graphs
from tests.pyg.compiling import on, reset, route  # noqa: F401
from tests.pyg.graphs import F, N
from tests.pyg.judge import close

#: functions around the host's, which Dynamo traces
WRAPPERS = {"forward", "propagate", "inside", "kept", "norm", "looped", "scatter", "softmax"}


class Own(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


class Telling(Own):
    """A layer whose message breaks the graph."""

    def message(self, x_j):
        torch._dynamo.graph_break()
        return x_j


@pytest.fixture
def enabled(route):
    if not uncompiled._KNOWN:
        pytest.skip("this torch knows no functions that Dynamo leaves alone")
    gnnaccel.enable(backend=route.backend, when="supported")
    reset()
    yield route


def adjacency(edges):
    values = torch.ones(edges.shape[1], device=edges.device)
    return torch.sparse_coo_tensor(edges.flip(0), values, (N, N)).coalesce().to_sparse_csr()


BROKEN = {"a message": (Telling, False), "a message over a matrix": (Telling, True),
          "an aggregation": (lambda: nn.SAGEConv(F, 8, "median"), False),
          "aggregations over a matrix": (lambda: nn.SAGEConv(F, 8, ["mean", "max"]), True),
          "a normalised matrix": (lambda: nn.GCNConv(F, 8), True),
          "attention over a matrix": (lambda: nn.GATConv(F, 8), True)}
#: what is asked of eager layers later
ASKED = {"PNAConv": lambda: nn.PNAConv(F, 8, ["mean", "max"], ["identity"], torch.ones(4).long()),
         "SAGEConv": lambda: nn.SAGEConv(F, 8, ["mean", "max"]), "GCNConv": lambda: nn.GCNConv(F, 8),
         "GATConv": lambda: nn.GATConv(F, 8), "Own": Own}


@pytest.mark.long
@pytest.mark.parametrize("label", BROKEN)
def test_no_wrong_reason_is_kept(enabled, label):
    """Eager calls after a compiled one with breaks are taken over as before."""
    made, sparse = BROKEN[label]
    layer, x = made().to(enabled.device), graphs.features().to(enabled.device)
    edges = graphs.square().to(enabled.device)
    given = adjacency(edges) if sparse else edges
    with gnnaccel.disabled():
        expected = layer(x, given)
    compiled = torch.compile(layer, backend="eager")
    with frames() as seen:
        for _ in range(3):
            assert close(compiled(x, given), expected)
    assert seen <= WRAPPERS, seen - WRAPPERS
    gnnaccel.reset_stats()
    for name, build in ASKED.items():
        build().to(enabled.device)(x, edges)
        assert gnnaccel.stats()[name] == {"calls": 1, "routes": {enabled.backend: 1}, "reasons": {}}


@pytest.mark.long
def test_readouts_after_a_break(enabled):
    x, batch = graphs.features().to(enabled.device), torch.zeros(N, dtype=torch.int64)
    batch = batch.to(enabled.device)

    def pooled(x):
        torch._dynamo.graph_break()
        return nn.global_mean_pool(x, batch)

    expected = pooled(x)
    reset()
    with frames() as seen:
        assert close(torch.compile(pooled, backend="eager")(x), expected)
    assert seen <= WRAPPERS, seen - WRAPPERS


@pytest.mark.long
@pytest.mark.parametrize("broken, other", [("GATConv", "GATv2Conv"), ("GCNConv", "SAGEConv")])
def test_what_dynamo_gives_up_is_the_class_alone(route, broken, other):
    """Layers of other classes are carried after a call that cannot be."""
    x, edges = graphs.features().to(route.device), graphs.square().to(route.device)
    layers = [getattr(nn, name)(F, 8).to(route.device) for name in (broken, other)]
    on(route)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sparse tensors
        torch.compile(layers[0], backend="eager")(x, adjacency(edges))
    gnnaccel.reset_stats()
    assert close(torch.compile(layers[1], backend="eager")(x, edges), layers[1](x, edges))
    assert gnnaccel.stats()[other]["compiled"] == 1
