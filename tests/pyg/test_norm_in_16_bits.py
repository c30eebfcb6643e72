"""GCN's normalisation in 16 bits: what kernels read was computed in fp32."""
from __future__ import annotations

import copy

import pytest
import torch
from torch_geometric.nn import GCNConv, LGConv, WLConvContinuous
from torch_geometric.nn.conv import gcn_conv

import gnnaccel
from gnnaccel.adapters.pyg.propagate import kept_results
from gnnaccel.dispatch.graph.ordered_weights import in_fp32
from tests.pyg import graphs
from tests.pyg.graphs import E, N

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_hosts_weights_and_those_in_fp32(emulated, weighted, dtype):
    ei = graphs.square()
    weight = torch.rand(E, dtype=dtype) if weighted else None
    expected = gcn_conv.gcn_norm(ei, weight, N, dtype=dtype)[1]
    exact = gcn_conv.gcn_norm(ei, weight.float() if weighted else None, N, dtype=torch.float32)[1]
    with emulated.on():
        for _ in range(3):
            got = gcn_conv.gcn_norm(ei, weight, N, dtype=dtype)[1]
        assert got.dtype == dtype and torch.equal(got, expected), "a user sees the host's"
        assert torch.equal(in_fp32(got.view(-1, 1)), exact.view(-1, 1))
        got.mul_(2)  # by the user, who owns it
        assert in_fp32(got) is got, "what was computed before the write is read"
        assert in_fp32(exact) is exact


@pytest.mark.long
@pytest.mark.parametrize("route", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)],
                         indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layer", [LGConv(), GCNConv(8, 8)], ids=["LGConv", "GCNConv"])
def test_more_edges_at_a_node_than_16_bits_count(route, layer, weighted, dtype):
    """In bf16 256 + 1 is 256, in fp16 2048 + 1 is 2048: on a GPU the host counts so."""
    torch.manual_seed(0)
    ei = torch.randint(0, 2, (2, 9000), device=route.device)
    weight = torch.ones(9000, device=route.device, dtype=dtype) if weighted else None
    conv = copy.deepcopy(layer).to(route.device)
    x = torch.randn(2, 8, device=route.device)

    def results(conv, x, weight):
        x = x.detach().requires_grad_()
        out = conv(x, ei, weight)
        out.sum().backward()
        return out.double(), x.grad.double()

    small = copy.deepcopy(conv).to(dtype)
    with route.on():
        for _ in range(3):
            got = results(small, x.to(dtype), weight)
    exact = results(copy.deepcopy(small).double(), x.to(dtype).double(),
                    None if weight is None else weight.double())
    for ours, truth in zip(got, exact):
        assert float((ours - truth).norm() / truth.norm()) < 0.02


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_over_graphs_that_do_not_come_again(emulated, monkeypatch, dtype):
    monkeypatch.setattr(kept_results, "find", lambda *args, **kwargs: None)
    ei, weight = graphs.square(), torch.rand(E, dtype=dtype)
    expected = gcn_conv.gcn_norm(ei, weight, N, dtype=dtype)[1]
    exact = gcn_conv.gcn_norm(ei, weight.float(), N, dtype=torch.float32)[1]
    with emulated.on():
        got = gcn_conv.gcn_norm(ei, weight, N, dtype=dtype)[1]
        assert torch.equal(got, expected) and torch.equal(in_fp32(got), exact)


@pytest.mark.long
@pytest.mark.parametrize("route", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)],
                         indirect=True)
@pytest.mark.parametrize("layer", [GCNConv(8, 8), WLConvContinuous()], ids=["GCNConv", "WLConv"])
def test_sums_in_16_bits_that_kernels_would_not_take(route, layer):
    """Where the host divides by such a sum, its own over the neighbours is as far off."""
    ei = torch.zeros(2, 2000, dtype=torch.long, device=route.device)
    weight = torch.rand(2000, device=route.device).bfloat16().requires_grad_()
    conv = copy.deepcopy(layer).to(route.device).bfloat16()
    x = torch.randn(1, 8, device=route.device).bfloat16()
    expected = conv(x, ei, weight)
    with route.on(on_fallback="native"):
        gnnaccel.reset_stats()
        for _ in range(3):
            got = conv(x, ei, weight)
            # atomic sums that stop growing differ from one call to the next on a GPU
            assert route.name == "cuda" or torch.equal(got, expected)
    assert gnnaccel.stats()[type(conv).__name__]["reasons"] == {"GA203": 3}
    with route.on():
        conv.float()(x.float(), ei, weight.detach().float())  # by kernels
