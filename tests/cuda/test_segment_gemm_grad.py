"""Gradients of the segments' matrices."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.segment import segment_plan
from gnnaccel.cuda.segment.segment_gemm_grad import weight_grad, weight_grad_and_sums
from tests.cuda.test_segment_gemm import LENGTHS, make_segments
from tests.emulation.orders import again
from tests.helpers import assert_accurate, on_devices, relative, same_bits

pytestmark = pytest.mark.usefixtures("poison")


def make(device, lengths, k, n, dtype=torch.float32, blocks=1, rows=None):
    """Segments, x and dy."""
    rows = sum(lengths) if rows is None else rows
    return (make_segments(device, lengths), torch.randn(rows, blocks * k).to(device, dtype),
            torch.randn(rows, blocks * n).to(device, dtype))


def reference(segments, x, dy, blocks=1, dtype=torch.float64):
    """[S, blocks, K, N] in ``dtype``; x and dy have a row for each of the segments'."""
    ends = segments.ptr.tolist()
    x, dy = (t.to(dtype).view(len(t), blocks, t.shape[1] // blocks) for t in (x, dy))
    return torch.stack([torch.einsum("ibk,ibn->bkn", x[begin:end], dy[begin:end])
                        for begin, end in zip(ends, ends[1:])])


def judge(got, segments, x, dy, blocks=1, floor=1e-7):
    """As a whole, and that segments without rows have zeros."""
    assert_accurate("gradient", got, reference(segments, x, dy, blocks, torch.float32),
                    reference(segments, x, dy, blocks), floor)
    assert (got[segments.ptr.diff() == 0] == 0).all()


@pytest.mark.parametrize("precision", ["fp32", "fma"])
@on_devices("k,n", [(64, 64), (16, 8), (1, 1), (3, 50), (33, 7), (40, 130)],
            [(128, 128), (130, 2), (512, 512), (1024, 40)])
def test_segments_of_all_lengths(device, k, n, precision):
    segments, x, dy = make(device, LENGTHS, k, n)
    judge(weight_grad(segments, x, dy, precision=precision), segments, x, dy)


@on_devices("length", [600], [100_000, 1_000_003])
def test_a_long_segment(device, length):
    segments, x, dy = make(device, (3, length, 0, 40), 64, 64)
    judge(weight_grad(segments, x, dy), segments, x, dy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k,n", [(32, 48), (5, 33)])
def test_half_types(device, dtype, k, n):
    segments, x, dy = make(device, LENGTHS, k, n, dtype)
    judge(weight_grad(segments, x, dy), segments, x, dy)
    judge(weight_grad(segments, x, dy, precision="fma"), segments, x, dy)


def test_tf32_rounds_once(device):
    segments, x, dy = make(device, LENGTHS, 64, 64)
    assert 5e-5 < relative(weight_grad(segments, x, dy, precision="tf32"),
                           reference(segments, x, dy)) < 6e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_does_not_add_up_to_a_bias(device, monkeypatch, dtype):
    monkeypatch.setattr(segment_plan, "_SMS", 1)  # long sums in one block
    monkeypatch.setattr(segment_plan.Tile, "blocks_per_sm", lambda self, shared: 1)
    segments, x, dy = make(device, (1500,), 16, 8, dtype)
    x, dy = x.abs(), dy.abs()
    assert relative(weight_grad(segments, x, dy), reference(segments, x, dy)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_indices_and_factors(device, dtype):
    segments, x, dy = make(device, LENGTHS, 20, 12, dtype, rows=40)
    index, dy_index = (torch.randint(0, 40, (segments.rows,), device=device, dtype=torch.int32)
                       for _ in range(2))
    judge(weight_grad(segments, x, dy, index=index, dy_index=dy_index), segments, x[index.long()],
          dy[dy_index.long()])
    scale = torch.randn(segments.rows).to(device)
    got = weight_grad(segments, x, dy, index=index, dy_index=dy_index, scale=scale)
    scaled = (dy[dy_index.long()].float() * scale[:, None]).to(dtype)
    judge(got, segments, x[index.long()], scaled)


@on_devices("blocks,k,n", [(4, 8, 8), (3, 10, 5), (2, 16, 136)], [(8, 64, 64)])
def test_blocks(device, blocks, k, n):
    segments, x, dy = make(device, LENGTHS, k, n, blocks=blocks)
    judge(weight_grad(segments, x, dy, blocks=blocks), segments, x, dy, blocks)


def sums_of(segments, dy, dtype=torch.float64):
    """[S, columns of dy] in ``dtype``."""
    ends = segments.ptr.tolist()
    return torch.stack([dy[begin:end].to(dtype).sum(0) for begin, end in zip(ends, ends[1:])])


def judge_sums(got, segments, dy):
    assert_accurate("sums", got, sums_of(segments, dy, torch.float32), sums_of(segments, dy), 1e-7)
    assert (got[segments.ptr.diff() == 0] == 0).all()


@pytest.mark.parametrize("precision", ["fp32", "fma"])
@on_devices("blocks,k,n", [(1, 64, 64), (1, 3, 50), (3, 10, 5), (2, 80, 136), (1, 16, 112)],
            [(1, 130, 2), (1, 512, 512)])
def test_sums_of_columns(device, blocks, k, n, precision):
    segments, x, dy = make(device, LENGTHS, k, n, blocks=blocks)
    got, sums = weight_grad_and_sums(segments, x, dy, blocks=blocks, precision=precision)
    assert same_bits(got, weight_grad(segments, x, dy, blocks=blocks, precision=precision))
    judge_sums(sums, segments, dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_columns_with_indices_and_factors(device, dtype):
    segments, x, dy = make(device, LENGTHS, 20, 12, dtype, rows=40)
    index, dy_index = (torch.randint(0, 40, (segments.rows,), device=device, dtype=torch.int32)
                       for _ in range(2))
    scale = torch.randn(segments.rows).to(device)
    got, sums = weight_grad_and_sums(segments, x, dy, index=index, dy_index=dy_index, scale=scale)
    assert same_bits(got, weight_grad(segments, x, dy, index=index, dy_index=dy_index, scale=scale))
    judge_sums(sums, segments, dy[dy_index.long()].float() * scale[:, None])


@pytest.mark.parametrize("sms", [1, 3, 50])
def test_sums_of_columns_of_divided_segments(device, monkeypatch, sms):
    monkeypatch.setattr(segment_plan, "_SMS", sms)
    monkeypatch.setattr(segment_plan.Tile, "blocks_per_sm", lambda self, shared: 1)
    segments, x, dy = make(device, (*LENGTHS, 1, 1, 500, 0, 64, 3), 70, 12)
    got, sums = weight_grad_and_sums(segments, x, dy)
    judge(got, segments, x, dy)
    judge_sums(sums, segments, dy)


def test_sums_of_no_rows(device):
    got, sums = weight_grad_and_sums(*make(device, (0, 0), 4, 6))
    assert got.shape == (2, 1, 4, 6) and sums.shape == (2, 6) and not got.any() and not sums.any()


@pytest.mark.parametrize("sms", [1, 2, 3, 5, 50])
def test_segments_are_divided_anywhere(device, monkeypatch, sms):
    # 1: no parts; 50: more blocks than tiles, since empty segments count in the bound
    monkeypatch.setattr(segment_plan, "_SMS", sms)
    monkeypatch.setattr(segment_plan.Tile, "blocks_per_sm", lambda self, shared: 1)
    lengths = (*LENGTHS, 1, 1, 500, 0, 64, 3)
    segments, x, dy = make(device, lengths, 20, 12)
    judge(weight_grad(segments, x, dy), segments, x, dy)


@pytest.mark.long
def test_thousands_of_segments_mostly_empty(device):
    lengths = torch.zeros(5000, dtype=torch.long)
    lengths[torch.randperm(5000)[:60]] = torch.randint(1, 80, (60,))
    segments, x, dy = make(device, lengths.tolist(), 8, 8)
    judge(weight_grad(segments, x, dy), segments, x, dy)


def test_out_is_overwritten(device):
    segments, x, dy = make(device, LENGTHS, 6, 5)
    out = torch.full((len(LENGTHS), 1, 6, 5), 3.0, device=device)
    assert weight_grad(segments, x, dy, out=out) is out
    assert same_bits(out, weight_grad(segments, x, dy))
    judge(out, segments, x, dy)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
def test_no_rows(device, lengths):
    segments, x, dy = make(device, lengths, 4, 6)
    got = weight_grad(segments, x, dy)
    assert got.shape == (len(lengths), 1, 4, 6) and (got == 0).all()


def test_same_bits_in_any_order(device, monkeypatch):
    monkeypatch.setattr(segment_plan, "_SMS", 2)
    monkeypatch.setattr(segment_plan.Tile, "blocks_per_sm", lambda self, shared: 1)
    segments, x, dy = make(device, (*LENGTHS, 200), 40, 36)
    scale = torch.randn(segments.rows).to(device)
    first = weight_grad(segments, x, dy, scale=scale)
    judge(first, segments, x, dy * scale[:, None])
    again(device, lambda: weight_grad(segments, x, dy, scale=scale), first)


@pytest.mark.parametrize("precision,dtype",
                         [("fp32", torch.float32), ("tf32", torch.float32),
                          ("fp32", torch.float16)])
def test_bad_numbers_stay_in_their_row_and_column(device, precision, dtype):
    segments, x, dy = make(device, (40, 30, 35), 24, 16, dtype)
    dy = torch.exp2(dy.float().round()).to(dtype)
    x[3, 5], x[45, 7], dy[50, 2] = float("inf"), float("nan"), float("inf")
    got = weight_grad(segments, x, dy, precision=precision)
    want = reference(segments, x, dy, dtype=torch.float32)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got[want.isinf()],
                       want[want.isinf()]) and want.isinf().any() and want.isnan().any()
    fine = want.isfinite()
    assert relative(got[fine], want[fine]) < 3e-7 * (2000 if precision == "tf32" else 1)


@pytest.mark.parametrize("change,message", [
    (dict(x=torch.randn(249)), "both need columns"), (dict(blocks=4), "divide into 4"),
    (dict(blocks=0), "at least one block"),
    (dict(dy=torch.randn(249, 5).half()), "have to be the same"),
    (dict(x=torch.randn(9, 6)), "x has 9 rows"), (dict(dy=torch.randn(9, 6)), "dy has 9 rows"),
    (dict(dy_index=torch.zeros(3, dtype=torch.int32)), "index of dy"),
    (dict(scale=torch.zeros(3)), "scale is"),
    (dict(out=torch.zeros(10, 6, 5)), "out is"), (dict(precision="half"), "precision is one of"),
])
def test_what_does_not_fit_is_refused(change, message):
    given = dict(x=torch.randn(249, 6), dy=torch.randn(249, 5)) | change
    with pytest.raises(ValueError, match=message):
        weight_grad(make_segments("cpu", LENGTHS), given.pop("x"), given.pop("dy"), **given)


def test_what_was_found_out_for_one_call_serves_only_those_alike(device):
    segments, x, dy = make(device, (20, 0, 7), 16, 16)
    first, kept = weight_grad(segments, x, dy), len(segments.made)
    judge(weight_grad(segments, x + 1, dy * 2), segments, x + 1, dy * 2)
    assert len(segments.made) == kept and same_bits(weight_grad(segments, x, dy), first)
    judge(weight_grad(segments, x[:, :8].contiguous(), dy), segments, x[:, :8], dy)
    assert same_bits(weight_grad_and_sums(segments, x, dy)[0], first)
    for refused in (dict(dy=dy.half()), dict(x=x[:20]), dict(scale=torch.ones(3, device=device)),
                    dict(out=first[:2])):
        with pytest.raises(ValueError):
            weight_grad(segments, **dict(x=x, dy=dy) | refused)
