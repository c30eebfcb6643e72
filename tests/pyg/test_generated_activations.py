"""Activations in messages that kernels are written for, at their corners and far from them."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, routes
from tests.pyg.generated_layers import Message
from tests.pyg.graphs import E, N
from tests.pyg.judge import compare

WIDTH = 12
MODULES = {"PReLU": nn.PReLU, "PReLU of channels": lambda: nn.PReLU(WIDTH), "SELU": nn.SELU,
           "CELU": nn.CELU, "CELU of 0.3": lambda: nn.CELU(0.3), "Hardtanh": nn.Hardtanh,
           "Hardtanh of 0.1": lambda: nn.Hardtanh(-0.5, 0.1), "Mish": nn.Mish,
           "SELU in place": lambda: nn.SELU(inplace=True), "ReLU6": nn.ReLU6,
           "Hardsigmoid": nn.Hardsigmoid, "Hardswish": nn.Hardswish, "LogSigmoid": nn.LogSigmoid,
           "Softsign": nn.Softsign, "Tanhshrink": nn.Tanhshrink}


class Bends(Message):
    """``act`` between both ends."""

    def __init__(self, act: nn.Module):
        super().__init__()
        self.act = act

    def message(self, x_i, x_j):
        return self.act(x_j - x_i) * x_j


class Lifted(Bends):
    """Of each end, and beside the other's."""

    def message(self, x_i, x_j):
        return self.act(x_j) * x_i + self.act(x_i)


class Sloped(Message):
    """Slopes of the first dimension after that of the edges."""

    def __init__(self, slopes: int):
        super().__init__(node_dim=0)
        self.slopes = nn.Parameter(torch.rand(slopes))

    def message(self, x_i, x_j):
        x_i, x_j = x_i.view(-1, 3, 4), x_j.view(-1, 3, 4)
        return (F.prelu(x_j - x_i, self.slopes) + torch.prelu(x_j * x_i, self.slopes)).view(-1, 12)


class Alone(Message):
    """One channel, without an axis."""

    def __init__(self):
        super().__init__()
        self.act = nn.PReLU()

    def message(self, x_i, x_j):
        return self.act((x_i * x_j).sum(-1)).unsqueeze(-1) * x_j


class SELU(Message):
    def message(self, x_i, x_j):
        return F.selu(x_j - x_i) + torch.selu(x_i) * x_j


class CELU(Message):
    def message(self, x_i, x_j):
        return F.celu(x_j - x_i, 2.0) + torch.celu(x_i, alpha=0.5) * x_j


class Hardtanh(Message):
    def message(self, x_i, x_j):
        return F.hardtanh(x_j - x_i, max_val=0.5) * x_j


class Mish(Message):
    def message(self, x_i, x_j):
        return F.mish(x_j - x_i) * x_j


class Bounded(Message):
    def message(self, x_i, x_j):
        return F.relu6(x_j - x_i) * F.hardsigmoid(x_i) + F.hardswish(2 * x_j + x_i)


class Soft(Message):
    def message(self, x_i, x_j):
        return F.softsign(x_j - x_i) + F.tanhshrink(x_j * x_i)


class Between(Message):
    """Weights of rows, and a number on either side of one half."""

    def message(self, x_i, x_j):
        near = torch.lerp(x_i, x_j, 0.3) + x_j.lerp(x_i, 0.7)
        return near + torch.lerp(x_i, x_j * x_i, torch.sigmoid(3 * x_j))


class Added(Message):
    def message(self, x_i, x_j):
        return torch.addcmul(x_j, x_i, x_j, value=0.5) + x_j.addcdiv(x_i, 1 + x_j.square())


@pytest.mark.parametrize("cls, name", [*((Bends, name) for name in MODULES), *(
    (Lifted, name) for name in MODULES if "place" not in name)])
def test_modules(kernels, cls, name):
    compare(kernels, cls(MODULES[name]()), *arguments(Message)[:2])


@pytest.mark.long
@pytest.mark.parametrize("make", [
    lambda: Sloped(1), lambda: Sloped(3), Alone, SELU, CELU, Hardtanh, Mish, Bounded, Soft, Between,
    Added], ids=["1 slope", "3 slopes", "alone", "selu", "celu", "hardtanh", "mish", "bounded",
                 "soft", "between", "added"])
def test_functions(kernels, make):
    compare(kernels, make(), *arguments(Message)[:2])


def results(layer, x: torch.Tensor, ei: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x, ei)
    out.backward(torch.linspace(-1, 2, out.numel(), device=x.device).view_as(out))
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


class Itself(Bends):
    """The activation of one end's rows, which both ends' make."""

    def message(self, x_i, x_j):
        return self.act(x_j * torch.sign(x_i.abs() + 1))


@pytest.mark.parametrize("name", [name for name in MODULES if "place" not in name])
def test_corners(kernels, name):
    """At 0, at bounds, and far out, at infinities and of NaN, as torch's."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.1, -0.5, 1e-6, -1e-6, 19.9, 20.1, -20.0, 90.0,
                           -90.0, 1e4, -1e4, 3e38, -3e38, torch.inf, -torch.inf, torch.nan])
    if "Hard" in name or "ELU" in name.replace("PReLU", "") or name == "ReLU6":
        values = values[:-1]  # of NaN, torch's gradient differs by device, and in a CPU's vectors
    x = torch.zeros(N, WIDTH)
    x[:len(values)] = values.unsqueeze(1)
    ei = torch.arange(N).expand(2, -1).contiguous()
    ei = torch.stack([ei[0], ei[1].flip(0)])
    layer = Itself(MODULES[name]()).to(kernels.device)
    x, ei = x.to(kernels.device), ei.to(kernels.device)
    expected = results(layer, x, ei)
    with kernels.on():
        got = results(layer, x, ei)
    assert routes(layer) == {"cuda": 1}
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-5, equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("name, option, value", [
    ("PReLU", "weight", nn.Parameter(torch.tensor([0.7]))), ("CELU", "alpha", 0.2),
    ("Hardtanh", "max_val", 0.3), ("ReLU6", "max_val", 0.5)])
def test_options_that_change(emulated, name, option, value):
    layer, given = Bends(MODULES[name]()), (graphs.features(), graphs.square(edges=E))
    for _ in range(2):
        expected = results(copy.deepcopy(layer), *given)
        with emulated.on():
            for _ in range(2):
                got = results(layer, *given)
                assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-4)
                           for a, b in zip(got, expected, strict=True))
        setattr(layer.act, option, value)
