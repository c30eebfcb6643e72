"""On a GPU: streams, pinned memory, and kernels that read it."""
from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

import gnnaccel
from gnnaccel.dispatch.offload import memory as memories
from gnnaccel.dispatch.offload.memory import Memory
from gnnaccel.dispatch.offload.session import BandSession
from gnnaccel.dispatch.offload.sizes import Widths
from gnnaccel.errors import OffloadError
from tests.helpers import same_bits
from tests.offload import checks

#: also without one, by the ways of a CPU
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def where(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch reports no CUDA device")
    return request.param


@pytest.mark.long
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("limit, pinned", [(4000, True), (20_000, False), (10**9, True)])
def test_layers(where, limit, pinned, enabled):
    if where == "cpu" and (enabled or limit != 4000):
        pytest.skip("as in test_layers.py")
    switched = gnnaccel.enabled() if enabled else contextlib.nullcontext()
    with switched:
        found = dict(checks.layers(where, limit, pinned and where == "cuda",
                                   checks.FEW if enabled else ()))
    assert {name: error for name, error in found.items() if error > 1e-4} == {}


@pytest.mark.long
@pytest.mark.parametrize("enabled", [False, True])
def test_a_model_trains(where, enabled):
    right = checks.trained("cpu", 200, 6, 1500)
    with (gnnaccel.enabled() if enabled else contextlib.nullcontext(), checks.small_bands(),
          gnnaccel.offload(20_000, device=where) as ran):
        found = checks.trained(where, 200, 6, 1500)
    assert len(ran.ran) == 3 and min(bands for _, bands in ran.ran) > 1
    for got, truth in zip(found, right):
        assert checks.difference(got, truth) < 1e-4


@pytest.mark.gpu
def test_with_memory_of_exactly_so_many_bytes(gpu, monkeypatch):
    from gnnaccel.cuda.runtime import pinned

    made, empty = [], pinned.Blocks.empty
    monkeypatch.setattr(memories, "_LARGE", 1)
    monkeypatch.setattr(memories, "_LASTING", 1)
    monkeypatch.setattr(pinned.Blocks, "empty", lambda self, *of: made.append(of)
                        or empty(self, *of))
    test_layers("cuda", 4000, True, True)
    test_a_model_trains("cuda", True)
    assert len(made) > 20


@pytest.mark.parametrize("pinned", [False, True])
def test_rows_move(where, pinned):
    memory = Memory(torch.device(where, 0) if where == "cuda" else torch.device("cpu"))
    far = torch.randn(100, 5)
    far = far.pin_memory() if pinned and where == "cuda" else far
    ids = memory.keep(torch.randperm(100)[:37].int())
    close = memory.fetch(far, slice(3, 9), ids, free=2)
    assert close.device.type == where
    assert same_bits(close[2:].cpu(), torch.cat([far[3:9], far[ids.long()]]))
    right = far.clone()
    right[3:9] = 1
    right[ids.long()] += 2
    memory.put(torch.ones(6, 5, device=where), slice(3, 9), far)
    memory.add(torch.full((37, 5), 2.0, device=where), ids, far)
    if where == "cuda":
        torch.cuda.synchronize()
    assert same_bits(far, right)
    kept = memory.near(far)
    assert same_bits(memory.fetch(kept, ids).cpu(), far[ids.long()])


@pytest.mark.gpu
def test_results_are_pinned_and_devices_that_do_not_fit_are_named(gpu):
    from torch_geometric.nn import SAGEConv

    layer = SAGEConv(6, 8).to(gpu.device)
    x, edges = torch.randn(60, 6), torch.randint(0, 60, (2, 300))
    with gnnaccel.offload(), torch.no_grad():
        out = layer(x, edges)
        assert out.is_pinned() and out.relu().device.type == "cpu"
        assert F.linear(out, layer.lin_l.weight[:, :1].t().contiguous()).is_pinned()
        with pytest.raises(OffloadError, match="^cdist of tensors in the host's memory"):
            torch.cdist(x, layer.lin_l.weight[:, :6])
        near = layer(x.to(gpu.device), edges.to(gpu.device))  # as ever
        assert near.is_cuda
    torch.testing.assert_close(out, near.cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_memory_stays_below_the_limit(gpu):
    from torch_geometric.nn import SAGEConv

    nodes, edges = 400_000, 4_000_000
    layer = SAGEConv(64, 64).to(gpu.device)
    x = torch.randn(nodes, 64).pin_memory()
    edge_index = torch.randint(0, nodes, (2, edges))
    right = layer.cpu()(x, edge_index)
    layer.to(gpu.device)
    for enabled in (False, True):
        torch.cuda.reset_peak_memory_stats()
        before, limit = torch.cuda.memory_allocated(), 120 << 20
        with (gnnaccel.enabled(first_use="wait") if enabled else contextlib.nullcontext(),
              gnnaccel.offload(limit) as ran, torch.no_grad()):
            out = layer(x, edge_index)
        assert max(bands for _, bands in ran.ran) > 1
        assert torch.cuda.max_memory_allocated() - before < 1.2 * limit
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_results_stay_within_the_limit(where):
    """Three layers and what is between them, over and over, in the same memory."""
    from torch_geometric.nn import SAGEConv

    nodes = 300_000 if where == "cuda" else 70_000  # of which results are no small ones
    torch.manual_seed(0)
    layers = [SAGEConv(16, 16) for _ in range(3)]
    x, edge_index = torch.randn(nodes, 16), torch.randint(0, nodes, (2, 4 * nodes))
    right, limit = x, nodes * 16 * 4 * 16
    with torch.no_grad():
        for layer in layers:
            right = layer(right, edge_index).relu()
        for layer in layers:
            layer.to(where)
        x, before = (x.pin_memory(), torch.cuda.memory_allocated()) if where == "cuda" else (x, 0)
        if where == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with gnnaccel.offload(limit, device=where) as ran:
            for _ in range(4):
                out = x
                for layer in layers:
                    out = layer(out, edge_index).relu()
                torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
                if where == "cuda":
                    assert torch.cuda.max_memory_allocated() - before < 1.2 * limit
    assert ran.memory.stayed >= 4 * 2 * x.numel() * 4  # at least those from a relu to a layer


@pytest.mark.long
def test_bands_gather_from_rows_that_stay(where, monkeypatch):
    """Twelve bands overlap on a GPU, and each writes its own rows in front of the same memory."""
    from torch_geometric.nn import GCNConv, GINConv, SAGEConv

    numbered, begin = [], BandSession.__init__

    def noted(self, bands, band, edges, halo, in_place=False):
        numbered.append(in_place)
        begin(self, bands, band, edges, halo, in_place)

    monkeypatch.setattr(BandSession, "__init__", noted)
    monkeypatch.setattr(Widths, "parts", lambda self, sizes, edges, room: 12)
    nodes = 200_000 if where == "cuda" else 70_000
    torch.manual_seed(0)
    layers = [SAGEConv(16, 32), GCNConv(32, 32), GINConv(torch.nn.Linear(32, 8))]
    x, edge_index = torch.randn(nodes, 16), torch.randint(0, nodes, (2, 8 * nodes))

    def model():
        out = x
        for layer in layers:
            out = layer(out, edge_index).relu()
        return out

    with torch.no_grad():
        right = model()
        for layer in layers:
            layer.to(where)
        x = x.pin_memory() if where == "cuda" else x
        for enabled in (False, True):
            with (gnnaccel.enabled() if enabled else contextlib.nullcontext(),
                  gnnaccel.offload(400_000_000, device=where)):
                for _ in range(4):
                    torch.testing.assert_close(model(), right, rtol=1e-4, atol=1e-4)
            assert sum(numbered) > len(numbered) // 2
            numbered.clear()
