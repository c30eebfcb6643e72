"""Gated sums over a graph's edges, and their gradients."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.traverse import gated
from tests.attention_cases import graph
from tests.emulation.orders import in_any_order
from tests.helpers import FLOOR, ROUNDING, assert_accurate, forget_report, on_devices

pytestmark = pytest.mark.usefixtures("poison")

F32 = torch.float32
EPSILON = 1e-6
NAMES = ("left", "right", "edge", "values")


def made(view, width: int, dtype: torch.dtype = F32) -> dict[str, Tensor]:
    rows = dict(left=view.num_src, right=view.num_dst, edge=view.num_edges, values=view.num_src)
    return {name: torch.randn(count, width).to(view.device, dtype) for name, count in rows.items()}


def grads(view, width: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(count, width).to(view.device, dtype)
                 for count in (view.num_edges, view.num_dst))


def by_torch(view, given: dict[str, Tensor], grad: tuple, dtype: torch.dtype) -> list[Tensor]:
    """Results and gradients, by autograd."""
    leaves = {name: t.to(dtype).requires_grad_() for name, t in given.items()}
    src, dst = view._kept
    score = leaves["left"][src] + leaves["right"][dst] + leaves["edge"]
    gate = score.sigmoid()

    def total(t: Tensor) -> Tensor:
        return t.new_zeros(view.num_dst, t.shape[1]).index_add(0, dst, t)

    out = total(gate * leaves["values"][src]) / (total(gate) + EPSILON)
    some = [(r, g) for r, g in zip((score, out), grad) if g is not None]
    found = torch.autograd.grad([r for r, _ in some], list(leaves.values()),
                                [g.to(dtype) for _, g in some])
    return [score.detach(), out.detach(), *found]


def by_kernels(view, given: dict[str, Tensor], grad: tuple) -> list[Tensor]:
    found = gated.forward(view.csc(), *(given[name] for name in NAMES), EPSILON)
    ratio = grad[1].float() / found.total
    edge_grad, right_grad = gated.by_row(view.csc(), found, given["values"], ratio, grad[0])
    left_grad, values_grad = gated.by_other(view.csr_by_id(), found.score, edge_grad, ratio)
    return [found.score, found.out, left_grad, right_grad, edge_grad, values_grad]


def check(view, width: int, dtype: torch.dtype = F32, scores: bool = True) -> list[Tensor]:
    given, grad = made(view, width, dtype), grads(view, width, dtype)
    grad = grad if scores else (None, grad[1])
    got = by_kernels(view, given, grad)
    plain, exact = (by_torch(view, given, grad, d) for d in (F32, torch.float64))
    for name, one, near, far in zip(("score", "out", *NAMES), got, plain, exact):
        assert one.dtype == dtype
        # gates are made of rounded scores, and their gradients of a rounded result
        assert_accurate(name, one, near, far, FLOOR + (8 * ROUNDING[dtype] if dtype != F32 else 0))
    return got


@on_devices("width", [1, 3, 8, 47, 64, 130], [2, 16, 128, 512, 521])
def test_widths(device, chunk_edges, width):
    chunk_edges(40)
    check(graph(device), width)


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("scores", [True, False])
def test_split_rows_and_scores_without_gradients(device, chunk_edges, chunk, scores):
    chunk_edges(chunk)
    check(graph(device), 10, scores=scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rows_and_wide_offsets(device, chunk_edges, dtype):
    chunk_edges(16)
    check(graph(device, wide=True), 12, dtype)


@pytest.mark.parametrize("num_src, num_dst, edges", [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    got = check(graph(device, num_src, num_dst, edges), 5)
    assert edges or not any(t.any() for t in got)


def test_split_rows_before_the_report(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    forget_report(view.csc())
    check(view, 7)


def test_large_scores_do_not_overflow(device):
    view = graph(device)
    given = made(view, 6)
    given["edge"] *= 200
    assert all(t.isfinite().all() for t in by_kernels(view, given, grads(view, 6)))


def test_scheduling_does_not_change_the_result(chunk_edges):
    chunk_edges(16)

    def run():
        view = graph("cpu")
        given, grad = made(view, 9), grads(view, 9)
        return lambda: by_kernels(view, given, grad)

    in_any_order(run)


def test_inputs_that_do_not_fit(device):
    view = graph(device)
    given = made(view, 6)
    for name, wrong in (("left", given["left"][:, :5]), ("right", given["right"][:3]),
                        ("edge", given["edge"].double()),
                        ("values", given["values"].t().contiguous().t())):
        with pytest.raises(ValueError, match="is .*needed is"):
            gated.forward(view.csc(), *({**given, name: wrong}[n] for n in NAMES), EPSILON)
    with pytest.raises(ValueError, match="places=True"):
        gated.forward(replace(view.csc(), place=view.csc().place[:0]), *(given[n] for n in NAMES),
                      EPSILON)
    with pytest.raises(ValueError, match="float64"):
        gated.kernels(6, torch.float64, False)
