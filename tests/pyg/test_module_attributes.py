"""Messages that ask modules of the layer for weights, settings, methods or parts; functions of
numpy, and types."""
from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnnaccel
from tests.pyg.generated_calls import arguments, routes
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.judge import close, compare
from tests.pyg.test_generated_changes import each_seen


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(EDGE, WIDTH), 0.3

    def encode(self, x, edge):
        return torch.tanh(self.left(x) + self.right(edge)) * self.scale

    def counted(self, x):
        self.seen = 1
        return self.left(x)

    def forward(self, x):
        return self.left(x)


class WeightOfModule(Message):
    def __init__(self):
        super().__init__()
        self.lin, self.out = nn.Linear(WIDTH, 6), nn.Linear(EDGE, 6)

    def message(self, x_j, edge_attr):
        rows = F.linear(x_j, self.lin.weight, self.lin.bias) * self.lin.out_features
        return rows * torch.sigmoid(edge_attr @ self.out.weight.T) * self.out.bias


class TableOfModule(Message):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, kind=(edge_attr[:, 0].abs() * 4).long() % 5)

    def message(self, x_j, kind):
        return torch.relu(x_j + self.table.weight[kind])


class MethodOfModule(Message):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()

    def message(self, x_j, edge_attr):
        return self.encoder.encode(x_j, edge_attr) * self.encoder.scale


class PartsOfSequence(Message):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def message(self, x_i, x_j):
        rows = x_j * x_i
        for at, part in enumerate(self.net):
            rows = part(rows) if at < len(self.net) - 1 else rows + part(rows)
        return rows * self.net[0](x_j)


class TurnedParameter(Message):
    def __init__(self):
        super().__init__(node_dim=0)
        self.weight, self.table = (nn.Parameter(torch.randn(*size)) for size in
                                   ((1, 3, 4), (6, WIDTH)))

    def message(self, x_i, x_j):
        rows = (x_j * torch.tanh(x_i)).view(-1, 4, 3) * self.weight.transpose(1, 2)
        return rows.reshape(-1, WIDTH) @ self.table.t()


class NumpyRoot(Message):
    def __init__(self):
        super().__init__()
        self.width = 7

    def message(self, x_i, x_j):
        return torch.exp((x_i * x_j / np.sqrt(self.width)).clamp(-2, 2)) * np.log(self.width)


class TypesAsked(Message):
    def forward(self, x, edge_index, edge_attr=None):
        return super().forward(x, edge_index)

    def message(self, x_i, x_j, edge_attr):
        if type(edge_attr) == type(None):  # noqa: E721 - as users write it
            x_j = x_j * x_i if type(x_j) is torch.Tensor else x_j
            return torch.tanh(x_j) if type(x_j) is Tensor and isinstance(x_i, Tensor) else x_j
        return torch.relu(x_i - x_j)


CLASSES = [WeightOfModule, TableOfModule, MethodOfModule, PartsOfSequence, TurnedParameter,
           NumpyRoot, TypesAsked]


@pytest.mark.parametrize("cls", CLASSES)
def test_values_and_gradients(kernels, cls):
    compare(kernels, cls(), *arguments(Message)[:2], arguments(Message)[2].requires_grad_(False),
            require=False)


def test_changes_are_seen(kernels, monkeypatch):
    layer = MethodOfModule()
    other = Encoder().to(kernels.device)

    def encode(self, x, edge):
        return torch.relu(self.left(x)) + self.right(edge)

    each_seen(kernels, layer, *arguments(Message), changes=(
        lambda: setattr(layer.encoder, "scale", -2.0), lambda: setattr(layer, "encoder", other),
        lambda: setattr(other, "left", nn.Linear(WIDTH, WIDTH).to(kernels.device)),
        lambda: monkeypatch.setattr(Encoder, "encode", encode)))


@pytest.mark.long
def test_other_weights_and_parts_are_seen(kernels, monkeypatch):
    layer = WeightOfModule()
    each_seen(kernels, layer, *arguments(Message), changes=(
        lambda: setattr(layer.lin, "weight", nn.Parameter(torch.randn_like(layer.lin.weight))),
        lambda: layer.out.bias.data.mul_(3),
        lambda: setattr(layer.lin, "out_features", 2)))
    layer = PartsOfSequence()
    each_seen(kernels, layer, *arguments(Message)[:2], changes=(
        lambda: layer.net.append(nn.Linear(WIDTH, WIDTH).to(kernels.device)),
        lambda: layer.net.__setitem__(1, nn.ReLU())))
    layer = NumpyRoot()
    each_seen(kernels, layer, *arguments(Message)[:2], changes=(
        lambda: setattr(layer, "width", 3),
        lambda: monkeypatch.setattr(np, "sqrt", lambda n: np.float64(math.sqrt(n) + 1))),
        taken="native")


class CountingMethod(MethodOfModule):
    def message(self, x_j, edge_attr):
        return torch.tanh(self.encoder.counted(x_j))


class HookedWeight(WeightOfModule):
    def __init__(self):
        super().__init__()
        self.lin.register_forward_hook(lambda *given: None)


class FoundByCode(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __getattr__(self, name):
        if name == "factor":
            self.__dict__["count"] += 1
            return float(self.__dict__["count"])
        return super().__getattr__(name)

    def forward(self, x):
        return x


class AttributeByCode(Message):
    def __init__(self):
        super().__init__()
        self.held = FoundByCode()

    def message(self, x_i, x_j):
        return torch.tanh(x_i * x_j) * self.held.factor


class TypeOfParameter(Message):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def message(self, x_i, x_j):
        return x_j * x_i * (self.weight if type(self.weight) is torch.Tensor else 2.0)


class TypeOfArgument(Message):
    """A parameter may be given, too."""

    edge = WIDTH

    def message(self, x_j, edge_attr):
        return x_j * edge_attr * (2.0 if type(edge_attr) is torch.Tensor else 3.0)


class StatisticsAsked(Message):
    """Statistics from before a call that changes them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def message(self, x_i, x_j):
        shifted = x_j - self.norm.running_mean
        return self.norm(x_j * x_i) + shifted


class NumpyOfRows(Message):
    def forward(self, x, edge_index, edge_attr):
        return super().forward(x.detach(), edge_index, None)

    def message(self, x_i, x_j):
        return torch.as_tensor(np.sqrt(np.abs(x_j))) * x_i


@pytest.mark.parametrize("cls", [CountingMethod, HookedWeight, AttributeByCode, TypeOfParameter,
                                 TypeOfArgument, StatisticsAsked, NumpyOfRows])
def test_what_stays_native(emulated, cls):
    layer, given = cls(), arguments(cls)
    if cls is StatisticsAsked:
        twin = copy.deepcopy(layer)
        with emulated.on(on_fallback="native"):
            assert close(layer(*given), twin(*given))
        return
    with emulated.on(on_fallback="native"):
        for _ in range(2):
            if cls is AttributeByCode:
                layer.held.__dict__["count"] = 0
            with gnnaccel.disabled():
                expected = layer(*given)
            if cls is AttributeByCode:
                layer.held.__dict__["count"] = 0
            gnnaccel.reset_stats()
            assert close(layer(*given), expected) and routes(layer) == {"native": 1}
    assert not hasattr(layer, "held") or layer.held.count == 1
