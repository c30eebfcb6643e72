"""``enable(capture=True)``: what a call does beside its results, in forward and backward."""
from __future__ import annotations

import collections
import copy
import os
import random
from os import getenv

import numpy
import pytest
import torch
from numpy.random import default_rng
from torch import nn

import gnnaccel
from gnnaccel.adapters.captured import kinds, results
from gnnaccel.adapters.captured.reads import Reads
from gnnaccel.adapters.captured.state import Snapshot
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import (  # noqa: F401
    PLACE, Net, given, on, refused, replays, same, step, trained)

GAIN = [1.0]


class Local(Net):
    """Goes back through a loss of its own."""

    def forward(self, x, edge_index):
        h = self.one(x, edge_index)
        if torch.is_grad_enabled():
            h.square().mean().backward()
        return self.two(self.norm(h.detach()), edge_index)


def test_backward_within_forward(on):
    trained(Local(), given())
    assert "it goes back through its own results" in refused("Local")


class Chance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * (random.random() + float(numpy.random.rand()))


class ByChance(Net):
    def forward(self, x, edge_index):
        return Chance.apply(super().forward(x, edge_index))


def test_random_numbers_of_the_host_in_backward(on):
    """The capture that is tried draws some, too, and gives them back."""
    model, args = ByChance(), given()

    def run(model):
        random.seed(3)
        numpy.random.seed(3)
        return [t for _ in range(9) for t in step(model, *args)], random.random()
    twin = copy.deepcopy(model)
    found, drawn = run(model)
    with gnnaccel.disabled():
        expected, other = run(twin)
    assert same(found, expected) and drawn == other
    assert refused("ByChance") == ["it draws random numbers on the host"]


class OfOneLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm()


class Heads(Net):
    def __init__(self, number):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(6, 3) for _ in range(number)]).to(PLACE[0])

    def forward(self, x, edge_index):
        h = OfOneLength.apply(super().forward(x, edge_index))
        return [head(h) for head in self.heads]


@pytest.mark.parametrize("number", [2, 3])
def test_gradients_that_do_not_add_up(on, number):
    """Through two of three results, by a Function that is not linear in its gradients."""
    model, args = Heads(number), given()
    for turn in range(12):
        grads = []
        for route in (gnnaccel.enabled(capture=True, when="supported"), gnnaccel.disabled()):
            with route:
                outs = model(*args)
                used = (outs[0] + outs[1]) if turn % 2 else outs[0]
                grads.append(torch.autograd.grad(used.square().sum(), model.one.lin.weight))
        assert same(*grads), turn
    assert bool(replays("Heads")) is (number == 2)


class ByTurns(Net):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(3, 3).to(PLACE[0])


def test_parameters_that_take_no_part(on):
    """Their hooks are not called, and no result says that it depends on them."""
    model, args = ByTurns(), given()
    for _ in range(7):
        step(model, *args)
    seen: list = []
    model.spare.weight.register_hook(seen.append)
    out = model(*args)
    out.sum().backward()
    leaves = [node.variable for node, _ in out.grad_fn.next_functions if hasattr(node, "variable")]
    assert replays("ByTurns") == 4 and not seen
    assert leaves and all(p is not model.spare.weight for p in leaves)


class Overlapping(Net):
    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        return out, out[3:]


class Chunks(Net):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).chunk(2, -1)


@pytest.mark.parametrize("make", [Overlapping, Chunks])
def test_results_that_lie_in_each_other(on, make):
    model, args = make().eval(), given()
    for _ in range(8):
        with torch.no_grad():
            first, second = model(*args)
            held = second.clone()
            first.add_(1)
            assert same([second], [held + 1 if make is Overlapping else held])
    assert bool(replays(make.__name__)) is (make is Chunks)


def test_expanded_results():
    whole = torch.zeros(3, 4)
    assert results._overlap([whole, whole[1:].unsqueeze(0).expand(2, -1, -1)])
    assert not results._overlap([whole[:1].expand(2, -1), whole[1:], torch.zeros(0)])


@torch.library.custom_op("gnnaccel_tests::gained", mutates_args=())
def gained(x: torch.Tensor) -> torch.Tensor:
    return x * GAIN[0]


def at_random(x):
    return x * default_rng().random()


def of_the_environment(x):
    return x * float(getenv("GAIN_OF_A_TEST", "1"))


def by_default(x, *, gain=1.0):
    return x * gain


WAYS = {  # what the model calls, a change, whether it is captured
    "an operator": (gained, lambda: GAIN.__setitem__(0, 3.0), True),
    "an operator by its name": (lambda x: torch.ops.gnnaccel_tests.gained(x),
                                lambda: GAIN.__setitem__(0, 3.0), True),
    "a generator": (at_random, lambda: None, False),
    "the environment": (of_the_environment, lambda: os.environ.update(GAIN_OF_A_TEST="3"), True),
    "a default": (by_default, lambda: by_default.__kwdefaults__.update(gain=3.0), True),
    "a seed": (lambda x: x * (torch.initial_seed() % 7), lambda: torch.manual_seed(13), False)}
WAY = None


class OfWay(Net):
    def forward(self, x, edge_index):
        return WAY(super().forward(x, edge_index))


@pytest.mark.parametrize("what", WAYS)
def test_a_change_of_what_is_called(on, what, monkeypatch):
    way, change, captured = WAYS[what]
    monkeypatch.setitem(globals(), "WAY", way)
    GAIN[0] = 1.0
    monkeypatch.setenv("GAIN_OF_A_TEST", "1")
    monkeypatch.setitem(by_default.__kwdefaults__, "gain", 1.0)
    model, args = OfWay().eval(), given()
    with torch.no_grad():
        outs = [model(*args) for _ in range(8)]
        change()
        found = model(*args)
        with gnnaccel.disabled():
            expected = model(*args)
    if what == "a generator":
        assert not same([outs[-1]], [found])
    else:
        assert same([found], [expected]) and not same([outs[-1]], [found])
    assert bool(replays("OfWay")) is captured, refused("OfWay")


@pytest.mark.parametrize("what", ["an operator", "an operator by its name"])
def test_what_operators_read(what, monkeypatch):
    """The stand-in for CUDA graphs calls their functions at each replay; a graph does not."""
    monkeypatch.setitem(globals(), "WAY", WAYS[what][0])
    GAIN[0] = 1.0
    reads = Reads([OfWay()])
    assert reads.holds()
    GAIN[0] = 3.0
    assert not reads.holds()


class Held(Net):
    def __init__(self):
        super().__init__()
        normal = torch.distributions.Normal
        self.prior = normal(torch.zeros(()), torch.ones(()), validate_args=False)


@pytest.mark.parametrize("what", ["written", "moved", "replaced"])
def test_tensors_in_objects_of_libraries(what):
    """A graph reads a number of the host once, and others where they lay."""
    model = Held()
    snapshot = Snapshot([model], torch.device("cuda"))
    assert snapshot.holds() and any(t is model.prior.loc for t in snapshot.read)
    if what == "written":
        model.prior.loc.fill_(2.0)
    elif what == "moved":
        model.prior.loc.data = torch.ones(())
    else:
        model.prior.loc = torch.zeros(())
    assert not snapshot.holds()


class Measured(Net):
    def __init__(self):
        super().__init__()
        self.start = torch.cuda.Event(enable_timing=True)


def test_events_of_a_model():
    with pytest.raises(Exception, match="Event"):
        Snapshot([Measured()], torch.device("cuda"))


class Two(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class ReturningTwo(Net):
    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        found = Two(out, out + 1)
        found.note = "kept"
        return found


def test_tuples_of_the_users_own(on):
    """They may be made otherwise, and hold more than is in them."""
    model, args = ReturningTwo().eval(), given()
    for _ in range(8):
        with torch.no_grad():
            assert model(*args).note == "kept"


class Moving(Net):
    """Writes to a parameter, as an encoder that follows another one does."""

    def __init__(self):
        super().__init__()
        self.slow = nn.Parameter(torch.zeros(8, device=PLACE[0]), requires_grad=False)

    def forward(self, x, edge_index):
        with torch.no_grad():
            self.slow.mul_(0.5).add_(self.one.bias, alpha=0.5).add_(1.0)
        return super().forward(x, edge_index) * (1 + 0.01 * self.slow.mean())


def test_a_parameter_that_forward_moves(on):
    trained(Moving(), given())
    assert replays("Moving"), refused("Moving")


def test_names_in_objects_of_libraries():
    model = Net()
    model.held = collections.ChainMap({"a": 1.0, "b": 2.0})
    snapshot = Snapshot([model], torch.device("cuda"))
    assert snapshot.holds()
    model.held.maps[0].clear()
    model.held.update(b=1.0, a=2.0)
    assert not snapshot.holds()


def test_numbers_on_the_host_that_are_written_unseen():
    """As by ``data`` or numpy: a module that runs on a GPU reads them when it is captured."""
    model = Net()
    model.alpha = torch.tensor([1.0, float("nan")])
    kind = kinds.Kind()
    kind.notes(Snapshot([model], torch.device("cuda")), Reads([model]), torch.device("cuda"))
    assert kind.stands()
    model.alpha.numpy()[0] = 2.0
    assert not kind.stands()


class LettingGo(Net):
    def forward(self, x, edge_index):
        self.zero_grad()
        return super().forward(x, edge_index)


def test_gradients_that_forward_lets_go_of(on):
    """Later ones, where the script had done that before."""
    model, args = LettingGo(), given()
    for number in range(10):
        if number < 7:
            model.zero_grad()
        assert number < 7 or model.one.bias.grad is not None
        out = model(*args)
        assert model.one.bias.grad is None, number
        out.sum().backward()
