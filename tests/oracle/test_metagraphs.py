"""A share of the random metagraphs, and faults that they have to notice."""
from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
import torch

import gnnaccel
from gnnaccel.adapters import alike, layout
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.plan import planner
from tests.oracle import metagraphs
from tests.oracle.metagraph_draws import Case, Metagraph, features, longest_sum
from tests.oracle.trees import layers_in_a_row
from tests.routes import clean, gpu, one_thread  # noqa: F401  (fixtures)

pytestmark = pytest.mark.skipif(not metagraphs.applicable(), reason="needs PyG")



@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(metagraphs, "DEVICE", torch.device("cpu"))


def alarms(seeds: range, only: str | None = None, **options: str) -> Iterator[str]:
    with gnnaccel.enabled(**{"backend": "torch", "when": "supported", **options}):
        for seed in seeds:
            found = metagraphs.check(seed, contextlib.nullcontext, only)
            if found is not None:
                yield found


@pytest.mark.long
def test_on_torch_operations():
    assert not list(alarms(range(30)))


def test_by_default():
    assert not list(alarms(range(60, 75), when="profitable"))


def test_by_emulated_kernels():
    if shutil.which("g++") is None:
        pytest.skip("the CPU emulation of kernels needs g++")
    from tests.emulation.emulator import EmulatedDriver

    with driver.using(EmulatedDriver()):
        planner.forget()
        found = list(alarms(range(100, 110), backend="cuda"))
    planner.forget()
    assert not found


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["supported", "profitable"])
def test_on_a_gpu(gpu, monkeypatch, when):
    monkeypatch.setattr(metagraphs, "DEVICE", gpu.device)
    assert not list(alarms(range(60), backend="cuda", when=when))


@pytest.mark.long
def test_a_product_that_cancels_is_allowed_the_rounding_of_the_sum_in_it():
    """60 copies of a message are added up before their product with a gradient is taken, where the
    host adds up 60 equal products. Relative to the terms of the product both are as far off."""
    assert not list(alarms(range(27112026000130, 27112026000131)))


def test_the_longest_sum_is_over_all_relations_of_a_type():
    edges = {("a", "x", "b"): torch.tensor([[0, 1, 2], [0, 0, 1]]),
             ("b", "y", "b"): torch.tensor([[0, 1], [0, 0]]),
             ("b", "z", "c"): torch.zeros(2, 0, dtype=torch.long)}
    assert longest_sum(Metagraph({"a": 3, "b": 2, "c": 0}, list(edges), edges, {})) == 4


def test_bases_stand_side_by_side():
    from torch_geometric.nn import SAGEConv, to_hetero_with_bases

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = SAGEConv(4, 4), SAGEConv(4, 4)

        def forward(self, x, edge_index):
            return self.second(self.first(x, edge_index), edge_index)

    assert layers_in_a_row(to_hetero_with_bases(Net(), (["a"], [("a", "x", "a")]), 3)) == 2


# ---- faults ----

def _every_share_its_own(*given):
    return None


def _next_relation(self, edge_indices):
    src, dst, relation = _by_torch(self, edge_indices)
    return src, dst, (relation + 1) % (1 + max(part.relation for part in self.parts))


_by_torch = layout.Layout._by_torch
_summed = alike._summed


def _twice(every, shares, row):
    found = _summed(every, shares, row)
    return found * 2 if found is not None and found.dim() == 2 else found


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        scale = torch.ones_like(grad)
        scale[0] = 1.01
        return grad * scale


def _one_gradient_scaled(every, shares, row):
    found = _summed(every, shares, row)
    return None if found is None else _Scaled.apply(found)


@pytest.mark.parametrize("where,name,fault,only", [
    (alike, "_shares", _every_share_its_own, "HeteroGraphConv"),
    (alike, "_summed", _twice, "HeteroConv"),
    (alike, "_summed", _one_gradient_scaled, "HeteroConv"),
    (layout.Layout, "_by_torch", _next_relation, "HGTConv")],
    ids=["a permuted share", "biases added twice", "a gradient of one type times 1.01",
         "relations of others"])
def test_faults_are_noticed(monkeypatch, where, name, fault, only):
    monkeypatch.setattr(where, name, fault)
    if only == "HeteroGraphConv":
        pytest.importorskip("dgl")
    assert next(alarms(range(60), only), None) is not None


def test_a_case_is_made_of_its_seed():
    """Two cases of one seed are the same, in structure and numbers."""
    def made() -> Case:
        import random

        torch.manual_seed(3)
        return metagraphs.drawn(3, "HeteroConv")[1](random.Random("metagraph-3"),
                                                    torch.device("cpu"))

    one, other = made(), made()
    assert one.text == other.text and one.x == other.x
    for a, b in zip(one.module.state_dict().values(), other.module.state_dict().values()):
        assert torch.nn.parameter.is_lazy(a) or torch.equal(a, b)
    assert all(torch.equal(t, features(one.x, 3)[name]) for name, t in features(other.x, 3).items())
