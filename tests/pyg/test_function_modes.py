"""A mode of the user's that sees torch's functions, and may change what they give, sees those of
the host's own code."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch_geometric import utils
from torch_geometric.nn import GATConv, HeteroConv, MessagePassing, SAGEConv

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import F, N
from tests.pyg.judge import close


class Halved(TorchFunctionMode):
    """Halves what some functions give."""

    NAMES = ("softmax", "sigmoid", "linear", "leaky_relu", "scatter_add_", "index_select", "exp")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out / 2 if getattr(function, "__name__", "") in self.NAMES else out


class Gated(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return (x_i * x_j).sum(-1, keepdim=True).sigmoid() * x_j


class Scattered(nn.Module):
    def forward(self, x, edge_index):
        return utils.scatter(x[edge_index[0]].sigmoid(), edge_index[1], 0, N)


class Related(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = HeteroConv({("a", "to", "b"): SAGEConv(F, 8),
                                 ("b", "to", "a"): SAGEConv(F, 8)})

    def forward(self, x, edge_index):
        return self.layer({"a": x, "b": x}, {("a", "to", "b"): edge_index,
                                             ("b", "to", "a"): edge_index})["a"]


LAYERS = {"GATConv": lambda: GATConv(F, 8, 2), "SAGEConv": lambda: SAGEConv(F, 8),
          "Gated": Gated, "pyg.scatter": Scattered, "HeteroConv": Related}


def routes() -> set[str]:
    found = {route for one in gnnaccel.stats().values() for route in one["routes"]}
    gnnaccel.reset_stats()
    return found


@pytest.mark.parametrize("name", list(LAYERS))
def test_modes_see_the_hosts_functions(kernels, name):
    """In turns, and each kind of call several times in a row: none repeats one of the other."""
    layer = LAYERS[name]().to(kernels.device)
    x, edge_index = graphs.features().to(kernels.device), graphs.square().to(kernels.device)

    def run():
        given = x.clone().requires_grad_()
        out = layer(given, edge_index)
        return [out, *torch.autograd.grad(out.sin().sum(), [given, *layer.parameters()],
                                          allow_unused=True)]

    def halved():
        with Halved():
            return run()

    plain, changed = run(), halved()
    assert not torch.allclose(plain[0], changed[0])
    with kernels.on(on_fallback="native"):
        for _ in range(2):
            for _ in range(6):
                assert all(close(a, b) for a, b in zip(halved(), changed) if b is not None)
            assert routes() == {"native"}
            for _ in range(6):
                for a, b in zip(run(), plain):
                    assert (a is None) is (b is None) and (a is None or close(a, b))
            assert "cuda" in routes()
    assert gnnaccel.stats() == {}


def test_the_reason(kernels):
    layer, x = GATConv(F, 8, 2).to(kernels.device), graphs.features().to(kernels.device)
    with Halved(), kernels.on(), pytest.raises(gnnaccel.errors.FallbackError,
                                               match="GA405.*a torch function mode is active"):
        layer(x, graphs.square().to(kernels.device))


def test_what_is_native_within_a_mode_is_not_learnt(kernels):
    """Of a layer around others, over graphs that are new each time: what runs inside is looked at
    after a few calls, and left alone from then on if it was native."""
    kinds = {("a", "one", "b"): SAGEConv(F, 8), ("a", "two", "b"): GATConv((F, F), 8,
                                                                          add_self_loops=False)}
    layer, x = HeteroConv(kinds).to(kernels.device), graphs.features().to(kernels.device)

    def run():
        layer({"a": x, "b": x}, {kind: graphs.square().to(kernels.device) for kind in kinds})

    with kernels.on(on_fallback="native"):
        for _ in range(3):
            run()
        with Halved():
            for _ in range(3):
                run()
        gnnaccel.reset_stats()
        run()
    assert gnnaccel.stats()["SAGEConv"]["routes"] == {"cuda": 1}
