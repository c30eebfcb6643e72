"""Messages that read global names: each must be torch's own, and stay so, whatever it is called."""
from __future__ import annotations

import sys

import numpy
import pytest
import torch
import torch as th
import torch.nn.functional as functional
from torch import relu, sigmoid
from torch_geometric.nn import MessagePassing

import gnnaccel
from gnnaccel.adapters.own import Path
from gnnaccel.adapters.tracing import message
from tests.pyg import graphs
from tests.pyg.graphs import E
from tests.pyg.judge import close

HERE = sys.modules[__name__]
exp = 2.0  # what a user may well call so: it is a method of tensors, too
tanh = torch.nn.Tanh()
F = functional


class Conv(MessagePassing):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x, w=w.view(-1, 1))


class Scaling(Conv):
    def message(self, x_j, w):
        return x_j * w * exp


class Tensors(Conv):
    def message(self, x_j, w):
        return x_j * w * neg  # noqa: F821 - set below


class Calling(Conv):
    def message(self, x_j, w):
        return x_j * tanh(w)


class Sigmoid(Conv):
    def message(self, x_j, w):
        return x_j * sigmoid(w)


class Aliased(Conv):
    def message(self, x_j, w):
        return th.relu(x_j) * functional.relu(w)


class ByName(Conv):
    def message(self, x_j, w):
        return x_j * F.relu(w)


class Setting(Conv):
    def message(self, x_j, w):
        global abs
        abs = 3.0
        return x_j * w


@pytest.fixture
def call(route):
    x, ei, w = route.put(graphs.features(), graphs.square(), torch.randn(E))
    return lambda layer: layer(x, ei, w)


def check(route, call, layer):
    """Enabled, three calls give what the host does."""
    expected = call(layer)
    with route.on(on_fallback="native"):
        assert all(close(call(layer), expected) for _ in range(3))
    return expected


@pytest.mark.parametrize("cls,name,values",
                         [(Scaling, "exp", (2.0, 5.0)), (Calling, "tanh", (torch.tanh, torch.relu)),
                          (Sigmoid, "sigmoid", (torch.sigmoid, torch.cos)),
                          (ByName, "F", (functional, torch.special))],
                         ids=lambda v: getattr(v, "__name__", None))
def test_a_global_that_changes_between_calls(route, call, monkeypatch, cls, name, values):
    if name == "F":
        monkeypatch.setattr(torch.special, "relu", torch.sinh, raising=False)
    layer = cls()
    for value in (*values, values[0]):
        monkeypatch.setattr(HERE, name, value)
        check(route, call, layer)


def test_a_change_inside_a_session(route, call, monkeypatch):
    layer = Sigmoid()
    with route.on(on_fallback="native"):
        for _ in range(3):
            before = call(layer)
        monkeypatch.setattr(HERE, "sigmoid", torch.cos)
        with gnnaccel.disabled():
            expected = call(layer)
        assert close(call(layer), expected) and not close(before, expected, 1e-2)


class Rectified(Conv):
    def message(self, x_j, w):
        return F.relu(x_j) * w


class ByMethod(Conv):
    def message(self, x_j, w):
        return x_j.relu() * w


@pytest.mark.parametrize("cls,owner", [(Rectified, functional), (ByMethod, torch.Tensor)])
@pytest.mark.parametrize("before", [True, False])
def test_a_function_of_torch_that_is_replaced(route, call, monkeypatch, cls, owner, before):
    layer = cls()
    with route.on(on_fallback="native"):
        for _ in range(0 if before else 3):
            call(layer)
        monkeypatch.setattr(owner, "relu", lambda t, *args, **kwargs: t * 0.25)
        with gnnaccel.disabled():
            expected = call(layer)
        assert all(close(call(layer), expected) for _ in range(3))


def test_a_global_that_becomes_what_cannot_be_compared(route, call, monkeypatch):
    layer, usual = Sigmoid(), call(Sigmoid())
    with route.on(on_fallback="native"):
        assert close(call(layer), usual)
        monkeypatch.setattr(HERE, "sigmoid", numpy.ones(3))
        with pytest.raises(TypeError, match="not callable"):
            call(layer)
        monkeypatch.undo()
        assert close(call(layer), usual)


def test_a_global_tensor_that_is_written_to(route, call, monkeypatch):
    monkeypatch.setattr(HERE, "neg", torch.tensor(2.0, device=route.device), raising=False)
    layer = Tensors()
    for _ in range(2):
        check(route, call, layer)
        HERE.neg.mul_(3)


@pytest.mark.parametrize("cls", [Sigmoid, Aliased, ByName])
def test_torchs_own_by_any_name(route, call, cls):
    layer = cls()
    expected = call(layer)
    with route.on():
        assert close(call(layer), expected)


@pytest.mark.parametrize("cls,owner,name", [(Sigmoid, HERE, "sigmoid"), (Aliased, HERE, "th"),
                                            (Aliased, HERE, "functional"), (Scaling, HERE, "exp"),
                                            (Calling, HERE, "tanh"), (Rectified, functional, "relu"),
                                            (ByMethod, torch.Tensor, "relu")])
def test_what_a_message_reads(monkeypatch, cls, owner, name):
    path = Path("torch_geometric")
    message.watch(path, cls.message)
    path.complete()
    assert path.same()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, torch.cos)
        assert not path.same()
    assert path.same()


def test_messages_of_no_form():
    for cls in (Scaling, Calling, Setting):
        assert message.form(cls.message, {"x": "tensor", "w": "tensor"}) is None
    assert relu is torch.relu and not isinstance(vars(HERE).get("abs"), float)
