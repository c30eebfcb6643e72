"""Messages that kernels are written for: what changes between calls is seen."""
from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.utils import softmax

import gnnaccel
from tests.pyg import generated_layers
from tests.pyg.generated_calls import arguments, routes, to
from tests.pyg.generated_layers import (WIDTH, Difference, EdgeNetwork, Flagged, Message,
                                        Product)
from tests.pyg.judge import close


def each_seen(route, layer, *args, changes, taken="cuda") -> None:
    """After each change a call gives what the host's own code does: in one block, over one graph,
    where a call is like the one before unless somebody looks. ``taken``: the route after the
    last change."""
    layer, args = layer.to(route.device), to(route.device, *args)
    with route.on(on_fallback="native"):
        for change in (lambda: None, lambda: None, *changes):
            change()
            with gnnaccel.disabled():
                expected = layer(*args)
            gnnaccel.reset_stats()
            assert close(layer(*args), expected)
            if change is not changes[-1]:
                assert routes(layer) == {"cuda": 1}
        assert routes(layer) == {taken: 1}


def test_options_that_change(kernels):
    layer = Flagged()
    each_seen(kernels, layer, *arguments(Flagged), changes=(
        lambda: setattr(layer, "power", 3), lambda: setattr(layer, "act", F.relu),
        lambda: setattr(layer, "gated", False), layer.eval, layer.train,
        lambda: setattr(layer, "act", nn.Softplus()),
        lambda: setattr(layer, "act", nn.Softplus(beta=3)),
        lambda: setattr(layer.act, "beta", 0.5), lambda: setattr(layer, "power", 2.5)))


def test_a_global_number_that_changes(kernels, monkeypatch):
    each_seen(kernels, Product(), *arguments(Product), changes=(
        lambda: monkeypatch.setattr(generated_layers, "SLOPE", 0.9),))


def test_a_variable_around_the_message_that_changes(kernels):
    factor = 0.5

    class Closed(Message):
        def message(self, x_i, x_j):
            return (x_j * factor - x_i).tanh()

    def change():
        nonlocal factor
        factor = 2.0

    each_seen(kernels, Closed(), *arguments(Message), changes=(change,))


def test_modules_and_parameters_that_change(kernels):
    layer = EdgeNetwork()

    def write():
        with torch.no_grad():
            layer.nn[0].weight.mul_(0.3)

    def replace():
        layer.nn[0].weight = nn.Parameter(torch.randn_like(layer.nn[0].weight))

    each_seen(kernels, layer, *arguments(EdgeNetwork), changes=(
        write, replace, lambda: layer.nn.__setitem__(1, nn.ReLU()),
        lambda: layer.nn.append(nn.ELU(0.4))))


class Helped(Message):
    """Calls methods, one of which reads a global number."""

    def message(self, x_i, x_j):
        return self.gate(x_i, x_j) * self.bend(x_j - x_i)

    def gate(self, a, b):
        return torch.sigmoid(a + b)

    def bend(self, x):
        return F.leaky_relu(x, FACTOR) * self.read

    read = 0.7  # as what a tracer might call its own


class Bent(Message):
    """A message through modules of torch, which call torch's functions."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def message(self, x_i, x_j):
        return self.net(x_j * x_i)


@pytest.mark.parametrize("name, other", [("relu", lambda x, inplace=False: x.abs()),
                                         ("linear", lambda x, weight, bias: x @ weight.t())])
def test_functions_that_modules_call(emulated, monkeypatch, name, other):
    """Nothing of the layer changes, but what its modules call does."""
    each_seen(emulated, Bent(), *arguments(Message), changes=(
        lambda: None, lambda: monkeypatch.setattr(F, name, other)), taken="native")


FACTOR = 0.1


def test_methods_that_change(kernels, monkeypatch):
    layer = Helped()
    each_seen(kernels, layer, *arguments(Message), changes=(
        lambda: monkeypatch.setitem(globals(), "FACTOR", 0.8),
        lambda: setattr(layer, "read", 1.5),
        lambda: monkeypatch.setattr(Helped, "gate", lambda self, a, b: torch.tanh(a * b)),
        lambda: monkeypatch.setattr(F, "leaky_relu", lambda x, slope: x * slope)), taken="native")
    monkeypatch.undo()
    layer = Helped()
    each_seen(kernels, layer, *arguments(Message), changes=(
        lambda: monkeypatch.setattr(layer, "gate", lambda a, b: a + b, raising=False),
        lambda: monkeypatch.setattr(layer, "gate", lambda a, b: a - b)))


def hooked(module):
    return lambda: module.register_forward_hook(lambda module, args, out: out + 1)


def test_hooks(kernels):
    """On a module that the message calls, and on the message itself."""
    layer = EdgeNetwork()
    each_seen(kernels, layer, *arguments(EdgeNetwork), changes=(hooked(layer.nn[0]),),
              taken="native")
    layer = Difference()
    each_seen(kernels, layer, *arguments(Difference), changes=(
        lambda: layer.register_message_forward_hook(lambda module, args, out: out * 2),),
        taken="native")


def test_hooks_on_all_modules(kernels):
    handles = []

    def hook():
        handles.append(nn.modules.module.register_module_forward_hook(
            lambda module, args, out: out + 1 if type(module) is nn.Linear else None))

    try:
        each_seen(kernels, EdgeNetwork(), *arguments(EdgeNetwork), changes=(hook,), taken="native")
    finally:
        handles.pop().remove()


class Scaled(Message):
    def forward(self, x, edge_index, edge_attr=None, scale=0.5, flag=True):
        return self.propagate(edge_index, x=x, scale=scale, flag=flag)

    def message(self, x_i, x_j, scale, flag):
        out = (x_j - x_i) * scale
        return out.tanh() if flag else out


def test_numbers_as_arguments(kernels):
    layer, args = Scaled(), arguments(Scaled)
    with kernels.on():
        for more in ((0.5, True), (0.5, True), (0.7, True), (2, True), (0.7, False)):
            given = to(kernels.device, *args)
            got = layer.to(kernels.device)(*given, *more)
            with gnnaccel.disabled():
                assert close(got, layer(*given, *more))


def test_numbers_share_kernels(emulated):
    """Another number, another call: no other kernels."""
    from gnnaccel.cuda.runtime import driver

    args = arguments(Flagged)
    layer = Flagged()
    layer.power = 2.2
    with torch.no_grad(), emulated.on():
        layer(*args)
        before = len(driver.noted())
        layer.power = 2.7
        layer(*args)
    assert len(driver.noted()) == before


# --- what keeps its identity ----------------------------------------------------------------------

def test_code_that_is_reloaded_in_place(kernels):
    """As a notebook does with a module that was edited: functions stay, their code is another."""

    class Activation(nn.Module):
        def forward(self, x):
            return x.tanh()

    class Edited(Message):
        def __init__(self):
            super().__init__()
            self.act = Activation()

        def message(self, x_i, x_j):
            return self.act(self.scaled(x_j - x_i))

        def scaled(self, x, by=2.0):
            return x * by

        def update(self, out):
            return out * 2

    def become(function, other):
        return lambda: setattr(function, "__code__", other.__code__)

    each_seen(kernels, Edited(), *arguments(Message), changes=(
        become(Edited.scaled, lambda self, x, by=2.0: x / by),
        lambda: setattr(Edited.scaled, "__defaults__", (5.0,)),
        become(Activation.forward, lambda self, x: x.sigmoid()),
        become(Edited.update, lambda self, out: out * 3),
        become(Edited.message, lambda self, x_i, x_j: torch.relu(x_j - x_i) * x_j)))


def test_defaults_that_are_written_to(kernels):
    class Given(Message):
        def scaled(self, x, *, by=2.0):
            return x * by

        def message(self, x_i, x_j):
            return self.scaled(torch.tanh(x_i - x_j))

        def update(self, out, *, plus=1.0):
            return out + plus

    each_seen(kernels, Given(), *arguments(Message), changes=(
        lambda: Given.scaled.__kwdefaults__.update(by=5.0),
        lambda: Given.update.__kwdefaults__.update(plus=3.0)), taken="native")


def test_parameters_of_another_shape(kernels):
    """Set by ``data``: the parameter is the same object."""

    class Weighed(Message):
        def __init__(self):
            super().__init__()
            self.weight, self.lin = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

        def message(self, x_i, x_j):
            score = (x_i * x_j * self.weight).sum(-1, keepdim=True)
            return torch.sigmoid(score) * (x_j * self.weight).norm(dim=-1, keepdim=True) * (
                self.lin(x_j) - self.lin(x_i)).tanh()

    layer = Weighed()

    def data(parameter, *shape):
        return lambda: setattr(parameter, "data", torch.randn(*shape, device=kernels.device))

    with torch.no_grad():
        each_seen(kernels, layer, *arguments(Message), changes=(
            data(layer.weight, 1), data(layer.weight, WIDTH), data(layer.lin.bias, 1),
            data(layer.weight, 1, WIDTH)))


def test_functions_around_those_of_torch(kernels):
    """They have the names of what is inside, by `functools.wraps`."""
    numbers = [1.0]

    @functools.wraps(torch.tanh)
    def scaled(x):
        return torch.tanh(x) * numbers[0]

    class Wrapped(Message):
        def __init__(self):
            super().__init__()
            self.act = torch.tanh

        def message(self, x_i, x_j):
            return self.act(x_j - x_i)

    layer = Wrapped()
    each_seen(kernels, layer, *arguments(Message), taken="native", changes=(
        lambda: setattr(layer, "act", scaled),))
    numbers[0] = 2.0
    args = to(kernels.device, *arguments(Message))
    expected = layer(*args)
    with kernels.on(on_fallback="native"):
        assert close(layer(*args), expected)


def test_a_tuple_of_nothing(kernels):
    class Tuples(Message):
        def __init__(self):
            super().__init__()
            self.parts = ()

        def message(self, x_i, x_j):
            return (x_j - x_i).tanh() * (1 + len(self.parts))

    layer = Tuples().to(kernels.device)
    with kernels.on(on_fallback="native"):
        for parts in ((), (), (1,)):
            layer.parts = parts
            args = to(kernels.device, *arguments(Message))
            with gnnaccel.disabled():
                expected = layer(*args)
            assert close(layer(*args), expected)


# --- buffers that are written to between a call and its backward -----------------------------------

class Running(Message):
    """A message about a mean that the layer follows: it is written to once messages are made."""

    def __init__(self, aggr: str = "add"):
        super().__init__(aggr)
        self.register_buffer("middle", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("spread", torch.tensor(0.5))

    def forward(self, x, edge_index, edge_attr=None):
        out = super().forward(x, edge_index)
        if self.training:
            self.middle.mul_(0.5).add_(x.detach().mean(0))
            self.spread.add_(1)
        return out

    def message(self, x_i, x_j):
        return torch.relu(x_i + x_j - self.middle) + (x_j - self.spread).tanh()


class RunningSoftmax(Running):
    def message(self, x_i, x_j, index, size_i):
        score = torch.tanh(x_i + x_j - self.middle).sum(-1, keepdim=True)
        return softmax(score, index, num_nodes=size_i) * (x_j - self.middle)


class RunningMapped(Running):
    """Messages are written for each edge before a module goes on."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def message(self, x_i, x_j):
        return self.norm(torch.relu(x_i + x_j - self.middle))


@pytest.mark.parametrize("make", [Running, functools.partial(Running, "max"), RunningSoftmax,
                                  RunningMapped])
def test_buffers_written_to_before_backward(kernels, make):
    """Twice before backward, as in a recurrent net: torch refuses to compute with what was written
    to since, and the host's code does not need it any more."""
    layer = make().to(kernels.device)
    x, ei, _ = to(kernels.device, *arguments(Message))
    before, found = {k: v.clone() for k, v in layer.state_dict().items()}, []
    for on in (gnnaccel.disabled, lambda: kernels.on(on_fallback="native")):
        layer.load_state_dict(before)
        gnnaccel.reset_stats()
        given = x.clone().requires_grad_()
        with on():
            out = layer(layer(given, ei).tanh(), ei)
            (out * torch.linspace(-1, 2, WIDTH, device=out.device)).sum().backward()
        found.append([out, given.grad, *[t.clone() for t in layer.buffers()]])
    assert routes(layer) == {"cuda": 2}
    assert all(close(a, b) for a, b in zip(*found))
