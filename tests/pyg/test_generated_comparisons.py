"""Comparisons, truth values and corners in messages that kernels are written for."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gnnaccel
from gnnaccel.cuda.structures import structure
from tests.pyg import graphs
from tests.pyg.generated_calls import routes
from tests.pyg.generated_layers import Message
from tests.pyg.graphs import E, N

WIDTH = 4


class Compared(Message):
    """With a threshold and a map that may be compared only."""

    def __init__(self, **options):
        super().__init__(**options)
        self.threshold = nn.Parameter(torch.tensor([0.5, -1.0, 0.0, 1.0]))
        self.lin = nn.Linear(WIDTH, WIDTH)


class Threshold(Compared):
    def message(self, x_i, x_j):
        return torch.where(x_j > self.threshold, x_j - x_i, 0.1 * x_j)


class MappedGate(Compared):
    def message(self, x_i, x_j):
        return x_j * (self.lin(x_i) > 0)


class NearEnough(Compared):
    """The root of 0, of edges whose ends are alike, is only compared."""

    def message(self, x_i, x_j):
        return torch.where(torch.sqrt(torch.square(x_j - x_i)) < 1.0, x_j, 0.5 * x_i)


class Inverse(Compared):
    def message(self, x_i, x_j):
        return ((1 / x_j > 0) * 1 + (x_i > 0) * 1) * x_j


class Either(Compared):
    """A sum of truth values is one, too."""

    def message(self, x_i, x_j):
        return ((x_i > 0) + (x_j < 1)) * x_j


class Both(Compared):
    def message(self, x_i, x_j):
        return torch.maximum((x_i > 0) * (x_j < 1), x_j < -1) * x_j


class Counted(Compared):
    """Numbers of truths."""

    def message(self, x_i, x_j):
        return ((x_i > 0) * 1 + (x_j > 0) * 1) * x_j


class Picked(Compared):
    """Numbers of truths pick rows of a table."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table, self.embed = nn.Parameter(torch.randn(3, WIDTH)), nn.Embedding(2, WIDTH)

    def message(self, x_i, x_j):
        row = (x_j[:, 0] > 0) * 1 + (x_j[:, 1] > 0) * 1
        return torch.tanh(x_i - x_j) * self.table[row] + self.embed((x_i[:, 0] > 0) * 1)


class LogSigmoid(Compared):
    """Smooth at 0, where its parts are not."""

    def message(self, x_i, x_j):
        return F.logsigmoid(x_j - x_i) + F.logsigmoid(30 * x_j)


class MappedTwice(Compared):
    """What is compared is also a value."""

    def message(self, x_i, x_j):
        mapped = self.lin(x_j)
        return torch.where(mapped * x_i > 0.1, mapped, x_i)


class Crossed(Compared):
    """Two maps at each end."""

    def __init__(self, **options):
        super().__init__(**options)
        self.maps = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def message(self, x_i, x_j):
        both = torch.cat([x_i, x_j], -1)
        return torch.sigmoid(self.maps[0](both)) * F.softplus(self.maps[1](both)) * x_i


class Indicator(Compared):
    def message(self, x_i, x_j):
        return (x_j > x_i).float()


class OfParameter(Compared):
    def message(self, x_i, x_j):
        return torch.where((x_i > 0) | (self.threshold == 0), x_j, x_i)


class Difference(Compared):
    """torch refuses to subtract truth values."""

    def message(self, x_i, x_j):
        return (x_i > 0) - (x_j > 0).float()


def found(layer, x: torch.Tensor, ei: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Results and gradients, None where there is none."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x, ei)
    if out.requires_grad:
        (out * torch.linspace(-1, 2, N, device=x.device).unsqueeze(1)).sum().backward()
    return {"out": out.detach(), "x": x.grad, **{k: p.grad for k, p in layer.named_parameters()}}


def of_halves(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Features that are often 0, and often equal at both ends."""
    return (torch.randint(-3, 4, (N, WIDTH)).float().div(2).to(device),
            graphs.square(edges=E).to(device))


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("aggr", ["add", "max"])
@pytest.mark.parametrize("cls", [Threshold, MappedGate, NearEnough, Inverse, Either, Both, Counted,
                                 LogSigmoid, Indicator, Picked])
def test_as_torch(kernels, cls, aggr):
    """What is only compared has no gradient, and brings no NaN to what has one."""
    layer, given = cls(aggr=aggr).to(kernels.device), of_halves(kernels.device)
    expected = found(layer, *given)
    with kernels.on():
        got = found(layer, *given)
    assert routes(layer) == {"cuda": 1}
    wrong = [name for name in expected if not same(got[name], expected[name])]
    assert not wrong


@pytest.mark.parametrize("aggr", ["add", "max"])
@pytest.mark.parametrize("unread", [True, False], ids=["", "all nodes have edges"])
def test_what_is_compared_has_its_gradient_as_a_value(kernels, aggr, unread):
    """Rows of nodes that no edge reads are replaced once in a call, first for the comparison."""
    layer, (x, ei) = MappedTwice(aggr=aggr).to(kernels.device), of_halves(kernels.device)
    if unread:
        ei = ei[:, (ei < N // 2).all(0)]
    else:
        ei = torch.cat([ei, torch.arange(N, device=ei.device).expand(2, -1)], 1)
    expected = found(layer, x, ei)
    with kernels.on():
        for _ in range(2):
            got = found(layer, x, ei)
            assert all(same(got[name], expected[name]) for name in expected)
    assert routes(layer) == {"cuda": 2}


@pytest.mark.long
def test_the_same_bits_before_and_after_the_device_has_reported(emulated, monkeypatch):
    """Which nodes have edges is known some time after a graph's first call."""
    torch.manual_seed(0)
    layer, x, ei = Crossed(), torch.randn(N, WIDTH), graphs.square(edges=4 * E)
    ei = torch.cat([ei, torch.arange(N).expand(2, -1)], 1)
    late = lambda rows, repeated=False: (  # noqa: E731
        rows.indptr.diff() == 0, (rows.indptr.diff() > 0).byte().argmax().view(1))
    with emulated.on():
        early = found(layer, x, ei)
        monkeypatch.setattr(structure.Rows, "bare", late)
        got = found(layer, x, ei)
        assert all(a is b or torch.equal(a, b) for a, b in zip(got.values(), early.values()))


def test_a_parameter_that_is_compared(emulated):
    """Python's own answer to ``==`` would be no."""
    layer, given = OfParameter(), of_halves(emulated.device)
    expected = found(layer, *given)
    with emulated.on(on_fallback="native"):
        got = found(layer, *given)
    assert all(same(got[name], expected[name]) for name in expected)


def test_what_torch_refuses(emulated):
    for block in (gnnaccel.disabled(), emulated.on(on_fallback="native")):
        with block, pytest.raises(RuntimeError, match="bool tensor is not supported"):
            Difference()(*of_halves(emulated.device))
