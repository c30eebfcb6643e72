"""PyG's MLP in a message, and modules that ask what they are given with `isinstance`."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import MLP

from tests.pyg import generated_layers
from tests.pyg.generated_calls import arguments, both, routes
from tests.pyg.generated_layers import Message
from tests.pyg.judge import compare
from tests.pyg.test_generated_changes import each_seen, hooked

WIDTH, EDGE = generated_layers.WIDTH, generated_layers.EDGE


class Network(Message):
    def __init__(self, aggr="add", widths=(9, 6), **options):
        super().__init__(aggr)
        self.mlp = MLP([2 * WIDTH + EDGE, *widths], **options)

    def message(self, x_i, x_j, edge_attr):
        return self.mlp(torch.cat([x_i, x_j, edge_attr], dim=-1))


OPTIONS = {
    "plain": dict(norm=None),
    "three maps": dict(norm=None, widths=(9, 8, 6), bias=[True, False, True]),
    "an activation last": dict(norm=None, plain_last=False, act="elu", act_kwargs={"alpha": 0.5}),
    "no activation": dict(norm=None, act=None),
    "batch norm": dict(),
    "activation before batch norm": dict(act_first=True, act="leaky_relu"),
    "torch's norm": dict(norm=nn.LayerNorm(9)),
    "maxima": dict(aggr="max", norm=None),
    "all dropped": dict(norm=None, dropout=1.0),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(kernels, name):
    layer = Network(**OPTIONS[name])
    compare(kernels, layer, *arguments(Network))
    compare(kernels, layer, *arguments(Network), train=False)


class MapLast(Message):
    def __init__(self, aggr):
        super().__init__(aggr)
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH + EDGE, 16), nn.ReLU(), nn.Linear(16, 16))

    def message(self, x_i, x_j, edge_attr):
        return self.mlp(torch.cat([x_i, x_j, edge_attr], dim=-1))


@pytest.mark.long
def test_sums_and_means_over_one_graph(kernels):
    """Each has the last map's bias as often as its nodes get messages, which a graph knows."""
    x, edge_index, edge_attr = arguments(MapLast)
    edge_index[1, edge_index[1] == 2] = 3  # one without
    given = [t.to(kernels.device) for t in (x, edge_index, edge_attr)]
    for aggr in ("add", "mean", "add"):
        both(kernels, MapLast(aggr), *given)
        with torch.no_grad():
            both(kernels, MapLast(aggr), *given)


def test_statistics(kernels):
    """A batch norm sees all edges once in a call."""
    layer = Network()
    both(kernels, layer, *arguments(Network))  # two calls
    assert layer.mlp.norms[0].module.num_batches_tracked == 2


def test_what_changes_between_calls(kernels):
    layer = Network(norm=None)
    mlp = layer.mlp

    def other():
        mlp.lins[0] = type(mlp.lins[0])(2 * WIDTH + EDGE, 9).to(kernels.device)

    each_seen(kernels, layer, *arguments(Network), changes=(
        lambda: setattr(mlp, "act_first", True), lambda: setattr(mlp, "act", nn.Tanh()),
        lambda: mlp.dropout.__setitem__(0, 1.0), layer.eval, other, layer.train,
        lambda: mlp.dropout.__setitem__(0, 0.0), lambda: mlp.norms.__setitem__(0, nn.LayerNorm(
            9).to(kernels.device)), lambda: setattr(mlp, "act", None),
        lambda: setattr(mlp, "plain_last", False), lambda: setattr(mlp, "plain_last", True),
        lambda: setattr(layer, "mlp", MLP([2 * WIDTH + EDGE, 6], norm=None).to(kernels.device)),
        hooked(layer.mlp)), taken="cuda")  # on the one that is no longer there
    each_seen(kernels, layer, *arguments(Network), changes=(hooked(layer.mlp),), taken="native")


def test_a_forward_that_is_replaced(kernels, monkeypatch):
    each_seen(kernels, Network(norm=None), *arguments(Network), changes=(
        lambda: monkeypatch.setattr(MLP, "forward", lambda self, x: self.lins[0](x).cumsum(0)),),
        taken="native")


def test_a_norm_over_all_edges_stays_native(kernels):
    layer = Network(norm="layer_norm")
    both(kernels, layer, *arguments(Network), on_fallback="native")
    assert routes(layer) == {"native": 1}


class Asking(Message):
    """Asks for the kinds of numbers, and whether a tensor is one."""

    scale: float | None = 2.0

    def message(self, x_i, x_j):
        if isinstance(self.scale, (int, float)) and not isinstance(self.scale, bool):
            x_j = x_j * self.scale
        return x_j if isinstance(x_i, (tuple, list)) else torch.tanh(x_i * x_j)


class AskingForMore(Asking):
    def message(self, x_i, x_j):
        return torch.tanh(x_i * x_j) if isinstance(x_i, nn.Parameter) else torch.tanh(x_i - x_j)


@pytest.mark.long
def test_questions(kernels):
    layer = Asking()
    compare(kernels, layer, *arguments(Asking))
    each_seen(kernels, layer, *arguments(Asking), changes=(
        lambda: setattr(layer, "scale", 3), lambda: setattr(layer, "scale", True),
        lambda: setattr(layer, "scale", None)))
    layer = AskingForMore()
    both(kernels, layer, *arguments(Asking), on_fallback="native")
    assert routes(layer) == {"native": 1}
