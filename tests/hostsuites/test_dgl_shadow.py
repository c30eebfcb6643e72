"""The comparison under DGL's own tests finds planted faults."""
from __future__ import annotations

import importlib.metadata

import pytest

pytest.importorskip("torch")
try:  # not by importing it: where tests/ is on the path, tests/dgl goes by that name
    importlib.metadata.version("dgl")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("DGL is not installed", allow_module_level=True)
import dgl
import torch
from dgl.backend.pytorch import sparse

import gnnaccel  # before dgl, which needs it on a current torch
from gnnaccel.dispatch.observe import watch
from tests.hostsuites import dgl_shadow


def gspmm(gidx, reduce, x, weight):
    return sparse.gspmm(gidx, "mul", reduce, x, weight)


class Scaled(torch.autograd.Function):
    """What it gets, with a gradient a hundredth too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def operands(bare=False):
    torch.manual_seed(0)
    dst = torch.randint(0, 8, (40,)) + (2 if bare else 0)
    g = dgl.graph((torch.randint(0, 10, (40,)), dst), num_nodes=10)
    return (g._graph, "max" if bare else "sum", torch.randn(10, 4, requires_grad=True),
            torch.randn(40, 1, requires_grad=True))


def compared(ours, native, args):
    dgl_shadow.taken()
    dgl_shadow._compare("call", lambda a, k: ours(*a, **k), lambda a, k: native(*a, **k), args, {})
    count, alarms = dgl_shadow.taken()
    assert count == 1
    return alarms


@pytest.mark.parametrize("bare", [False, True],
                         ids=["sum", "maximum, with nodes that no edge enters"])
def test_no_alarm(bare):
    assert compared(gspmm, gspmm, operands(bare)) == []


@pytest.mark.parametrize("fault,expected", [
    (lambda g, r, x, w: gspmm(g, r, x, w) * 1.001, "value 0 differs"),
    (lambda g, r, x, w: gspmm(g, r, Scaled.apply(x), w), "gradient 0 differs"),
    (lambda g, r, x, w: gspmm(g, r, x, Scaled.apply(w)), "gradient 1 differs"),
    (lambda g, r, x, w: gspmm(g, r, x, w.detach()), "gradient 1 differs"),
    (lambda g, r, x, w: gspmm(g, r, x, w).double(), "is torch.float64"),
    (lambda g, r, x, w: gspmm(g, r, x, w).index_fill(0, torch.tensor([3]), float("nan")),
     "finite in other places"),
], ids=["value", "gradient", "weight's gradient", "no gradient", "dtype", "nan"])
def test_planted_faults(fault, expected):
    alarms = compared(fault, gspmm, operands())
    assert len(alarms) >= 1 and expected in alarms[0]


def test_planted_fault_in_a_layer():
    g = dgl.add_self_loop(dgl.rand_graph(10, 30))
    layer, x = dgl.nn.GATConv(4, 3, 2), torch.randn(10, 4, requires_grad=True)
    native = dgl.nn.GATConv.forward
    assert compared(native, native, (layer, g, x)) == []
    alarms = compared(lambda self, g, x: native(self, g, Scaled.apply(x)), native, (layer, g, x))
    assert alarms and "gradient" in alarms[0]


def test_every_call_is_compared(monkeypatch):
    """Around what gnnaccel put into DGL: an operation and a layer each, taken out again here."""
    gnnaccel.enable(when="supported", backend="torch")
    try:
        _, calls = _under_shadow(monkeypatch)
    finally:
        watch.remove(dgl_shadow._watch, dgl_shadow._ignore)
        monkeypatch.undo()
        gnnaccel.disable()
    assert calls == (2, [])


def _under_shadow(monkeypatch):
    from gnnaccel.adapters.dgl.ops import replaced

    for module in replaced._modules():  # remembered, for `undo`
        for name, value in list(vars(module).items()):
            if hasattr(value, "__wrapped__"):
                monkeypatch.setattr(module, name, value)
    dgl_shadow.taken()
    dgl_shadow.install()
    g, x = dgl.rand_graph(10, 30), torch.randn(10, 4, requires_grad=True)
    out = dgl.ops.copy_u_sum(g, x), dgl.nn.GATv2Conv(4, 3, 2, allow_zero_in_degree=True)(g, x)
    return out, dgl_shadow.taken()
