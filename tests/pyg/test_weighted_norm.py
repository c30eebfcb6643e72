"""GCN's normalisation over weights: the edges are kept, the weights are read in each call."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv import gcn_conv

import gnnaccel
from gnnaccel.adapters.pyg.propagate import weighted_norm
from tests.pyg import graphs
from tests.pyg.graphs import E, F, N
from tests.pyg.judge import close

OPTIONS = [dict(improved=i, add_self_loops=loops, flow=flow)
           for i, loops, flow in itertools.product(
    (False, True), (False, True), ("source_to_target", "target_to_source"))]


@pytest.fixture
def seen(monkeypatch):
    """For each call over weights, whether it was served from kept edges."""
    calls, true = [], weighted_norm._edges
    monkeypatch.setattr(weighted_norm, "_edges",
                        lambda *args, **kwargs: (calls.append(1), true(*args, **kwargs))[1])
    return calls


@pytest.mark.parametrize("options", OPTIONS)
def test_the_same_numbers_as_the_host(emulated, seen, options):
    ei, native = graphs.square(), gcn_conv.gcn_norm
    ei[:, 7:9] = 3  # repeated loops
    weights = [torch.rand(E) for _ in range(4)] + [torch.zeros(E),
                                                   torch.rand(E, dtype=torch.float64)]
    expected = [native(ei, w, N, **options) for w in weights]
    with emulated.on():
        got = [gcn_conv.gcn_norm(ei, w, N, **options) for w in weights]
    for (edges, norm), (true_edges, true) in zip(got, expected):
        assert torch.equal(edges,
                           true_edges) and torch.equal(norm, true) and norm.dtype == true.dtype
    assert len(seen) == 1, "the edges were not made once"
    assert all(edges is got[-1][0] for edges, _ in got[1:]), "the layer would not know its graph"


@pytest.mark.parametrize("write", [lambda w: w.data.mul_(0.3), lambda w: w.numpy().__imul__(0.3),
                                   lambda w: w.mul_(0.3)])
def test_weights_written_to(emulated, write):
    layer, x, ei, w = GCNConv(F, 4), graphs.features(), graphs.square(), torch.rand(E)
    with emulated.on(), torch.no_grad():
        for _ in range(4):
            layer(x, ei, w)
        write(w)
        got = layer(x, ei, w)
    with torch.no_grad():
        assert close(got, layer(x, ei, w))


def test_edges_written_to(emulated):
    ei, w = graphs.square(), torch.rand(E)
    with emulated.on():
        for _ in range(3):
            gcn_conv.gcn_norm(ei, w, N)
        ei[1] = (ei[1] + 1) % N
        got = gcn_conv.gcn_norm(ei, w, N)
    expected = gcn_conv.gcn_norm(ei, w, N)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_results_written_to(emulated):
    """What a user does to the edges that he was given harms nobody."""
    ei, w = graphs.square(), torch.rand(E)
    expected = gcn_conv.gcn_norm(ei, w, N)
    with emulated.on():
        for _ in range(4):
            edges, norm = gcn_conv.gcn_norm(ei, w, N)
            assert torch.equal(edges, expected[0]) and torch.equal(norm, expected[1])
            edges.zero_(), norm.zero_()


def test_who_is_left_to_the_host(emulated, seen):
    ei, w = graphs.square(), torch.rand(E)
    with emulated.on():
        for _ in range(3):
            gcn_conv.gcn_norm(ei, w.clone().requires_grad_(), N)
            gcn_conv.gcn_norm(ei, w)
            gcn_conv.gcn_norm(ei, torch.nn.Parameter(w, requires_grad=False), N)
    with gnnaccel.enabled():  # where no kernels run
        gcn_conv.gcn_norm(ei, w, N)
    assert not seen


def test_a_replaced_function_of_the_host_runs(emulated, seen, monkeypatch):
    ei, w = graphs.square(), torch.rand(E)
    with emulated.on():
        for _ in range(3):
            gcn_conv.gcn_norm(ei, w, N)
        monkeypatch.setattr(gcn_conv, "scatter", lambda *args, **kwargs: torch.full((N,), 4.0))
        assert torch.equal(gcn_conv.gcn_norm(ei, w, N, add_self_loops=False)[1], w / 4)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights_there", [False, True])
def test_sixteen_bits_in_inference_mode(emulated, dtype, weights_there):
    """Tensors made there have no count of writes. Edges of a star, whose sums the host rounds."""
    x, ei = graphs.features().to(dtype), graphs.square()
    ei[1, ::2] = 4
    weight = torch.rand(E).to(dtype)
    layer = GCNConv(F, F).to(dtype).eval()
    with torch.inference_mode():
        if weights_there:
            weight = weight.clone()
        expected = layer(x, ei, weight)
        for options in ({}, dict(backend="cuda", when="supported")):
            with gnnaccel.enabled(**options):
                for _ in range(3):
                    assert close(layer(x, ei, weight), expected, 2e-2)
    with gnnaccel.enabled(backend="cuda", when="supported"):
        assert close(layer(x, ei, weight.clone()), expected, 2e-2)
