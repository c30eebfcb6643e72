"""Products of rows with their segment's matrix, the matrix in shared memory whole."""
from __future__ import annotations

import dataclasses

import pytest
import torch

from gnnaccel.cuda.segment import segment_direct, segment_gemm
from gnnaccel.cuda.segment.segment_direct import depth_of, direct_plan, grid, store_width
from gnnaccel.cuda.segment.segment_gemm import multiply
from tests.cuda.test_segment_gemm import DIRECT as LENGTHS
from tests.cuda.test_segment_gemm import direct_alone, judge, make, reference
from tests.emulation.orders import again
from tests.helpers import assert_accurate, on_devices, relative, same_bits

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    direct_alone(monkeypatch)


def with_plan(monkeypatch, **changes):
    """The plan with some of its numbers changed; depth is that of the plan where it does not
    divide."""
    def changed(k, n, dtype, precision, dots, limit):
        plan = dataclasses.replace(direct_plan(k, n, dtype, precision, dots, limit), **changes)
        shared = segment_direct.shared_bytes(k, n, dtype, precision, dots, plan.warps)
        return dataclasses.replace(plan, depth=depth_of(k, dtype, plan.depth), shared=shared)

    monkeypatch.setattr(segment_gemm, "direct_plan", changed)


def gathered(device, k, n, dtype, blocks=1):
    segments, x, w = make(device, LENGTHS, k, n, dtype, blocks, rows=60)
    return segments, x, w, torch.randint(0, 60, (segments.rows,), device=device, dtype=torch.int32)


@pytest.mark.parametrize("rows,warps,depth,group",
                         [(16, 4, 4, 2), (16, 1, 1, 1), (32, 4, 2, 2), (32, 2, 4, 1),
                          (16, 16, 2, 4)])
@pytest.mark.parametrize("precision,dtype",
                         [("fp32", torch.float32), ("tf32", torch.float32),
                          ("fp32", torch.bfloat16)])
def test_plans(device, monkeypatch, rows, warps, depth, group, precision, dtype):
    with_plan(monkeypatch, rows=rows, warps=warps, depth=depth, group=group)
    segments, x, w, index = gathered(device, 64, 64, dtype)
    got = multiply(segments, x, w, index=index, precision=precision)
    if precision == "tf32":
        assert 5e-5 < relative(got, reference(segments, x, w, index)) < 6e-4
    else:
        judge("product", got, segments, x, w, index, floor=0 if dtype == torch.float32 else 2e-7)


@on_devices("k,n", [(16, 8), (48, 24), (24, 32), (80, 16), (128, 128)],
            [(128, 8), (8, 128), (112, 120), (64, 128), (128, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sizes(device, k, n, dtype):
    if k * dtype.itemsize % 32 or k <= 8:
        pytest.skip("another kernel's")
    segments, x, w = make(device, LENGTHS, k, n, dtype)
    judge("product", multiply(segments, x, w), segments, x, w, floor=2e-7)


@pytest.mark.long
@pytest.mark.parametrize("dtype,precision",
                         [(torch.float32, "fp32"), (torch.float32, "tf32"),
                          (torch.bfloat16, "fp32")])
@pytest.mark.parametrize("k,n", [(64, 32), (48, 24)])
def test_transposed_misaligned_and_scattered(device, poison, k, n, dtype, precision):
    segments, x, w, index = gathered(device, k, n, dtype)
    plain = multiply(segments, x, w, index=index, precision=precision)
    turned = w.transpose(2, 3).contiguous()
    assert same_bits(multiply(segments, x, turned, index=index, precision=precision,
                              transposed=True), plain)
    x1, w1, t1, out = (poison.guard(torch.empty(t.numel() + 1, device=device,
                                                dtype=dtype))[1:].view(t.shape)
                       for t in (x, w, turned, plain))
    x1.copy_(x), w1.copy_(w), t1.copy_(turned)
    assert same_bits(multiply(segments, x1, w1, index=index, precision=precision, out=out), plain)
    assert same_bits(multiply(segments, x1, t1, index=index, precision=precision, transposed=True),
                     plain)
    places = torch.randperm(segments.rows + 5, device=device)[:segments.rows]
    out = torch.full((segments.rows + 5, n), 7.0, device=device, dtype=dtype)
    multiply(segments, x, w, index=index, precision=precision, out=out, out_index=places.int())
    assert same_bits(out[places], plain) and (out == 7.0).all(1).sum() == 5


@pytest.mark.parametrize("rows", [16, 32])
def test_everything_at_once(device, monkeypatch, rows):
    with_plan(monkeypatch, rows=rows)
    segments, x, w, index = gathered(device, 16, 32, torch.float32, blocks=3)
    bias, scale, att = (torch.randn(*shape).to(device)
                        for shape in ((len(LENGTHS), 96), (segments.rows,), (len(LENGTHS), 2, 48)))
    y, a = multiply(segments, x, w, index=index, blocks=3, bias=bias, scale=scale,
                    activation="leaky_relu", slope=0.2, dots=att)
    counts = segments.ptr.diff().long()

    def expected(dtype):
        each = bias.to(dtype).repeat_interleave(counts, 0)
        plain = (reference(segments, x, w, index, dtype) + each) * scale.to(dtype)[:, None]
        out = torch.where(plain > 0, plain, 0.2 * plain)
        return out, (out.view(-1, 2, 48) * att.to(dtype).repeat_interleave(counts, 0)).sum(-1)

    for name, got, plain, exact in zip(("product", "dots"), (y, a), expected(torch.float32),
                                       expected(torch.float64)):
        assert_accurate(name, got, plain, exact)


def test_accumulate_adds_repeated_rows(device):
    segments, x, w = make(device, LENGTHS, 32, 16, torch.bfloat16)
    places = torch.randint(0, 30, (segments.rows,), device=device, dtype=torch.int32)
    start = torch.randn(30, 16, device=device)
    got = multiply(segments, x, w, out_index=places, out=start.clone(), accumulate=True)
    assert relative(got,
                    start.double().index_add(0, places.long(), reference(segments, x, w))) < 5e-7


def test_rounding_does_not_add_up_to_a_bias(device):
    segments, x, w = make(device, (40,), 128, 24)
    x, w = x.abs(), w.abs()
    judge("product", multiply(segments, x, w), segments, x, w, floor=0)
    x, w = x.bfloat16(), w.bfloat16()
    assert relative(multiply(segments, x, w, out_dtype=torch.float32),
                    reference(segments, x, w)) < 1e-6


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_numbers_that_are_none(device, monkeypatch, rows, precision):
    with_plan(monkeypatch, rows=rows)
    segments, x, w = make(device, (40, 30, 50), 64, 16)
    w = torch.exp2(w.round())
    clean = multiply(segments, x, w, precision=precision)
    x[3, 5], x[39, 0], x[45, 63], x[50, 1], x[50,
                                              2] = float("inf"), float("nan"), float("-inf"), float(
                                                  "inf"), float("-inf")
    w[2, 0, 7, 3], w[2, 0, 9, 5] = float("inf"), float("nan")
    got, want = multiply(segments, x, w,
                         precision=precision), reference(segments, x, w, dtype=torch.float32)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got[want.isinf()], want[want.isinf()])
    fine = want.isfinite()
    fine[[3, 39, 45, 50]] = False
    assert relative(got[fine], clean[fine]) < 3e-7 * (2000 if precision == "tf32" else 1)


@pytest.mark.parametrize("sms", [1, 3])
def test_blocks_walk_over_segments(device, monkeypatch, sms):
    segments, x, w = make(device, LENGTHS * 3, 32, 16)
    alone = multiply(segments, x, w)
    judge("product", alone, segments, x, w)
    monkeypatch.setattr(segment_direct, "_SMS", sms)
    with_plan(monkeypatch, per_sm=1)
    assert same_bits(multiply(segments, x, w), alone)
    again(device, lambda: multiply(segments, x, w), alone)


def test_which_matrices():
    limit = 227 * 1024
    plan = direct_plan(64, 64, torch.float32, "FP32", False, limit)
    assert plan.warps * plan.per_sm >= 16 and plan.shared == 2 * 4 * 64 * 64 + 16
    for k, n, precision in ((136, 64, "FP32"), (64, 136, "FP32"), (12, 64, "FP32"),
                            (64, 12, "FP32"), (64, 64, "FMA")):
        assert direct_plan(k, n, torch.float32, precision, False, limit) is None
    assert direct_plan(128, 128, torch.float32, "FP32", True, limit).shared <= limit
    assert direct_plan(128, 128, torch.float32, "FP32", False, 99 * 1024) is None  # sm_86
    assert direct_plan(16, 16, torch.float32, "FP32", False, 64 * 1024) is None  # sm_75


def test_grids_and_stores():
    plan = dataclasses.replace(direct_plan(64, 64, torch.float32, "FP32", False, 227 * 1024),
                               warps=4, per_sm=4)
    assert grid(plan, 1, 1) == 1 and grid(plan, 132 * 16,
                                          1) == 528 and grid(plan, 132 * 16 + 4, 1) == 265
    assert grid(plan, 10**6, 1000) == 1
    assert [store_width(n, torch.float32, 0) for n in (8, 24, 16, 64)] == [2, 2, 4, 4]
    assert [store_width(n, torch.float16, 0) for n in (8, 24, 16, 64)] == [2, 2, 4, 8]
    assert store_width(64, torch.float32, 8) == 2 and store_width(64, torch.float16, 2) == 1
