"""``enable(capture=True)``: modules that keep methods of their own, `torch_geometric.nn.Sequential`, and
settings in namespaces and in objects of a user's classes."""
from __future__ import annotations

import argparse
import array
import dataclasses
import functools
import gc
import types
import weakref

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv, Sequential

import gnnaccel
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import (  # noqa: F401
    PLACE,
    given,
    on,
    refused,
    replays,
    same,
    step,
    trained,
)

FACTOR = 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GCNConv(6, 3)
        self.to(PLACE[0])

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def scaled(x):
    return x * FACTOR


class OfOwnMethod(Net):
    def __init__(self):
        super().__init__()
        self.act = self.scaled

    def scaled(self, x):
        return x * FACTOR

    def other(self, x):
        return x.tanh() * 3

    def forward(self, x, edge_index):
        return self.act(super().forward(x, edge_index))


class Callable:
    number = 1.0

    def __call__(self, module, x):
        return x * self.number


class OfSettings(Net):
    def __init__(self, kind):
        super().__init__()
        self.args = kind(scale=1.0, layers=[1.0], inner=argparse.Namespace(shift=0.0))

    def forward(self, x, edge_index):
        args = self.args
        return super().forward(x, edge_index) * args.scale * args.layers[0] + args.inner.shift


@dataclasses.dataclass
class Settings:
    scale: float
    layers: list
    inner: object


class Config:
    """An object with attributes and a property."""

    unit = 1.0

    def __init__(self, scale, layers, inner):
        self.__dict__.update(of=scale, layers=layers, inner=inner)

    @property
    def scale(self):
        return self.of * self.unit


class OfFunction(OfSettings):
    def __init__(self, kind):
        super().__init__(kind)
        self.args.through = scaled

    def forward(self, x, edge_index):
        return self.args.through(super().forward(x, edge_index))


CONFIG = Settings(1.0, [1.0], None)


class OfGlobal(Net):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * CONFIG.scale * CONFIG.layers[0]


class Slots:
    __slots__ = ("scale", "layers", "inner")

    def __init__(self, scale, layers, inner):
        self.scale, self.layers, self.inner = scale, layers, inner


class Counting(Settings):
    @property
    def shift(self):
        self.calls = getattr(self, "calls", 0) + 1
        return 0.0


class OfCounting(OfSettings):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) + self.args.shift


def sequential():
    return Sequential("x, edge_index", [
        (GCNConv(6, 8), "x, edge_index -> x"), nn.ReLU(inplace=True),
        (lambda x: x * FACTOR, "x -> x"), (GCNConv(8, 3), "x, edge_index -> x")]).to(PLACE[0])


def set_factor(model):
    globals()["FACTOR"] = 2.0


#: by name: (a module, what is changed of it after calls were replayed)
CHANGES = {
    "another method": (OfOwnMethod, lambda m: setattr(m, "act", m.other)),
    "a method of another module": (OfOwnMethod, lambda m: setattr(
        m, "act", OfOwnMethod().to(PLACE[0]).other)),
    "what a method reads": (OfOwnMethod, set_factor),
    "a method of its class": (OfOwnMethod, lambda m: setattr(
        OfOwnMethod, "forward", lambda self, x, e: Net.forward(self, x, e) * 3)),
    "a module of Sequential": (sequential, lambda m: setattr(
        m, "module_0", GCNConv(6, 8).to(PLACE[0]))),
    "a name in Sequential": (sequential, set_factor),
    "a function of Sequential": (sequential, lambda m: setattr(m, "module_2", torch.tanh)),
    "another Sequential": (sequential, lambda m: sequential()),
    "a Namespace": (lambda: OfSettings(argparse.Namespace),
                    lambda m: setattr(m.args, "scale", 2.0)),
    "a list in a Namespace": (lambda: OfSettings(argparse.Namespace),
                              lambda m: m.args.layers.__setitem__(0, 2.0)),
    "a Namespace in one": (lambda: OfSettings(types.SimpleNamespace),
                           lambda m: setattr(m.args.inner, "shift", 2.0)),
    "a dataclass": (lambda: OfSettings(Settings), lambda m: setattr(m.args, "scale", 2.0)),
    "what a dataclass holds": (lambda: OfSettings(Settings),
                               lambda m: setattr(m.args.inner, "shift", 2.0)),
    "an object": (lambda: OfSettings(Config), lambda m: setattr(m.args, "of", 2.0)),
    "the class of an object": (lambda: OfSettings(Config), lambda m: setattr(Config, "unit", 2.0)),
    "a property of an object": (lambda: OfSettings(Config), lambda m: setattr(
        Config, "scale", property(lambda self: 3.0))),
    "a new attribute of an object": (lambda: OfSettings(Config),
                                     lambda m: setattr(m.args, "unit", 2.0)),
    "another class": (lambda: OfSettings(Settings), lambda m: setattr(
        m.args, "__class__", type("Doubled", (Settings,), {"layers": [2.0]}))),
    "a function of an object": (lambda: OfFunction(Config), lambda m: m.args.__dict__.update(
        through=torch.tanh)),
    "what a function of an object reads": (lambda: OfFunction(Config), set_factor),
    "a global object": (OfGlobal, lambda m: setattr(CONFIG, "scale", 2.0)),
    "a list of a global object": (OfGlobal, lambda m: CONFIG.layers.__setitem__(0, 2.0)),
    "all of a Namespace": (lambda: OfSettings(types.SimpleNamespace),
                           lambda m: setattr(m, "args", OfSettings(argparse.Namespace).args)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes(on, what, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    monkeypatch.setitem(globals(), "CONFIG", Settings(1.0, [1.0], None))
    monkeypatch.setattr(OfOwnMethod, "forward", OfOwnMethod.forward)
    monkeypatch.setattr(Config, "unit", 1.0)
    monkeypatch.setattr(Config, "scale", Config.scale)
    monkeypatch.setattr(Sequential, "forward", Sequential.forward)  # which each new one sets
    make, change = CHANGES[what]
    model, args = make(), given()
    for _ in range(8):
        found = step(model, *args)
        with gnnaccel.disabled():
            assert same(found, step(model, *args))
    name = type(model).__name__
    assert replays(name) >= 3, refused(name)
    before = replays(name)
    change(model)
    for _ in range(7):
        found = step(model, *args)
        with gnnaccel.disabled():
            assert same(found, step(model, *args))
    assert replays(name) > before, refused(name)


@pytest.mark.parametrize("make", [OfOwnMethod, sequential])
def test_training(on, make, monkeypatch):
    monkeypatch.setattr(Sequential, "forward", Sequential.forward)
    model = make()
    trained(model, given())
    assert replays(type(model).__name__) > 3


@pytest.mark.parametrize("make", [OfOwnMethod, sequential])
def test_a_module_is_not_kept_alive(on, make, monkeypatch):
    monkeypatch.setattr(Sequential, "forward", Sequential.forward)
    model, args = make(), given()
    for _ in range(7):
        step(model, *args)
    assert replays(type(model).__name__)
    gone = weakref.ref(model)
    Sequential.forward = None  # PyG's class holds the last one's function
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("held", [
    lambda m: functools.partial(m.scaled), lambda m: [m.scaled], lambda m: {"act": m.scaled},
    lambda m: argparse.Namespace(act=m.scaled)])
def test_methods_of_a_module_in_other_things(on, held):
    """Which keeping them would keep alive."""
    model, args = OfOwnMethod(), given()
    model.held = held(model)
    for _ in range(7):
        step(model, *args)
    assert not replays("OfOwnMethod")
    assert any("a method of an object" in why for why in refused("OfOwnMethod"))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_method_of_the_module_around_a_module(on):
    """Which keeping it would keep alive."""
    model, args = OfOwnMethod(), given()
    model.conv.of_a_user = model.other
    for _ in range(7):
        step(model, *args)
    assert not replays("OfOwnMethod")
    assert any("a method of the module around it" in why for why in refused("OfOwnMethod"))


def test_a_method_that_is_no_function(on):
    model, args = OfOwnMethod(), given()
    model.act = types.MethodType(Callable(), model)
    for _ in range(7):
        step(model, *args)
    assert not replays("OfOwnMethod")
    assert any("a method of an object" in why for why in refused("OfOwnMethod"))


def around():
    model = OfSettings(Config)
    model.args.__dict__["whole"] = model.args
    return model


@pytest.mark.parametrize("make, why", [
    (lambda: OfSettings(Slots), "an object of class"), (around, "that holds itself"),
    (lambda: OfCounting(Counting), "")])
def test_objects_that_are_not_followed(on, make, why):
    model, args = make(), given()
    for _ in range(9):
        step(model, *args)
    name = type(model).__name__
    assert not replays(name) and any(why in text for text in refused(name) or [""])
    if not why:
        assert model.args.calls == 9


class Divided(Net):
    def __init__(self):
        super().__init__()
        self.zero, self.args = 0.0, argparse.Namespace(zero=0.0)

    def forward(self, x, edge_index):
        ones = torch.ones_like(x[:, :1])
        return super().forward(x, edge_index).tanh() + ones / self.zero - ones / self.args.zero


def test_zeros_of_both_signs(on):
    model, args = Divided(), given()
    model.args.zero = -0.0
    for _ in range(7):
        step(model, *args)
    assert replays("Divided")
    assert torch.equal(model(*args), torch.full((len(args[0]), 3), torch.inf, device=PLACE[0]))
    model.zero = -0.0
    assert model(*args).isnan().all()
    model.args.zero = 0.0
    assert torch.equal(model(*args), torch.full((len(args[0]), 3), -torch.inf, device=PLACE[0]))


class Holding:
    def __init__(self, value):
        self.value = value


class OfHeld(Net):
    def __init__(self, value, number):
        super().__init__()
        self.args, self.number = Holding(value), number

    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * self.number(self.args.value)


SCALES = {"a": 1.0}


def test_objects_of_classes_in_c(on):
    """What these hold is not in their ``__dict__``."""
    @functools.lru_cache
    def cached():
        return SCALES["a"]

    numbers = array.array("d", [1.0])
    for value, number in ((cached, lambda value: value()), (numbers, lambda value: value[0])):
        model, args = OfHeld(value, number), given()
        for _ in range(7):
            step(model, *args)
        before, numbers[0], SCALES["a"] = model(*args), 3.0, 3.0
        cached.cache_clear()
        assert torch.allclose(model(*args), 3 * before)
        numbers[0] = SCALES["a"] = 1.0
        cached.cache_clear()
    assert not replays("OfHeld")


def closed_over(model):
    model.act = lambda x: model.other(x)


@pytest.mark.parametrize("keep", [
    closed_over, lambda model: setattr(model.conv, "of_a_user", model.other),
    lambda model: vars(model.conv).update(of_a_user=model)])
def test_modules_that_what_they_hold_reads_are_let_go_of(on, keep):
    model, args = OfOwnMethod(), given()
    keep(model)
    for _ in range(7):
        step(model, *args)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
