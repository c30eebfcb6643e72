"""Sums and means of gated messages that leave nothing at the edges, and their gradients."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.traverse import gated_sum
from gnnaccel.cuda.traverse.gated_sum import Operands
from tests.attention_cases import graph
from tests.emulation.orders import in_any_order
from tests.helpers import FLOOR, ROUNDING, assert_accurate, forget_report, on_devices

pytestmark = pytest.mark.usefixtures("poison")

F32 = torch.float32
NAMES = Operands._fields


def made(view, width: int, dtype: torch.dtype = F32, edges: int = 2) -> tuple[Operands, Tensor]:
    """Operands with so many features of edges, and the gradient of the sums."""
    counts = (view.num_src, view.num_dst, view.num_src, *(view.num_edges,) * edges, view.num_dst)
    *found, grad = (torch.randn(count, width).to(view.device, dtype) for count in counts)
    return Operands(*found), grad


def by_torch(view, given: Operands, grad: Tensor, mean: bool, dtype: torch.dtype) -> list[Tensor]:
    left, right, values, edge, beside = leaves = [None
                                                  if t is None else t.to(dtype).requires_grad_()
                                                  for t in given]
    src, dst = view._kept
    score = left[src] + right[dst]
    gate = (score if edge is None else score + edge).sigmoid()
    out = left.new_zeros(view.num_dst,
                         left.shape[1]).index_add(0, dst,
                                                  gate
                                                  * (values[src] + (0
                                                                    if beside is None else beside)))
    if mean:
        out = out / torch.bincount(dst, minlength=view.num_dst).clamp(min=1).unsqueeze(1)
    return [out.detach(),
            *torch.autograd.grad(out, [t for t in leaves if t is not None], grad.to(dtype))]


def by_kernels(view, given: Operands, grad: Tensor, mean: bool) -> list[Tensor]:
    out = gated_sum.forward(view.csc(), given, mean)
    if mean:
        grad = (grad * view.inverse_degree().unsqueeze(1)).to(grad.dtype)
    right, *edges = gated_sum.by_row(view.csc(), given, grad, given.edge is not None,
                                     given.beside is not None)
    left, values = gated_sum.by_other(view.csr_by_id(), given, grad)
    return [out, left, right, values, *(t for t in edges if t is not None)]


def check(view, width: int, edges: int = 2, mean: bool = False,
          dtype: torch.dtype = F32) -> list[Tensor]:
    given, grad = made(view, width, dtype, edges)
    got = by_kernels(view, given, grad, mean)
    plain, exact = (by_torch(view, given, grad, mean, d) for d in (F32, torch.float64))
    for name, one, near, far in zip(("out", *NAMES), got, plain, exact):
        assert one.dtype == dtype
        assert_accurate(name, one, near, far, FLOOR + (4 * ROUNDING[dtype] if dtype != F32 else 0))
    return got


@on_devices("width", [130], [1, 2, 8, 47, 64, 128, 512, 521])
def test_widths(device, chunk_edges, width):
    chunk_edges(40)
    check(graph(device), width, edges=width % 3)


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("edges, mean", [(2, False), (1, True), (0, True)])
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
    given, grad = made(view, 10, edges=0)
    row = view._kept[1][0]
    given.values.abs_()
    grad.zero_()[row] = float("inf")
    got = by_kernels(view, given, grad, False)
    assert got[2][row].isinf().all() and got[2].isfinite().all(1).sum() == view.num_dst - 1


def test_large_scores_do_not_overflow(device):
    view = graph(device)
    given, grad = made(view, 10)
    given.edge.mul_(200)
    assert all(t.isfinite().all() for t in by_kernels(view, given, grad, False))


def test_scheduling_does_not_change_the_result(chunk_edges):
    chunk_edges(16)

    def run():
        view = graph("cpu")
        given, grad = made(view, 10)
        return lambda: by_kernels(view, given, grad, True)

    in_any_order(run)


def test_inputs_that_do_not_fit(device):
    view = graph(device)
    given, grad = made(view, 10)
    for name in NAMES:
        with pytest.raises(ValueError,
                           match=f"{name} is .*needed is" if name != "left" else "is .*needed is"):
            gated_sum.forward(view.csc(), given._replace(**{name: getattr(given, name).double()}),
                              False)
    with pytest.raises(ValueError, match="grad is .*needed is"):
        gated_sum.by_row(view.csc(), given, grad[1:], True, True)
    with pytest.raises(ValueError, match="float64"):
        gated_sum.kernels(6, torch.float64, 0, False)
