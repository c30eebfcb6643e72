"""Sums of int8 rows with a scale per row: exact but for fp32's rounding, given the rows; and what
they do to gradients."""
from __future__ import annotations

from functools import partial

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.int8 import quantize
from gnnaccel.cuda.int8.quantize import Int8Rows, bf16_rows, int8_rows
from gnnaccel.cuda.traverse import aggregate
from gnnaccel.cuda.traverse.aggregate import edge_dot, forward, variant
from tests.attention_cases import graph
from tests.cuda.test_aggregate import Sum, by_torch, dots_by_torch, left_of, make
from tests.emulation.orders import in_any_order
from tests.helpers import FLOOR, assert_accurate, on_devices, relative

pytestmark = pytest.mark.usefixtures("poison")

KINDS = ["none", "edge", "head"]
SIZES = [(1, 1), (1, 7), (1, 16), (1, 47), (1, 64), (1, 100), (1, 128), (1, 131), (1, 256),
         (1, 512), (1, 521), (1, 1024), (8, 8), (3, 5), (2, 40), (12, 20), (4, 32), (40, 2),
         (2, 512)]


@dataclass
class Case:
    """A sum over int8 rows, and the same over what they stand for."""

    exact: Sum
    rows: Int8Rows

    @property
    def variant(self):
        return replace(self.exact.variant, row=torch.int8)


def quantized(p: Sum, stochastic: bool = False) -> Case:
    rows = int8_rows(p.x, quantize.key(p.x.device) if stochastic else None)
    values = rows.data[:, :rows.width].double() * rows.scale.double().unsqueeze(1)
    return Case(replace(p, x=values.view(p.x.shape)), rows)


def case(rows, others, heads, width, *args, **more) -> Case:
    wide = heads * width > 512 and args[:1] != ("head",)  # `make` sees the layout of floats
    p = make(rows, others, *(aggregate.factored(heads * width) if wide else (heads, width)), *args,
             **more)
    return quantized(p)


def run(c: Case) -> Tensor:
    p = c.exact
    return forward(c.variant, p.rows, c.rows, p.weight, p.scale, p.bias)


def check(c: Case, floor: float = FLOOR) -> Tensor:
    got = run(c)
    stored = 0.0 if got.dtype is torch.float32 else 2.0**-8
    assert_accurate("sum", got, by_torch(c.exact, torch.float32), by_torch(c.exact, torch.float64),
                    floor + stored)
    return got


def check_dots(c: Case) -> None:
    p, left = c.exact, left_of(c.exact)
    whole = int8_rows(left.float())
    exact_left = (whole.data[:,
                             :whole.width].double() * whole.scale.double().unsqueeze(1)).view(
                                 left.shape)
    for given, values in ((left, left), (whole, exact_left)):
        got = edge_dot(c.variant, p.rows, given, c.rows)
        plain, exact = (dots_by_torch(p, values, dtype) for dtype in (torch.float32, torch.float64))
        if not c.variant.per_head:
            plain, exact = plain.sum(1, keepdim=True), exact.sum(1, keepdim=True)
        assert_accurate("dots", got, plain, exact, 3e-7)


# ---- numbers ----

@on_devices("heads,width,weight",
            [(h, d, KINDS[i % 3]) for i, (h, d) in enumerate(SIZES) if h * d < 513 or h > 1],
            [(h, d, kind) for h, d in SIZES for kind in KINDS if d <= 512 or kind != "head"])
def test_sizes(device, chunk_edges, heads, width, weight):
    chunk_edges(40)
    view = graph(device)
    c = case(view.csc(), view.num_src, heads, width, weight)
    check(c)
    check_dots(c)


@on_devices("width", [521, 1024, 1433])
def test_rows_wider_than_a_warp(device, chunk_edges, width):
    chunk_edges(40)
    view = graph(device)
    c = case(view.csc(), view.num_src, 1, width, "edge", bias=True)
    check(c)
    check_dots(c)


OPTIONS = [dict(weight="edge", at="place", scale=True),
           dict(weight="head", at="position", mean=True),
           dict(weight="head", at="place", bias=True), dict(mean=True, scale=True, bias=True),
           dict(identity=True, mean=True),
           dict(weight="head", at="place", identity=True, scale=True, bias=True)]


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("size", [(3, 5), (2, 16)], ids=str)
@pytest.mark.parametrize("options", OPTIONS,
                         ids=lambda options: "-".join(map(str, options.values())))
def test_options(device, chunk_edges, options, size, chunk):
    chunk_edges(chunk)
    view = graph(device)
    view.csc()
    c = case(view.csr(), view.num_dst, *size, **options)
    check(c)
    check_dots(c)


@pytest.mark.parametrize("chunk", [1024, 150, 16])
@pytest.mark.parametrize("width, weight", [(3, "edge"), (32, "none"), (64, "edge")])
def test_rows_of_several_turns(device, chunk_edges, width, weight, chunk):
    chunk_edges(chunk)
    view = graph(device, 60, 50, 900)
    c = case(view.csc(), view.num_src, 1, width, weight, "place")
    check(c)
    check_dots(c)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_results_in_half_precision(device, out):
    view = graph(device)
    check(case(view.csc(), view.num_src, 1, 48, "edge", out=out, bias=True))


def test_wide_offsets(device, chunk_edges):
    chunk_edges(16)
    view = graph(device, wide=True)
    c = case(view.csc(), view.num_src, 3, 5, "edge", "place", mean=True)
    check(c)
    check_dots(c)


@on_devices("heads,width,weight", [(1, 64, "none"), (8, 8, "head"), (1, 20, "edge")])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_short_rows_and_long_ones_agree(device, chunk_edges, monkeypatch, heads, width, weight,
                                        chunk):
    chunk_edges(chunk)
    c = case(graph(device, 40, 37, 250).csc(), 40, heads, width, weight, "place", mean=True,
             scale=True, bias=True)
    found = []
    for most in (10**6, 0):
        monkeypatch.setattr(aggregate, "_SHORT", most)
        check(c)
        found.append(run(c))
    assert relative(found[0], found[1]) < 1e-6


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("width", [64, 7])
def test_adding_to_what_is_there(device, chunk_edges, split, width):
    if split:
        chunk_edges(32)
    view = graph(device)
    c = case(view.csc(), view.num_src, 1, width, "edge", scale=True, bias=True)
    alone, p = run(c), c.exact
    into = torch.randn(alone.shape).to(alone)
    expected = into.double() + alone.double()
    got = forward(c.variant, p.rows, c.rows, p.weight, p.scale, p.bias, into)
    assert got is into and (got.double() - expected).norm() <= 1e-6 * expected.norm()


# ---- rows and graphs that are not like others ----

@pytest.mark.parametrize("weight", KINDS)
def test_rows_that_are_not_like_others(device, weight):
    view = graph(device)
    p = make(view.csc(), view.num_src, 2, 20, weight)
    p.x[1], p.x[2], p.x[3, 0, 0], p.x[4] = 0.0, -2.5, 1e6, 1e-38
    # a few sums of 1e6 with either sign are nearly all of the norm: no average over many
    check(quantized(p), 6e-7)


def test_what_is_not_finite_stays_in_the_rows_it_enters(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    for weight in KINDS:
        p = make(view.csc(), view.num_src, 3, 5, weight)
        p.x[7, 1, 2] = float("inf")
        got = run(quantized(p))
        enters = torch.zeros(view.num_dst, dtype=torch.bool, device=device)
        edges = view.edges()
        enters[edges.dst[edges.src == 7]] = True
        assert enters.any() and torch.equal(torch.isnan(got).flatten(1).all(1), enters)
        assert torch.isfinite(got[~enters]).all()


@pytest.mark.parametrize("num_src, num_dst, edges",
                         [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0), (0, 0, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    view = graph(device, num_src, num_dst, edges)
    c = case(view.csc(), num_src, 3, 5, "head", mean=True)
    assert check(c).shape == (num_dst, 3, 5)
    assert edge_dot(c.variant, c.exact.rows, left_of(c.exact), c.rows).shape == (edges, 3)


@pytest.mark.parametrize("weight", ["edge", "head"])
def test_scheduling_does_not_change_the_result(chunk_edges, weight):
    chunk_edges(16)

    def made():
        view = graph("cpu")
        return partial(run, case(view.csc(), view.num_src, 3, 5, weight))

    in_any_order(made)


def test_nothing_outside_is_touched(device, chunk_edges, poison):
    chunk_edges(16)
    view = graph(device)
    for size, weight in (((1, 47), "edge"), ((3, 5), "head")):
        c = case(view.csc(), view.num_src, *size, weight, scale=True, bias=True)
        rows = replace(c.rows, data=poison.guard(c.rows.data), scale=poison.guard(c.rows.scale))
        guarded = Case(replace(c.exact, weight=poison.guard(c.exact.weight),
                               bias=poison.guard(c.exact.bias)), rows)
        check(guarded)
        check_dots(guarded)
        poison.check()


# ---- what quantizing does ----

def test_a_scale_per_tensor_loses_rows_that_a_scale_per_row_keeps(device):
    """One row a million times as large as the others: with its scale they are zero, as is what sums
    them."""
    view = graph(device)
    p = make(view.csc(), view.num_src, 1, 32, "edge")
    p.x[0] *= 1e6
    edges = view.edges()
    without = torch.ones(view.num_dst, dtype=torch.bool, device=device)
    without[edges.dst[edges.src == 0]] = False
    whole = by_torch(p, torch.float64)[without]
    one = (p.x / (p.x.abs().max() / 127)).round() * (p.x.abs().max() / 127)
    assert relative(run(quantized(p))[without], whole) < 0.02
    assert relative(by_torch(replace(p, x=one), torch.float64)[without], whole) > 0.99


@pytest.mark.parametrize("chunk", [1024, 16])
def test_gradients(device, chunk_edges, chunk):
    """Rows and gradients int8: every gradient close to fp64's, and exact given the quantized
    rows."""
    chunk_edges(chunk)
    view, width = graph(device), 32
    csc, csr = view.csc(), view.csr()
    p = make(csc, view.num_src, 1, width, "edge", "place")
    d_out = torch.randn(view.num_dst, 1, width).to(device)
    rows, grad = int8_rows(p.x), int8_rows(d_out, quantize.key(device))
    by_edge, by_src = (variant(1, width, torch.int8, torch.float32, "edge", "place")
                       for _ in range(2))
    weight = p.weight[csc.place.long()]
    d_x, d_weight = forward(by_src, csr, grad, weight), edge_dot(by_edge, csc, grad, rows)

    src, dst = view._ends()
    x, w = (t.double().requires_grad_() for t in (p.x, p.weight))
    out = torch.zeros(view.num_dst, 1, width, dtype=torch.float64, device=device)
    out = out.index_add(0, dst, w.view(-1, 1, 1) * x[src])
    exact = torch.autograd.grad(out, (x, w), d_out.double())
    for got, expected in ((d_x, exact[0]), (d_weight.flatten(), exact[1])):
        assert relative(got, expected) < 0.02
        assert torch.cosine_similarity(got.double().flatten(), expected.flatten(), 0) > 0.9995
    given = (grad.data.double() * grad.scale.double().unsqueeze(1)).view(d_out.shape)
    d_given = torch.zeros_like(x).index_add(0, src, w.detach().view(-1, 1, 1) * given[dst])
    assert relative(d_x, d_given) < 1e-6


@pytest.mark.long
def test_gradients_are_unbiased(device):
    """The mean over draws of the gradient comes as close as its own spread allows."""
    view, draws = graph(device), 150
    csr = view.csr()
    d_out = torch.randn(view.num_dst, 1, 16).to(device)
    plain = variant(1, 16, torch.float32, torch.float32)
    exact = forward(plain, csr, d_out).double()
    found = torch.stack([forward(replace(plain, row=torch.int8), csr,
                                 int8_rows(d_out, quantize.key(device))).double()
                         for _ in range(draws)])
    spread = found.std(0) / draws**0.5
    seen = spread > 1e-5
    z = (found.mean(0) - exact)[seen] / spread[seen]
    assert seen.any() and z.abs().max() < 6 and abs(z.mean()) < 0.5 and 0.7 < z.std() < 1.4


def test_bf16_rows_with_fp32_results(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    p = make(view.csc(), view.num_src, 1, 24, "edge", row=torch.bfloat16, out=torch.float32)
    got = forward(p.variant, p.rows, p.x, p.weight)
    assert got.dtype is torch.float32
    assert_accurate("sum", got, by_torch(p, torch.float32), by_torch(p, torch.float64))
    d_out = torch.randn(view.num_dst, 1, 24).to(device)
    view.csc()
    drawn = replace(p, rows=view.csr(), x=bf16_rows(d_out, quantize.key(device)), weight=p.weight)
    assert_accurate("grad", forward(drawn.variant, drawn.rows, drawn.x, drawn.weight),
                    by_torch(drawn, torch.float32), by_torch(drawn, torch.float64))


# ---- refusals ----

@pytest.mark.parametrize("change, message", [
    (lambda c: dict(x=c.exact.x.float()),
     "x is a torch.float32 tensor.*15 channels in torch.int8.*int8_rows"),
    (lambda c: dict(x=replace(c.rows, width=14)), "x is Int8Rows of 14 channels"),
    (lambda c: dict(x=replace(c.rows, data=c.rows.data[:, :15])), "x.data is .40, 15."),
    (lambda c: dict(x=replace(c.rows, scale=c.rows.scale[:39])), "x.scale is .39."),
    (lambda c: dict(variant=replace(c.variant, row=torch.float32)),
     "x is Int8Rows of 15 channels.*torch.float32")])
def test_inputs_that_do_not_fit(device, change, message):
    view = graph(device)
    c = case(view.csc(), view.num_src, 3, 5)
    given = dict(variant=c.variant, graph=c.exact.rows, x=c.rows) | change(c)
    with pytest.raises(ValueError, match=message):
        forward(**given)


def test_left_rows_that_do_not_fit(device):
    view = graph(device)
    c = case(view.csc(), view.num_src, 3, 5)
    with pytest.raises(ValueError, match="left has 40 rows, the graph 30"):
        edge_dot(c.variant, c.exact.rows, c.rows, c.rows)
