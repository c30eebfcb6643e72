"""Negative samples are those that PyG draws, from the same state of Python's generator."""
from __future__ import annotations

import random
import threading
from unittest import mock

import pytest
import torch
from torch_geometric import utils
from torch_geometric.nn import SuperGATConv
from torch_geometric.nn.conv import supergat_conv
from torch_geometric.utils import _negative_sampling as host

import gnnaccel
from gnnaccel.adapters.pyg import negatives

#: populations and samples: of one word and of two, at the edges of words, with few and many repeats
DRAWS = [(2**20, 600), (2**20 - 1, 3000), (2**32, 700), (2**32 - 1, 700), (2**32 + 1, 700),
         (2**33 - 7, 900), (2**40, 5000), (2**62, 600), (2**63 - 1, 600), (17_000, 1100),
         (65_537, 3000), (7_333_264, 14_590), (300_000, 20_000)]


def graph(nodes: int, edges: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("population, k", DRAWS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_samples_and_the_state_left(population, k, seed):
    random.seed(seed)
    for _ in range(37 * seed):
        random.random()
    if seed:
        random.gauss(0, 1)  # keeps a second number
    before = random.getstate()
    wanted, after = random.sample(range(population), k), random.getstate()
    random.setstate(before)
    assert negatives.drawable(population, k)
    assert negatives.drawn(population, k).tolist() == wanted
    assert random.getstate() == after


@pytest.mark.parametrize("population, k", [(2**20, 10), (2000, 1000), (600, 600), (2**63, 600)])
def test_what_is_drawn_otherwise(population, k):
    assert not negatives.drawable(population, k)


def test_anybodys_own_sample_is_called():
    with gnnaccel.enabled(), mock.patch.object(random, "sample", lambda of, k: list(of)[:k]):
        assert host.sample(10**6, 600).tolist() == list(range(600))


def test_another_thread_that_draws_makes_pyg_draw():
    random.seed(3)
    wanted = random.sample(range(10**6), 600)
    with gnnaccel.enabled():
        found = []
        with negatives._drawing:
            random.seed(3)
            thread = threading.Thread(target=lambda: found.append(host.sample(10**6, 600)))
            thread.start()
            thread.join(timeout=60)
    assert found[0].tolist() == wanted


@pytest.mark.parametrize("nodes, edges, options", [
    (300, 2000, {}), (300, 2000, {"num_neg_samples": 900}), (40, 1500, {}),
    (300, 2000, {"force_undirected": True}), (300, 2000, {"method": "dense"}),
    (300, 2000, {"num_neg_samples": 0.7})])
def test_the_function(nodes, edges, options):
    edge_index = graph(nodes, edges)
    random.seed(5)
    wanted, after = utils.negative_sampling(edge_index, nodes, **options), random.getstate()
    with gnnaccel.enabled():
        random.seed(5)
        found = utils.negative_sampling(edge_index, nodes, **options)
        assert random.getstate() == after
        assert supergat_conv.negative_sampling is utils.negative_sampling
    assert torch.equal(found, wanted)


def test_the_default_device():
    """Where nobody names one, as torch.tensor."""
    with gnnaccel.enabled(), torch.device("meta"):
        assert host.sample(10**6, 600).is_meta and host.sample(10**6, 600, "cpu").is_cpu


def on_device(edge_index, nodes, wanted=None):
    with gnnaccel.enabled():
        return negatives.on_device(host, edge_index, nodes, wanted)


@pytest.mark.long
@pytest.mark.parametrize("nodes, edges, wanted", [
    (300, 2000, None), (300, 2000, 700), (40, 1200, None), (40, 3000, None), (40, 3000, 1500),
    (3, 60, None), (500, 0, 40), (200, 30_000, 35_000)])
def test_the_way_of_a_gpu(nodes, edges, wanted):
    """Also where some tries are needed, or none can succeed."""
    for seed in range(3):
        edge_index = graph(nodes, edges, seed)
        random.seed(seed)
        found = on_device(edge_index, nodes, wanted)
        after = random.getstate()
        random.seed(seed)
        assert torch.equal(found, utils.negative_sampling(edge_index, nodes, wanted))
        assert random.getstate() == after


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"num_neg_samples": 900}, {"force_undirected": True},
                                     {"method": "dense"}, {"num_neg_samples": 0.7}])
def test_on_a_gpu(options):
    edge_index = graph(900, 6000).cuda()
    random.seed(5)
    wanted = utils.negative_sampling(edge_index, 900, **options)
    with gnnaccel.enabled():
        random.seed(5)
        found = utils.negative_sampling(edge_index, 900, **options)
    assert found.is_cuda and torch.equal(found, wanted)


def test_a_training_step_of_a_layer_that_samples(route):
    torch.manual_seed(0)
    layer = SuperGATConv(8, 4, heads=2, attention_type="SD", neg_sample_ratio=1.0,
                         edge_sample_ratio=1.0).to(route.device)
    x, edge_index = torch.randn(300, 8, device=route.device), graph(300, 2000).to(route.device)

    def step():
        random.seed(1)
        torch.manual_seed(1)
        layer.zero_grad()
        (layer(x, edge_index).square().sum() + layer.get_attention_loss()).backward()
        return layer.att_y, layer.att_x, layer.lin.weight.grad

    wanted = step()
    with route.on():
        found = step()
    assert torch.equal(found[0], wanted[0])
    for one, other in zip(found[1:], wanted[1:]):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_edges_that_change_are_numbered_anew():
    edge_index = graph(300, 2000)
    for _ in range(4):
        random.seed(5)
        wanted = utils.negative_sampling(edge_index, 300, 700)
        random.seed(5)
        assert torch.equal(on_device(edge_index, 300, 700), wanted)
        random.seed(5)
        assert torch.equal(on_device(edge_index, 301, 700), utils_after(5, edge_index, 301, 700))
        edge_index[:, :1500] = wanted[:, :1]  # what was drawn is an edge now


def utils_after(seed, *args):
    random.seed(seed)
    return utils.negative_sampling(*args)


@pytest.mark.parametrize("loops", [True, False])
def test_a_layer_over_edges_that_change(route, loops):
    """Its edges with self loops are kept."""
    torch.manual_seed(0)
    layer = SuperGATConv(8, 4, heads=2, add_self_loops=loops, edge_sample_ratio=1.0)
    layer = layer.to(route.device)
    x, edge_index = torch.randn(300, 8, device=route.device), graph(300, 2000).to(route.device)

    def step():
        random.seed(1)
        torch.manual_seed(1)
        layer.zero_grad()
        (layer(x, edge_index).square().sum() + layer.get_attention_loss()).backward()
        return layer.att_x, layer.lin.weight.grad

    for _ in range(3):
        wanted = step()
        with route.on():
            found = [step() for _ in range(4)][-1]
        for one, other in zip(found, wanted):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
        edge_index[1, :40] = edge_index[0, :40]  # more self loops
