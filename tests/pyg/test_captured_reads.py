"""``enable(capture=True)``: changes of what a module's code reads besides its own attributes."""
from __future__ import annotations

import collections
import copy
import functools
import os
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data

import gnnaccel
from gnnaccel.adapters.captured import backend
from gnnaccel.adapters.captured.state import Snapshot
from gnnaccel.dispatch.graph.ordered_weights import of_the_graph
from gnnaccel.dispatch.graph.tensor_ref import TensorRef
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import PLACE, Net, given, on, refused, replays, same, step  # noqa: F401

SCALE, HEAD = 1.0, None


class Config:
    alpha, table, nested = 1.0, [1.0], types.SimpleNamespace(v=1.0)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad * SCALE


def scaled(function):
    @functools.wraps(function)
    def run(*args):
        return function(*args) * SCALE

    return run


def helper(x):
    return x * helper.scale


@scaled
def wrapped(x):
    return x


class Owning(Net):
    table, nested = [1.0], {"a": 1.0}

    def way(self, x):
        return x * SCALE


class OfOwn(Owning):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * self.table[0] * self.nested["a"]


class OfConfig(Net):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * Config.alpha * Config.table[0] * Config.nested.v


class OfWrapped(Net):
    def forward(self, x, edge_index):
        return helper(wrapped(super().forward(x, edge_index)))


class OfBackward(Net):
    def forward(self, x, edge_index):
        return Reversed.apply(super().forward(x, edge_index))


class OfName(Owning):
    def forward(self, x, edge_index):
        return getattr(self, "w" + "ay")(super().forward(x, edge_index))


class OfGlobalModule(Net):
    def forward(self, x, edge_index):
        return HEAD(super().forward(x, edge_index))


class OfImport(Net):
    def forward(self, x, edge_index):
        import settings_of_a_user
        from settings_of_a_user import beta

        return super().forward(x, edge_index) * settings_of_a_user.alpha * beta


class OfHidden(Net):
    """With a module that it does not know as a submodule."""

    def __init__(self):
        super().__init__()
        self.__dict__["teacher"] = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).to(
            given()[0].device)

    def forward(self, x, edge_index):
        with torch.no_grad():
            target = self.__dict__["teacher"](x)
        return super().forward(x, edge_index) * target.sum()


class OfAttributes(Net):
    def __init__(self):
        super().__init__()
        self.data, self.last = Data(edge_index=given()[1]), collections.deque([2.0])

    def forward(self, x, edge_index):
        return super().forward(x, self.data.edge_index) * (self.last[0] if self.last else 1.0)


class OfData(OfAttributes):
    def __init__(self):
        super().__init__()
        del self.last

    def forward(self, x, edge_index):
        return Net.forward(self, x, self.data.edge_index)


class Square(Net):
    def __init__(self):
        super().__init__()
        self.square = nn.Linear(6, 6, bias=False).to(given()[0].device)

    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * self.square.weight[:3, 0].sum() * self.square(x).sum()


class OfLibraries(Net):
    def __init__(self):
        super().__init__()
        self.noise = torch.distributions.Normal(0.0, torch.ones(6, device=given()[0].device))

    def forward(self, x, edge_index):
        x = F.elu(x) * float(os.environ.get("OF_A_USER", "1")) * self.noise.scale
        return super().forward(x, edge_index)


def here(**values):
    return lambda model: globals().update(values)


def head(seed):
    torch.manual_seed(seed)
    return nn.Linear(6, 2).to(given()[0].device)


CHANGES = {
    "a class": (OfConfig, lambda m: setattr(Config, "alpha", 3.0)),
    "a class's list": (OfConfig, lambda m: Config.table.__setitem__(0, 3.0)),
    "a class's namespace": (OfConfig, lambda m: setattr(Config.nested, "v", 3.0)),
    "another class": (OfConfig, lambda m: globals().update(Config=type(
        "Other", (), dict(alpha=2.0, table=[2.0], nested=types.SimpleNamespace(v=2.0))))),
    "its class's list": (OfOwn, lambda m: m.table.__setitem__(0, 3.0)),
    "its class's dictionary": (OfOwn, lambda m: m.nested.update(a=3.0)),
    "another module": (OfGlobalModule, lambda m: globals().update(HEAD=head(2))),
    "what wraps a function": (OfWrapped, here(SCALE=3.0)),
    "an attribute of a function": (OfWrapped, lambda m: setattr(helper, "scale", 3.0)),
    "what backward reads": (OfBackward, here(SCALE=3.0)),
    "a method of a name made at run time": (OfName, here(SCALE=3.0)),
    "a module imported inside": (OfImport, lambda m: setattr(
        sys.modules["settings_of_a_user"], "alpha", 3.0)),
    "a name imported inside": (OfImport, lambda m: setattr(
        sys.modules["settings_of_a_user"], "beta", 3.0)),
    "a hidden module's mode": (OfHidden, lambda m: m.__dict__["teacher"].eval()),
    "a hidden module's weight": (OfHidden, lambda m: setattr(
        m.__dict__["teacher"][1], "weight", nn.Parameter(torch.ones(6, 6, device=given()[0].device)))),
    "a Data": (OfData, lambda m: setattr(m.data, "edge_index", given()[1].flip(0).contiguous())),
    "a function of torch": (OfLibraries, lambda m: setattr(F, "elu", F.relu)),
    "the environment": (OfLibraries, lambda m: os.environ.update(OF_A_USER="3")),
    "an object of torch's": (OfLibraries, lambda m: setattr(
        m.noise, "scale", torch.full((6,), 3.0, device=given()[0].device))),
    "a weight's strides": (Square, lambda m: setattr(
        m.square.weight, "data", m.square.weight.data.t())),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_is_read(on, what, monkeypatch):
    cls, change = CHANGES[what]
    for name, value in dict(SCALE=1.0, HEAD=head(1), Config=type("Config", (), dict(
            alpha=1.0, table=[1.0], nested=types.SimpleNamespace(v=1.0)))).items():
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(helper, "scale", 1.0, raising=False)
    monkeypatch.setattr(F, "elu", F.elu)
    monkeypatch.setenv("OF_A_USER", "1")
    monkeypatch.setattr(Owning, "table", [1.0])
    monkeypatch.setattr(Owning, "nested", {"a": 1.0})
    settings = types.ModuleType("settings_of_a_user")
    settings.alpha = settings.beta = 1.0
    monkeypatch.setitem(sys.modules, "settings_of_a_user", settings)
    model, args = cls(), given()
    for _ in range(7):
        step(model, *args)
    # on a GPU a graph that the module holds may take one call more
    assert replays(cls.__name__) == 3 or (PLACE[0], what) == ("cuda", "a Data")
    change(model)
    for _ in range(6):
        with gnnaccel.disabled():
            before = copy.deepcopy(model.state_dict())
            hidden = copy.deepcopy(model.__dict__.get("teacher"))
            expected = step(model, *args)
            model.load_state_dict(before)
            if hidden is not None:
                model.__dict__["teacher"].load_state_dict(hidden.state_dict())
        assert same(step(model, *args), expected)


def test_a_deque_is_no_constant(on):
    model, args = OfAttributes().eval(), given()
    with torch.no_grad():
        for _ in range(8):
            before = model(*args)
        model.last.appendleft(4.0)
        assert torch.allclose(model(*args), before * 2, atol=1e-5)


class Drawing(Net):
    """Takes the next of something."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x, edge_index):
        drawn = (torch.rand(1, generator=self.held) if isinstance(self.held, torch.Generator)
                 else next(self.held) if hasattr(self.held, "__next__") else self.held[0])
        return super().forward(x, edge_index) * float(drawn)


@pytest.mark.parametrize("make", [lambda: torch.Generator().manual_seed(1),
                                  lambda: iter(range(1, 99)), lambda: bytearray(b"ab")])
def test_what_moves_on_is_no_constant(on, make):
    models, args = [Drawing(make()).eval() for _ in range(2)], given()
    for number in range(12):
        if number == 8 and isinstance(models[0].held, bytearray):
            for model in models:
                model.held[0] = 5
        found = models[0](*args)
        with gnnaccel.disabled():
            assert same([found], [models[1](*args)]), number


class Twins(Net):
    def forward(self, one, two, edge_index):
        return super().forward(one, edge_index) * (1 if one is two else two.mean())


def test_one_tensor_as_two_arguments(on):
    model, (x, edge_index) = Twins().eval(), given()
    for number in range(24):
        one = (x + number % 2).requires_grad_(number >= 12)
        two = one if number % 12 < 6 else one.detach().clone()
        found = model(one, two, edge_index)
        with gnnaccel.disabled():
            expected = model(one, two, edge_index)
        assert same([found], [expected]), number
        if number >= 12:
            assert same(*[list(torch.autograd.grad(out.pow(2).sum(), one))
                          for out in (found, expected)])
    assert replays("Twins") >= 2


def counted(function):
    @functools.wraps(function)
    def run(*args):
        COUNTS.append(1)
        return function(*args)

    return run


def told(function):
    @functools.wraps(function)
    def run(*args):
        print("called")
        return function(*args)

    return run


COUNTS: list = []


class Counted(Net):
    @counted
    def forward(self, x, edge_index):
        return Net.forward(self, x, edge_index)


class Told(Net):
    @told
    def forward(self, x, edge_index):
        return Net.forward(self, x, edge_index)


class Quiet(Net):
    @torch.enable_grad()
    def forward(self, x, edge_index):
        return Net.forward(self, x, edge_index)


def test_what_decorators_do(on, capsys):
    COUNTS.clear()
    args = given()
    for model in (Counted(), Told(), Quiet()):
        for _ in range(9):
            step(model, *args)
    assert len(COUNTS) == 9 and capsys.readouterr().out == "called\n" * 9
    assert not replays("Counted") and not replays("Told") and replays("Quiet") == 5


def test_modules_that_import_each_other(on, monkeypatch):
    one, two = types.ModuleType("one_of_a_user"), types.ModuleType("two_of_a_user")
    one.two_of_a_user, two.one_of_a_user = two, one
    monkeypatch.setitem(sys.modules, one.__name__, one)
    exec("def twice(x):\n    return x * 2 if one_of_a_user else x", vars(two))
    exec("class Across(Net):\n"
         "    def forward(self, x, edge_index):\n"
         "        x = Net.forward(self, x, edge_index)\n"
         "        return one_of_a_user.two_of_a_user.twice(x)",
         {"Net": Net, "__name__": "a_user", "one_of_a_user": one}, found := {})
    model, args = found["Across"](), given()
    for _ in range(7):
        step(model, *args)
    assert replays("Across") == 3


@pytest.mark.parametrize("scope", [  # only the last one's import finds a module
    dict(__name__="__main__", __package__=None), dict(__name__="a", __package__=""),
    dict(__name__="a.b", __package__="a"), dict(__name__="a.b.c")])
def test_relative_imports(on, scope, monkeypatch):
    monkeypatch.setitem(sys.modules, "a", module := types.ModuleType("a"))
    exec("def factor():\n    try:\n        from .. import alpha\n        return alpha\n"
         "    except ImportError:\n        return 1.0\n"
         "class Relative(Net):\n    def forward(self, x, edge_index):\n"
         "        return Net.forward(self, x, edge_index) * factor()", scope := dict(scope, Net=Net))
    model, args = scope["Relative"]().eval(), given()
    with gnnaccel.disabled():
        plain = Net().eval()(*args).detach()
    for module.alpha in (2.0, 3.0):
        for _ in range(7):
            found = model(*args).detach()
        assert same([found], [plain * scope["factor"]()])
    assert replays("Relative") > 5


class Sliced(Net):
    def forward(self, x, edge_index, rows):
        return super().forward(x, edge_index)[rows]


def test_a_slice_among_the_arguments(on):
    model, args = Sliced().eval(), given()
    with torch.no_grad():
        for number in range(16):
            rows = slice(0, 4 + number // 8)
            found = model(*args, rows)
            with gnnaccel.disabled():
                assert same([found], [model(*args, rows)])
    assert replays("Sliced") == 8


def test_weights_of_a_graph_are_compared_whole():
    """Kernels may read them from a sorted copy, which a replay does not make again."""
    model = nn.Module()
    model.register_buffer("norm", of_the_graph(torch.rand(60)))
    model.register_buffer("other", torch.rand(60))
    snapshot = Snapshot([model], torch.device("cpu"))
    other, norm = TensorRef(model.other), TensorRef(model.norm)
    model.other.mul_(2)
    assert snapshot.holds() and backend._stays(other, model.other)
    model.norm.mul_(2)
    assert not snapshot.holds() and not backend._stays(norm, model.norm)


def test_a_number_on_the_host_is_compared_whole():
    """A kernel of a CUDA graph has got it as an argument."""
    model = nn.Module()
    model.slope, model.rows = torch.tensor(0.5), torch.ones(3)
    there, here = (Snapshot([model], torch.device(kind)) for kind in ("cuda", "cpu"))
    model.slope.fill_(0.9)
    assert not there.holds() and here.holds()
