"""``enable(capture=True)``: gradients that are used further, and what a call's backward reads."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import nn as pyg

import gnnaccel
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import PLACE, given, on, refused, replays, same  # noqa: F401


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.lin, self.one, self.two = nn.Linear(6, 6), pyg.SAGEConv(6, 8), pyg.GraphConv(8, 3)
        self.emb = nn.Parameter(torch.randn(20, 6))
        self.to(PLACE[0])

    def forward(self, x, edge_index, more=None):
        x = x * 2.0 + self.emb + self.lin(x)
        x = torch.tanh(self.one(x if more is None else x * more, edge_index))
        return self.two(x, edge_index)


class Double(Smooth):
    """Its backward does not read its argument."""

    def forward(self, x, edge_index):
        return self.two(torch.tanh(self.one(x * 2.0, edge_index)), edge_index)


class Scaled(Smooth):
    """Its forward moves statistics that it reads: a buffer, and a tensor that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), device=PLACE[0]))
        self.plain = torch.ones((), device=PLACE[0])

    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        with torch.no_grad():
            self.scale.mul_(0.5).add_(0.5 * out.std())
            self.plain.mul_(0.8).add_(0.2 * out.abs().mean())
        return out / self.scale.clone() * self.plain.clone()


def compared(model, run, times: int = 9) -> None:
    """What ``run(model, features, edges)`` gives is what a twin gives that runs natively."""
    twin, (x, edge_index) = copy.deepcopy(model), given()
    for number in range(times):
        found = run(model, x.clone().requires_grad_(), edge_index)
        with gnnaccel.disabled():
            assert same(found, run(twin, x.clone().requires_grad_(), edge_index)), number
    assert replays(type(model).__name__)


def twice(out, wrt: list, more: list) -> list:
    """Gradients that can be differentiated again, and such of their squares."""
    first = torch.autograd.grad(out.pow(2).sum(), wrt, create_graph=True)
    return [g.detach() for g in first] + list(
        torch.autograd.grad(sum(g.pow(2).sum() for g in first), more))


def test_arguments_that_are_made_from_each_other(on):
    def run(model, x, edge_index) -> list:
        more = x.pow(2).sum(1, keepdim=True)
        return twice(model(x, edge_index, more), [x], [x, model.one.lin_l.weight])
    compared(Smooth(), run)


@pytest.mark.parametrize("made", [lambda model, x: model.emb, lambda model, x: model.lin(x)])
def test_an_argument_that_is_a_parameter_or_made_from_one(on, made):
    def run(model, x, edge_index) -> list:
        wrt = [model.emb, model.lin.weight]
        return twice(model(made(model, x), edge_index), wrt, [*wrt, model.one.lin_l.weight])
    compared(Smooth(), run)


def test_statistics_that_forward_moves_and_reads(on):
    def run(model, x, edge_index) -> list:
        return [*twice(model(x, edge_index), [x], [x]), model.scale.clone(), model.plain.clone()]
    compared(Scaled(), run)


def test_features_that_are_written_before_gradients_of_gradients(on):
    def run(model, x, edge_index) -> list:
        given = x * 1.0
        out = model(given, edge_index)
        with torch.no_grad():
            given.zero_()
        return twice(out, [x], [model.two.lin_rel.weight])
    compared(Double(), run)


def test_other_features_before_the_backward(on):
    """A call brings other features, to be copied from now on, while a backward waits."""
    model, (x, edge_index) = Smooth(), given()
    parameters = list(model.parameters())
    for _ in range(6):
        torch.autograd.grad(model(x, edge_index).sum(), parameters)
    assert replays("Smooth") == 2
    out = model(x, edge_index)
    model(x * 2, edge_index)
    found = torch.autograd.grad(out.pow(2).sum(), parameters)
    with gnnaccel.disabled():
        assert same(found, torch.autograd.grad(model(x, edge_index).pow(2).sum(), parameters))


def test_writes_to_one_gradient_are_none_to_another(on):
    """Rates that are learned, of gradients that are clamped one after the other."""
    model, (x, edge_index) = Smooth(), given()
    for _ in range(7):
        gradients = torch.autograd.grad(model(x, edge_index).pow(2).sum(), [*model.parameters()])
        rate, moved = torch.ones((), device=x.device, requires_grad=True), []
        for g in gradients:
            g.clamp_(-0.1, 0.1)
            moved.append(rate * g)
        sum(one.sum() for one in moved).backward()
    assert replays("Smooth")


def test_writes_of_a_replay_are_counted(on):
    """A layer that reads a buffer of a captured model has to see that it changed."""
    model, (x, edge_index) = Scaled(), given()
    for _ in range(7):
        before = model.scale._version, model.plain._version
        model(x, edge_index).sum().backward()
        assert model.scale._version > before[0] and model.plain._version > before[1]
    assert replays("Scaled")


def test_what_is_no_buffer_is_not_written_to_more_often(on):
    """BatchNorm's writes are not counted, so a dictionary of its means looks unchanged."""
    class Means(Smooth):
        def __init__(self) -> None:
            super().__init__()
            self.means = {"mean": torch.zeros(3, device=PLACE[0]),
                          "var": torch.ones(3, device=PLACE[0])}

        def forward(self, x, edge_index):
            return F.batch_norm(super().forward(x, edge_index), *self.means.values(), training=True)

    model, (x, edge_index) = Means(), given()
    twin = copy.deepcopy(model)
    for _ in range(8):
        model(x, edge_index).sum().backward()
        with gnnaccel.disabled():
            twin(x, edge_index)
        assert same(list(model.means.values()), list(twin.means.values()))
    assert "it writes to a tensor that is no buffer and no attribute of a module" in refused("Means")


@pytest.mark.parametrize("name", ["is_leaf", "grad_fn", "_version"])
def test_code_that_asks_where_its_arguments_come_from(on, name):
    class Asks(Smooth):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index)

    body = f"lambda self, x, edge_index: Smooth.forward(self, x * (2 if x.{name} else 1), edge_index)"
    Asks.forward = eval(body, {"Smooth": Smooth})
    model, (x, edge_index) = Asks(), given()
    x.requires_grad_()
    for _ in range(7):
        model(x * 1.0, edge_index).sum().backward()
    assert not replays("Asks") and f"reads the attribute {name} of tensors" in refused("Asks")[0]


class Moves(Smooth):
    def forward(self, x, edge_index):
        scale = torch.tensor([1.0, 2.0, 0.5], device="cpu")
        return super().forward(x, edge_index) * scale.to(x.device, non_blocking=True)


class Pins(Smooth):
    def forward(self, x, edge_index):
        scale = torch.tensor([1.0, 2.0, 0.5], device="cpu")
        scale = scale.pin_memory() if x.is_cuda else scale
        return super().forward(x, edge_index) * scale.cuda(x.device, True) if x.is_cuda else x


@pytest.mark.parametrize("cls", [Moves, Pins])
def test_copies_from_memory_that_is_let_go_of(on, cls):
    model, (x, edge_index) = cls(), given()
    for _ in range(7):
        model(x, edge_index)
    assert not replays(cls.__name__)
    assert "may copy from the host without waiting" in refused(cls.__name__)[0]


class Seeds(Smooth):
    """Its noise is the same in each call."""

    def forward(self, x, edge_index):
        with torch.random.fork_rng(devices=[0] if x.is_cuda else []):
            torch.manual_seed(7)
            x = x + torch.randn_like(x)
        return super().forward(x, edge_index)


def test_noise_that_is_the_same_in_each_call(on):
    model, (x, edge_index) = Seeds(), given()
    torch.manual_seed(7)
    found = [model(x, edge_index).detach() for _ in range(9)]
    assert same(found[1:], found[:-1])


def test_memory_of_parameters_is_kept_for_backward(on):
    """A script gives weights other memory between forward and backward, which reads the old."""
    model, (x, edge_index) = Smooth(), given()
    parameters = list(model.parameters())
    for _ in range(7):
        torch.autograd.grad(model(x, edge_index).sum(), parameters)
    with gnnaccel.disabled():
        expected = torch.autograd.grad(model(x, edge_index).pow(2).sum(), parameters)
    assert replays("Smooth")
    out, places = model(x, edge_index), [p.data_ptr() for p in parameters]
    for p in parameters:
        p.data = p.data * 0.5
    others = [torch.full_like(p, 9.0) for p in parameters for _ in range(9)]
    assert not set(places) & {t.data_ptr() for t in others}
    assert same(list(torch.autograd.grad(out.pow(2).sum(), parameters)), list(expected))
