"""Pairwise attention: the output under training and the gradient of every input."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.attention import pairwise as launchers
from gnnaccel.cuda.attention.pairwise import SCORES
from gnnaccel.dispatch.graph import view as graph_module
from gnnaccel.dispatch.run import attention, attention_families as families
from gnnaccel.dispatch.run.attention_families import keeps_scores, side_by_side
from tests.attention_cases import (SIZES, by_kernels, by_torch, check, check_average, graph,
                                   pairwise, pairwise_vectors)
from tests.helpers import forget_report, on_devices, relative, same_bits

pytestmark = pytest.mark.usefixtures("poison")

KINDS = [(score, False) for score in SCORES] + [("gatv2", True), ("dot", True)]


@on_devices("heads,width,score",
            [(h, d, list(SCORES)[i % len(SCORES)]) for i, (h, d) in enumerate(SIZES)],
            [(h, d, score) for h, d in SIZES for score in SCORES])
def test_sizes(device, heads, width, score):
    check(pairwise(score, graph(device), heads, width))


@on_devices("score,edge,dropout,heads,width",
            [(*kind, 0.0, 3, 5) for kind in KINDS] + [("gatv2", True, 0.3, 3, 5),
                                                      ("dot", True, 0.3, 8, 8),
                                                      ("mx", False, 0.3, 3, 5),
                                                      ("sd", False, 0.3, 3, 5),
                                                      ("gatv2", False, 0.3, 1, 64)],
            [(*kind, p, *size) for kind in KINDS for p in (0.0, 0.3) if kind[0] != "cosine"
             for size in SIZES])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_kinds(device, chunk_edges, score, edge, dropout, heads, width, chunk):
    chunk_edges(chunk)
    problem = pairwise(score, graph(device), heads, width, edge, dropout)
    check(problem)
    if device.type == "cuda":
        torch.cuda.synchronize()
    splits = [rows.split.sizes()[1] for rows in (problem.graph.csc(), problem.graph.csr())]
    assert all(splits) == (chunk == 16)


@on_devices("score", ["gatv2", "dot"], list(SCORES))
def test_split_rows_before_the_report(device, chunk_edges, score):
    chunk_edges(16)
    problem = pairwise(score, graph(device), 8, 8)
    for rows in (problem.graph.csc(), problem.graph.csr()):
        forget_report(rows)
    check(problem)


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("train", [False, True])
def test_bias(device, chunk_edges, train, chunk, edge):
    chunk_edges(chunk)
    problem = pairwise("gatv2", graph(device), 3, 5, edge, bias=True)
    out = check(problem, train)["out"]
    alone = problem.graph.csc().indptr.diff() == 0
    assert alone.any() and (out[alone] == problem.tensors["bias"].view(3, 5)).all()


@on_devices("score,heads,width", [(score, 3, 5) for score in SCORES],
            [(score, 8, 8) for score in SCORES])
def test_average_accuracy(device, score, heads, width):
    check_average(lambda: pairwise(score, graph(device), heads, width))


@pytest.mark.parametrize("score", ["gatv2", "dot"])
def test_large_graph_with_super_nodes(device, score):
    size = (60, 50, 900) if device.type == "cpu" else (5000, 4000, 400_000)
    check(pairwise(score, graph(device, *size), 8, 8))


@pytest.mark.parametrize("chunk", [1024, 16])
def test_the_attention_vectors_sum_when_blocks_take_many_rows(device, chunk_edges, monkeypatch,
                                                              chunk):
    chunk_edges(chunk)
    monkeypatch.setattr(launchers, "_ATT_BLOCKS", 2)
    check(pairwise("gatv2", graph(device), 3, 5, edge=True))


@pytest.mark.parametrize("slope", [0.0, 1.0])
@pytest.mark.parametrize("score", ["gatv2", "mx", "sd"])
def test_slopes(device, score, slope):
    check(pairwise(score, graph(device), 3, 5, slope=slope))


@pytest.mark.parametrize("score", ["gatv2", "dot"])
def test_loops(device, score):
    problem = pairwise(score, graph(device, 40, 40, loops=30), 3, 5, edge=True)
    grads = check(problem)
    dropped = torch.ones(problem.graph.num_edges, dtype=torch.bool, device=device)
    dropped[problem.graph.edges().eid] = False
    assert dropped.any() and (grads["edges"][dropped] == 0).all()


def test_wide_offsets(device, chunk_edges):
    chunk_edges(16)
    check(pairwise("dot", graph(device, wide=True), 3, 5, edge=True, dropout=0.3))


@on_devices("row,out", [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
            [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("score", ["gatv2", "dot"])
def test_half_rows(device, row, out, score):
    # backward reads the output as it was stored: delta = <dO, O> carries its rounding into
    # differences
    check(pairwise(score, graph(device), 8, 8, edge=True, row=row, out=out),
          floor=0.0 if out == torch.float32 else 2e-2)


@pytest.mark.parametrize("score", SCORES)
def test_saturated_softmax(device, score):
    """Where one edge takes nearly all of a softmax, t - delta is a small difference: what can be
    had is bounded by the scores."""
    problem = pairwise(score, graph(device), 3, 5, scale=10.0)
    got, call = by_kernels(problem)
    exact = by_torch(problem, call, torch.float64)
    errors = {name: relative(got[name], exact[name]) for name in got}
    assert max(errors.values()) < 1e-3, errors


def _score(name: str, t: dict) -> torch.Tensor:
    """The scores of problems of `pairwise` whose source i belongs to destination i // 2."""
    leaky, queries = torch.nn.functional.leaky_relu, t["queries"].repeat_interleave(2, 0)
    if name == "gatv2":
        return (t["att"] * leaky(t["keys"] + queries, 0.2)).sum(-1)
    dot = (t["keys"] * queries).sum(-1)
    if name == "mx":
        return leaky((t["c_src"] + t["c_dst"].repeat_interleave(2, 0)) * dot.sigmoid(), 0.2)
    return {"dot": 0.7 * dot, "cosine": dot * t.get("c_src", 1.0),
            "sd": leaky(0.7 * dot, 0.2)}[name]


def _nearly_decided(device, score: str):
    """Two sources for each destination, of which one has 1e-7 to 2e-6 of the softmax."""
    rows = 60
    edges = torch.stack([torch.arange(2 * rows), torch.arange(rows).repeat_interleave(2)])
    view = graph_module.GraphView(edges.to(device), 2 * rows, rows, own=True)
    problem = pairwise(score, view, 3, 5)
    tensors, scaled = problem.tensors, {"gatv2": ("keys", "queries"), "mx": ("c_src", "c_dst")}
    ratio = (1e-7 * 20 ** torch.rand(rows, 3)).log().abs().to(device)
    gap = _score(score, tensors).view(rows, 2, 3).diff(dim=1).abs().squeeze(1)
    for name in scaled.get(score, ("queries",)):  # what the scores are proportional to
        t = tensors[name]
        factor = (ratio / gap).repeat_interleave(t.shape[0] // rows, 0)
        tensors[name] = t * (factor if t.dim() == 2 else factor.unsqueeze(-1))
    return problem


@pytest.mark.long
@pytest.mark.parametrize("score", SCORES)
def test_one_edge_takes_nearly_all(device, score):
    """Its gradient is a difference no larger than roundings, but balances that of the other edge.

    Medians, as some scores are so large that little is left of either's digits."""
    errors = []
    for _ in range(16):
        problem = _nearly_decided(device, score)
        got, call = by_kernels(problem)
        exact, plain = (by_torch(problem, call, t)["queries"] for t in (torch.float64,
                                                                        torch.float32))
        errors.append((relative(got["queries"], exact), relative(plain, exact)))
    ours, torchs = torch.tensor(errors).median(0).values.tolist()
    assert ours <= 2 * torchs, f"error {ours:.2e}, {torchs:.2e} by torch in fp32"


def test_one_of_two_edges_from_one_source_takes_nearly_all(device):
    """Both have the same value, so their softmax does not matter."""
    edges = torch.zeros(2, 2, dtype=torch.long, device=device)
    view = graph_module.GraphView(edges, 1, 1, own=True)
    problem = pairwise("gatv2", view, 3, 5, edge=True)
    att, tensors = problem.tensors["att"], problem.tensors
    for name in ("keys", "queries"):
        tensors[name] = torch.zeros_like(tensors[name])
    score = (att * torch.nn.functional.leaky_relu(att, 0.2)).sum(-1, keepdim=True)
    tensors["edges"] = torch.cat([att * 9 / score, att * 0])  # 0.9999 of the softmax and the rest
    got, _ = by_kernels(problem)
    assert all((got[name] == 0).all() for name in ("queries", "att", "edges"))


@pytest.mark.parametrize("score", ["gatv2", "dot", "mx", "sd"])
def test_dropout_of_everything_gives_zero_gradients(device, score):
    grads = by_kernels(pairwise(score, graph(device), 3, 5, dropout=1.0))[0]
    assert all((g == 0).all() for g in grads.values())


BAD = [("gatv2", "keys", float("nan")), ("gatv2", "att", float("inf")),
       ("dot", "queries", float("nan")), ("dot", "edges", float("nan")),
       ("cosine", "c_src", float("nan")), ("mx", "c_dst", float("inf"))]


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("score, name, value", BAD)
def test_gradients_are_not_silently_finite(device, chunk_edges, score, name, value, chunk):
    chunk_edges(chunk)
    problem = pairwise(score, graph(device), 3, 5, edge=name == "edges")
    problem.tensors[name][0, 1] = value
    got, call = by_kernels(problem)
    for key, expected in by_torch(problem, call, torch.float32).items():
        silent = torch.isfinite(got[key]) & ~torch.isfinite(expected)
        assert not silent.any(), f"{key}: {int(silent.sum())} of {int((~torch.isfinite(expected)).sum())}"


@pytest.mark.parametrize("num_src, num_dst, edges",
                         [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("score", ["gatv2", "mx"])
def test_small_and_empty_graphs(device, score, num_src, num_dst, edges):
    problem = pairwise(score, graph(device, num_src, num_dst, edges), 3, 5)
    grads = by_kernels(problem)[0]
    if edges == 0:
        assert all((g == 0).all() for g in grads.values())
    else:
        torch.testing.assert_close(grads["keys"], problem.grad_out(), rtol=1e-6, atol=1e-6)


@on_devices("change", ["non_contiguous", "misaligned", "expanded"])
def test_gradients_of_any_stride(device, change):
    problem = pairwise("gatv2", graph(device), 8, 8)
    plain = problem.grad_out()
    if change == "non_contiguous":
        problem.grad = plain.transpose(0, 2).contiguous().transpose(0, 2)
    elif change == "misaligned":
        problem.grad = torch.cat([plain.new_zeros(1), plain.flatten()])[1:].view(plain.shape)
    else:
        problem.grad = plain[:1, :1, :1].expand_as(plain)  # what sum() sends back
    check(problem)


@pytest.mark.parametrize("score", ["gatv2", "dot"])
def test_results_repeat(device, chunk_edges, score):
    chunk_edges(16)
    problem = pairwise(score, graph(device), 8, 8)
    runs = [by_kernels(problem)[0] for _ in range(3)]
    assert all(same_bits(runs[0][name], run[name]) for run in runs for name in run)


@pytest.mark.parametrize("edge,dropout,heads,width",
                         [(False, 0.0, 4, 16), (True, 0.0, 8, 8), (False, 0.3, 1, 4),
                          (False, 0.0, 3, 5)])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_keys_and_values_side_by_side(device, chunk_edges, chunk, edge, dropout, heads, width):
    """Rows that are no multiple of 16 bytes are copied."""
    chunk_edges(chunk)
    problem = pairwise("dot", graph(device), heads, width, edge, dropout)
    torch.manual_seed(1)
    expected, _ = by_kernels(problem)
    both = torch.stack([problem.tensors["keys"], problem.tensors["values"]], 1)
    problem.tensors.update(keys=both[:, 0], values=both[:, 1])
    torch.manual_seed(1)
    got, call = by_kernels(problem)
    assert all(same_bits(got[name].contiguous(), expected[name]) for name in expected)
    beside = width % 4 == 0
    assert side_by_side(got["keys"],
                        got["values"]) == side_by_side(both[:, 0], both[:, 1]) == beside


def _large(monkeypatch):
    """Every graph made from now on keeps its scores."""
    monkeypatch.setattr(graph_module, "SORT_FROM", 1)
    monkeypatch.setattr(families, "_KEPT_SHARE", 0)
    monkeypatch.setattr(families, "_LEAST_ROW", 0)


@on_devices("heads,width,dropout,loops,beside,row",
            [(4, 16, 0.0, 0, True, torch.float32), (3, 5, 0.3, 9, False, torch.float32),
             (12, 20, 0.3, 0, False, torch.bfloat16)],
            [(h, d, p, 0, d % 4 == 0, torch.float32) for h, d in SIZES for p in (0.0, 0.3)])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_scores_kept_between_the_passes(device, chunk_edges, monkeypatch, chunk, heads, width,
                                        dropout, loops, beside, row):
    chunk_edges(chunk)
    torch.manual_seed(1)
    plain, _ = by_kernels(pairwise("dot", graph(device, loops=loops), heads, width, False, dropout,
                                   row=row))
    torch.manual_seed(1)
    _large(monkeypatch)
    problem = pairwise("dot", graph(device, loops=loops), heads, width, False, dropout, row=row)
    if beside:
        both = torch.stack([problem.tensors["keys"], problem.tensors["values"]], 1)
        problem.tensors.update(keys=both[:, 0], values=both[:, 1])
    got = check(problem)
    assert problem.graph.csr(False).inverse is not None
    # a GPU builds small graphs in any order, and masks go by places
    if not dropout or device.type == "cpu":
        torch.testing.assert_close(got["queries"], plain["queries"],
                                   rtol=1e-2 if row is torch.bfloat16 else 1e-4, atol=1e-4)
    again, _ = by_kernels(problem)
    assert dropout or all(same_bits(again[name].contiguous(), got[name].contiguous())
                          for name in got)


@pytest.mark.long
def test_scores_kept_with_wide_offsets_and_without_edges(device, chunk_edges, monkeypatch):
    chunk_edges(16)
    _large(monkeypatch)
    check(pairwise("dot", graph(device, wide=True), 3, 5, dropout=0.3))
    for size in ((40, 30, 0), (0, 5, 0), (5, 0, 0)):
        problem = pairwise("dot", graph(device, *size), 3, 5)
        problem.graph.large = True
        assert all((g == 0).all() for g in by_kernels(problem)[0].values())


def test_scores_are_kept_where_nodes_hold_more_memory(device, monkeypatch):
    problem = pairwise("dot", graph(device), 8, 8)
    found = problem.call().attention
    assert not keeps_scores(found, problem.graph, 8, 8, 4)  # a small graph
    monkeypatch.setattr(graph_module, "SORT_FROM", 1)
    view = graph(device, 1000, 1000, 200)
    assert keeps_scores(found, view, 8, 8,
                        4) and not keeps_scores(found, graph(device, 40, 30, 5000), 8, 8, 4)
    assert not keeps_scores(found, view, 8, 4,
                            4) and not keeps_scores(pairwise("sd", view, 8, 8).call().attention,
                                                    view, 8, 8, 4)
    assert not keeps_scores(pairwise("dot", view, 8, 8, True).call().attention, view, 8, 8, 4)


def test_backward_twice_through_a_graph_that_is_kept(device):
    problem = pairwise("dot", graph(device), 8, 8)
    tensors = {name: t.detach().requires_grad_() for name, t in problem.tensors.items()}
    out = attention.run_cuda(problem.call(), tensors)
    first = torch.autograd.grad(out, list(tensors.values()), problem.grad_out(), retain_graph=True)
    second = torch.autograd.grad(out, list(tensors.values()), problem.grad_out())
    assert all(map(same_bits, first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, list(tensors.values()), problem.grad_out())


@on_devices("heads,width,dropout,row", [(3, 5, 0.3, torch.float32), (8, 8, 0.0, torch.bfloat16)],
            [(*size, 0.0, torch.float32) for size in SIZES])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_several_attention_vectors(device, chunk_edges, chunk, heads, width, dropout, row):
    chunk_edges(chunk)
    problem = pairwise_vectors(device, heads, width, 3, dropout, row=row)
    got = check(problem)
    # the last has no edges
    assert not got["att"][2].any() and got["att"][:2].any() and not got["out"][30:].any()
    twice, _ = by_kernels(problem)
    assert dropout or same_bits(twice["att"], got["att"])
