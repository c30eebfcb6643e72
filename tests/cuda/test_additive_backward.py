"""Additive attention (GAT): the output under training and the gradient of every input."""
from __future__ import annotations

import itertools

import pytest
import torch

from tests.attention_cases import SIZES, additive, by_kernels, by_torch, check, check_average, graph
from tests.helpers import forget_report, on_devices, relative, same_bits

pytestmark = pytest.mark.usefixtures("poison")


#: few lanes per head, where each scores for itself, and many, where scores pass through shared
#: memory
both_ways = pytest.mark.parametrize("size", [(8, 8), (3, 5)], ids=["direct", "tiled"])


@on_devices("heads,width", SIZES)
def test_sizes(device, heads, width):
    check(additive(graph(device, 40, 40), heads, width, "same"))


TERMS = ("same", "bipartite", "source")


@on_devices("terms,edge,dropout,heads,width",
            [(*case, *size) for size in ((3, 5), (8, 8))
             for case in itertools.product(TERMS, (False, True), (0.0, 0.3))],
            [(*case, *size) for size in SIZES
             for case in itertools.product(TERMS, (False, True), (0.0, 0.3))])
def test_terms(device, terms, edge, dropout, heads, width):
    check(additive(graph(device, 40, 40 if terms == "same" else 30), heads, width, terms, edge,
                   dropout))


@on_devices("heads,width,pmf,edge,dropout",
            [(8, 8, False, False, 0.0), (8, 8, True, False, 0.0), (3, 5, True, True, 0.3),
             (3, 5, False, True, 0.3), (40, 2, True, False, 0.0), (2, 512, False, False, 0.0)],
            [(h, d, pmf, e, p) for h, d in SIZES for pmf in (False, True)
             for e, p in ((False, 0.0), (True, 0.3))])
@pytest.mark.parametrize("chunk", [16, 33])
def test_split_rows(device, chunk_edges, heads, width, pmf, edge, dropout, chunk):
    chunk_edges(chunk)
    problem = additive(graph(device, 40, 40), heads, width, "same", edge, dropout, pmf=pmf)
    check(problem)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert problem.graph.csc().split.sizes()[1] >= 1 and problem.graph.csr().split.sizes()[1] >= 1


@on_devices("pmf", [False, True])
def test_split_rows_before_the_report(device, chunk_edges, pmf):
    chunk_edges(16)
    problem = additive(graph(device), 8, 8, "bipartite", pmf=pmf)
    for rows in (problem.graph.csc(), problem.graph.csr()):
        forget_report(rows)
    check(problem)


@on_devices("pmf", [False, True])
@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("train", [False, True])
@both_ways
def test_bias(device, chunk_edges, size, train, chunk, pmf):
    chunk_edges(chunk)
    problem = additive(graph(device), *size, "bipartite", pmf=pmf, bias=True)
    out = check(problem, train)["out"]
    alone = problem.graph.csc().indptr.diff() == 0
    assert alone.any() and (out[alone] == problem.tensors["bias"].view(size)).all()


def test_large_graph_with_super_nodes(device):
    size = (60, 60, 900) if device.type == "cpu" else (5000, 5000, 400_000)
    check(additive(graph(device, *size), 8, 8, "same"))


@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
@both_ways
def test_slopes(device, size, slope):
    check(additive(graph(device), *size, "bipartite", slope=slope))


@pytest.mark.parametrize("loops", [1, 40])
@both_ways
def test_loops(device, size, loops):
    problem = additive(graph(device, 40, 40, loops=loops), *size, "same", edge=True)
    grads = check(problem)
    dropped = torch.ones(problem.graph.num_edges, dtype=torch.bool, device=device)
    dropped[problem.graph.edges().eid] = False
    assert dropped.any() and (grads["a_edge"][dropped] == 0).all()


@both_ways
def test_wide_offsets(device, chunk_edges, size):
    chunk_edges(16)
    check(additive(graph(device, wide=True), *size, "bipartite", edge=True, dropout=0.3))


@on_devices("row,out", [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
            [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("size", [(8, 8), (3, 5)])
def test_half_rows(device, row, out, size):
    check(additive(graph(device), *size, "bipartite", row=row, out=out))


@on_devices("heads,width,terms", [(8, 8, "same"), (8, 8, "bipartite")],
            [(3, 5, "bipartite"), (1, 64, "same")])
def test_average_accuracy(device, heads, width, terms):
    check_average(lambda: additive(graph(device, 40, 40), heads, width, terms))


@pytest.mark.parametrize("terms", ["same", "bipartite"])
@pytest.mark.parametrize("scale", [5.0, 30.0])
@both_ways
def test_saturated_softmax(device, size, terms, scale):
    """Where one edge takes nearly all of a softmax, the gradient of att_dst is a small difference
    of large numbers: torch in fp32 loses all of it, so torch is no measure here. What is allowed
    comes from the scores, which reach 10 * scale."""
    problem = additive(graph(device, 40, 40), *size, terms, scale=scale)
    got, call = by_kernels(problem)
    exact = by_torch(problem, call, torch.float64)
    errors = {name: relative(got[name], exact[name]) for name in got}
    assert max(errors.values()) < 2e-6 * scale, errors


@both_ways
def test_dropout_of_everything_gives_zero_gradients(device, size):
    grads = by_kernels(additive(graph(device), *size, "bipartite", dropout=1.0, edge=True))[0]
    assert all((g == 0).all() for g in grads.values())


@pytest.mark.parametrize("name, value",
                         [("x", float("nan")), ("att_src", float("inf")), ("a_edge", float("nan")),
                          ("a_edge", float("inf"))])
@pytest.mark.parametrize("pmf, chunk", [(False, 1024), (True, 16)])
@both_ways
def test_gradients_are_not_silently_finite(device, chunk_edges, size, name, value, pmf, chunk):
    chunk_edges(chunk)
    problem = additive(graph(device), *size, "bipartite", edge=True, pmf=pmf)
    problem.tensors[name][0, 1] = value
    got, call = by_kernels(problem)
    plain = by_torch(problem, call, torch.float32)
    for key, expected in plain.items():
        silent = torch.isfinite(got[key]) & ~torch.isfinite(expected)
        assert not silent.any(), f"{key}: {int(silent.sum())} of {int((~torch.isfinite(expected)).sum())}"


@both_ways
def test_a_bad_gradient_reaches_the_inputs(device, size):
    problem = additive(graph(device), *size, "bipartite", edge=True)
    problem.grad_out()[3, 1, 2] = float("nan")
    got, call = by_kernels(problem)
    plain = by_torch(problem, call, torch.float32)
    for key in ("x", "x_dst", "a_edge", "att_src"):
        assert torch.equal(torch.isfinite(got[key]), torch.isfinite(plain[key])), key


@pytest.mark.parametrize("num_src, num_dst, edges",
                         [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0), (0, 0, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    problem = additive(graph(device, num_src, num_dst, edges), 3, 5, "bipartite")
    grads = by_kernels(problem)[0]
    if edges == 0:
        assert all((g == 0).all() for g in grads.values())
    else:
        torch.testing.assert_close(grads["x"], problem.grad_out(), rtol=1e-6, atol=1e-6)


@on_devices("change", ["non_contiguous", "misaligned", "expanded"])
def test_gradients_of_any_stride(device, change):
    problem = additive(graph(device), 8, 8, "bipartite")
    plain = problem.grad_out()
    if change == "non_contiguous":
        problem.grad = plain.transpose(0, 2).contiguous().transpose(0, 2)
    elif change == "misaligned":
        problem.grad = torch.cat([plain.new_zeros(1), plain.flatten()])[1:].view(plain.shape)
    else:
        problem.grad = plain[:1, :1, :1].expand_as(plain)  # what sum() sends back
    check(problem)


def test_results_repeat(device, chunk_edges):
    chunk_edges(16)
    problem = additive(graph(device, 40, 40), 8, 8, "same")
    runs = [by_kernels(problem)[0] for _ in range(3)]
    assert all(same_bits(runs[0][name], run[name]) for run in runs for name in run)
