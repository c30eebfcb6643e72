"""``python -m gnnaccel --partition``: scripts of one process, run by several, compute what they
compute alone."""
from __future__ import annotations

import functools
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")

from gnnaccel.errors import PartitionError
from tests.distributed import graphs, layer_cases
from tests.distributed.processes import start

pytestmark = pytest.mark.skipif(not dist.is_available(),
                                reason="this torch has no torch.distributed")
STEPS = 5


def graph(nodes=60, edges=400):
    from torch_geometric.data import Data

    g = graphs.generator(0)
    return Data(x=torch.randn(nodes, 6, generator=g),
                edge_index=torch.randint(0, nodes, (2, edges), generator=g),
                edge_weight=torch.rand(edges, generator=g),
                y=torch.randint(0, 3, (nodes,), generator=g),
                train_mask=torch.rand(nodes, generator=g) < 0.6)


class OfAllNodes(nn.Module):
    """What a part alone would get wrong: norms of all nodes, dropout, a mean, weights outside of
    layers, weights of edges that are learnt, a layer used twice."""

    def __init__(self):
        from torch_geometric.nn import GATConv, GCNConv, GraphNorm

        super().__init__()
        self.first, self.norm, self.batch = GCNConv(6, 8), GraphNorm(8), nn.BatchNorm1d(8)
        self.gate, self.again = nn.Linear(1, 1), GCNConv(8, 8)
        self.last, self.head = GATConv(8, 4, heads=2), nn.Linear(8, 3)

    def forward(self, data):
        weight = self.gate(data.edge_weight[:, None]).sigmoid().view(-1)
        x = self.batch(self.norm(self.first(data.x, data.edge_index, weight))).relu()
        x = F.dropout(x, 0.5, self.training)
        x = self.again(self.again(x, data.edge_index), data.edge_index)
        return self.head(self.last(x + x.mean(0), data.edge_index))


class Cached(nn.Module):
    def __init__(self):
        from torch_geometric.nn import GCNConv, SGConv

        super().__init__()
        self.first, self.second = GCNConv(6, 8, cached=True), SGConv(6, 8, 2, cached=True)
        self.head = nn.Linear(8, 3)

    def forward(self, data):
        return self.head(self.first(data.x, data.edge_index).tanh()
                         + self.second(data.x, data.edge_index))


class Recomputed(nn.Module):
    def __init__(self):
        from torch_geometric.nn import GATConv

        super().__init__()
        self.first, self.second = GATConv(6, 4, heads=2), GATConv(8, 3, heads=2, concat=False)

    def forward(self, data):
        from torch.utils.checkpoint import checkpoint

        x = checkpoint(self.first, data.x, data.edge_index, use_reentrant=False)
        return checkpoint(self.second, x.tanh(), data.edge_index, use_reentrant=False)


class Typed(nn.Module):
    def __init__(self):
        from tests.distributed.models import Typed as Layers

        super().__init__()
        self.layers = Layers()

    def forward(self, data):
        return self.layers(data)["paper"]


MODELS = {"all nodes": OfAllNodes, "cached": Cached, "recomputed": Recomputed, "typed": Typed}
#: calls of layers, each in every step and once in evaluation
DIVIDED = {"all nodes": {"GCNConv": 18, "GATConv": 6}, "cached": {"GCNConv": 6, "SGConv": 6},
           "recomputed": {"GATConv": 22},  # twice where backward follows
           "typed": {"GCNConv": 12, "SAGEConv": 12, "GATConv": 12}}


def train(name):
    """As a script of one process."""
    torch.manual_seed(0)
    data = graphs.heterogeneous() if name == "typed" else graph()
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses, gradients = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = model(data)
        loss = (F.cross_entropy(out, data["paper"].y) if name == "typed" else
                F.cross_entropy(out[data.train_mask], data.y[data.train_mask]))
        loss.backward()
        losses.append(loss.item())
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return losses, gradients, model(data)


def train_divided(rank, world, enabled):
    import gnnaccel
    from gnnaccel.adapters.pyg.distributed import script

    found = {}
    for name in MODELS:
        switched = gnnaccel.enabled(when="supported") if enabled else gnnaccel.disabled()
        with switched, script.divided(20) as divider:
            found[name] = train(name), divider.ran
    return found


@pytest.mark.long
@pytest.mark.parametrize("world, enabled", [(3, False), (2, True)])
def test_training_is_that_of_one_process(world, enabled):
    found = start(world, train_divided, enabled)
    for name in MODELS:
        losses, gradients, out = train(name)
        for rank in found:
            (mine, shares, result), ran = rank[name]
            assert mine == pytest.approx(losses, abs=1e-5), name
            assert mine == found[0][name][0][0]
            for got, truth in zip(shares, gradients):
                for a, b in zip(got, truth):
                    assert (a is None) == (b is None), name
                    if a is not None:
                        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)
            torch.testing.assert_close(result, out, rtol=1e-4, atol=1e-4, msg=name)
            calls = {layer: count for (layer, why), count in ran.items() if why is None}
            assert calls == DIVIDED[name]


def all_layers(rank, world, names):
    from gnnaccel.adapters.pyg.distributed import script

    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        with script.divided(1) as divider:
            found[name] = *layer_cases.run(name, layer_cases.data()), dict(divider.ran)
    return found


@pytest.mark.long
def test_every_layer_is_divided():
    names = sorted(layer_cases.CASES)
    found = start(2, all_layers, names)
    for name in names:
        out, gradients = layer_cases.run(name, layer_cases.data())
        for mine, shares, ran in (rank[name] for rank in found):
            assert [why for _, why in ran] == [None], (name, ran)
            scale = max(1.0, out.abs().max().item())
            torch.testing.assert_close(mine, out, rtol=0, atol=1e-5 * scale, msg=name)
            assert shares.keys() == gradients.keys()
            for key, truth in gradients.items():
                scale = max(1.0, truth.abs().max().item())
                torch.testing.assert_close(shares[key], truth, rtol=0, atol=1e-5 * scale,
                                           msg=lambda text, at=(name, key): f"{at}: {text}")


def by_kernels(rank, world):
    import gnnaccel
    from gnnaccel.adapters.pyg.distributed import script
    from gnnaccel.cuda.runtime import driver
    from tests.emulation.emulator import EmulatedDriver

    gnnaccel.reset_stats()
    with (driver.using(EmulatedDriver()), gnnaccel.enabled(when="supported"),
          script.divided(1)):
        found = layer_cases.run("GATConv", layer_cases.data())
    return *found, gnnaccel.stats()["GATConv"]["routes"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU emulation of kernels needs g++")
def test_kernels_run_divided_calls():
    out, gradients = layer_cases.run("GATConv", layer_cases.data())
    for mine, shares, routes in start(2, by_kernels):
        assert routes == {"cuda": 1}
        torch.testing.assert_close(mine, out, rtol=1e-4, atol=1e-5)
        for key, truth in gradients.items():
            torch.testing.assert_close(shares[key], truth, rtol=1e-4, atol=1e-4)


def dropouts(rank, world):
    """Attention with dropout: each process draws its own, and all draw alike after it."""
    from torch_geometric.nn import GATConv

    from gnnaccel.adapters.pyg.distributed import script

    torch.manual_seed(0)
    data, layer = graph(), GATConv(6, 8, dropout=0.5)
    with script.divided(1):
        with pytest.raises(PartitionError, match="sets up torch.distributed itself"):
            dist.init_process_group("gloo")
        first, second = (layer(data.x, data.edge_index) for _ in range(2))
        return first.detach(), second.detach(), torch.rand(3)


@pytest.mark.long
def test_processes_draw_alike_outside_of_layers():
    (first, second, after), (others, _, afterwards) = start(2, dropouts)
    assert torch.equal(first, others) and torch.equal(after, afterwards)
    assert not torch.equal(first, second)


def in_other_modes(rank, world):
    """Inference, autocast, and a report."""
    import gnnaccel
    from torch_geometric.nn import SAGEConv

    from gnnaccel.adapters.pyg.distributed import script

    torch.manual_seed(0)
    data, layer = graph(), SAGEConv(6, 8)
    x = data.x.clone().requires_grad_()
    with gnnaccel.enabled(when="supported"), script.divided(1) as divider:
        with torch.inference_mode():
            found = [layer(data.x.clone(), data.edge_index.clone()).clone() for _ in range(2)]
        with torch.autocast("cpu", torch.bfloat16):
            found.append(layer(data.x, data.edge_index).detach())
        with gnnaccel.report() as report:
            layer(x, data.edge_index).sum().backward()
    return found, divider.ran, report.exchanged.as_dicts()


@pytest.mark.long
def test_inference_autocast_and_reports():
    from torch_geometric.nn import SAGEConv

    torch.manual_seed(0)
    data, layer = graph(), SAGEConv(6, 8)
    right = layer(data.x, data.edge_index)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(data.x, data.edge_index)
    sent = 0
    for found, ran, (entry,) in start(2, in_other_modes):
        assert list(ran) == [("SAGEConv", None)]
        torch.testing.assert_close(found[0], right)
        torch.testing.assert_close(found[1], right)
        assert found[2].dtype == half.dtype
        torch.testing.assert_close(found[2].float(), half.float(), rtol=2e-2, atol=2e-2)
        # halo rows and results; gradients of halo rows and of x
        assert entry["layer"] == "SAGEConv" and entry["forwards"] == entry["backwards"] == 2
        sent += entry["forward_bytes"]
    edges = data.edge_index
    ends = [0, found_middle(edges), 60]
    halo = sum(((edges[0][(edges[1] >= low) & (edges[1] < high)].unique() < low)
                | (edges[0][(edges[1] >= low) & (edges[1] < high)].unique() >= high)).sum().item()
               for low, high in zip(ends, ends[1:]))
    assert sent == 4 * (halo * 6 + 60 * 8)


def found_middle(edges):
    from gnnaccel.dispatch.distributed.ranges import bounds

    return bounds(torch.bincount(edges[1], minlength=60) + 1, 2)[1]


def not_divided(rank, world):
    from torch_geometric.nn import (GATConv, GCNConv, GINConv, HypergraphConv, MessagePassing,
                                    SAGEConv)

    from gnnaccel.adapters.pyg.distributed import script

    class Mine(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x - x.mean(0))

    torch.manual_seed(0)
    data = graph()
    mlp = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    hooked = SAGEConv(6, 8)
    hooked.register_forward_hook(lambda *given: None)
    plain, edges = (data.x, data.edge_index), data.edge_index
    calls = [(Mine(), plain, {}), (GINConv(mlp), plain, {}), (hooked, plain, {}),
             (HypergraphConv(6, 8), plain, {}),
             (GATConv(6, 8), plain, {"return_attention_weights": True}),
             (GCNConv(6, 8), (data.x, edges[:, :30]), {}),
             (SAGEConv(6, 8), (data.x, edges[:, :60]), {}),
             (SAGEConv((6, 6), 8), ((data.x, None), edges), {"size": (60, 60)}),
             (GCNConv(6, 8), (data.x, edges.clamp(max=0)), {})]
    with script.divided(50) as divider:
        found = [layer(*args, **kwargs) for layer, args, kwargs in calls]
    for (layer, args, kwargs), out in zip(calls, found):
        right = layer(*args, **kwargs)
        if isinstance(out, tuple):
            out, right = out[0], right[0]
        assert torch.equal(out, right)
    return [str(why) for _, why in divider.ran], script.summary(divider)


@pytest.mark.long
def test_what_cannot_be_divided_runs_whole():
    for reasons, text in start(2, not_divided):
        for why, words in zip(reasons, ["script's own", "batch normalisation", "hooks",
                                        "GA701", "return_attention_weights", "less than 50 edges",
                                        "as many edges as nodes", "no pair", "too few"]):
            assert words in why
        assert "2 processes divided no layer" in text and "GINConv (1 calls): GA704" in text


def other_seeds(rank, world, what):
    from torch_geometric.nn import GCNConv

    from gnnaccel.adapters.pyg.distributed import script

    torch.manual_seed(rank if what == "weights" else 0)
    layer, data = GCNConv(6, 8), graph()
    if what == "edges" and rank:
        data.edge_index[0, 0] += 1
    with script.divided(1):
        try:
            layer(data.x, data.edge_index).sum().backward()
            torch.optim.SGD(layer.parameters(), lr=0.1).step()
        except PartitionError as problem:
            return str(problem)


@pytest.mark.parametrize("what", ["weights", "edges"])
def test_processes_that_differ_are_an_error_in_all(what):
    for text in start(2, functools.partial(other_seeds, what=what)):
        assert text is not None and "Set seeds" in text
        assert ("2 weights" if what == "weights" else "400 edges") in text
