"""Softmax aggregation by channel of neighbours' rows and of rectified messages, and its
gradients."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.traverse import softmax_sum
from gnnaccel.cuda.traverse.softmax_sum import Messages
from tests.attention_cases import graph
from tests.emulation.orders import in_any_order
from tests.helpers import (FLOOR, ROUNDING, assert_accurate, forget_report, on_devices, relative,
                           same_bits)

pytestmark = pytest.mark.usefixtures("poison")

F32 = torch.float32
CONSTANT = 0.25


def made(view, width: int, edge: bool, t=1.5, dtype: torch.dtype = F32, scale: float = 1.0) -> list:
    """x, features of edges, t (a number, or for "one" and "each" tensors) and the gradient of the
    sums."""
    counts = (view.num_src, view.num_edges if edge else 0, view.num_dst)
    x, e, grad = ((torch.randn(count, width) * scale).to(view.device, dtype) for count in counts)
    if type(t) is str:
        t = torch.linspace(-1.0, 3.0, width if t == "each" else 1).to(view.device)
    return [x, e if edge else None, t, grad / scale]


def by_torch(view, given: list, whole: bool, dtype: torch.dtype) -> list[Tensor]:
    """The host's way, in its order of operations."""
    x, edge, t, grad = (v.to(dtype) if isinstance(v, Tensor) else v for v in given)
    leaves = [v.requires_grad_() for v in (x, edge, t) if isinstance(v, Tensor)]
    src, dst = view._kept
    m = x[src] if edge is None else (x[src] + edge).relu() + CONSTANT
    with torch.set_grad_enabled(whole):
        z = m * t
        at = dst.view(-1, 1).expand_as(z)
        top = z.new_zeros(view.num_dst,
                          z.shape[1]).scatter_reduce(0, at, z.detach(), "amax", include_self=False)
        power = (z - top[dst]).exp()
        alpha = power / (z.new_zeros(top.shape).index_add(0, dst, power) + 1e-16)[dst]
    out = z.new_zeros(top.shape).index_add(0, dst, m * alpha)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def by_kernels(view, given: list, whole: bool) -> list[Tensor]:
    x, edge, t, grad = given
    messages = Messages(x, edge, 0.0 if edge is None else CONSTANT, t)
    out, kept = softmax_sum.forward(view.csc(), messages, True)
    learnt = isinstance(t, Tensor)
    x_grad, edge_grad, t_grad = softmax_sum.backward(view.csr_by_id(), messages, kept.center,
                                                     grad / kept.total, whole, edge is not None,
                                                     learnt)
    if learnt:
        t_grad = t_grad.double().sum(0 if t.numel() > 1 else (0, 1)).view(t.shape).float()
    return [out, *(g for g in (x_grad, edge_grad, t_grad) if g is not None)]


def check(view, width: int, edge: bool, t=1.5, whole: bool = True,
          dtype: torch.dtype = F32) -> list[Tensor]:
    given = made(view, width, edge, t, dtype)
    got = by_kernels(view, given, whole)
    plain, exact = (by_torch(view, given, whole, d) for d in (F32, torch.float64))
    assert len(got) == len(exact)
    for place, (one, near, far) in enumerate(zip(got, plain, exact)):
        stored = 4 * ROUNDING[dtype] if dtype != F32 and one.dtype == dtype else 0
        assert_accurate(f"{place}", one, near, far, (FLOOR if place == 0 else 1e-6) + stored)
    return got


@on_devices("width", [1, 47], [2, 8, 64, 128, 512, 521])
@pytest.mark.parametrize("edge", [False, True])
def test_widths(device, chunk_edges, width, edge):
    chunk_edges(40)
    check(graph(device), width, edge, "each")


@on_devices("chunk", [1024, 16])
@pytest.mark.parametrize("t", [1, -0.7, 0.0, "one"])
@pytest.mark.parametrize("edge", [False, True])
def test_numbers_and_split_rows(device, chunk_edges, chunk, t, edge):
    chunk_edges(chunk)
    check(graph(device), 10, edge, t)


@pytest.mark.parametrize("edge", [False, True])
def test_gradients_that_pass_the_softmax_by(device, chunk_edges, edge):
    chunk_edges(16)
    check(graph(device), 10, edge, 0.5, whole=False)


@on_devices("dtype", [torch.bfloat16], [torch.float16])
@pytest.mark.parametrize("edge", [False, True])
def test_half_rows_and_wide_offsets(device, chunk_edges, dtype, edge):
    chunk_edges(16)
    check(graph(device, wide=True), 12, edge, "each", dtype=dtype)


@pytest.mark.parametrize("t", [0.01, "one"])
def test_long_rows_of_messages_that_cancel(device, chunk_edges, t):
    """Weights that hardly differ, so that means are small next to the messages."""
    chunk_edges(64)
    view, errors = graph(device, edges=2000), []
    for _ in range(6):
        given = made(view, 10, False, t)
        got, plain, exact = by_kernels(view, given,
                                       True), *(by_torch(view, given, True, d)
                                                for d in (F32, torch.float64))
        errors.append([[relative(one, far), relative(near, far)]
                       for one, near, far in zip(got, plain, exact)])
    errors = torch.tensor(errors).pow(2).mean(0).sqrt()
    ours, plains = errors.T
    assert (ours[:2] <= 2 * plains[:2]).all() and ours[0] <= FLOOR
    # the gradient of ``t``, where it is a parameter, is a sum over all nodes
    assert all(one <= max(2 * plain, 3e-6) for one, plain in zip(ours[2:], plains[2:]))


@on_devices("scale", [1e4], [30.0, 1e8])
@pytest.mark.parametrize("t", [40.0, "each"])
@pytest.mark.parametrize("edge", [False, True])
def test_saturated_softmax(device, chunk_edges, scale, t, edge):
    """Scores far from 0 and from each other. What is left of a gradient hangs on few edges, and
    torch's error on luck: so over several draws."""
    chunk_edges(16)
    view, errors = graph(device), []
    for _ in range(8):
        given = made(view, 10, edge, t, scale=scale)
        got = by_kernels(view, given, True)
        plain, exact = (by_torch(view, given, True, d) for d in (F32, torch.float64))
        assert all(torch.isfinite(one).all() for one in got)
        errors.append([[relative(one, far), relative(near, far)]
                       for one, near, far in zip(got, plain, exact)])
    for mine, host in torch.tensor(errors).pow(2).mean(0).sqrt():
        assert mine <= 2 * host + 1e-6


@pytest.mark.parametrize("step, t", [(0, 1e7), (2, 1e7), (7, -1e7), (0, 50.0)])
def test_large_messages_that_are_equal_or_nearly(device, chunk_edges, step, t):
    """A mean that rounding takes away from them would have a score that is far from theirs here."""
    chunk_edges(16)
    view, base = graph(device), 1700000.125  # all 24 digits
    x, grad = torch.full((view.num_src, 3), base,
                         device=device), torch.randn(view.num_dst, 3).to(device)
    if step:
        x[::step] += 0.125  # the next number
    out, x_grad = by_kernels(view, [x, None, t, grad], True)
    expected, expected_grad = by_torch(view, [x.double() - base, None, t, grad], True,
                                       torch.float64)
    some = torch.bincount(view._kept[1], minlength=view.num_dst).unsqueeze(1) > 0
    assert torch.equal(out.double(),
                       expected + base
                       * some) and torch.allclose(x_grad.double(), expected_grad, atol=1e-5)


@pytest.mark.parametrize("num_src, num_dst, edges", [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    for edge in (False, True):
        got = check(graph(device, num_src, num_dst, edges), 10, edge)
        assert edges or not any(t.any() for t in got)


def test_split_rows_before_the_report_and_nothing_kept(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    forget_report(view.csc())
    check(view, 10, True)
    given = Messages(*made(view, 10, False)[:2], 0.0, 1.0)
    kept = softmax_sum.forward(view.csc(), given, True)[1]
    assert not kept.center[-1].any() and (kept.total[-1] == 1).all()  # which no edge enters
    assert softmax_sum.forward(view.csc(), given, False)[1] is None


def test_without_places_of_edges(device):
    view = graph(device)
    given = Messages(*made(view, 10, False)[:2], 0.0, 1.0)
    expected = softmax_sum.forward(view.csc(), given, False)[0]
    without = replace(view.csc(), place=view.csc().place[:0], launched=None)
    assert same_bits(softmax_sum.forward(without, given, False)[0], expected)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("first", [False, True])
def test_what_is_not_finite_shows(device, chunk_edges, odd, first):
    """Wherever it comes in its row, as in the host's: infinite scores have no softmax."""
    chunk_edges(16)
    view = graph(device)
    src, dst = view._kept
    for row in (3, 4):  # one split, one not
        x, edge, t, grad = made(view, 10, False)
        edges = (dst == row).nonzero().flatten()
        x[src[edges[0 if first else -1]]] = odd
        out = by_torch(view, [x, edge, t, grad], True, F32)[0]
        got = by_kernels(view, [x, edge, t, grad], True)[0]
        assert out[row].isnan().all() and torch.equal(got.isnan(), out.isnan())


def test_scheduling_does_not_change_the_result(chunk_edges):
    chunk_edges(16)

    def run():
        view = graph("cpu")
        given = made(view, 10, True, "each")
        return lambda: by_kernels(view, given, True)

    in_any_order(run)


def test_inputs_that_do_not_fit(device):
    view = graph(device)
    x, edge, t, grad = made(view, 10, True, "each")
    for wrong, text in ((Messages(x, edge[1:], 0.0, t), "edge is .*needed is"),
                        (Messages(x, edge, 0.0, t[1:]), "t is .*needed is"),
                        (Messages(x.t(), None, 0.0, 1.0), "x is .*needed is"),
                        (Messages(x, edge.half(), 0.0, t), "edge is")):
        with pytest.raises(ValueError, match=text):
            softmax_sum.forward(view.csc(), wrong, False)
    with pytest.raises(ValueError, match="share is .*needed is"):
        softmax_sum.backward(view.csr_by_id(), Messages(x, edge, 0.0, t), grad, grad.double(), True,
                             True, True)
    with pytest.raises(ValueError, match="places=True"):
        softmax_sum.forward(replace(view.csc(), place=view.csc().place[:0]),
                            Messages(x, edge, 0.0, t), False)
    with pytest.raises(ValueError, match="float64"):
        softmax_sum.kernels(6, torch.float64, False, False)
