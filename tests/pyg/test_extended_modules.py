"""Modules of classes that extend torch's, within messages: those that only say how they are made are
followed as their base, all others are not."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import nn
from torch_geometric.nn import BatchNorm

from tests.pyg.generated_calls import arguments, both
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.judge import compare

ALL = 2 * WIDTH + EDGE


class Maps(nn.Sequential):
    """Networks of linear maps."""

    least = 2

    def __init__(self, *widths, norm=nn.LayerNorm):
        parts = []
        for one, other in zip(widths, widths[1:]):
            parts += [Map(one, other), norm(other), self.activation()]
        super().__init__(*parts[:-2])

    @staticmethod
    def activation():
        return Slope(0.1)


class Map(nn.Linear):
    def reset_parameters(self):
        nn.init.orthogonal_(self.weight)
        nn.init.constant_(self.bias, 0.1)


class Slope(nn.LeakyReLU):
    pass


class Norm(nn.BatchNorm1d):
    def extra_repr(self):
        return "of edges"


class Stages(nn.ModuleList):
    pass


class OneNetwork(Message):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__("add")
        self.net = Maps(ALL, 9, 6, norm=norm)

    def message(self, x_i, x_j, edge_attr):
        return self.net(torch.cat([x_i, x_j, edge_attr], dim=-1))


class Several(Message):
    def __init__(self):
        super().__init__("mean")
        self.stages = Stages([Map(ALL, 9), Slope(0.3), Map(9, 6)])

    def message(self, x_i, x_j, edge_attr):
        out = torch.cat([x_i, x_j, edge_attr], dim=-1)
        for stage in self.stages:
            out = stage(out)
        return out


@pytest.mark.parametrize("make", [OneNetwork, lambda: OneNetwork(Norm),
                                  lambda: OneNetwork(BatchNorm), Several])
def test_values_and_gradients(kernels, make):
    layer = make()
    compare(kernels, layer, *arguments(type(layer)))
    compare(kernels, layer, *arguments(type(layer)), train=False)


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Halved(nn.Linear):
    @property
    def scale(self):
        return 0.5

    def __call__(self, x):
        return self.scale * super().__call__(x)


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized():
    """torch gives it a class with a property."""
    return parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Double())


class Backwards(nn.Sequential):
    def __iter__(self):
        return reversed([*self._modules.values()])


class Through(Message):
    def __init__(self, net):
        super().__init__("add")
        self.net = net

    def message(self, x_i, x_j):
        return self.net(x_i * x_j)


OTHERS = {"forward": lambda: Twice(WIDTH, WIDTH), "call": lambda: Halved(WIDTH, WIDTH),
          "property": parametrized,
          "order": lambda: Backwards(nn.Linear(WIDTH, WIDTH), nn.Tanh())}


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_more_runs_as_written(emulated, name):
    torch.manual_seed(0)
    layer, given = Through(OTHERS[name]()), arguments(Through)
    both(emulated, layer, *given, on_fallback="native")


def test_changes_are_seen(emulated):
    layer, given = OneNetwork(), arguments(OneNetwork)
    twin = copy.deepcopy(layer)
    with emulated.on():
        for one in (layer, twin):
            one(*given), one(*given)
    for change in (lambda: layer.net.append(nn.Tanh()), lambda: layer.net.pop(1),
                   lambda: layer.net[0].weight.data.mul_(2),
                   lambda: setattr(layer.net, "0", Map(ALL, 9)),
                   lambda: setattr(layer.net[1], "negative_slope", 0.7)):
        change()
        both(emulated, layer, *given)
