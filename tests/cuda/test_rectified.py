"""Sums and means of rectified messages over a graph's edges, and their gradients."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.traverse import rectified
from tests.attention_cases import graph
from tests.emulation.orders import in_any_order
from tests.helpers import FLOOR, ROUNDING, assert_accurate, forget_report, on_devices

pytestmark = pytest.mark.usefixtures("poison")

F32 = torch.float32


def made(view, width: int, dtype: torch.dtype = F32) -> list[Tensor]:
    """x, features of edges and the gradient of the sums."""
    counts = (view.num_src, view.num_edges, view.num_dst)
    return [torch.randn(count, width).to(view.device, dtype) for count in counts]


def by_torch(view, given: list[Tensor], constant: float, mean: bool,
             dtype: torch.dtype) -> list[Tensor]:
    x, edge, grad = (t.to(dtype) for t in given)
    x, edge = x.requires_grad_(), edge.requires_grad_()
    src, dst = view._kept
    out = x.new_zeros(view.num_dst, x.shape[1]).index_add(0, dst, (x[src] + edge).relu() + constant)
    if mean:
        out = out / torch.bincount(dst, minlength=view.num_dst).clamp(min=1).unsqueeze(1)
    return [out.detach(), *torch.autograd.grad(out, (x, edge), grad)]


def by_kernels(view, given: list[Tensor], constant: float, mean: bool) -> list[Tensor]:
    x, edge, grad = given
    out = rectified.forward(view.csc(), x, edge, constant, mean)
    if mean:
        grad = (grad * view.inverse_degree().unsqueeze(1)).to(grad.dtype)
    return [out, *rectified.backward(view.csr_by_id(), x, edge, grad, True)]


def check(view, width: int, constant: float = 0.0, mean: bool = False,
          dtype: torch.dtype = F32) -> list[Tensor]:
    given = made(view, width, dtype)
    got = by_kernels(view, given, constant, mean)
    plain, exact = (by_torch(view, given, constant, mean, d) for d in (F32, torch.float64))
    for name, one, near, far in zip(("out", "x", "edge"), got, plain, exact):
        assert one.dtype == dtype
        assert_accurate(name, one, near, far, FLOOR + (4 * ROUNDING[dtype] if dtype != F32 else 0))
    return got


@on_devices("width", [10, 130], [1, 2, 8, 47, 64, 128, 512, 521])
def test_widths(device, chunk_edges, width):
    chunk_edges(40)
    check(graph(device), width)


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("mean", [True, False])
def test_constants_means_and_split_rows(device, chunk_edges, chunk, mean):
    chunk_edges(chunk)
    check(graph(device), 10, 0.25, mean)


@on_devices("dtype", [torch.bfloat16], [torch.float16])
def test_half_rows_and_wide_offsets(device, chunk_edges, dtype):
    chunk_edges(16)
    check(graph(device, wide=True), 12, 0.5, True, dtype)


@pytest.mark.parametrize("num_src, num_dst, edges", [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    got = check(graph(device, num_src, num_dst, edges), 10, 1.0)
    assert edges or not any(t.any() for t in got)


def test_split_rows_before_the_report_and_no_gradient_of_edges(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    forget_report(view.csc())
    got = check(view, 10)
    assert got and rectified.backward(view.csr_by_id(), *made(view, 10), False)[1] is None


def test_nan_is_not_rectified(device):
    view = graph(device)
    x, edge, grad = made(view, 10)
    edge[3] = float("nan")
    out, x_grad, edge_grad = by_kernels(view, [x, edge, grad], 0.0, False)
    dst = view._kept[1][3]
    assert out[dst].isnan().all() and out.isnan().any(1).sum() == 1
    assert torch.equal(edge_grad[3], grad[dst]) and x_grad.isfinite().all()


def test_scheduling_does_not_change_the_result(chunk_edges):
    chunk_edges(16)

    def run():
        view = graph("cpu")
        given = made(view, 10)
        return lambda: by_kernels(view, given, 0.5, True)

    in_any_order(run)


def test_inputs_that_do_not_fit(device):
    view = graph(device)
    x, edge, grad = made(view, 10)
    with pytest.raises(ValueError, match="edge is .*needed is"):
        rectified.forward(view.csc(), x, edge[1:], 0.0, False)
    with pytest.raises(ValueError, match="grad is .*needed is"):
        rectified.backward(view.csr_by_id(), x, edge, grad.double(), True)
    with pytest.raises(ValueError, match="places=True"):
        rectified.forward(replace(view.csc(), place=view.csc().place[:0]), x, edge, 0.0, False)
    with pytest.raises(ValueError, match="float64"):
        rectified.kernels(6, torch.float64, False)
