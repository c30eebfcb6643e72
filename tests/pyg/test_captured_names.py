"""``enable(capture=True)``: what a module's code reaches by other ways than plain names."""
from __future__ import annotations

import collections
import enum
import functools
import importlib
import operator
import sys
import types

import pytest
import torch
from torch import nn
from torch_geometric import transforms
from torch_geometric.data import Data

import gnnaccel
from gnnaccel.adapters.captured.reads import is_library
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import PLACE, Net, given, on, refused, replays, same  # noqa: F401

SCALE = 1.0
SETTINGS = types.ModuleType("settings_by_name")
exec("alpha = 1.0\ndef __getattr__(name):\n"
     "    if name != 'later':\n        raise AttributeError(name)\n    return alpha", vars(SETTINGS))


class Config:
    alpha = 1.0


class Inheriting(Config):
    pass


class Kind(enum.Enum):
    ONE = 1

    def __init__(self, value):
        self.beta = 1.0

    @property
    def alpha(self):
        return SCALE


class Number(enum.IntEnum):
    ONE = 1

    @property
    def alpha(self):
        return SCALE


class Tuple(collections.namedtuple("Tuple", "a")):
    @property
    def alpha(self):
        return self.a * SCALE


class Meta(type):
    @property
    def alpha(cls):
        return SCALE


class OfMeta(metaclass=Meta):
    pass


class Descriptor:
    def __get__(self, owner, cls=None):
        return SCALE


class Made:
    def __init__(self):
        self.alpha = SCALE


class Times:
    def __init__(self, x):
        self.x = x

    def __mul__(self, other):
        return self.x * other * SCALE


class Scaled:
    alpha = 1.0

    def times(self, x):
        return x * self.alpha


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def __getitem__(self, number):
        return self.layers[number + int(SCALE) - 1]

    def __iter__(self):
        return iter([self[0]])


def times(factor, x):
    return x * factor * SCALE


@functools.singledispatch
def dispatched(x):
    return x


@dispatched.register
def _(x: torch.Tensor):
    return x * SCALE


PARTIAL, ALPHA = functools.partial(times, 1.0), operator.attrgetter("alpha")
TABLE = {"config": Config}
NAMESPACE = types.SimpleNamespace(times=lambda x: x * SCALE)
SCALED = Scaled()


class Reading(Net):
    """Its result is what one of the functions below makes of Net's."""

    descriptor = Descriptor()
    partial = functools.partialmethod(lambda self, factor, x: x * factor * SCALE, 1.0)

    def __init__(self, way, held=None):
        super().__init__()
        self.way, self.held, self.layers = way, held, Layers().to(PLACE[0])

    @functools.cache  # noqa: B019 - one of the ways to find a value
    def remembered(self):
        return SCALE

    def forward(self, x, edge_index, *more):
        return self.way(self, Net.forward(self, x, edge_index), *more)


def scale(model):
    globals().update(SCALE=2.0)


def config(model):
    Config.alpha = 2.0


def settings(model):
    SETTINGS.alpha = 2.0


def again(model):
    scale(model)
    Reading.remembered.cache_clear()


class Slots(Reading):
    __slots__ = ("alpha",)

    def __init__(self):
        super().__init__(lambda m, x: x * m.alpha)
        self.alpha = 1.0


class Names(Reading):
    def __init__(self):
        super().__init__(lambda m, x: m.heads["a"](x) * m.low + m.high)
        self.low, self.high = 1.0, 3.0
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}).to(PLACE[0])


def other_names(model):
    for held, (one, two) in ((vars(model), ("low", "high")), (model.heads._modules, ("a", "b"))):
        first, second = held.pop(one), held.pop(two)
        held.update({two: first, one: second})


def another_dictionary(model):
    model.__dict__ = {**model.__dict__, "low": 2.0}


def composed(model, x):
    return x * model.held(Data(x=torch.ones(1), edge_index=torch.zeros(
        2, 1, dtype=torch.int64), w=torch.ones(1), num_nodes=1)).w.sum().to(x.device)


def way(function, change, *more, held=None):
    return lambda: Reading(function, held), change, more


WAYS = {
    "a function as an argument": way(lambda m, x, f: f(x), scale, lambda x: x * SCALE),
    "a method as an argument": way(lambda m, x, f: f(x), lambda m: setattr(SCALED, "alpha", 2.0),
                                   SCALED.times),
    "a class as an argument": way(lambda m, x, c: x * c.alpha, config, Config),
    "a module as an argument": way(lambda m, x, c: x * c.alpha, settings, SETTINGS),
    "a member as an argument": way(lambda m, x, c: x * c.alpha, scale, Kind.ONE),
    "a class in a dictionary": way(lambda m, x: x * m.held["c"].alpha, config, held={"c": Config}),
    "a module in a dictionary": way(lambda m, x: x * m.held["c"].alpha, settings,
                                    held={"c": SETTINGS}),
    "an attribute of a member": way(lambda m, x: x * Kind.ONE.beta,
                                    lambda m: setattr(Kind.ONE, "beta", 2.0)),
    "a member in a dictionary": way(lambda m, x: x * m.held["c"].alpha, scale,
                                    held={"c": Kind.ONE}),
    "a number's property": way(lambda m, x: x * m.held.alpha, scale, held=Number.ONE),
    "a tuple's property": way(lambda m, x: x * m.held.alpha, scale, held=Tuple(1.0)),
    "a class in a global": way(lambda m, x: x * TABLE["config"].alpha, config),
    "a function in a namespace": way(lambda m, x: NAMESPACE.times(x), scale),
    "a partial": way(lambda m, x: PARTIAL(x), scale),
    "a partial method": way(lambda m, x: m.partial(x), scale),
    "a descriptor": way(lambda m, x: x * m.descriptor, scale),
    "a class of a class": way(lambda m, x: x * OfMeta.alpha, scale),
    "a module's __getattr__": way(lambda m, x: x * SETTINGS.later, settings),
    "getattr of a module": way(lambda m, x: x * getattr(SETTINGS, "alpha", 1.0), settings),
    "a module's dictionary": way(lambda m, x: x * SETTINGS.__dict__["alpha"], settings),
    "a class's dictionary": way(lambda m, x: x * Config.__dict__["alpha"], config),
    "an attribute that hides one": way(lambda m, x: x * Inheriting.alpha,
                                       lambda m: setattr(Inheriting, "alpha", 2.0)),
    "a builtin that is hidden": way(lambda m, x: x * max(1.0, 2.0),
                                    lambda m: globals().update(max=min)),
    "an operator of a module": way(lambda m, x: m.layers[0](x), scale),
    "a loop over a module": way(lambda m, x: [f(x) for f in m.layers][0], scale),
    "an object that is made": way(lambda m, x: x * Made().alpha, scale),
    "an operator of an object": way(lambda m, x: Times(x) * 1.0, scale),
    "an attrgetter": way(lambda m, x: x * ALPHA(Config), config),
    "sys.modules": way(lambda m, x: x * sys.modules["settings_by_name"].alpha, settings),
    "import_module": way(lambda m, x: x * importlib.import_module("settings_by_name").alpha,
                         settings),
    "a function by type": way(lambda m, x: dispatched(x), scale),
    "a method that remembers": way(lambda m, x: x * m.remembered(), again),
    "a UserDict": way(lambda m, x: x * m.held["a"], lambda m: m.held.update(a=2.0),
                      held=collections.UserDict(a=1.0)),
    "a transform in another": way(composed, lambda m: setattr(
        m.held.transforms[0], "fill_value", 5.0), held=transforms.Compose(
            [transforms.AddSelfLoops(attr="w", fill_value=2.0)])),
    "a method of a layer": way(lambda m, x: m.held(x), lambda m: setattr(
        m.held.__self__, "weight", nn.Parameter(torch.ones(6, 6, device=PLACE[0]), False)),
        held=nn.Linear(6, 6).requires_grad_(False).forward),
    "a slot": (Slots, lambda m: setattr(m, "alpha", 2.0), ()),
    "other names": (Names, other_names, ()),
    "another dictionary": (Names, another_dictionary, ()),
}
#: calls that are not captured for it
NOT_FOLLOWED = (
    "a method as an argument", "a module as an argument", "a module in a dictionary",
    "a descriptor", "getattr of a module", "a module's dictionary", "a class's dictionary",
    "an attrgetter", "sys.modules", "import_module", "a method that remembers", "a slot")


@pytest.fixture
def names(on, monkeypatch):
    """All that the ways read is as it was in the end."""
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setitem(globals(), "max", max)
    del globals()["max"]
    monkeypatch.setattr(Config, "alpha", 1.0)
    monkeypatch.setattr(SETTINGS, "alpha", 1.0)
    monkeypatch.setattr(Kind.ONE, "beta", 1.0)
    monkeypatch.setattr(SCALED, "alpha", 1.0, raising=False)
    monkeypatch.setitem(sys.modules, "settings_by_name", SETTINGS)
    Reading.remembered.cache_clear()
    yield
    if "alpha" in vars(Inheriting):
        del Inheriting.alpha


@pytest.mark.parametrize("what", WAYS)
def test_a_change_of_what_is_reached(names, what):
    make, change, more = WAYS[what]
    model, args = make().eval(), (*given(), *more)
    if isinstance(getattr(model.held, "__self__", None), nn.Module):
        model.held.__self__.to(PLACE[0])
    with torch.no_grad():
        with gnnaccel.disabled():
            before = model(*args)
        for number in range(14):
            if number == 8:
                change(model)
            found = model(*args)
            with gnnaccel.disabled():
                assert same([found], [model(*args)]), number
    assert not same([found], [before])
    # on a GPU AddSelfLoops waits for the device, which a captured module may not
    assert (PLACE[0], what) == ("cuda", "a transform in another") or (
        bool(replays(type(model).__name__)) is (what not in NOT_FOLLOWED)), refused()


class Timed(Net):
    def forward(self, x, edge_index):
        with Entered():
            self.total = 1
            return super().forward(x, edge_index)

    @property
    def total(self):
        return 1

    @total.setter
    def total(self, value):
        SEEN.append(value)


class Entered:
    def __enter__(self):
        SEEN.append("in")

    def __exit__(self, *what):
        SEEN.append("out")


SEEN: list = []


class Hooked(Net):
    def forward(self, x, edge_index):
        x = super().forward(x, edge_index)
        x.register_hook(lambda grad: SEEN.append("back"))
        return x * 2


class Written(Net):
    def forward(self, x, edge_index):
        sys.stdout.write("called\n")
        return super().forward(x, edge_index)


def test_what_operators_do(on, capsys):
    SEEN.clear()
    timed, written, args = Timed().eval(), Written().eval(), given()
    for _ in range(9):
        timed(*args), written(*args)
    assert SEEN == ["in", 1, "out"] * 9 and capsys.readouterr().out == "called\n" * 9
    assert not replays("Timed") and not replays("Written")


def test_hooks_that_a_forward_registers(on):
    model, args = Hooked(), given()
    for _ in range(9):
        SEEN.clear()
        model(*args).sum().backward()
        assert SEEN == ["back"]


def test_a_users_module_may_have_a_name_of_pythons(monkeypatch):
    own = types.ModuleType("profile")
    own.__file__ = "/home/somebody/profile.py"
    assert is_library("profile") and is_library("math") and is_library("_thread")
    monkeypatch.setitem(sys.modules, "profile", own)
    assert not is_library("profile")


class OfTensors(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("held", torch.tensor(2.0, device=PLACE[0]))
        self.plain = torch.tensor(2.0, device=PLACE[0])
        self.several = [torch.tensor(2.0, device=PLACE[0])]

    def forward(self, x, edge_index):
        weight = self.one.lin.weight
        x = super().forward(x, edge_index) * self.held * self.plain * self.several[0]
        return x * getattr(weight, "factor", 1.0) * getattr(edge_index, "factor", 1.0) * (
            1.0 if weight.grad is None else 2.0)


@pytest.mark.parametrize("what", ["held", "plain", "several"])
def test_gradients_that_are_asked_for_later(on, what):
    model, args = OfTensors(), given()
    tensor = getattr(model, what) if what != "several" else model.several[0]
    for number in range(12):
        if number == 8:
            tensor.requires_grad_()
        out = model(*args)
        if number >= 8:
            found = torch.autograd.grad(out.square().sum(), tensor)
            with gnnaccel.disabled():
                assert same(found, torch.autograd.grad(model(*args).square().sum(), tensor))


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("what", ["a weight", "an argument", "a gradient"])
def test_attributes_of_tensors(on, what, later):
    model, args = OfTensors().eval(), given()
    weight = model.one.lin.weight
    with torch.no_grad():
        for number in range(12):
            if number == (8 if later else 0):
                if what == "a gradient":
                    weight.grad = torch.ones_like(weight)
                else:
                    (weight if what == "a weight" else args[1]).factor = 3.0
            found = model(*args)
            with gnnaccel.disabled():
                assert same([found], [model(*args)]), number
