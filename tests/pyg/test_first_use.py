"""Layers whose kernels are not compiled yet: native calls that cost little, and none in a
checkpoint that the kernels' arrival would change."""
from __future__ import annotations

import pytest
import torch
import torch_geometric.nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (GATConv, GraphConv, HeteroConv, HGTConv, RGCNConv, SAGEConv,
                                TransformerConv)

import gnnaccel
from gnnaccel.cuda.runtime.driver import using
from gnnaccel.dispatch.ops import aggregation_route
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.reasons import reason
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.run.autograd import checkpointed
from tests.call_counts import counted
from tests.emulation.emulator import EmulatedDriver

TYPES = ["a", "b"]
RELATIONS = [("a", "to", "b"), ("b", "to", "a")]


def plain():
    return GATConv(8, 8, 2), (torch.randn(40, 8), torch.randint(0, 40, (2, 300)))


def typed():
    return RGCNConv(8, 8, 3), (torch.randn(40, 8), torch.randint(0, 40, (2, 300)),
                               torch.randint(0, 3, (300,)))


def by_type():
    return HGTConv(8, 8, (TYPES, RELATIONS), 2), (
        {t: torch.randn(40, 8) for t in TYPES},
        {r: torch.randint(0, 40, (2, 300)) for r in RELATIONS})


class Around(torch.nn.Module):
    """A layer of tensors around a HeteroConv, which is native for its unlike layers."""

    def __init__(self):
        super().__init__()
        self.edges = {r: torch.randint(0, 40, (2, 300)) for r in RELATIONS}
        self.conv = HeteroConv({RELATIONS[0]: GATConv(8, 8, add_self_loops=False),
                                RELATIONS[1]: TransformerConv(8, 8)})

    def forward(self, x):
        return torch.cat(list(self.conv(dict.fromkeys(TYPES, x), self.edges).values()))


def around():
    return Around(), (torch.randn(40, 8),)


def summed():
    return SAGEConv(8, 8), (torch.randn(40, 8), torch.randint(0, 40, (2, 300)))


@pytest.fixture
def pending(monkeypatch):
    """Kernels that are compiled in the background for as long as the list is not empty."""
    left = [1]
    real = compiling.problem

    def problem(*args, **kwargs):
        if left and not checkpointed():
            return reason(compiling.PENDING)
        return real(*args, **kwargs)

    monkeypatch.setattr(compiling, "problem", problem)
    with using(EmulatedDriver()), gnnaccel.enabled(backend="cuda", when="supported",
                                                   on_fallback="native"):
        yield left


@pytest.mark.long
@pytest.mark.parametrize("make", [plain, typed, by_type])
def test_calls_that_wait_are_remembered_and_decided_anew(pending, make):
    layer, args = make()
    gnnaccel.reset_stats()
    for _ in range(6):
        layer(*args)
    [one] = [one for name, one in gnnaccel.stats().items() if name == type(layer).__name__]
    assert one["reasons"] == {"GA408": 6}
    repeated = counted(lambda: layer(*args)).python
    pending.clear()
    configs.renew()
    gnnaccel.reset_stats()
    layer(*args)
    assert gnnaccel.stats()[type(layer).__name__]["routes"] == {"cuda": 1}
    with gnnaccel.disabled():
        natively = counted(lambda: layer(*args)).python
    assert repeated <= natively + 12


@pytest.mark.parametrize("make", [plain, typed, summed, around])
def test_a_checkpoint_repeats_its_calls(pending, make, monkeypatch):
    monkeypatch.setattr(aggregation_route, "_without_kernels", lambda graph, given, config, why, _:
                        aggregation_route.native(why))  # torch operations gain nothing on a GPU
    layer, (x, *rest) = make()
    x.requires_grad_()
    gnnaccel.reset_stats()
    for _ in range(6):
        layer(x, *rest)
    assert {route for one in gnnaccel.stats().values() for route in one["routes"]} == {"native"}
    out = checkpoint(layer, x, *rest, use_reentrant=False)
    pending.clear()
    configs.renew()  # the kernels have come between forward and backward
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.long
@pytest.mark.parametrize("make", [plain, summed])
def test_a_checkpoint_repeats_calls_whose_quantized_kernels_are_not_there(pending, monkeypatch,
                                                                          make):
    """Those for rows and maps of fp32 are."""
    waits = compiling.problem

    def problem(key, compile_, *more):
        if "quantized" not in str(key):
            return compile_()
        return waits(key, compile_, *more)

    monkeypatch.setattr(compiling, "problem", problem)
    layer, (x, edges) = make()
    last = GraphConv(layer(x, edges).shape[1], 4)  # the last one is not quantized
    model = torch_geometric.nn.Sequential("x, e", [(layer, "x, e -> x"), (last, "x, e -> x")])
    gnnaccel.quantize(model, "int8")
    for _ in range(6):
        model(x.requires_grad_(), edges)
    [entry] = [one for one in settings.entries() if one.layer == type(layer).__name__]
    assert entry.reasons.get("GA408") and not entry.quantized
    out = checkpoint(model, x, edges, use_reentrant=False)
    assert entry.quantized == 1
    pending.clear()
    configs.renew()
    out.sum().backward()
    assert x.grad is not None and entry.quantized == 2
