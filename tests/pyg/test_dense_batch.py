"""Rows that are padded graph by graph, and taken out again, are the same bits as PyG's."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import utils
from torch_geometric.experimental import set_experimental_mode
from torch_geometric.nn import (GINEConv, GPSConv, GraphMultisetTransformer, GRUAggregation,
                                MemPooling)
from torch_geometric.utils import to_dense_batch as hosts

import gnnaccel
from gnnaccel.adapters.captured import modules
from gnnaccel.adapters.pyg import dense_batch

SIZES = (3, 1, 5, 0, 2)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated"])
def where(request):
    """The device of rows that are padded, with gnnaccel enabled."""
    request.getfixturevalue("gpu" if request.param == "cuda" else "emulated")
    with gnnaccel.enabled():
        yield torch.device("cuda" if request.param == "cuda" else "cpu")


def batch_of(sizes=SIZES, device="cpu") -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)


def same(found, wanted) -> bool:
    return all(a.dtype == b.dtype and type(a) is torch.Tensor and a.stride() == b.stride()
               and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture
def looked(monkeypatch):
    """The batches whose places were computed."""
    seen, places = [], dense_batch.places
    monkeypatch.setattr(dense_batch, "places", lambda *args: seen.append(args) or places(*args))
    return seen


OPTIONS = [{}, {"max_num_nodes": 2}, {"max_num_nodes": 9}, {"batch_size": 7}, {"fill_value": -1.5},
           {"fill_value": float("-inf"), "max_num_nodes": 3, "batch_size": 6},
           {"max_num_nodes": 0}, {"fill_value": 10 ** 30}, {"fill_value": -1e39}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_masks_and_gradients(where, looked, options, shape, dtype):
    batch = batch_of(device=where)
    for _ in range(3):
        x = torch.randn(len(batch), *shape, dtype=dtype, device=where).requires_grad_()
        found, wanted = utils.to_dense_batch(x, batch, **options), hosts(x, batch, **options)
        assert same(found, wanted)
        seed = torch.randn_like(found[0])
        assert torch.equal(*(torch.autograd.grad(out, x, seed)[0] for out in (found[0], wanted[0])))
    beyond = abs(options.get("fill_value", 0.0)) > torch.finfo(dtype).max and (
        options["fill_value"] != float("-inf"))
    assert len(looked) == (not beyond)


def test_what_pyg_does_itself(where, looked):
    batch, x = batch_of(device=where), torch.randn(11, 2, device=where)
    for given in ((x,), (x.long(), batch), (x, batch.int()), (x, batch, False),
                  (x.to_sparse(), batch), (x[:0], batch[:0], 0.0, 2, 1)):
        try:
            wanted = hosts(*given)
        except (RuntimeError, IndexError, TypeError, NotImplementedError) as error:
            with pytest.raises(type(error)):
                utils.to_dense_batch(*given)
            continue
        assert same(utils.to_dense_batch(*given), wanted)
    assert not looked


@pytest.mark.parametrize("order", [[1, 0, 0, 2], [2, 1, 0, 0], [0, 0, 2, 1]])
def test_a_batch_that_is_not_sorted_goes_to_pyg(where, order):
    """PyG asks for sorted ones, and gives what it gives for others."""
    batch, x = torch.tensor(order, device=where), torch.randn(4, 2, device=where)
    for _ in range(3):
        try:
            wanted = hosts(x, batch)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                utils.to_dense_batch(x, batch)
        else:
            assert same(utils.to_dense_batch(x, batch), wanted)


def test_sizes_that_pyg_asks_for(where):
    batch, x = batch_of(device=where), torch.randn(11, 2, device=where)
    for _ in range(3):
        utils.to_dense_batch(x, batch)
    with set_experimental_mode(True, "disable_dynamic_shapes"):
        with pytest.raises(ValueError, match="batch_size"):
            utils.to_dense_batch(x, batch)


def test_a_batch_that_was_written_to(where):
    batch, x = batch_of(device=where), torch.randn(11, 2, device=where)
    for last in (4, 5, 4, 7):
        batch[-1] = last
        for _ in range(2):
            assert same(utils.to_dense_batch(x, batch), hosts(x, batch))


def test_what_was_handed_out_may_be_written_to(where):
    batch, x = batch_of(device=where), torch.randn(11, 2, device=where)
    for _ in range(2):  # so that it is known
        utils.to_dense_batch(x, batch)
    first = utils.to_dense_batch(x, batch)
    second = utils.to_dense_batch(x, batch)
    first[0].zero_()
    first[1].fill_(True)
    assert same(second, hosts(x, batch))
    assert same(utils.to_dense_batch(x, batch), hosts(x, batch))


# --- the layers that pad --------------------------------------------------------------------------

def gps(**options) -> GPSConv:
    return GPSConv(8, GINEConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))),
                   heads=2, **options)


LAYERS = {
    "multihead": lambda: gps(attn_kwargs={"dropout": 0.5}, dropout=0.3),
    "performer": lambda: gps(attn_type="performer"),
    "no local layer": lambda: GPSConv(8, None, heads=2),
    "layer norm": lambda: gps(norm="layer_norm"),
    "GraphMultisetTransformer": lambda: GraphMultisetTransformer(8, 2, num_encoder_blocks=1),
    "MemPooling": lambda: MemPooling(8, 4, heads=2, num_clusters=3),
    "GRUAggregation": lambda: GRUAggregation(8, 4),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_layers(where, looked, name, training):
    if name == "GRUAggregation" and not training and where.type == "cuda":
        pytest.skip("cuDNN has no backward of a GRU in evaluation")
    torch.manual_seed(0)
    layer = LAYERS[name]().to(where).train(training)
    batch = batch_of(device=where)
    edges = torch.randint(0, 11, (2, 20), device=where)
    features = torch.randn(20, 8, device=where)

    def run():
        torch.manual_seed(1)
        x = start.clone().requires_grad_()
        args = (edges, batch) if isinstance(layer, GPSConv) else (batch,)
        local = isinstance(layer, GPSConv) and layer.conv is not None
        out = layer(x, *args, **({"edge_attr": features} if local else {}))
        out = out[0] if isinstance(out, tuple) else out
        weights = [p for p in layer.parameters() if p.requires_grad]
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(where)
        grads = torch.autograd.grad((out * seed).sum(), [x, *weights], allow_unused=True)
        return [out, *(g for g in grads if g is not None)]

    for _ in range(3):
        start = torch.randn(11, 8, device=where)
        found = run()
        with gnnaccel.disabled():
            wanted = run()
        for ours, theirs in zip(found, wanted, strict=True):
            assert type(ours) is torch.Tensor
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            if where.type == "cpu" and name != "no local layer":
                assert name in ("multihead", "layer norm") or torch.equal(ours, theirs)
    assert len(looked) == 1


def test_rows_that_find_no_room(where):
    """Of a batch that is not sorted PyG leaves some out, and then has too few to add."""
    layer, batch = gps().to(where), torch.tensor([0, 1, 0], device=where)
    x, edges = torch.randn(3, 8, device=where), torch.tensor([[0, 1], [1, 2]], device=where)
    features = torch.randn(2, 8, device=where)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="size of tensor"):
            layer(x, edges, batch, edge_attr=features)


def test_a_layer_of_ten_looks_at_a_batch_once(where, looked):
    layers = [gps().to(where) for _ in range(4)]
    for sizes in (SIZES, (4, 4, 3)):
        batch, x = batch_of(sizes, where), torch.randn(11, 8, device=where)
        edges = torch.randint(0, 11, (2, 20), device=where)
        for layer in layers:
            x = layer(x, edges, batch, edge_attr=torch.randn(20, 8, device=where))
    assert len(looked) == 2


@pytest.mark.parametrize("unused", [0, 8])
def test_layers_that_are_repeated_in_backward(where, unused, monkeypatch):
    """A checkpoint holds what the repeated call saves against what the first one saved, which may
    have been PyG's."""
    monkeypatch.setattr(dense_batch, "_unused", [unused])
    layer, batch = gps().to(where), batch_of(device=where)
    x, edges = torch.randn(11, 8, device=where).requires_grad_(), torch.randint(
        0, 11, (2, 20), device=where)
    features = torch.randn(20, 8, device=where)

    def run(through):
        out = through(lambda x: layer(x, edges, batch, edge_attr=features), x)
        return torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])

    with gnnaccel.disabled():
        wanted = run(lambda function, x: function(x))
    for _ in range(3):
        found = run(lambda function, x: checkpoint(function, x, use_reentrant=False))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_rows_taken_by_a_mask(where, turned):
    batch = batch_of(device=where)
    index, mask, by_place = dense_batch.places(batch, None, None)
    known = dense_batch.Mask.of(mask, index, by_place)
    rows = torch.randn(5, 5, 3, device=where)
    rows = rows.transpose(0, 1) if turned else rows
    rows.requires_grad_()
    found, wanted = rows[known], rows[mask]
    assert type(found) is torch.Tensor and torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(out.square().sum(), rows)[0]
                         for out in (found, wanted)))
    for ours, theirs in ((~known, ~mask), (known.sum(), mask.sum()), (known & mask, mask),
                         (known[:, None], mask[:, None]), (known.clone(), mask),
                         (rows[:2][known[:2]], rows[:2][mask[:2]])):
        assert type(ours) is torch.Tensor and torch.equal(ours, theirs)


class Padded(nn.Module):
    """Two layers and a readout over the graphs of one batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(gps() for _ in range(2))
        self.read = MemPooling(8, 4, heads=2, num_clusters=3)

    def forward(self, x, edges, batch, features):
        for layer in self.layers:
            x = layer(x, edges, batch, edge_attr=features)
        return self.read(x, batch)[0]


@pytest.mark.gpu
def test_captured_models(gpu):
    """A batch that stays is captured with what pads by it; a written one is read anew."""
    model = Padded().to(gpu.device).eval()
    batch, edges = batch_of(device=gpu.device), torch.randint(0, 11, (2, 20), device=gpu.device)
    x, features = (torch.randn(rows, 8, device=gpu.device) for rows in (11, 20))
    modules.reset()

    def run():
        model.zero_grad()
        out = model(x, edges, batch, features)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    for last in (4, 5):
        batch[-1] = last
        with gnnaccel.enabled(when="supported", capture=True):
            found = [run() for _ in range(10)]
            gone = torch.randn(1 << 20, device=gpu.device)  # where something freed may have been
        with gnnaccel.disabled():
            wanted = run()
        for ours in (found[0], found[6], found[-1]):
            for a, b in zip(ours, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        del gone
    captured = gnnaccel.status()["captured"]
    assert captured["replays"] or captured["refused"], captured
