"""Weighted sums of rows over a graph's edges, and the inner products that are the gradients of the
weights."""
from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse import aggregate
from gnnaccel.cuda.traverse.aggregate import Variant, edge_dot, factored, forward, variant
from gnnaccel.dispatch.graph.view import GraphView
from tests.attention_cases import SIZES, graph
from tests.emulation.orders import in_any_order
from tests.helpers import (FLOOR, ROUNDING, assert_accurate, forget_report, on_devices, relative,
                           same_bits)

pytestmark = pytest.mark.usefixtures("poison")

NARROW = [(1, 1, "edge"), (1, 3, "edge"), (2, 1, "head"), (1, 8, "none")]
ALL_SIZES = [*SIZES, (1, 3), (8, 1), (1, 8), (1, 131), factored(1024), factored(521)]
KINDS = ["head", "edge", "none"]


@dataclass
class Sum:
    variant: Variant
    rows: Rows
    x: Tensor
    weight: Tensor | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None


def make(rows, others, heads, width, weight="none", at="position", identity=False, mean=False,
         scale=False, bias=False, row=torch.float32, out=None) -> Sum:
    """A sum over ``rows`` of random rows; ``others``: nodes on the other side."""
    device, edges = rows.indptr.device, rows.other.shape[0]

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape).to(device, dtype)

    weights = {"none": None, "edge": (edges,), "head": (edges, heads)}[weight]
    return Sum(variant(heads, width, row, out or row, weight, at, identity, mean, rows.wide), rows,
               normal(edges if identity else others, heads, width, dtype=row),
               weights and normal(*weights), normal(rows.rows) if scale else None,
               normal(heads * width) if bias else None)


def run(p: Sum) -> Tensor:
    return forward(p.variant, p.rows, p.x, p.weight, p.scale, p.bias)


def ends(p: Sum) -> tuple[Tensor, Tensor, Tensor]:
    """Per edge in the order of ``p.rows``: its row, the row of x, and where arrays over edges have
    it."""
    total = int(p.rows.indptr[-1])
    position = torch.arange(total, device=p.x.device)
    row = torch.repeat_interleave(p.rows.indptr.diff().long(), output_size=total)
    other = position if p.variant.identity else p.rows.other[:total].long()
    return row, other, p.rows.place[:total].long() if p.variant.weight_at == "place" else position


def by_torch(p: Sum, dtype: torch.dtype) -> Tensor:
    row, other, at = ends(p)
    terms = p.x.to(dtype)[other]
    if p.weight is not None:
        terms = terms * p.weight.to(dtype)[at].view(row.shape[0],
                                                    p.weight.shape[1] if p.weight.dim() == 2 else 1,
                                                    1)
    out = torch.zeros(p.rows.rows, *p.x.shape[1:], dtype=dtype,
                      device=p.x.device).index_add(0, row, terms)
    count = p.rows.indptr.diff().to(dtype).view(-1, 1, 1)
    if p.scale is not None:
        out = torch.where(count > 0, out * p.scale.to(dtype).view(-1, 1, 1), 0)
    if p.variant.mean:
        out = out / count.clamp(min=1)
    return out if p.bias is None else out + p.bias.to(dtype).view(out.shape[1:])


def stored(dtype: torch.dtype) -> float:
    return ROUNDING[dtype] if dtype in (torch.float16, torch.bfloat16) else 0.0


def check(p: Sum) -> Tensor:
    got = run(p)
    assert got.dtype == p.variant.out
    assert_accurate("sum", got, by_torch(p, torch.float32), by_torch(p, torch.float64),
                    FLOOR + stored(got.dtype))
    return got


def dots_by_torch(p: Sum, left: Tensor, dtype: torch.dtype) -> Tensor:
    row, other, at = ends(p)
    out = torch.zeros(p.rows.other.shape[0], p.variant.heads, dtype=dtype, device=left.device)
    return out.index_copy(0, at, (left.to(dtype)[row] * p.x.to(dtype)[other]).sum(-1))


def left_of(p: Sum) -> Tensor:
    return torch.randn(p.rows.rows, p.variant.heads, p.variant.width).to(p.x.device, p.variant.out)


def check_dots(p: Sum) -> Tensor:
    left = left_of(p)
    got = edge_dot(p.variant, p.rows, left, p.x)
    assert got.dtype == torch.float32
    assert_accurate("dots", got, dots_by_torch(p, left, torch.float32),
                    dots_by_torch(p, left, torch.float64))
    return got


# ---- numbers ----

@pytest.mark.parametrize("chunk", [4096, 256])
@pytest.mark.parametrize("heads, width, weight", [(1, 64, "none"), (3, 5, "edge"), (1, 4, "head")])
def test_means_of_very_long_rows(device, chunk_edges, heads, width, weight, chunk):
    """Rows of some 600 and 1,700 edges, whole and split: one edge more or less in the divisor is
    seen."""
    chunk_edges(chunk)
    src, dst = torch.randint(0, 9, (2400,)), torch.zeros(2400, dtype=torch.int64)
    dst[:1700], dst[1700:2300], dst[2300:] = 1, 2, torch.randint(3, 6, (100,))
    view = GraphView(torch.stack([src, dst]).to(device), 9, 6, own=True)
    problem = make(view.csc(), 9, heads, width, weight, "place", mean=True)
    problem.x.abs_()
    if problem.weight is not None:
        problem.weight.abs_()
    check(problem)


@on_devices("heads,width,weight", [(h, d, KINDS[i % 3]) for i, (h, d) in enumerate(ALL_SIZES)],
            [(h, d, kind) for h, d in ALL_SIZES for kind in KINDS])
def test_sizes(device, chunk_edges, heads, width, weight):
    chunk_edges(40)  # so that rows of 32 and 33 edges are whole and the longest one is split
    view = graph(device)
    problem = make(view.csc(), view.num_src, heads, width, weight)
    check(problem)
    check_dots(problem)


@pytest.mark.parametrize("chunk", [1024, 150, 16])
@pytest.mark.parametrize("heads, width, weight", NARROW)
def test_rows_of_several_turns(device, chunk_edges, heads, width, weight, chunk):
    """Narrow rows go 128 edges at a time; the longest row here has some 300, and more in flight
    than one load brings."""
    chunk_edges(chunk)
    view = graph(device, 60, 50, 900)
    assert int(view.csc().indptr.diff().max()) > 256
    problem = make(view.csc(), view.num_src, heads, width, weight, "place")
    check(problem)
    check_dots(problem)


OPTIONS = [dict(weight="edge", at="position"), dict(weight="edge", at="place", scale=True),
           dict(weight="head", at="position", mean=True),
           dict(weight="head", at="place", bias=True), dict(mean=True, scale=True, bias=True),
           dict(identity=True, mean=True),
           dict(weight="head", at="place", identity=True, scale=True, bias=True)]


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("options", OPTIONS,
                         ids=lambda options: "-".join(map(str, options.values())))
def test_options(device, chunk_edges, options, chunk):
    chunk_edges(chunk)
    view = graph(device)
    view.csc()
    # by source, where place is far from position
    problem = make(view.csr(), view.num_dst, 3, 5, **options)
    check(problem)
    check_dots(problem)


@on_devices("row,out",
            [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16),
             (torch.float32, torch.float16)],
            [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)])
def test_half_rows(device, chunk_edges, row, out):
    chunk_edges(16)
    view = graph(device)
    problem = make(view.csc(), view.num_src, 8, 8, "head", row=row, out=out, bias=True)
    check(problem)
    check_dots(problem)


def test_half_rows_are_summed_in_fp32(device):
    """4096 + 1 is 4096 in half precision, so a sum kept in it would stay there."""
    view = graph(device, 40, 30, 200)
    problem = make(view.csc(), view.num_src, 1, 8, row=torch.bfloat16, out=torch.float32,
                   identity=True)
    problem.x.fill_(1.0)
    problem.x[::2] = 4096.0
    assert torch.equal(run(problem), by_torch(problem, torch.float32))


def test_wide_offsets(device, chunk_edges):
    chunk_edges(16)
    view = graph(device, wide=True)
    problem = make(view.csc(), view.num_src, 3, 5, "edge", "place", mean=True)
    assert problem.rows.place.dtype == torch.int64
    check(problem)
    check_dots(problem)
    check(make(view.csc(), view.num_src, 3, 5, "head", "place", identity=True))


def test_weights_per_head_of_one_head_are_the_edges(device):
    view = graph(device)
    problem = make(view.csc(), view.num_src, 1, 8, "head", "place")
    alone = replace(problem, variant=replace(problem.variant, weight="edge"),
                    weight=problem.weight.flatten())
    assert same_bits(check(problem), run(alone))


@pytest.mark.parametrize("weight", KINDS)
def test_split_rows_before_the_report(device, chunk_edges, weight):
    chunk_edges(16)
    view = graph(device)
    exact = forget_report(view.csc())
    assert view.csc().split.sizes() > exact
    problem = make(view.csc(), view.num_src, 3, 5, weight, mean=True)
    check(problem)
    check_dots(problem)


@pytest.mark.parametrize("chunk", [1024, 16])
def test_gradients(device, chunk_edges, chunk):
    """Forward by caller's edge ids, backward over the transposed graph by place in the CSC, against
    autograd in fp64."""
    chunk_edges(chunk)
    view, heads, width = graph(device), 3, 5
    csc, csr = view.csc(), view.csr()
    p = make(csc, view.num_src, heads, width, "head", "place")
    d_out = left_of(p)

    src, dst = view._ends()
    expected = []
    for dtype in (torch.float32, torch.float64):
        x, w = (t.to(dtype).requires_grad_() for t in (p.x, p.weight))
        out = torch.zeros(view.num_dst, heads, width, dtype=dtype,
                          device=device).index_add(0, dst, w.unsqueeze(-1) * x[src])
        expected.append((out.detach(), *torch.autograd.grad(out, (x, w), d_out.to(dtype))))

    in_csc_order = p.weight[csc.place.long()]
    by_src = variant(heads, width, torch.float32, torch.float32, "head", "place")
    got = run(p), forward(by_src, csr, d_out, in_csc_order), edge_dot(p.variant, csc, d_out, p.x)
    for name, value, plain, exact in zip(("out", "x", "weight"), got, *expected):
        assert_accurate(name, value, plain, exact, 1e-6 if name == "weight" else FLOOR)
    by_position = replace(p, variant=replace(p.variant, weight_at="position"), weight=in_csc_order)
    assert same_bits(run(by_position), got[0])
    # the inner products by source, written to places in the CSC
    transposed = edge_dot(by_src, csr, p.x, d_out)
    assert_accurate("transposed", transposed, *(e[2][csc.place.long()] for e in expected), 1e-6)


# ---- graphs ----

@pytest.mark.parametrize("num_src, num_dst, edges",
                         [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0), (0, 0, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    view = graph(device, num_src, num_dst, edges)
    problem = make(view.csc(), num_src, 3, 5, "head", mean=True)
    assert check(problem).shape == (num_dst, 3, 5)
    assert check_dots(problem).shape == (edges, 3)
    if edges:
        assert torch.equal(run(problem), problem.weight.unsqueeze(-1) * problem.x)


@pytest.mark.parametrize("row", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 64), (3, 5)], ids=str)
@pytest.mark.parametrize("split", [False, True])
def test_adding_to_what_is_there(device, chunk_edges, split, size, row):
    if split:
        chunk_edges(32)
    view = graph(device)
    problem = make(view.csc(), view.num_src, *size, "edge", scale=True, bias=True, row=row)
    alone = run(problem)
    into = torch.randn(alone.shape).to(alone)
    expected = into.double() + alone.double()
    got = forward(problem.variant, problem.rows, problem.x, problem.weight, problem.scale,
                  problem.bias, into)
    assert got is into
    assert (got.double() - expected).norm() <= (1e-6
                                                if row is torch.float32 else 8e-3) * expected.norm()


def test_rows_without_edges_are_the_bias(device):
    view = graph(device)
    problem = make(view.csc(), view.num_src, 3, 5, mean=True, scale=True, bias=True)
    alone = view.csc().indptr.diff() == 0
    problem.scale[alone] = float("inf")  # as 1 / count makes them
    out = check(problem)
    assert alone.any() and (out[alone] == problem.bias.view(3, 5)).all()
    problem.bias = None
    assert (run(problem)[alone] == 0).all()


def test_edges_that_the_graph_dropped_count_nothing(device):
    """Loops of the caller are replaced by new ones; what stands at their ids is neither read nor
    written."""
    view = graph(device, 40, 40, loops=30)
    src, dst = view._ends()
    dropped = torch.nonzero(src == dst).flatten()
    problem = make(view.csc(), view.num_src, 3, 5, "head", "place")
    assert len(dropped) and problem.weight.shape[0] == src.shape[0] + 30
    problem.weight[dropped] = float("nan")
    check(problem)
    assert (check_dots(problem)[dropped] == 0).all()
    by_position = make(view.csc(), view.num_src, 3, 5, "head")
    assert (check_dots(by_position)[int(view.csc().indptr[-1]):] == 0).all()


# ---- numbers that are not finite ----

def kinds(t: Tensor) -> Tensor:
    return torch.isnan(t) * 2 + torch.isinf(t)


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("name, value",
                         [("x", float("nan")), ("x", float("inf")), ("weight", float("inf")),
                          ("weight", float("nan")), ("scale", float("nan"))])
@pytest.mark.parametrize("heads, width, weight", [(3, 5, "head"), (1, 131, "edge"), (1, 3, "edge")])
def test_what_is_not_finite_stays_in_its_rows(device, chunk_edges, heads, width, weight, name,
                                              value, chunk):
    chunk_edges(chunk)
    view = graph(device)
    problem = make(view.csc(), view.num_src, heads, width, weight, scale=True)
    indptr = view.csc().indptr
    # the first edge of the row of 32: 131 channels go three edges at a time, so its lane is asked
    # for a 33rd one as well
    first = int(indptr[6])
    at = {"x": int(view.csc().other[first]), "weight": first, "scale": 6}[name]
    getattr(problem, name)[at] = value
    got, expected = run(problem), by_torch(problem, torch.float32)
    assert int(indptr.diff()[6]) == 32 and not torch.isfinite(expected[6]).all() and torch.isfinite(
        expected).any()
    assert torch.equal(kinds(got), kinds(expected))


def test_inner_products_that_are_not_finite_stay_with_their_edges(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    problem = make(view.csc(), view.num_src, 3, 5, "head", "place")
    left = left_of(problem)
    problem.x[7, 1, 2], left[3, 2, 4] = float("inf"), float("nan")
    got, expected = edge_dot(problem.variant, problem.rows, left,
                             problem.x), dots_by_torch(problem, left, torch.float32)
    assert torch.isinf(expected).any() and torch.isnan(expected).any() and torch.isfinite(
        expected).any()
    assert torch.equal(kinds(got), kinds(expected))


# ---- order and memory ----

@pytest.mark.parametrize("heads, width, weight", [(3, 5, "head"), (1, 1, "edge")])
def test_scheduling_does_not_change_the_result(chunk_edges, heads, width, weight):
    chunk_edges(16)

    def made():
        view = graph("cpu")
        problem = make(view.csc(), view.num_src, heads, width, weight, mean=True, bias=True)
        left = left_of(problem)
        return lambda: (run(problem), edge_dot(problem.variant, problem.rows, left, problem.x))

    in_any_order(made)


def test_results_repeat(device, chunk_edges):
    chunk_edges(16)
    view = graph(device, *((60, 50, 900) if device.type == "cpu" else (5000, 4000, 400_000)))
    problem = make(view.csc(), view.num_src, 3, 5, "head", "place")
    first = check(problem)
    assert all(same_bits(run(problem), first) for _ in range(3))


def test_inputs_and_outputs_keep_their_bounds(device, chunk_edges, poison):
    chunk_edges(16)
    view = graph(device)
    problem = make(view.csc(), view.num_src, 3, 5, "head", "place", scale=True, bias=True)
    names = ("x", "weight", "scale", "bias")
    guarded = replace(problem, **{name: poison.guard(getattr(problem, name)) for name in names})
    check(guarded)
    check_dots(guarded)
    assert all(same_bits(getattr(guarded, name), getattr(problem, name)) for name in names)
    poison.check()


@on_devices("heads,width,weight",
            [(1, 64, "none"), (8, 8, "head"), (1, 32, "edge"), (2, 20, "head"), (1, 16, "none")],
            [])
@pytest.mark.parametrize("at", ["position", "place"])
@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("mean", [False, True])
def test_short_rows_and_long_ones_agree(device, chunk_edges, monkeypatch, heads, width, weight, at,
                                        chunk, mean):
    """Of a graph whose rows are short on average, whichever kernel sums them; the hub is in
    chunks."""
    chunk_edges(chunk)
    p = make(graph(device, 40, 37, 250).csc(), 40, heads, width, weight, at, mean=mean, scale=True,
             bias=True)
    found = []
    for most in (10**6, 0):
        monkeypatch.setattr(aggregate, "_SHORT", most)
        check(p)
        found.append(run(p))
    assert relative(found[0], found[1]) < 1e-6
