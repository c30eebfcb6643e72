"""Pairwise attention (GATv2, dot product, cosine, SuperGAT), forward."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.attention.pairwise import SCORES
from tests.attention_cases import SIZES, by_kernels, by_torch, check, graph, pairwise
from tests.emulation.orders import in_any_order
from tests.helpers import assert_accurate, forget_report, on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")

KINDS = [(score, False) for score in SCORES] + [("gatv2", True), ("dot", True)]


@on_devices("heads,width,score",
            [(h, d, list(SCORES)[i % len(SCORES)]) for i, (h, d) in enumerate(SIZES)],
            [(h, d, score) for h, d in SIZES for score in SCORES])
def test_sizes(device, heads, width, score):
    check(pairwise(score, graph(device), heads, width), train=False)


@on_devices("score,edge,dropout",
            [(*kind, 0.0) for kind in KINDS] + [("gatv2", True, 0.3), ("dot", False, 0.3)],
            [(*kind, p) for kind in KINDS if kind[0] != "cosine" for p in (0.0, 0.3)])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_kinds(device, chunk_edges, score, edge, dropout, chunk):
    chunk_edges(chunk)
    check(pairwise(score, graph(device), 3, 5, edge, dropout), train=False)


@on_devices("score", ["gatv2", "dot"], list(SCORES))
def test_split_rows_before_the_report(device, chunk_edges, score):
    chunk_edges(16)
    problem = pairwise(score, graph(device), 8, 8)
    rows = problem.graph.csc()
    exact = forget_report(rows)
    assert rows.split.sizes() > exact
    check(problem, train=False)


@pytest.mark.parametrize("score", ["gatv2", "dot"])
def test_large_graph_with_super_nodes(device, score):
    size = (60, 50, 900) if device.type == "cpu" else (5000, 4000, 400_000)
    check(pairwise(score, graph(device, *size), 8, 8), train=False)


@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("score", ["gatv2", "mx", "sd"])
def test_slopes(device, score, slope):
    check(pairwise(score, graph(device), 3, 5, slope=slope), train=False)


@pytest.mark.parametrize("score, edge", [("gatv2", True), ("dot", True), ("mx", False)])
def test_loops(device, score, edge):
    check(pairwise(score, graph(device, 40, 40, loops=30), 3, 5, edge), train=False)


def test_wide_offsets(device, chunk_edges):
    chunk_edges(16)
    check(pairwise("dot", graph(device, wide=True), 3, 5, edge=True, dropout=0.3), train=False)


@on_devices("row,out", [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
            [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("score", ["gatv2", "dot"])
def test_half_rows(device, row, out, score):
    check(pairwise(score, graph(device), 8, 8, edge=True, row=row, out=out), train=False)


@pytest.mark.parametrize("score", SCORES)
def test_saturated_softmax(device, chunk_edges, score):
    chunk_edges(16)
    check(pairwise(score, graph(device), 3, 5, scale=10.0), train=False, floor=2e-6)


@pytest.mark.parametrize("score", ["gatv2", "dot", "mx", "sd"])
def test_dropout_of_everything_gives_zeros(device, score):
    assert (by_kernels(pairwise(score, graph(device), 3, 5, dropout=1.0),
                       train=False)[0]["out"] == 0).all()


BAD = [("gatv2", "keys", float("nan")), ("gatv2", "att", float("nan")),
       ("gatv2", "queries", float("inf")), ("dot", "queries", float("nan")),
       ("dot", "values", float("inf")), ("dot", "keys", float("inf")),
       ("dot", "edges", float("nan")), ("cosine", "c_src", float("nan")),
       ("mx", "c_dst", float("inf")), ("sd", "keys", -float("inf"))]


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("score, name, value", BAD)
def test_what_is_not_finite_shows_where_it_does_in_torch(device, chunk_edges, score, name, value,
                                                         chunk):
    chunk_edges(chunk)
    problem = pairwise(score, graph(device), 3, 5, edge=name == "edges")
    problem.tensors[name][0, 1] = value
    got, call = by_kernels(problem, train=False)
    plain = by_torch(problem, call, torch.float32, train=False)["out"]
    assert 0 < int((~torch.isfinite(plain)).sum()) < plain.numel()
    assert torch.equal(torch.isfinite(got["out"]), torch.isfinite(plain))


@pytest.mark.parametrize("chunk", [1024, 16])
def test_masked_edges(device, chunk_edges, chunk):
    """A score of -inf takes an edge out, also where whole steps and chunks consist of such
    edges."""
    chunk_edges(chunk)
    problem = pairwise("cosine", graph(device), 3, 5)
    problem.tensors["keys"].abs_(), problem.tensors["queries"].abs_()
    problem.tensors["c_src"][:25] = -float("inf")
    got, call = by_kernels(problem, train=False)
    plain, exact = (by_torch(problem, call, dtype, train=False)["out"]
                    for dtype in (torch.float32, torch.float64))
    some = torch.isfinite(exact)
    assert not some.all() and some[
        3].all(), "there are rows with nothing but such edges, and a long one with some others"
    assert torch.equal(torch.isfinite(got["out"]), some)
    assert_accurate("out", got["out"][some], plain[some], exact[some])


@pytest.mark.parametrize("num_src, num_dst, edges",
                         [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("score", ["gatv2", "dot"])
def test_small_and_empty_graphs(device, score, num_src, num_dst, edges):
    problem = pairwise(score, graph(device, num_src, num_dst, edges), 3, 5)
    out = by_kernels(problem, train=False)[0]["out"]
    assert out.shape == (num_dst, 3, 5)
    if edges == 0:
        assert (out == 0).all()
    else:
        torch.testing.assert_close(out, problem.tensors["values" if score == "dot" else "keys"],
                                   rtol=1e-6, atol=0)


def test_isolated_rows_are_zero(device):
    problem = pairwise("gatv2", graph(device), 3, 5)
    out = by_kernels(problem, train=False)[0]["out"]
    alone = problem.graph.csc().indptr.diff() == 0
    assert alone.any() and (out[alone] == 0).all() and (out[~alone] != 0).any(dim=2).all()


@on_devices("change", ["non_contiguous", "misaligned"])
def test_inputs_of_any_stride(device, change):
    problem = pairwise("dot", graph(device), 8, 8, edge=True)
    expected = check(problem, train=False)["out"]
    for name, tensor in problem.tensors.items():
        if change == "non_contiguous":
            problem.tensors[name] = tensor.transpose(0, 2).contiguous().transpose(0, 2)
        else:
            problem.tensors[name] = torch.cat([tensor.new_zeros(1),
                                               tensor.flatten()])[1:].view(tensor.shape)
    assert same_bits(by_kernels(problem, train=False)[0]["out"], expected)


@pytest.mark.parametrize("score, edge", [("gatv2", True), ("dot", True), ("mx", False)])
def test_scheduling_does_not_change_the_result(chunk_edges, score, edge):
    chunk_edges(16)

    def made():
        problem = pairwise(score, graph("cpu"), 3, 5, edge)
        problem.graph.csc(), problem.graph.csr()
        return lambda: by_kernels(problem)[0]

    in_any_order(made)


def test_inputs_and_outputs_keep_their_bounds(device, poison):
    problem = pairwise("dot", graph(device), 3, 5, edge=True)
    zones = {name: poison.guard(t) for name, t in problem.tensors.items()}
    before = {name: t.clone() for name, t in zones.items()}
    problem.tensors = zones
    check(problem)
    assert all(same_bits(zones[name], before[name]) for name in zones)
    poison.check()
