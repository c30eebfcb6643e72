"""Layers with a list of aggregations whose members change after calls by kernels: what was
remembered of the list is looked at in each call."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import MessagePassing, aggr

import gnnaccel
from tests.pyg.judge import close
from tests.routes import opened

N, E, C = 30, 140, 8


class Layer(MessagePassing):
    def __init__(self):
        super().__init__(aggr=["mean", "max", "std"])

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return x_j - 2 * x_i


def member(layer, monkeypatch):
    layer.aggr_module.aggrs[1] = aggr.MinAggregation()


def hook(layer, monkeypatch):
    layer.aggr_module.aggrs[0].register_forward_hook(lambda module, args, out: out * 2)


def method(layer, monkeypatch):
    inner = layer.aggr_module.aggrs[1]
    inner.reduce = lambda *args, **kwargs: -aggr.MaxAggregation.reduce(inner, *args, **kwargs)


def of_class(layer, monkeypatch):
    native = aggr.MeanAggregation.forward
    monkeypatch.setattr(aggr.MeanAggregation, "forward",
                        lambda self, *args, **kwargs: native(self, *args, **kwargs) + 1)


def option(layer, monkeypatch):
    layer.aggr_module.aggrs[2].var_aggr.semi_grad = True


def more(layer, monkeypatch):
    layer.aggr_module.aggrs.append(aggr.SumAggregation())


@pytest.mark.parametrize("change", [member, hook, method, of_class, option, more])
def test_it_is_seen(monkeypatch, change):
    torch.manual_seed(0)
    gnnaccel.reset_stats()
    layer, x, edge_index = Layer(), torch.randn(N, C), torch.randint(N, (2, E))
    layer.aggr_module.fused_aggr = None  # each member is asked

    def run():
        leaf = x.clone().requires_grad_()
        out = layer(leaf, edge_index)
        out.square().sum().backward()
        return out.detach(), leaf.grad

    with opened("emulated"), gnnaccel.enabled(backend="cuda", when="supported"):
        for _ in range(4):
            run()
        assert set(gnnaccel.stats()["Layer"]["routes"]) == {"cuda"}
        change(layer, monkeypatch)  # within the block: beyond it calls are decided anew
        with gnnaccel.disabled():
            expected = run()
        for _ in range(3):
            for one, two in zip(run(), expected):
                assert close(one, two, 1e-5)
