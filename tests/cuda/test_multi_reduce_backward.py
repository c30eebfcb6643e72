"""Gradients of several reduces of each row's messages in one pass."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.traverse import multi_reduce_backward as backward
from gnnaccel.cuda.traverse.multi_reduce import REDUCES, Reduced, Variant, forward, variant
from gnnaccel.dispatch.graph.view import GraphView
from tests.attention_cases import SIZES, graph
from tests.cuda.test_multi_reduce import SETS, WEIGHTS, by_torch, made, reduced
from tests.emulation.orders import in_any_order
from tests.helpers import FLOOR, ROUNDING, assert_accurate, on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")

F32 = torch.float32
ALL = REDUCES
_KEPT = 1e-3  # standard deviations below it have gradients that no precision gets right


def gradients(v: Variant, view, x: Tensor, weight: Tensor | None, grad: Tensor,
              zero_share: bool = True) -> tuple:
    """Of x and the weights, by the kernels."""
    rows, found = view.csc(), forward(v, view.csc(), x, weight, True)
    terms = backward.spread(v, rows, found, grad, zero_share)
    if v.weight == "added":  # whose gradient is that of the messages
        d_weight = backward.weight_grad(v, rows, x, weight, found.out, terms)
        by_edge = x.new_empty(weight.shape[0], dtype=torch.long)
        total = int(rows.indptr[-1])
        by_edge[rows.place[:total].long()] = rows.other[:total].long()
        wide = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        return wide.index_add(0, by_edge, d_weight.double()).to(x.dtype), d_weight
    d_x = backward.rows_grad(v, view.csr_by_id(), x, weight, found.out, terms)
    return (d_x,
            None if weight is None else backward.weight_grad(v, rows, x, weight, found.out, terms))


def by_autograd(v: Variant, rows, x: Tensor, weight: Tensor | None, grad: Tensor,
                dtype: torch.dtype) -> tuple:
    """By torch, of the very function that PyG's aggregations are."""
    x = x.detach().to(dtype).requires_grad_()
    weight = None if weight is None else weight.detach().to(dtype).requires_grad_()
    wide = replace(v, row=F32) if dtype != v.row else v
    out = by_torch(wide, rows, x, weight, dtype)
    found = torch.autograd.grad(out, [t for t in (x, weight) if t is not None], grad.to(dtype))
    return found if weight is not None else (*found, None)


def check(v: Variant, view, equal: bool = True) -> tuple:
    rows = view.csc()
    x, weight = made(v, rows, view.num_src, equal)
    grad = torch.randn(view.num_dst, len(v.reduces), v.heads, v.width).to(x.device, v.row)
    if "std" in v.reduces:  # the square root's slope has no bound at zero
        some = by_torch(v, rows, x, weight, torch.float64)[:, v.reduces.index("std")] > _KEPT
        grad[:, v.reduces.index("std")] *= some
    got = gradients(v, view, x, weight, grad)
    assert got[0].dtype == v.row
    exact = by_autograd(v, rows, x, weight, grad, torch.float64)
    plain = by_autograd(v, rows, x, weight, grad, F32)
    for name, one, near, far in zip(("x", "weight"), got, plain, exact):
        if one is not None:
            assert_accurate(name, one, near, far, FLOOR + (ROUNDING[v.row] if v.row != F32 else 0))
    return got


@on_devices("heads,width", SIZES)
def test_sizes(device, chunk_edges, heads, width):
    chunk_edges(40)
    i = heads + width
    check(variant(heads, width, F32, SETS[i % len(SETS)], WEIGHTS[i % 4]), graph(device))


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("reduces", SETS, ids="-".join)
def test_sets(device, chunk_edges, reduces, weight, chunk):
    """Half of the numbers are equal to others, and many extrema are 0."""
    chunk_edges(chunk)
    view = graph(device)
    for equal in (True, False):
        check(variant(3, 5, F32, reduces, weight), view, equal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rows_and_wide_offsets(device, chunk_edges, dtype):
    chunk_edges(16)
    view = graph(device, wide=True)
    check(variant(3, 5, dtype, ("mean", "max"), wide=True), view)
    check(variant(3, 8, dtype, ("min", "sum"), "head", True), view)
    check(variant(3, 8, dtype, ("min", "mean"), "added", True), view)


def test_half_products_are_compared_as_they_are_rounded(device):
    """1/3 of something, in half precision: the message found the largest is found again, or its
    gradient would be lost."""
    view = graph(device)
    v = variant(2, 4, torch.float16, ("max",), "edge")
    x = torch.rand(view.num_src, 2, 4).to(device, torch.float16)
    weight = torch.rand(view.csc().other.shape[0]).add(0.1).to(device)
    grad = torch.ones(view.num_dst, 1, 2, 4).to(device, torch.float16)
    _, d_weight = gradients(v, view, x, weight, grad)
    best = forward(v, view.csc(), x, weight).out.double()
    assert abs((d_weight.double() * weight.double()).sum() / best.sum() - 1) < 1e-2


@pytest.mark.parametrize("num_src, num_dst, edges", [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    d_x, _ = check(variant(3, 5, F32, ALL, "edge"), graph(device, num_src, num_dst, edges))
    assert d_x.shape == (num_src, 3, 5) and (edges or not d_x.any())


@on_devices("reduces", [(("var",),), (("mean", "var"),), (("sum", "std", "var"),)])
@pytest.mark.parametrize("copies", [1, 4])
def test_equal_messages_have_no_variance(device, reduces, copies):
    """Their gradient is exactly that of the other reduces, however far the mean is from zero."""
    v = variant(2, 8, F32, reduces, "none")
    ends = torch.arange(40, device=device).repeat(copies)
    view = GraphView(torch.stack([ends, 39 - ends]), 40, 40, own=True)
    x, grad = 1000 * torch.randn(40, 2, 8), torch.randn(40, len(reduces), 2, 8)
    x, grad = x.to(device), grad.to(device)
    times = {"sum": copies, "mean": 1, "var": 0, "std": 0}
    expected = sum(times[name] * grad[:, at] for at, name in enumerate(reduces)).flip(0)
    assert same_bits(gradients(v, view, x, None, grad)[0], expected)


@pytest.mark.parametrize("zero_share", [True, False])
def test_an_extremum_of_zero_keeps_a_share(device, zero_share):
    """Three equal messages of 0 get a third of the gradient each, or a quarter."""
    view = graph(device, 5, 4, 12)
    v, x = variant(1, 1, F32, ("max",)), torch.zeros(5, 1, 1).to(device)
    d_x, _ = gradients(v, view, x, None, torch.ones(4, 1, 1, 1).to(device), zero_share)
    degree = view.csc().indptr.diff().double()
    kept = degree / (degree + zero_share)
    assert abs(d_x.double().sum() - kept[degree > 0].sum()) < 1e-5


def test_where_the_extremum_is_nan_so_are_all_gradients(device):
    view = graph(device)
    v = variant(2, 3, F32, ("max",))
    x, _ = made(v, view.csc(), view.num_src)
    x[view.csc().other[0]] = float("nan")
    grad = torch.randn(view.num_dst, 1, 2, 3).to(device)
    got, _ = gradients(v, view, x, None, grad)
    expected, _ = by_autograd(v, view.csc(), x, None, grad, F32)
    assert torch.allclose(got, expected, equal_nan=True, rtol=1e-5, atol=1e-6) and got.isnan().any()


def test_the_yardstick_shares_evenly():
    """Or agreeing with it would prove nothing."""
    row = torch.tensor([0, 0, 0])
    value = torch.tensor([2.0, 2.0, 1.0]).view(3, 1, 1).requires_grad_()
    (got,) = torch.autograd.grad(reduced("max", row, value, 1).sum(), value)
    assert got.view(-1).tolist() == [0.5, 0.5, 0.0]


def test_scheduling_does_not_change_the_result(chunk_edges):
    chunk_edges(16)

    def run():
        view, v = graph("cpu"), variant(3, 5, F32, ALL, "head")
        x, weight = made(v, view.csc(), view.num_src)
        view.csr_by_id()
        grad = torch.randn(view.num_dst, 6, 3, 5)
        return lambda: gradients(v, view, x, weight, grad)

    in_any_order(run)


def test_inputs_that_do_not_fit(device):
    view = graph(device)
    rows, v = view.csc(), variant(3, 5, F32, ALL)
    x, _ = made(v, rows, view.num_src)
    found = forward(v, rows, x, train=True)
    grad = torch.ones_like(found.out)
    with pytest.raises(ValueError, match="train=True"):
        backward.spread(v, rows, Reduced(found.out, None, None), grad)
    with pytest.raises(ValueError, match="grad is"):
        backward.spread(v, rows, found, grad[:, :2])
    terms = backward.spread(v, rows, found, grad)
    with pytest.raises(ValueError, match="coefficients is"):
        backward.rows_grad(v, view.csr(), x, None, found.out, terms[:, :2].contiguous())
    with pytest.raises(ValueError, match="x is"):
        backward.rows_grad(v, view.csr(), x[:3], None, found.out, terms)
