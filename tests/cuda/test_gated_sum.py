"""Sums and means of gated messages that leave nothing at the edges, and their gradients."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda import driver, gated_sum
from tests.attention_cases import graph
from tests.emulation.emulator import EmulatedDriver
from tests.helpers import FLOOR, ROUNDING, assert_accurate, forget_report, on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")

F32 = torch.float32
NAMES = ("left", "right", "edge", "values")


def made(view, width: int, dtype: torch.dtype = F32, edges: bool = True) -> tuple[list[Tensor | None], Tensor]:
    """The operands in the order of `NAMES`, and the gradient of the sums."""
    counts = (view.num_src, view.num_dst, view.num_edges, view.num_src, view.num_dst)
    *found, grad = (torch.randn(count, width).to(view.device, dtype) for count in counts)
    return [t if edges or name != "edge" else None for name, t in zip(NAMES, found)], grad


def by_torch(view, given: list, grad: Tensor, mean: bool, dtype: torch.dtype) -> list[Tensor]:
    left, right, edge, values = leaves = [None if t is None else t.to(dtype).requires_grad_() for t in given]
    src, dst = view._kept
    score = left[src] + right[dst]
    gate = (score if edge is None else score + edge).sigmoid()
    out = left.new_zeros(view.num_dst, left.shape[1]).index_add(0, dst, gate * values[src])
    if mean:
        out = out / torch.bincount(dst, minlength=view.num_dst).clamp(min=1).unsqueeze(1)
    return [out.detach(), *torch.autograd.grad(out, [t for t in leaves if t is not None], grad.to(dtype))]


def by_kernels(view, given: list, grad: Tensor, mean: bool) -> list[Tensor]:
    edges = given[2] is not None
    out = gated_sum.forward(view.csc(), *given, mean)
    if mean:
        grad = (grad * view.inverse_degree().unsqueeze(1)).to(grad.dtype)
    right, edge = gated_sum.by_row(view.csc(), *given, grad, edges)
    left, values = gated_sum.by_other(view.csr_by_id(), *given, grad)
    return [out, left, right, *([edge] if edges else []), values]


def check(view, width: int, edges: bool = True, mean: bool = False, dtype: torch.dtype = F32) -> list[Tensor]:
    given, grad = made(view, width, dtype, edges)
    got = by_kernels(view, given, grad, mean)
    plain, exact = (by_torch(view, given, grad, mean, d) for d in (F32, torch.float64))
    names = [name for name in NAMES if edges or name != "edge"]
    for name, one, near, far in zip(("out", *names), got, plain, exact):
        assert one.dtype == dtype
        assert_accurate(name, one, near, far, FLOOR + (4 * ROUNDING[dtype] if dtype != F32 else 0))
    return got


@on_devices("width", [130], [1, 2, 8, 47, 64, 128, 512, 521])
def test_widths(device, chunk_edges, width):
    chunk_edges(40)
    check(graph(device), width, edges=width in (8, 47, 512))


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("edges, mean", [(True, False), (False, True)])
def test_means_and_split_rows(device, chunk_edges, chunk, edges, mean):
    chunk_edges(chunk)
    check(graph(device), 10, edges, mean)


@on_devices("dtype", [torch.bfloat16], [torch.float16])
def test_half_rows_and_wide_offsets(device, chunk_edges, dtype):
    chunk_edges(16)
    check(graph(device, wide=True), 12, dtype=dtype)


@pytest.mark.parametrize("num_src, num_dst, edges", [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    got = check(graph(device, num_src, num_dst, edges), 10)
    assert edges or not any(t.any() for t in got)


def test_split_rows_before_the_report(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    forget_report(view.csc())
    check(view, 10)


def test_an_infinite_gradient_stays_in_its_row(device):
    """A warp's turns that no edge is left for add nothing to it."""
    view = graph(device)
    given, grad = made(view, 10, edges=False)
    row = view._kept[1][0]
    given[3].abs_()
    grad.zero_()[row] = float("inf")
    got = by_kernels(view, given, grad, False)
    assert got[2][row].isinf().all() and got[2].isfinite().all(1).sum() == view.num_dst - 1


def test_large_scores_do_not_overflow(device):
    view = graph(device)
    given, grad = made(view, 10)
    given[2] *= 200
    assert all(t.isfinite().all() for t in by_kernels(view, given, grad, False))


def test_scheduling_does_not_change_the_result(chunk_edges):
    chunk_edges(16)
    torch.manual_seed(0)
    with driver.using(EmulatedDriver()):
        view = graph("cpu")
        given, grad = made(view, 10)
        expected = by_kernels(view, given, grad, True)
    for order in ("reversed", "uneven"):
        with driver.using(EmulatedDriver(order, seed=5)):
            assert all(same_bits(a, b) for a, b in zip(by_kernels(view, given, grad, True), expected))


def test_inputs_that_do_not_fit(device):
    view = graph(device)
    given, grad = made(view, 10)
    for place, name in enumerate(NAMES):
        wrong = [t.double() if i == place else t for i, t in enumerate(given)]
        with pytest.raises(ValueError, match="is .*needed is"):
            gated_sum.forward(view.csc(), *wrong, False)
        assert name
    with pytest.raises(ValueError, match="grad is .*needed is"):
        gated_sum.by_row(view.csc(), *given, grad[1:], True)
    with pytest.raises(ValueError, match="float64"):
        gated_sum.kernels(6, torch.float64, False, False)
