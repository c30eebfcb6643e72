"""Both gradients of a product by segment in one kernel."""
from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from gnnaccel.cuda.runtime import driver
from gnnaccel.cuda.segment import segment_backward, segment_plan
from gnnaccel.cuda.segment.segment_backward import backward, gradients, plans
from gnnaccel.cuda.segment.segment_gemm import multiply
from gnnaccel.cuda.segment.segment_plan import precision_of
from tests.cuda import test_segment_gemm as products
from tests.cuda import test_segment_gemm_grad as sums_of_products
from tests.cuda.test_segment_gemm import LENGTHS, make_segments
from tests.emulation.emulator import EmulatedDriver
from tests.emulation.orders import again
from tests.helpers import on_devices, relative, same_bits

pytestmark = pytest.mark.usefixtures("poison")

LIMIT = 227 * 1024
MORE = (*LENGTHS, 64, 1, 1, 200, 0, 65, 3)


def make(device, lengths, k, n, dtype=torch.float32, blocks=1, rows=None):
    """Segments, x, dy and w [S, blocks, K, N]."""
    rows = sum(lengths) if rows is None else rows
    return (make_segments(device, lengths), torch.randn(rows, blocks * k).to(device, dtype),
            torch.randn(rows, blocks * n).to(device, dtype),
            torch.randn(len(lengths), blocks, k, n).to(device, dtype))


def together(segments, x, dy, w, number=0, changes=None, **more):
    """`gradients` by the one kernel, whatever `serves` says."""
    blocks = more.get("blocks", 1)
    k, n = x.shape[1] // blocks, dy.shape[1] // blocks
    plan = plans(n, k, x.dtype, precision_of(more.get("precision", "fp32"), x.dtype, n),
                 LIMIT)[number]
    return backward(segments, dataclasses.replace(plan, **changes or {}), x, dy, w, **more)


def judge(got, segments, x, dy, w, blocks=1, floor=2e-7):
    """Against fp64; x and dy have a row for each of the segments', w is [S, blocks, K, N]."""
    dx, dw, sums = got
    products.judge("rows", dx, segments, dy, w.transpose(2, 3), floor=floor)
    sums_of_products.judge(dw, segments, x, dy, blocks)
    if sums is not None:
        sums_of_products.judge_sums(sums, segments, dy)


def few_blocks(monkeypatch, sms):
    monkeypatch.setattr(segment_plan, "_SMS", sms)
    return dict(per_sm=1)


@on_devices("number,precision,dtype",
            [*((i, "fp32", torch.float32) for i in range(3)), (0, "tf32", torch.float32),
             (2, "tf32", torch.float32), (0, "fp32", torch.bfloat16), (2, "fp32", torch.bfloat16)],
            [(1, "tf32", torch.float32), (1, "fp32", torch.bfloat16)])
def test_every_plan(device, number, precision, dtype):
    segments, x, dy, w = make(device, MORE, 64, 64, dtype)
    dx, dw, sums = together(segments, x, dy, w, number, precision=precision, sums=True)
    assert same_bits(dx, multiply(segments, dy, w, transposed=True, precision=precision))
    if precision == "tf32":
        assert 5e-5 < relative(dw, sums_of_products.reference(segments, x, dy)) < 6e-4
        sums_of_products.judge_sums(sums, segments, dy)
    else:
        judge((dx, dw, sums), segments, x, dy, w)


SIZES = [(16, 24), (24, 40), (8, 16), (64, 32), (120, 16), (128, 64), (64, 128), (128, 128)]


@on_devices("k,n,dtype",
            [(24, 40, torch.float32), (8, 16, torch.float16), (120, 16, torch.float32),
             (64, 128, torch.float16)],
            [(k, n, dtype) for k, n in SIZES for dtype in (torch.float32, torch.float16)
             if n * dtype.itemsize % 32 == 0])
def test_sizes(device, k, n, dtype):
    segments, x, dy, w = make(device, LENGTHS, k, n, dtype)
    judge(together(segments, x, dy, w, sums=True), segments, x, dy, w)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("k,n", [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_plan_with_long_segments(device, k, n, dtype):
    segments, x, dy, w = make(device, (3, 300_001, 0, 100_000, 40), k, n, dtype)
    for number in range(len(plans(n, k, dtype, precision_of("fp32", dtype), LIMIT))):
        judge(together(segments, x, dy, w, number, sums=True), segments, x, dy, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_from_anywhere_to_anywhere(device, dtype):
    segments, x, dy, w = make(device, LENGTHS, 40, 16, dtype, rows=50)
    index, dy_index = (torch.randint(0, 50, (segments.rows,), device=device, dtype=torch.int32)
                       for _ in range(2))
    places = torch.randperm(segments.rows + 9, device=device)[:segments.rows]
    out = torch.full((segments.rows + 9, 40), 7.0, device=device, dtype=dtype)
    dx, dw, sums = together(segments, x, dy, w, index=index, dy_index=dy_index, out=out,
                            out_index=places.int(), sums=True)
    assert dx is out
    judge((out[places], dw, sums), segments, x[index.long()], dy[dy_index.long()], w)
    assert (out == 7.0).all(1).sum() == 9


@pytest.mark.long
def test_what_is_added_to_and_the_derivative_of_gelu(device):
    segments, x, dy, w = make(device, LENGTHS, 32, 16)
    plain, dw, _ = together(segments, x, dy, w)
    places = torch.randperm(segments.rows, device=device)
    start = torch.randn(segments.rows, 32, device=device)
    got, same, _ = together(segments, x, dy, w, out=start.clone(), out_index=places.int(),
                            accumulate=True)
    assert relative(got[places],
                    start[places].double() + plain.double()) < 2e-7 and same_bits(same, dw)
    exact = start.double().requires_grad_()
    torch.nn.functional.gelu(exact).sum().backward()
    got, same, _ = together(segments, x, dy, w, gelu_grad=start)
    assert relative(got, plain.double() * exact.grad) < 5e-7 and same_bits(same, dw)
    with pytest.raises(ValueError, match="other memory"):
        together(segments, x, dy, w, gelu_grad=start, out=start)


@pytest.mark.long
@pytest.mark.parametrize("blocks,k,n,dtype",
                         [(1, 24, 32, torch.float32), (3, 48, 16, torch.bfloat16)])
def test_turned_matrices_and_blocks(device, blocks, k, n, dtype):
    segments, x, dy, w = make(device, MORE, k, n, dtype, blocks)
    plain = together(segments, x, dy, w, blocks=blocks, sums=True)
    judge(plain, segments, x, dy, w, blocks)
    turned = together(segments, x, dy, w.transpose(2, 3).contiguous(), blocks=blocks, sums=True,
                      transposed=True)
    assert same_bits(turned[0], plain[0]) and same_bits(turned[1].transpose(2, 3),
                                                        plain[1]) and same_bits(turned[2], plain[2])
    spread = torch.stack([w, w], 1).flatten(0, 1)[::2]
    assert all(same_bits(a, b)
               for a, b in zip(together(segments, x, dy, spread, blocks=blocks, sums=True), plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_misaligned_memory(device, poison, dtype):
    segments, x, dy, w = make(device, LENGTHS, 32, 16, dtype)
    plain = together(segments, x, dy, w)
    x1, dy1, w1, out = (poison.guard(torch.empty(t.numel() + 1, device=device,
                                                 dtype=dtype))[1:].view(t.shape)
                        for t in (x, dy, w, x))
    x1.copy_(x), dy1.copy_(dy), w1.copy_(w)
    got = together(segments, x1, dy1, w1, out=out)
    assert got[0] is out and same_bits(out, plain[0]) and same_bits(got[1], plain[1])


@pytest.mark.parametrize("sms", [1, 2, 3, 5, 50])
def test_segments_are_divided_anywhere(device, monkeypatch, sms):
    # 1: no parts; 50: more blocks than tiles, since empty segments count in the bound
    changes = few_blocks(monkeypatch, sms)
    segments, x, dy, w = make(device, MORE, 24, 16)
    judge(together(segments, x, dy, w, changes=changes, sums=True), segments, x, dy, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_does_not_add_up_to_a_bias(device, monkeypatch, dtype):
    changes = few_blocks(monkeypatch, 1)  # long sums in one block
    segments, x, dy, w = make(device, (1500,), 16, 16, dtype)
    x, dy, w = x.abs(), dy.abs(), w.abs()
    dx, dw, _ = together(segments, x, dy, w, changes=changes)
    assert relative(dw, sums_of_products.reference(segments, x, dy)) < 1e-6
    judge((dx, dw, None), segments, x, dy, w)


@pytest.mark.long
def test_same_bits_in_any_order(device, monkeypatch):
    changes = few_blocks(monkeypatch, 2)
    segments, x, dy, w = make(device, MORE, 64, 64)
    first = together(segments, x, dy, w, changes=changes, sums=True)
    judge(first, segments, x, dy, w)
    again(device, lambda: together(segments, x, dy, w, changes=changes, sums=True), first)


@pytest.mark.long
def test_thousands_of_segments_mostly_empty(device):
    lengths = torch.zeros(5000, dtype=torch.long)
    lengths[torch.randperm(5000)[:40]] = torch.randint(1, 80, (40,))
    segments, x, dy, w = make(device, lengths.tolist(), 16, 16)
    judge(together(segments, x, dy, w, sums=True), segments, x, dy, w)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
def test_no_rows(device, lengths):
    segments, x, dy, w = make(device, lengths, 16, 24)
    dx, dw, sums = together(segments, x, dy, w, sums=True)
    assert dx.shape == (0, 16) and dw.shape == w.shape and sums.shape == (len(lengths), 24) and not dw.any() and not sums.any()


@pytest.mark.parametrize("precision,dtype",
                         [("fp32", torch.float32), ("tf32", torch.float32),
                          ("fp32", torch.bfloat16)])
def test_bad_numbers_stay_where_they_belong(device, precision, dtype):
    # powers of two, whose small part is 0: inf * 0 would be NaN where fp32 gives inf
    segments, x, dy, w = make(device, (40, 70, 35), 24, 16, dtype)
    x, dy, w = (torch.exp2(t.float().round()).to(dtype) for t in (x, dy, w))
    inf = float("inf")
    dy[3, 5], dy[45, 7], dy[50, 2], x[60, 1], x[100, 0], w[2, 0, 3,
                                                           3] = inf, float("nan"), -inf, inf, float(
                                                               "nan"), inf
    dx, dw, _ = together(segments, x, dy, w, precision=precision)
    turned = w.transpose(2, 3)
    for got, want in ((dx, products.reference(segments, dy, turned, dtype=torch.float32).to(dtype)),
                      (dw, sums_of_products.reference(segments, x, dy, dtype=torch.float32))):
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
        assert torch.equal(got[want.isinf()],
                           want[want.isinf()]) and want.isinf().any() and want.isnan().any()
        fine = want.isfinite()
        assert relative(got[fine],
                        want[fine]) < (6e-4 if precision == "tf32" else 4e-3
                                       if got.dtype != torch.float32 else 3e-7)


# ---- by one kernel or by two ----

@pytest.mark.parametrize("k,n,fused", [(64, 64, True), (33, 7, False)])
def test_gradients_by_what_serves(device, monkeypatch, k, n, fused):
    segments, x, dy, w = make(device, LENGTHS, k, n)
    launched, made = [], segment_backward.kernels
    monkeypatch.setattr(segment_backward, "kernels",
                        lambda *args: launched.append(args) or made(*args))
    got = gradients(segments, x, dy, w, sums=True)
    assert bool(launched) == fused
    judge(got, segments, x, dy, w)


@pytest.mark.long
@pytest.mark.parametrize("sums,transposed", [(False, True), (True, False), (True, True)])
def test_two_kernels_make_the_same(device, monkeypatch, transposed, sums):
    segments, x, dy, w = make(device, LENGTHS, 32, 16, blocks=2)
    w = w.transpose(2, 3).contiguous() if transposed else w
    how = dict(blocks=2, transposed=transposed, sums=sums)
    one = gradients(segments, x, dy, w, **how)
    segment_backward._plan.cache_clear()
    monkeypatch.setattr(segment_backward, "serves", lambda *size: False)
    two = gradients(make_segments(device, LENGTHS), x, dy, w, **how)
    segment_backward._plan.cache_clear()
    assert same_bits(one[0],
                     two[0]) and one[1].shape == two[1].shape == w.shape and relative(one[1],
                                                                                      two[1]) < 3e-7
    assert (one[2] is None) == (two[2] is None) == (not sums) and (not sums
                                                                   or relative(one[2],
                                                                               two[2]) < 3e-7)


def test_plans_fit():
    for k, n in ((64, 64), (16, 8), (48, 40), (128, 64), (64, 128), (128, 128), (96, 64)):
        for dtype, precision in ((torch.float32, "FP32"), (torch.float32, "TF32"),
                                 (torch.bfloat16, "HALF")):
            for limit in (LIMIT, 163 * 1024, 99 * 1024):
                found = plans(k, n, dtype, precision, limit)
                assert all(p.shared(dtype, precision, True) <= limit and p.threads <= 1024
                           for p in found)
            assert plans(k, n, dtype, precision, LIMIT) and not plans(k, n, dtype, "FMA", LIMIT)
    for k, n, dtype in ((4, 64, torch.float32), (64, 20, torch.float32), (8, 64, torch.float16),
                        (136, 64, torch.float32)):
        assert not plans(k, n, dtype, "HALF" if dtype is torch.float16 else "FP32", LIMIT)


@pytest.mark.parametrize("change,message", [
    (dict(x=torch.randn(249, 8)), "w has shape"), (dict(w=torch.randn(10, 16, 16)), "w has shape"),
    (dict(w=torch.randn(9, 16, 24)), "w has shape"),
    (dict(w=torch.randn(10, 24, 16).transpose(1, 2)), "have to be contiguous"),
    (dict(x=torch.randn(249, 32)[:, ::2]), "x has shape"),
    (dict(dy=torch.randn(249, 24).half()), "have to be the same"),
    (dict(dy=torch.randn(9, 24)), "dy has 9 rows"),
    (dict(index=torch.zeros(3, dtype=torch.int32)), "index of x"),
    (dict(out_index=torch.zeros(249, dtype=torch.int32)), "out is None"),
    (dict(out=torch.zeros(249, 24)), "out is"),
    (dict(gelu_grad=torch.zeros(9, 16)), "gelu_grad is"), (dict(transposed=True), "w has shape"),
])
def test_what_does_not_fit_is_refused(change, message):
    given = dict(x=torch.randn(249, 16), dy=torch.randn(249, 24),
                 w=torch.randn(10, 16, 24)) | change
    plan, segments = plans(24, 16, torch.float32, "FP32", LIMIT)[0], make_segments("cpu", LENGTHS)
    with pytest.raises(ValueError, match=message):
        backward(segments, plan, given.pop("x"), given.pop("dy"), given.pop("w"), **given)


def test_what_was_found_out_for_one_call_serves_only_those_alike(device):
    segments, x, dy, w = make(device, (20, 0, 7), 16, 16)
    first, kept = gradients(segments, x, dy, w), len(segments.made)
    judge(gradients(segments, x + 1, dy * 2, w), segments, x + 1, dy * 2, w)
    assert len(segments.made) == kept
    judge(gradients(segments, x, dy, w, sums=True), segments, x, dy, w)
    assert same_bits(gradients(segments, x, dy, w)[1], first[1])


@pytest.mark.long
def test_prepare_compiles_what_serves(device, monkeypatch):
    """All kernels, and no others: those that `gradients` finds afterwards have the same texts."""
    texts, kernel = [], EmulatedDriver.kernel
    monkeypatch.setattr(EmulatedDriver, "kernel", lambda self, family, entry, defines=():
                        texts.append((family, defines)) or kernel(self, family, entry, defines))
    segments = make_segments("cpu", LENGTHS)
    for n, transposed, sums, written in itertools.product(
            (64, 33), (False, True), (False, True), ({}, {"accumulate": True})):
        x, dy = torch.randn(sum(LENGTHS), 64), torch.randn(sum(LENGTHS), n)
        w = torch.randn(len(LENGTHS), *((n, 64) if transposed else (64, n)))
        with driver.using(EmulatedDriver()):
            segments.tile_ptr(16)  # whose kernel is no part of it
            texts.clear()
            segment_backward.prepare(64, n, 1, torch.float32, sum(LENGTHS), len(LENGTHS),
                                     transposed, "fp32", torch.device("cpu"), sums,
                                     "BLEND" if written else "PLAIN")
            prepared = set(texts)
            texts.clear()
        with driver.using(EmulatedDriver()):  # which has none of them
            gradients(segments, x, dy, w, transposed=transposed, sums=sums,
                      out=torch.zeros_like(x), **written)
        assert set(texts) == prepared
        assert len(prepared) == (1 if n == 64 else 2)
