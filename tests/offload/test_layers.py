"""Layers in bands compute what they compute over the whole graph: outputs and gradients."""
from __future__ import annotations

import contextlib
import functools
import shutil
import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

import gnnaccel
from gnnaccel import offload
from gnnaccel.adapters.pyg.offload import banding
from gnnaccel.adapters.pyg.offload.banding import plans
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.graph import cache
from gnnaccel.errors import GraphError, OffloadError
from tests.distributed import graphs, layer_cases

NODES, WIDTH = 60, 6
BANDS = 6000  # bytes that make about ten bands of `graph`


def graph(nodes=NODES, edges=400, ends=None):
    g = graphs.generator(0)
    edge_index = torch.randint(0, ends or nodes, (2, edges), generator=g)
    return torch.randn(nodes, WIDTH, generator=g), edge_index


def judged(layer, inputs, edge_index, *rest, limit=BANDS, tolerance=1e-5, bands=None):
    """Holds a layer in bands against the whole; how many bands there were. ``inputs``: x."""
    def run(x):
        for p in layer.parameters():
            p.grad = None
        leaves = [t.clone().requires_grad_() for t in (x if isinstance(x, tuple) else (x,))]
        floats = [t.clone().requires_grad_() if t.is_floating_point() else t for t in rest]
        out = layer(tuple(leaves) if isinstance(x, tuple) else leaves[0], edge_index, *floats)
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        (out * weights).sum().backward()
        return [out.detach(), *(t.grad for t in (*leaves, *floats)),
                *(p.grad for p in layer.parameters())]

    right = run(inputs)
    with offload(limit, device="cpu") as ran:
        found = run(inputs)
    for got, truth in zip(found, right):
        assert (got is None) == (truth is None)
        if truth is not None:
            scale = max(1.0, truth.abs().max().item())
            torch.testing.assert_close(got, truth, rtol=0, atol=tolerance * scale)
    (_, count), = ran.ran
    assert bands is None or count == bands
    return count


@pytest.mark.parametrize("name", sorted(layer_cases.CASES))
@pytest.mark.parametrize("limit", [4000, 20_000])
def test_every_layer(name, limit):
    warnings.simplefilter("ignore")
    out, gradients = layer_cases.run(name, layer_cases.data())
    with offload(limit, device="cpu") as ran:
        found, shares = layer_cases.run(name, layer_cases.data())
    assert [layer for layer, _ in ran.ran] == [name]
    torch.testing.assert_close(found, out, rtol=0, atol=1e-6 * max(1.0, out.abs().max().item()))
    assert shares.keys() == gradients.keys()
    for key, truth in gradients.items():
        scale = max(1.0, truth.abs().max().item())
        torch.testing.assert_close(shares[key], truth, rtol=0, atol=1e-5 * scale, msg=key)


@pytest.mark.parametrize("limit", [500, 2000, 6000, 20_000, 10**9])
def test_the_number_of_bands_changes_nothing(limit):
    from torch_geometric.nn import GCNConv

    count = judged(GCNConv(WIDTH, 8), *graph(), torch.rand(400), limit=limit)
    assert count == 1 if limit == 10**9 else count > 1


@pytest.mark.long
def test_ugly_graphs():
    from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

    x, edge_index = graph()
    hub = torch.stack([edge_index[0], torch.full((400,), 31)])
    back = hub.flip(0)
    few = graph(ends=5)[1]
    for edges in (hub, back, few, edge_index[:, :0], edge_index[:, :1]):
        for layer in (SAGEConv(WIDTH, 8), GCNConv(WIDTH, 8), GATConv(WIDTH, 4, 2),
                      GINConv(nn.Linear(WIDTH, 8), train_eps=True), SAGEConv(WIDTH, 8, "max")):
            judged(layer, x, edges, limit=3000)


@pytest.mark.long
def test_sources_and_destinations():
    from torch_geometric.nn import GATv2Conv, SAGEConv, TransformerConv

    g = graphs.generator(1)
    edges = torch.stack([torch.randint(0, 70, (300,), generator=g),
                         torch.randint(0, 20, (300,), generator=g)])
    pair = torch.randn(70, WIDTH, generator=g), torch.randn(20, 5, generator=g)
    for layer in (SAGEConv((WIDTH, 5), 8), GATv2Conv((WIDTH, 5), 4, 2, add_self_loops=False),
                  TransformerConv((WIDTH, 5), 4, 2)):
        assert judged(layer, pair, edges) > 1


@pytest.mark.long
def test_rows_that_are_collected_between_stages_are_few():
    """What a layer gathers as it was given comes from the inputs, all else is collected once."""
    from torch_geometric.nn import APPNP, GCNConv, SAGEConv

    x, edges = graph()
    for layer, stages in ((SAGEConv(WIDTH, 8), 0), (GCNConv(WIDTH, 8), 2), (APPNP(3, 0.1), 3)):
        with offload(BANDS, device="cpu") as ran, torch.no_grad():
            out = layer(x, edges.clone())  # of which nothing is known
            stored = ran.memory.stored
        width = out.shape[1]
        collected = {0: 0, 2: NODES * (1 + width), 3: NODES * (1 + 2 * width)}[stages]
        assert stored == 4 * (NODES * width + collected), layer


def test_what_ran_is_said():
    from torch_geometric.nn import SAGEConv

    x, edges = graph()
    with offload(device="cpu") as ran:
        assert str(ran) == "no layer; 0 GB came to cpu, 0 GB went back"
        out = SAGEConv(WIDTH, 8)(x, edges)
    assert str(ran) == (f"SAGEConv in 1 band: 1 call; {ran.memory.fetched / 1e9:.3g} GB came to "
                        f"cpu, {out.numel() * 4 / 1e9:.3g} GB went back")


@pytest.mark.long
def test_degrees_are_collected_once_a_graph():
    from torch_geometric.nn import GCNConv

    x, edges = graph()
    weight = torch.rand(400)
    layer, improved = GCNConv(WIDTH, 8), GCNConv(WIDTH, 8, improved=True)
    rows = 4 * NODES * (8 + 8)  # after the linear map, and the result
    with offload(BANDS, device="cpu") as ran, torch.no_grad():
        moved = [0]
        for one, rest in ((layer, ()), (layer, ()), (improved, ()), (layer, (weight,)),
                          (layer, (weight,)), (improved, ())):
            right = GCNConv.forward(one, x, edges, *rest)
            torch.testing.assert_close(one(x, edges, *rest), right, rtol=1e-5, atol=1e-6)
            moved.append(ran.memory.stored)
    degrees = 4 * NODES
    assert [b - a for a, b in zip(moved, moved[1:])] == [
        rows + degrees, rows, rows + degrees, rows + degrees, rows + degrees, rows]


@pytest.mark.long
def test_dropout_is_drawn_again_in_backward():
    from torch_geometric.nn import GATConv

    x, edges = graph()
    x, layer = x.double(), GATConv(WIDTH, 8, dropout=0.5, bias=False).double()
    with offload(BANDS, device="cpu"):
        torch.manual_seed(3)
        out = layer(x, edges)
        again = layer(x, edges)
        torch.rand(5)
        # linear in the features, but for what attention sees of them
        out.sum().backward()
        torch.manual_seed(3)
        same = layer(x, edges)
    assert not torch.equal(out, again) and torch.equal(out, same)
    weight = layer.lin.weight
    found, weight.grad = weight.grad.clone(), None
    step = torch.randn(weight.shape, generator=graphs.generator(2))
    sums = []
    with offload(BANDS, device="cpu"), torch.no_grad():
        for sign in (1, -1):
            torch.manual_seed(3)
            layer.lin.weight += sign * 1e-7 * step
            sums.append(layer(x, edges).sum())
            layer.lin.weight -= sign * 1e-7 * step
    assert (found * step).sum().item() == pytest.approx(
        ((sums[0] - sums[1]) / 2e-7).item(), rel=1e-4)


@pytest.mark.long
def test_backward_after_the_block_and_what_needs_no_gradient():
    from torch_geometric.nn import GCNConv

    x, edges = graph()
    layer = GCNConv(WIDTH, 8)
    layer(x, edges).square().sum().backward()
    right = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    with offload(BANDS, device="cpu"):
        out = layer(x, edges)
    out.square().sum().backward()
    for p, truth in zip(layer.parameters(), right):
        torch.testing.assert_close(p.grad, truth, rtol=1e-5, atol=1e-5)
    layer.lin.weight.requires_grad_(False)
    layer.bias.grad = None
    with offload(BANDS, device="cpu"):
        layer(x, edges).square().sum().backward()
    torch.testing.assert_close(layer.bias.grad, right[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        with offload(BANDS, device="cpu"):
            out = layer(x.requires_grad_(), edges).square().sum()
            grad, = torch.autograd.grad(out, x, create_graph=True)
            grad.sum().backward()


def test_autocast_inference_and_double():
    from torch_geometric.nn import SAGEConv

    x, edges = graph()
    layer = SAGEConv(WIDTH, 8)
    with torch.autocast("cpu", torch.bfloat16):
        right = layer(x, edges)
        right.float().sum().backward()
        truth, layer.lin_l.weight.grad = layer.lin_l.weight.grad, None
        with offload(BANDS, device="cpu"):
            half = layer(x, edges)
    half.float().sum().backward()
    assert half.dtype == right.dtype
    torch.testing.assert_close(half, right)
    torch.testing.assert_close(layer.lin_l.weight.grad, truth, rtol=2e-2, atol=2e-2)
    with offload(BANDS, device="cpu") as ran, torch.inference_mode():
        found = [layer(x.clone(), edges.clone()) for _ in range(2)]
    assert ran.ran.total() == 2
    for out in found:
        torch.testing.assert_close(out, layer(x, edges), rtol=1e-6, atol=1e-6)
    judged(layer.double(), x.double(), edges, tolerance=1e-12)


@pytest.mark.long
def test_a_cached_layer():
    from torch_geometric.nn import GCNConv, SGConv

    x, edges = graph()
    for layer in (GCNConv(WIDTH, 8, cached=True), SGConv(WIDTH, 8, 2, cached=True)):
        other = type(layer)(*((WIDTH, 8, 2)[:2 + isinstance(layer, SGConv)]))
        other.load_state_dict(layer.state_dict())
        with offload(BANDS, device="cpu"):
            found = [layer(x, edges) for _ in range(2)]
        for out in found:
            torch.testing.assert_close(out, other(x, edges), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer(x, edges), other(x, edges))


def test_bands_are_made_once_a_graph():
    from torch_geometric.nn import SAGEConv

    x, edges = graph()
    layer = SAGEConv(WIDTH, 8)
    with offload(BANDS, device="cpu"), torch.no_grad():
        layer(x, edges)
        plan = plans.get(edges)
        layer(x, edges)
        assert plans.get(edges) is plan
    with offload(BANDS, device="cpu"), torch.no_grad():
        layer(x, edges)
        assert plans.get(edges) is plan
        edges[0] = edges[0].flip(0)  # which the plan does not stand for any more
        torch.testing.assert_close(layer(x, edges), SAGEConv.forward(layer, x, edges),
                                   rtol=1e-6, atol=1e-6)


def test_a_hub_does_not_make_bands_without_end(monkeypatch):
    from torch_geometric.nn import SAGEConv

    cuts, cut = [], banding.plan.cut
    monkeypatch.setattr(banding.plan, "cut", lambda *given: cuts.append(given[3]) or cut(*given))
    x, edges = torch.randn(3000, WIDTH), torch.randint(0, 3000, (2, 9000))
    edges[1, :6000] = 7
    layer = SAGEConv(WIDTH, 8)
    with offload(400_000, device="cpu"), torch.no_grad():
        out = layer(x, edges)
        assert torch.allclose(layer(x, edges), out)
    assert 1 < len(cuts) < 6 and max(cuts) < 100  # once, though the hub's edges never fit
    torch.testing.assert_close(out, layer(x, edges), rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_rows_that_fit_are_fetched_once():
    from torch_geometric.nn import APPNP, SAGEConv

    x, edges = torch.randn(NODES, 4), graph(edges=4000)[1]
    layer, hops = SAGEConv(4, 8), APPNP(3, 0.1)
    for run in (layer, hops):
        right = run(x, edges)
        moved = []
        for limit in (100_000, 2_000):  # 960 bytes of rows are less than a share of the first alone
            with offload(limit, device="cpu") as ran, torch.no_grad():
                torch.testing.assert_close(run(x, edges), right, rtol=1e-5, atol=1e-5)
            (_, bands), = ran.ran
            assert bands > 1
            moved.append(ran.memory.fetched)
        assert moved[0] < moved[1]


def test_edges_that_are_few_stay_on_the_device():
    from torch_geometric.nn import GCNConv

    x, edges = torch.randn(NODES, 256), graph()[1][:, :80]
    layer, limit = GCNConv(256, 8), cache.limit()
    with offload(100_000, device="cpu") as ran, torch.no_grad():
        found = [layer(x, edges)]
        assert cache.limit() > limit  # all bands' structures
        first = ran.memory.stored
        found.append(layer(x, edges))
        (_, count), = ran.ran
        (bands,), = (known.values() for known in plans.get(edges).values())
        assert count > 1 and len(bands.resident) == count
        # degrees are known, and with them the normalisation
        assert first - (ran.memory.stored - first) == 4 * NODES
    assert not bands.resident and cache.limit() == limit
    for out in found:
        torch.testing.assert_close(out, layer(x, edges), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU emulation of kernels needs g++")
@pytest.mark.parametrize("name", ["GATConv", "GCNConv", "SAGEConv", "RGCNConv"])
def test_kernels_run_bands(name):
    from tests.emulation.emulator import EmulatedDriver

    out, gradients = layer_cases.run(name, layer_cases.data())
    gnnaccel.reset_stats()
    with (driver.using(EmulatedDriver()), gnnaccel.enabled(), offload(14_000, device="cpu") as ran):
        found, shares = layer_cases.run(name, layer_cases.data())
    assert min(bands for _, bands in ran.ran) > 1
    routes = gnnaccel.stats()[name]["routes"]
    assert routes["cuda"] and "native" not in routes
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    for key, truth in gradients.items():
        torch.testing.assert_close(shares[key], truth, rtol=1e-4, atol=1e-4)


def test_what_cannot_run_is_named():
    from torch_geometric.nn import SAGEConv

    x, edges = graph()
    with offload(BANDS, device="cpu"):
        with pytest.raises(OffloadError, match="vmap|transform"):
            torch.func.vmap(functools.partial(SAGEConv(WIDTH, 8), edge_index=edges))(x[None])
        with pytest.raises(GraphError, match="names nodes from 0 to 60"):
            SAGEConv(WIDTH, 8)(x, torch.cat([edges, torch.tensor([[60], [0]])], 1))
        with pytest.raises(OffloadError, match="is active"), offload():
            pass
    for wrong in (0, -5, "all"):
        with pytest.raises(ValueError, match="limit="), offload(wrong):
            pass
    before = SAGEConv(WIDTH, 8)
    assert before(x, edges).shape == (NODES, 8)


def test_rows_and_gradients_that_negate_their_numbers():
    from torch_geometric.nn import SAGEConv

    torch.manual_seed(0)
    layer, edges = SAGEConv(4, 4), torch.randint(0, 40, (2, 200))
    x = torch.complex(torch.zeros(40, 4), torch.randn(40, 4)).conj().imag
    weight = torch.complex(torch.zeros(40, 4), torch.randn(40, 4)).conj().imag
    assert x.is_neg() and weight.is_neg()
    found = []
    for block in (contextlib.nullcontext(), gnnaccel.offload(limit=3000)):
        leaf = x.clone().requires_grad_()
        with block:
            out = layer(x, edges) + layer(leaf, edges)
        out.backward(weight)
        found.append((out.detach(), leaf.grad))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
