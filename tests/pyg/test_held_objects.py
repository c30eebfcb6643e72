"""Messages that read objects which the layer holds: settings of a command line, dataclasses."""
from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import types

import pytest
import torch
from torch import nn
from torch_geometric.utils import scatter

import gnnaccel
from tests.pyg.generated_calls import arguments, routes
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.judge import close, compare


@dataclasses.dataclass
class Options:
    slope: float = 0.2
    kind: str = "mul"
    nested: object = dataclasses.field(default_factory=lambda: types.SimpleNamespace(scale=2.0))


class WithDefault:
    slope = 0.3

    def __init__(self):
        self.kind, self.nested = "sub", types.SimpleNamespace(scale=0.5)


OBJECTS = [
    lambda: argparse.Namespace(slope=0.1, kind="mul", nested=argparse.Namespace(scale=3.0)),
    lambda: types.SimpleNamespace(slope=0.1, kind="sub", nested=types.SimpleNamespace(scale=3.0)),
    Options, WithDefault]


class Configured(Message):
    def __init__(self, options):
        super().__init__()
        self.args, self.lin = options, nn.Linear(WIDTH, WIDTH)

    def transformed(self, x_i, x_j):
        if self.args.kind == "mul":
            return x_j * torch.tanh(x_i)
        elif self.args.kind == "sub":
            return x_j - x_i
        raise NotImplementedError

    def message(self, x_i, x_j):
        out = nn.functional.leaky_relu(self.lin(self.transformed(x_i, x_j)), self.args.slope)
        return out * self.args.nested.scale


class Aggregated(Configured):
    def aggregate(self, inputs, index, dim_size=None):
        return scatter(inputs, index, 0, dim_size) * self.args.nested.scale


@pytest.mark.parametrize("cls", [Configured, Aggregated])
@pytest.mark.parametrize("options", OBJECTS)
def test_values_and_gradients(kernels, cls, options):
    compare(kernels, cls(options()), *arguments(Message)[:2])


@pytest.mark.long
@pytest.mark.parametrize("cls", [Configured, Aggregated])
@pytest.mark.parametrize("options", OBJECTS)
def test_changes_are_seen(emulated, cls, options):
    """Attributes that are set, in the object and in one that it holds, and other objects."""
    layer, given = cls(options()), arguments(Message)[:2]
    of = layer.args
    for change in (lambda: None, lambda: setattr(of, "slope", 0.7),
                   lambda: setattr(of.nested, "scale", -1.5),
                   lambda: setattr(of, "kind", "sub" if of.kind == "mul" else "mul"),
                   lambda: setattr(of, "nested", types.SimpleNamespace(scale=4)),
                   lambda: setattr(layer, "args", Options(0.9, "sub"))):
        change()
        expected = layer(*given)
        gnnaccel.reset_stats()
        with emulated.on():
            for _ in range(2):
                assert close(layer(*given), expected)
            other = copy.deepcopy(layer)
            other.args.slope = 0.4
            assert close(layer(*given), expected)
            got = other(*given)
        assert close(got, other(*given)) and routes(layer) == {"cuda": 4}


class Found:
    """Finds an attribute by code."""

    def __init__(self):
        self.asked = 0

    def __getattr__(self, name):
        self.__dict__["asked"] += 1
        return 0.1 * self.__dict__["asked"]


class Counting:
    """Computes an attribute."""

    def __init__(self):
        self.asked = 0

    @property
    def slope(self):
        self.asked += 1
        return 0.1 * self.asked


class Hidden:
    """A property that has the name of something in the object's dictionary."""

    def __init__(self):
        self.__dict__.update(slope=7.0, asked=0)

    @property
    def slope(self):
        self.asked += 1
        return 0.1 * self.asked


class False_:
    slope = 0.3

    def __bool__(self):
        return False


class Read(Message):
    def __init__(self, options):
        super().__init__()
        self.args = options

    def message(self, x_i, x_j):
        return x_j * torch.relu(x_i) * self.args.slope


class Asked(Read):
    def message(self, x_i, x_j):
        return x_j * torch.relu(x_i) if self.args else x_j - x_i


class Compared(Read):
    def message(self, x_i, x_j):
        return x_j * torch.relu(x_i) if self.args == Options() else x_j - x_i


class Told(Read):
    def message(self, x_i, x_j):
        return x_j * torch.relu(x_i) * len(f"{self.args}")


class Called(Read):
    def message(self, x_i, x_j):
        return x_j * torch.relu(x_i) * self.args.scaled(2.0)


class Scaling:
    def scaled(self, number):
        self.scale = number + getattr(self, "scale", 0.0)
        return self.scale


@pytest.mark.parametrize("make", [
    lambda: Read(Found()), lambda: Read(Counting()), lambda: Read(Hidden()),
    lambda: Asked(False_()), lambda: Asked(Options()), lambda: Compared(Options()),
    lambda: Told(Options()), lambda: Called(Scaling())])
def test_others_stay_native(emulated, make):
    """Objects whose code would run, and what stands for one is not asked for more."""
    layer, other, given = make(), make(), arguments(Message)[:2]
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        got = [layer(*given) for _ in range(3)]
    assert all(close(a, other(*given)) for a in got)
    assert routes(layer) == {"native": 3}


# --- objects that are global values ---------------------------------------------------------------

here = sys.modules[__name__]
settings = argparse.Namespace(slope=0.1, kind="mul", scale=None,
                              nested=types.SimpleNamespace(scale=3.0, lin=nn.Linear(WIDTH, 1)))


class Global(Message):
    """A script's settings, as it has them by its command line."""

    def message(self, x_i, x_j):
        rows = x_j * torch.tanh(x_i) if settings.kind == "mul" else x_j - x_i
        if settings.scale is not None:
            rows = rows * settings.scale
        return nn.functional.leaky_relu(rows, settings.slope) * settings.nested.scale


class GlobalAggregated(Global):
    def aggregate(self, inputs, index, dim_size=None):
        return scatter(inputs, index, 0, dim_size) * settings.nested.scale


class GlobalModule(Global):
    def message(self, x_i, x_j):
        return super().message(x_i, x_j) * settings.nested.lin(x_j)


class OfAnotherFile(Message):
    def message(self, x_i, x_j):
        return nn.functional.leaky_relu(x_j * x_i, here.settings.slope) * (
            here.settings.nested.scale)


@pytest.mark.parametrize("cls", [Global, GlobalAggregated, OfAnotherFile])
def test_global_objects(kernels, cls):
    compare(kernels, cls(), *arguments(Message)[:2])


@pytest.mark.long
@pytest.mark.parametrize("cls", [Global, GlobalAggregated, GlobalModule, OfAnotherFile])
def test_changes_of_global_objects_are_seen(emulated, cls, monkeypatch):
    """Of a number, a text, an object within, and another object under the name."""
    layer, given = cls(), arguments(Message)[:2]
    weight = torch.randn(WIDTH)
    for change in (lambda: None, lambda: monkeypatch.setattr(settings, "slope", 0.7),
                   lambda: monkeypatch.setattr(settings.nested, "scale", -1.5),
                   lambda: monkeypatch.setattr(settings, "kind", "sub"),
                   lambda: monkeypatch.setattr(settings, "scale", weight),
                   lambda: monkeypatch.setattr(settings, "scale", weight * 2),
                   lambda: weight.zero_(),
                   lambda: monkeypatch.setattr(settings.nested, "lin", nn.Linear(WIDTH, 1)),
                   lambda: monkeypatch.setitem(globals(), "settings", argparse.Namespace(
                       slope=0.3, kind="sub", scale=2.0, nested=settings.nested))):
        change()
        expected = layer(*given)
        gnnaccel.reset_stats()
        with emulated.on(on_fallback="native"):
            for _ in range(2):
                assert close(layer(*given), expected)
        if cls is not GlobalModule:
            assert routes(layer) == {"cuda": 2}


global_found = Found()


class GlobalFound(Message):
    def message(self, x_i, x_j):
        return x_j * torch.relu(x_i) * global_found.slope


class GlobalAsked(Message):
    def message(self, x_i, x_j):
        return x_j * torch.relu(x_i) if settings == 2 else x_j - x_i


@pytest.mark.long
@pytest.mark.parametrize("cls", [GlobalFound, GlobalAsked])
def test_other_global_objects_stay_native(emulated, cls):
    layer, given, found = cls(), arguments(Message)[:2], vars(global_found)
    results = []
    for on in (False, True, True):
        found["asked"] = 0
        with emulated.on(on_fallback="native") if on else torch.enable_grad():
            results.append(layer(*given))
    assert all(close(one, results[0]) for one in results) and routes(layer) == {"native": 2}
