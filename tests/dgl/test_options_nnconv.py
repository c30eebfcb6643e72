"""NNConv: every constructor and call option against DGL's own layer."""
from __future__ import annotations

import pytest
import torch
from dgl.nn import NNConv
from torch import nn

import gnnaccel
from gnnaccel.dispatch.ops import outer_sums
from gnnaccel.dispatch.ops.plain import PlainRequest
from tests.dgl import graphs
from tests.dgl.graphs import E, F, M
from tests.dgl.judge import compare, on_routes
from tests.dgl.test_options_graphconv import bare

K, HIDDEN, OUT = 5, 9, 6
FLOOR = 3e-6  # of gradients: sums over all edges


def network(*more: nn.Module, last: nn.Module | None = None, width: int = F) -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, HIDDEN), *(more or (nn.ReLU(),)),
                         last or nn.Linear(HIDDEN, width * OUT))


def layer(made: nn.Module | None = None, width=F, kind: str = "sum", **options) -> NNConv:
    return NNConv(width, OUT, made or network(), kind, **options)


def edges(count: int = E):
    return torch.randn(count, K)


@on_routes("options", [dict(), dict(kind="mean"), dict(residual=True, bias=False)],
           [dict(kind="mean", residual=True), dict(bias=False)])
def test_options(route, options):
    compare(route, layer(**options), graphs.square(), graphs.features(), edges(), floor=FLOOR)


def test_a_residual_without_a_map(route):
    compare(route, layer(network(width=OUT), OUT, residual=True), graphs.square(),
            graphs.features(width=OUT), edges(), floor=FLOOR)


@on_routes("made", [lambda: network(last=nn.Linear(HIDDEN, F * OUT, bias=False)),
                    lambda: nn.Sequential(nn.Linear(K, F * OUT)), lambda: nn.Linear(K, F * OUT)],
           [lambda: network(nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.LayerNorm(HIDDEN)),
            lambda: network(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Dropout(0.0))])
def test_networks(route, made):
    compare(route, layer(made()), graphs.square(), graphs.features(), edges(), floor=FLOOR)


@on_routes("kind", ["sum", "mean"])
def test_pairs_and_blocks(route, kind):
    compare(route, layer(network(width=F), (F, 3), kind, residual=True), graphs.bipartite(),
            (graphs.features(), torch.randn(M, 3)), edges(), floor=FLOOR)
    block = graphs.block()
    compare(route, layer(kind=kind, residual=True), block, graphs.features(block.num_src_nodes()),
            edges(block.num_edges()), floor=FLOOR)


@pytest.mark.long
@on_routes("kind", ["sum", "mean"])
def test_nodes_without_edges_and_int32(route, kind):
    compare(route, layer(kind=kind), bare(), graphs.features(), edges(bare().num_edges()),
            floor=FLOOR)
    compare(route, layer(kind=kind), graphs.square().int(), graphs.features(), edges(), floor=FLOOR)


class Narrow(nn.Linear):
    """Has a forward of its own."""

    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize("made", [
    lambda: layer(kind="max"), lambda: layer(Narrow(K, F * OUT)),
    lambda: layer(network(nn.Flatten(1))),
    lambda: layer(network(last=nn.Sequential(nn.Linear(HIDDEN, F * OUT)))),
], ids=["max", "a map of another class", "another module", "nested"])
def test_what_stays_native(emulated, made):
    module, args = made(), (graphs.square(), graphs.features(), edges())
    expected = module(*args)
    with gnnaccel.enabled(backend="cuda", when="supported"):
        got = module(*args)
    found = gnnaccel.stats()["NNConv"]
    assert found["routes"] == {"native": 1} and set(found["reasons"]) == {"GA208"}
    torch.testing.assert_close(got, expected)


def test_price():
    """Many edges for each node pay; fewer edges than nodes do not."""
    def request(nodes: int, count: int) -> PlainRequest:
        return PlainRequest("dgl.NNConv", "outer:0:64:1:64", False, 64, torch.float32, "cuda",
                            nodes.bit_length(), nodes.bit_length(), count.bit_length(), True, False)

    dense, sparse = request(2_000, 60_000), request(250_000, 60_000)
    assert outer_sums.seconds(dense, True) < outer_sums.seconds(dense, False)
    assert outer_sums.seconds(sparse, True) > outer_sums.seconds(sparse, False)
