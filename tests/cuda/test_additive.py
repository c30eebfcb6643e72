"""Additive attention (GAT), forward, by the rule of `helpers.assert_accurate`."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.run import attention
from tests.attention_cases import SIZES, additive, by_kernels, by_torch, check, graph
from tests.emulation.orders import in_any_order
from tests.helpers import forget_report, on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")


#: few lanes per head, where each scores for itself, and many, where scores pass through shared
#: memory
both_ways = pytest.mark.parametrize("size", [(8, 8), (3, 5)], ids=["direct", "tiled"])


@on_devices("heads,width", SIZES)
def test_sizes(device, heads, width):
    check(additive(graph(device), heads, width, "bipartite"), train=False)


@on_devices("terms,edge,dropout",
            [("same", False, 0.0), ("bipartite", True, 0.3), ("source", False, 0.3),
             ("same", True, 0.0)],
            [(t, e, p) for t in ("same", "bipartite", "source") for e in (False, True)
             for p in (0.0, 0.3)])
@both_ways
def test_terms(device, size, terms, edge, dropout):
    side = 40 if terms == "same" else 30
    check(additive(graph(device, 40, side), *size, terms, edge, dropout), train=False)


@on_devices("heads,width,pmf,edge,dropout",
            [(8, 8, False, False, 0.0), (8, 8, True, False, 0.0), (3, 5, True, True, 0.3),
             (3, 5, False, True, 0.3), (40, 2, True, False, 0.0), (2, 512, True, False, 0.0)],
            [(h, d, pmf, False, 0.0) for h, d in SIZES for pmf in (False, True)])
@pytest.mark.parametrize("chunk", [16, 33])
def test_split_rows(device, chunk_edges, heads, width, pmf, edge, dropout, chunk):
    chunk_edges(chunk)
    problem = additive(graph(device), heads, width, "bipartite", edge, dropout, pmf=pmf)
    problem.graph.csc()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert problem.graph.csc().split.sizes()[1] >= (2 if chunk == 16 else 1)
    check(problem, train=False)


@on_devices("pmf", [False, True])
def test_split_rows_before_the_report(device, chunk_edges, pmf):
    chunk_edges(16)
    problem = additive(graph(device), 8, 8, "bipartite", pmf=pmf)
    rows = problem.graph.csc()
    exact = forget_report(rows)
    assert rows.split.sizes() > exact
    check(problem, train=False)


def test_large_graph_with_super_nodes(device):
    size = (60, 50, 900) if device.type == "cpu" else (5000, 4000, 400_000)
    check(additive(graph(device, *size), 8, 8, "bipartite"), train=False)


@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
def test_slopes(device, slope):
    check(additive(graph(device), 8, 8, "bipartite", slope=slope), train=False)


@pytest.mark.parametrize("loops", [1, 20, 40])
@both_ways
def test_loops(device, size, loops):
    check(additive(graph(device, 40, 40, loops=loops), *size, "same", edge=True), train=False)


def test_loops_of_a_bipartite_graph(device):
    check(additive(graph(device, 40, 30, loops=25), 3, 5, "bipartite", edge=True), train=False)


@both_ways
def test_wide_offsets(device, chunk_edges, size):
    chunk_edges(16)
    check(additive(graph(device, wide=True), *size, "bipartite", edge=True, dropout=0.3),
          train=False)


@on_devices("row,out", [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
            [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("size", [(8, 8), (3, 5)])
def test_half_rows(device, row, out, size):
    check(additive(graph(device), *size, "bipartite", row=row, out=out), train=False)


@both_ways
@pytest.mark.parametrize("pmf", [False, True])
def test_saturated_softmax(device, chunk_edges, size, pmf):
    chunk_edges(16)
    # scores reach some 300, and the exponent of exp2 is rounded accordingly
    check(additive(graph(device), *size, "bipartite", scale=30.0, pmf=pmf), train=False, floor=2e-6)


@both_ways
def test_dropout_of_everything_gives_zeros(device, size):
    assert (by_kernels(additive(graph(device), *size, dropout=1.0, terms="bipartite"),
                       train=False)[0]["out"] == 0).all()


BAD = [("x", float("nan")), ("x", float("inf")), ("att_src", float("nan")),
       ("att_dst", -float("inf")), ("a_edge", float("nan")), ("a_edge", float("inf")),
       ("a_edge", -float("inf"))]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("pmf, chunk", [(False, 1024), (False, 16), (True, 16)])
@pytest.mark.parametrize("name, value", BAD)
@both_ways
def test_what_is_not_finite_shows_where_it_does_in_torch(device, chunk_edges, size, name, value,
                                                         pmf, chunk, train):
    chunk_edges(chunk)
    problem = additive(graph(device), *size, "bipartite", edge=True, pmf=pmf)
    problem.tensors[name][0, 1] = value
    got, call = by_kernels(problem, train)
    plain = by_torch(problem, call, torch.float32, train=False)["out"]
    assert 0 < int((~torch.isfinite(plain)).sum()) < plain.numel() or value == -float("inf")
    assert torch.equal(torch.isfinite(got["out"]), torch.isfinite(plain))


@pytest.mark.parametrize("chunk, pmf", [(1024, False), (16, False), (16, True)])
@both_ways
def test_masked_edges(device, chunk_edges, size, chunk, pmf):
    """A score of -inf takes an edge out, also where whole tiles and chunks consist of such
    edges."""
    chunk_edges(chunk)
    problem = additive(graph(device), *size, "bipartite", edge=True, pmf=pmf)
    edges = problem.graph.edges()
    hub = edges.eid[edges.dst == 3]
    problem.tensors["a_edge"][hub[:-2]] = -float("inf")
    assert hub.numel() > 64
    check(problem, train=False)


@pytest.mark.parametrize("num_src, num_dst, edges",
                         [(40, 30, 0), (1, 1, 1), (1, 1, 0), (5, 0, 0), (0, 5, 0), (0, 0, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    problem = additive(graph(device, num_src, num_dst, edges), 3, 5, "bipartite")
    out = by_kernels(problem, train=False)[0]["out"]
    assert out.shape == (num_dst, 3, 5)
    if edges == 0:
        assert (out == 0).all()
    else:
        torch.testing.assert_close(out, problem.tensors["x"], rtol=1e-6, atol=0)


def test_isolated_rows_are_zero(device):
    problem = additive(graph(device), 3, 5, "bipartite")
    out = by_kernels(problem, train=False)[0]["out"]
    alone = problem.graph.csc().indptr.diff() == 0
    assert alone.any() and (out[alone] == 0).all() and (out[~alone] != 0).any(dim=2).all()


@on_devices("change", ["non_contiguous", "misaligned", "expanded"])
def test_inputs_of_any_stride(device, change):
    problem = additive(graph(device), 8, 8, "bipartite")
    expected = check(problem, train=False)["out"]
    for name, tensor in problem.tensors.items():
        if change == "non_contiguous":
            other = tensor.transpose(0, 2).contiguous().transpose(0, 2)
        elif change == "misaligned":
            other = torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
            assert other.data_ptr() % 16 == 4
        else:
            problem.tensors[name] = other = tensor[:1].expand_as(tensor)
        problem.tensors[name] = other
    if change == "expanded":
        check(problem, train=False)
    else:
        assert same_bits(by_kernels(problem, train=False)[0]["out"], expected)


def test_results_repeat(device, chunk_edges):
    chunk_edges(16)
    problem = additive(graph(device), 8, 8, "bipartite")
    runs = [by_kernels(problem, train=False)[0]["out"] for _ in range(3)]
    assert same_bits(runs[0], runs[1]) and same_bits(runs[0], runs[2])


@pytest.mark.parametrize("pmf", [False, True])
@both_ways
def test_scheduling_does_not_change_the_result(chunk_edges, size, pmf):
    chunk_edges(16)

    def made():
        problem = additive(graph("cpu"), *size, "bipartite", edge=True, pmf=pmf)
        problem.graph.csc(), problem.graph.csr()
        return lambda: by_kernels(problem)[0]

    in_any_order(made)


@both_ways
def test_inputs_and_outputs_keep_their_bounds(device, poison, size):
    problem = additive(graph(device), *size, "bipartite", edge=True)
    zones = {name: poison.guard(t) for name, t in problem.tensors.items()}
    before = {name: t.clone() for name, t in zones.items()}
    problem.tensors = zones
    check(problem)
    assert all(same_bits(zones[name], before[name]) for name in zones)
    poison.check()


def test_without_gradients_nothing_is_saved(device):
    problem = additive(graph(device), 3, 5, "bipartite")
    assert attention.run_cuda(problem.call(), problem.tensors).grad_fn is None
