"""``enable(capture=True)``: arguments that are copied, where the code tells them from others, and
settings of torch that change."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import gnnaccel
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import PLACE, Net, given, on, refused, replays, same, step  # noqa: F401


class Knowing(Net):
    """With features that it treats in another way than others."""

    def __init__(self):
        super().__init__()
        self.held, self.numbers = given()[0], []
        self.numbers.append(id(self.held))


class ByIdentity(Knowing):
    def forward(self, x, edge_index):
        return super().forward(x * 2 if x is self.held else x, edge_index)


class ById(Knowing):
    def forward(self, x, edge_index):
        return super().forward(x * 2 if id(x) in self.numbers else x, edge_index)


class ByPlace(Knowing):
    def forward(self, x, edge_index):
        return super().forward(x * 2 if x.data_ptr() == self.held.data_ptr() else x, edge_index)


class ByKey(Knowing):
    def __init__(self):
        super().__init__()
        self.factors = {self.held: 2.0}

    def forward(self, x, edge_index):
        return super().forward(x * self.factors.get(x, 1.0), edge_index)


@pytest.mark.parametrize("make", [ByIdentity, ById, ByPlace, ByKey])
def test_features_that_the_module_knows(on, make):
    model, (_, edge_index) = make().eval(), given()
    for number in range(14):
        x = model.held if number in (9, 12) else torch.randn_like(model.held)
        with torch.no_grad():
            found = model(x, edge_index)
            with gnnaccel.disabled():
                assert same([found], [model(x, edge_index)]), number
    assert bool(replays(make.__name__)) is (make is ByIdentity)


class ByLayout(Net):
    def forward(self, x, edge_index):
        return super().forward(x if x.is_contiguous() else x * 2, edge_index)


class ByOffset(Net):
    def forward(self, x, edge_index):
        return super().forward(x * 2 if x.storage_offset() else x, edge_index)


@pytest.mark.parametrize("make", [ByLayout, ByOffset])
def test_features_that_lie_in_others(on, make):
    """A copy of them lies in another way."""
    model, (x, edge_index) = make().eval(), given()
    for number in range(12):
        wide = torch.randn(21, 12, device=x.device)
        x = wide[1:, ::2] if make is ByLayout else wide[1 if number > 8 else 0:][:20, :6]
        with torch.no_grad():
            found = model(x, edge_index)
            with gnnaccel.disabled():
                assert same([found], [model(x, edge_index)]), number
    assert not replays(make.__name__)


class Remembering(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.ones(20, 6, device=PLACE[0]))

    def forward(self, x, edge_index):
        self.memory.mul_(0.9).add_(0.1 * x.mean(0).abs())
        return super().forward(x * self.memory, edge_index)


def test_features_that_lie_in_what_forward_writes(on):
    """They are read after the write to them."""
    model = Remembering().eval()
    twin, (other, edge_index) = copy.deepcopy(model), given()
    for number in range(14):
        def call(one):
            return one(one.memory.detach() if number in (9, 12) else other * number, edge_index)
        with torch.no_grad():
            found = call(model)
            with gnnaccel.disabled():
                assert same([found, model.memory], [call(twin), twin.memory]), number
    assert replays("Remembering")


class WritingData(Net):
    def forward(self, x, edge_index):
        x.data.clamp_(-1.0, 1.0)
        return super().forward(x, edge_index)


def test_a_write_that_changed_nothing_at_the_capture(on):
    model, (x, edge_index) = WritingData().eval(), given()
    for number in range(10):
        features = torch.full_like(x, 0.5 if number < 7 else 3.0)
        with torch.no_grad():
            model(features, edge_index)
        assert float(features.max()) <= 1.0, number


class AskingForTheDevice(Net):
    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        return out * 2 if torch.get_default_device().type == "meta" else out


def test_another_default_device(on):
    model, args = AskingForTheDevice().eval(), given()
    with torch.no_grad():
        first = [model(*args) for _ in range(7)][-1]
        with torch.device("meta"):
            assert same([model(*args)], [first * 2])
    assert replays("AskingForTheDevice")


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="torch is older")
def test_precisions_by_their_newer_names(on, monkeypatch):
    """torch's older getter raises then."""
    model, args = Net(), given()
    before = torch.backends.cuda.matmul.fp32_precision
    for number in range(12):
        torch.backends.cuda.matmul.fp32_precision = "tf32" if number > 7 else before
        try:
            step(model, *args)
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
    assert replays() == 4


class Shrinking(nn.Module):
    """Other weights each time that they are computed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.ones(()))

    def forward(self, weight):
        self.by.mul_(0.9)
        return weight * self.by.clone()


def test_parametrizations_that_are_cached_later(on):
    model, args = Net().eval(), given()
    parametrize.register_parametrization(model.one.lin, "weight", Shrinking().to(PLACE[0]))
    twin = copy.deepcopy(model)

    def calls(one):
        found = [one(*args) for _ in range(7)]
        with parametrize.cached():
            found += [one(*args), one(*args)]
        return [*found, one.one.lin.parametrizations.weight[0].by.clone()]
    with torch.no_grad():
        found = calls(model)
        with gnnaccel.disabled():
            assert same(found, calls(twin))
    assert replays()


FEATURES = None


class ByGlobal(Net):
    def forward(self, x, edge_index):
        return super().forward(x * 2 if x is FEATURES else x, edge_index)


def test_features_that_are_a_global(on, monkeypatch):
    model, (held, edge_index) = ByGlobal().eval(), given()
    monkeypatch.setitem(globals(), "FEATURES", held)
    for number in range(14):
        x = held if number in (9, 12) else torch.randn_like(held)
        with torch.no_grad():
            found = model(x, edge_index)
            with gnnaccel.disabled():
                assert same([found], [model(x, edge_index)]), number
    assert replays("ByGlobal")


class Wanting(Net):
    def forward(self, x, edge_index):
        x.requires_grad_()
        return super().forward(x, edge_index).detach()


class Retaining(Net):
    def forward(self, x, edge_index):
        if x.requires_grad:
            x.retain_grad()
        return super().forward(x, edge_index)


@pytest.mark.parametrize("make", [Wanting, Retaining])
def test_gradients_that_forward_asks_for(on, make):
    model, (x, edge_index) = make().eval(), given()
    leaf = x.clone().requires_grad_()
    for number in range(10):
        features = leaf * number if make is Retaining else x * number
        out = model(features, edge_index)
        if make is Retaining:
            out.sum().backward()
            assert features.grad is not None, number
        else:
            assert features.requires_grad, number


class ByClass(Net):
    def forward(self, x, edge_index):
        return super().forward(x * 2 if isinstance(x, nn.Parameter) else x, edge_index)


def test_features_that_are_a_parameter(on):
    model, (x, edge_index) = ByClass().eval(), given()
    for number in range(14):
        make = nn.Parameter if number in (9, 12) else torch.Tensor.requires_grad_
        features = make(x * number)
        found = model(features, edge_index)
        with gnnaccel.disabled():
            assert same([found], [model(features, edge_index)]), number
    assert replays("ByClass")
