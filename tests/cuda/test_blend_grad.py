"""Backward of blends by segment."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.attention import blend_grad as module
from gnnaccel.cuda.attention.blend_grad import blend_grad
from tests.cuda.test_segment_gemm import LENGTHS, make_segments
from tests.helpers import assert_accurate, relative, same_bits

pytestmark = pytest.mark.usefixtures("poison")


def make(device, columns: int, dtype=torch.float32, lengths=LENGTHS):
    segments = make_segments(device, lengths)
    grad, rest = (torch.randn(segments.rows, columns).to(device, dtype) for _ in range(2))
    return segments, grad, rest, torch.rand(segments.count).to(device)


def reference(segments, grad, rest, order=None, dtype=torch.float64):
    products = (grad.to(dtype) * rest.to(dtype)).sum(1)
    products = products if order is None else products[order.long()]
    return torch.stack([part.sum() for part in products.split(segments.ptr.diff().tolist())])


def judge(got, segments, grad, rest, order=None):
    plain, exact = (reference(segments, grad, rest, order, dtype)
                    for dtype in (torch.float32, torch.float64))
    assert_accurate("sums", got, plain, exact, 1e-7)


@pytest.mark.parametrize("most", [1, 3, 1000])
@pytest.mark.parametrize("columns", [64, 1, 6, 33])
def test_sums_and_gradients(device, monkeypatch, columns, most):
    monkeypatch.setattr(module, "_MOST", most)
    monkeypatch.setattr(module, "_EACH", 1)
    segments, grad, rest, share = make(device, columns)
    d_rest = torch.empty_like(grad)
    judge(blend_grad(segments, grad, rest, share, d_rest=d_rest), segments, grad, rest)
    each = share.repeat_interleave(segments.ptr.diff())[:, None]
    assert relative(d_rest, (1 - each.double()) * grad.double()) < 3e-7
    assert same_bits(blend_grad(segments, grad, rest, share),
                     blend_grad(segments, grad, rest, share, d_rest=d_rest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_in_any_order(device, dtype):
    segments, grad, rest, share = make(device, 20, dtype)
    order = torch.randperm(segments.rows, device=device).int()
    d_rest = torch.empty_like(grad)
    judge(blend_grad(segments, grad, rest, share, order, d_rest), segments, grad, rest, order)
    each = torch.empty(segments.rows, device=device)
    each[order.long()] = share.repeat_interleave(segments.ptr.diff())
    assert relative(d_rest, (1 - each.double())[:, None]
                    * grad.double()) < (3e-7 if dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("lengths", [(), (0, 0), (1,)])
def test_few_rows(device, lengths):
    segments, grad, rest, share = make(device, 4, lengths=lengths)
    judge(blend_grad(segments, grad, rest, share), segments, grad, rest) if lengths else None
    assert blend_grad(segments, grad, rest, share).shape == (len(lengths),)


@pytest.mark.parametrize("change,message", [
    (dict(rest=torch.randn(249, 5)), "rest is"), (dict(share=torch.zeros(3)), "share is"),
    (dict(grad=torch.randn(9, 6)), "grad has 9"),
    (dict(d_rest=torch.randn(249, 6).half()), "d_rest is"),
    (dict(order=torch.zeros(249)), "index of grad")])
def test_what_does_not_fit_is_refused(change, message):
    given = dict(grad=torch.randn(249, 6), rest=torch.randn(249, 6),
                 share=torch.zeros(len(LENGTHS))) | change
    with pytest.raises(ValueError, match=message):
        blend_grad(make_segments("cpu", LENGTHS), **given)
