"""Products of rows with their segment's matrix."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.segment import segment_gemm, segment_plan
from gnnaccel.cuda.segment.segment_gemm import Segments, multiply
from tests.emulation.orders import again
from tests.helpers import ROUNDING, assert_accurate, on_devices, relative, same_bits

pytestmark = pytest.mark.usefixtures("poison")

LENGTHS = (0, 1, 31, 32, 33, 0, 0, 150, 2, 0)
#: for segment_direct.cu
DIRECT = (0, 1, 15, 16, 17, 0, 31, 32, 33, 0, 0, 100, 2, 0)
#: sizes for segment_gemm.cu, and sizes that are left to segment_direct.cu
of_each_kernel = pytest.mark.parametrize(
    "lengths,k,n", [(LENGTHS, 12, 10), (LENGTHS, 33, 7), (LENGTHS, 140, 72),
                    (DIRECT, 32, 16), (DIRECT, 64, 64), (DIRECT, 48, 24)])


def make_segments(device, lengths):
    ptr = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return Segments(ptr, sum(lengths))


def make(device, lengths, k, n, dtype=torch.float32, blocks=1, rows=None):
    """Segments, x and w [S, blocks, K, N]."""
    x = torch.randn(sum(lengths) if rows is None else rows, blocks * k).to(device, dtype)
    w = torch.randn(len(lengths), blocks, k, n).to(device, dtype)
    return make_segments(device, lengths), x, w


def reference(segments, x, w, index=None, dtype=torch.float64):
    """The rows' products, segment by segment. w [S, blocks, K, N]."""
    x = (x if index is None else x[index.long()]).to(dtype)
    ends, (_, blocks, k, n) = segments.ptr.tolist(), w.shape
    parts = [torch.einsum("ibk,bkn->ibn", x[begin:end].view(-1, blocks, k),
                          w[s].to(dtype)).reshape(-1, blocks * n)
             for s, (begin, end) in enumerate(zip(ends, ends[1:]))]
    return torch.cat([x.new_zeros(0, blocks * n), *parts])


def judge(name, got, segments, x, w, index=None, floor=6e-8):
    plain, exact = reference(segments, x, w, index, torch.float32), reference(segments, x, w, index)
    assert_accurate(name, got, plain, exact,
                    floor=floor + (ROUNDING[got.dtype] if got.dtype != torch.float32 else 0))


def tiled(monkeypatch):
    """Also small matrices by segment_gemm.cu."""
    monkeypatch.setattr(segment_gemm, "direct_plan", lambda *args: None)


def fixed_rows(monkeypatch, height):
    """Tiles of this height, which these small graphs would not get."""
    tiled(monkeypatch)
    monkeypatch.setattr(segment_gemm, "tile_rows", lambda rows, segments: height)


@pytest.fixture
def alone(monkeypatch, lengths):
    """Nothing that is for segment_direct.cu falls back to segment_gemm.cu."""
    if lengths is DIRECT:
        direct_alone(monkeypatch)


def direct_alone(monkeypatch):
    monkeypatch.setattr(segment_gemm, "product_plan",
                        lambda *args: pytest.fail("not the kernel under test"))


@pytest.fixture(params=["tiled", "direct"])
def either(request, monkeypatch):
    """By segment_gemm.cu and, where it can do it, by segment_direct.cu."""
    if request.param == "tiled":
        tiled(monkeypatch)


@pytest.mark.parametrize("height,precision",
                         [(16, "fp32"), (32, "fp32"), (64, "fp32"), (128, "fp32"), (128, "fma"),
                          (32, "fma")])
def test_segments_of_all_lengths(device, monkeypatch, height, precision):
    fixed_rows(monkeypatch, height)
    segments, x, w = make(device, LENGTHS, 64, 64)
    judge("product", multiply(segments, x, w, precision=precision), segments, x, w, floor=0)


@on_devices("length", [300], [100_000, 1_000_003])
def test_a_long_segment(device, either, length):
    segments, x, w = make(device, (3, length, 0, 40), 64, 64)
    judge("product", multiply(segments, x, w), segments, x, w, floor=0)


@on_devices("k,n", [(1, 1), (3, 5), (5, 130), (130, 1), (33, 47), (100, 36), (520, 24)],
            [(8, 8), (128, 128), (256, 96), (512, 512), (1024, 1024), (1000, 3), (66, 200)])
def test_sizes(device, k, n):
    segments, x, w = make(device, (20, 0, 7), k, n)
    judge("product", multiply(segments, x, w), segments, x, w)


@on_devices("height", [64], [128])
def test_wide_tiles(device, monkeypatch, height):
    fixed_rows(monkeypatch, height)
    segments, x, w = make(device, (70, 0, 65), 40, 140)
    judge("product", multiply(segments, x, w), segments, x, w)


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k,n", [(64, 48), (33, 5)])
def test_half_types(device, either, dtype, out_dtype, k, n):
    segments, x, w = make(device, LENGTHS, k, n, dtype)
    got = multiply(segments, x, w, out_dtype=out_dtype)
    assert got.dtype == (out_dtype or dtype)
    judge("product", got, segments, x, w, floor=2e-7)
    judge("without tensor cores", multiply(segments, x, w, precision="fma", out_dtype=out_dtype),
          segments, x, w, floor=2e-7)


def test_tf32_rounds_once(device, either):
    segments, x, w = make(device, LENGTHS, 64, 64)
    error = relative(multiply(segments, x, w, precision="tf32"), reference(segments, x, w))
    assert 5e-5 < error < 6e-4


def test_rounding_does_not_add_up_to_a_bias(device):
    # all of one sign: tensor cores that kept the sum would lose half a last place in every step,
    # always downwards
    segments, x, w = make(device, (40,), 520, 24)
    x, w = x.abs(), w.abs()
    judge("product", multiply(segments, x, w), segments, x, w, floor=0)


# ---- where rows come from and go to ----

@on_devices("k,n", [(36, 20), (5, 6)])
def test_gather_and_scatter(device, k, n):
    segments, x, w = make(device, LENGTHS, k, n, rows=40)
    index = torch.randint(0, 40, (segments.rows,), device=device, dtype=torch.int32)
    judge("gathered", multiply(segments, x, w, index=index), segments, x, w, index)
    out = torch.full((segments.rows + 9, n), 7.0, device=device)
    places = torch.randperm(segments.rows + 9, device=device)[:segments.rows]
    assert multiply(segments, x, w, index=index, out_index=places.int(), out=out) is out
    judge("scattered", out[places], segments, x, w, index)
    rest = torch.ones(len(out), dtype=torch.bool, device=device)
    rest[places] = False
    assert rest.sum() == 9 and (out[rest] == 7.0).all()


@of_each_kernel
def test_what_is_added_by_the_only_writer(device, alone, lengths, k, n):
    segments, x, w = make(device, lengths, k, n)
    places = torch.randperm(segments.rows + 5, device=device)[:segments.rows]
    start = torch.randn(segments.rows + 5, n, device=device)
    got = multiply(segments, x, w, out_index=places.int(), out=start.clone(), accumulate=True,
                   distinct=True)
    exact = start.double().index_add(0, places, reference(segments, x, w))
    assert relative(got, exact) < 5e-7
    in_order = multiply(segments, x, w, out=start[:segments.rows].clone(), accumulate=True)
    assert relative(in_order, start[:segments.rows].double() + reference(segments, x, w)) < 5e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@of_each_kernel
def test_blends(device, alone, lengths, k, n, dtype):
    segments, x, w = make(device, lengths, k, n, dtype)
    places = torch.randperm(segments.rows, device=device)
    share = torch.rand(segments.count, device=device)
    rest = torch.randn(segments.rows, n).to(device, dtype)
    each = share.double().repeat_interleave(segments.ptr.diff())[:, None]
    bias = torch.randn(segments.count, n).to(device)
    product = reference(segments, x, w) + bias.double().repeat_interleave(segments.ptr.diff(), 0)
    got = multiply(segments, x, w, blend=(share, rest), bias=bias)
    limit = 5e-7 if dtype is torch.float32 else 4e-3
    assert relative(got, each * product + (1 - each) * rest.double()) < limit
    got = multiply(segments, x, w, blend=(share, rest), bias=bias, out_index=places.int(),
                   out=torch.empty_like(rest))
    assert relative(got[places], each * product + (1 - each) * rest.double()[places]) < limit


@pytest.mark.parametrize("lengths,k,n", [(LENGTHS, 12, 7), (DIRECT, 64, 64)])
def test_derivative_of_gelu(device, alone, lengths, k, n):
    segments, x, w = make(device, lengths, k, n)
    at = (4 * torch.randn(segments.rows, n)).to(device)
    exact = at.double().requires_grad_()
    torch.nn.functional.gelu(exact).sum().backward()
    places = torch.randperm(segments.rows, device=device)
    wanted = reference(segments, x, w)
    assert relative(multiply(segments, x, w, gelu_grad=at), wanted * exact.grad) < 5e-7
    got = multiply(segments, x, w, gelu_grad=at, out_index=places.int(), out=torch.empty_like(at))
    assert relative(got[places], wanted * exact.grad[places]) < 5e-7


def test_accumulate_adds_repeated_rows(device):
    segments, x, w = make(device, LENGTHS, 12, 10)
    places = torch.randint(0, 30, (segments.rows,), device=device, dtype=torch.int32)
    start = torch.randn(30, 10, device=device)
    got = multiply(segments, x, w, out_index=places, out=start.clone(), accumulate=True)
    exact = start.double().index_add(0, places.long(), reference(segments, x, w))
    assert relative(got, exact) < 5e-7
    twice = multiply(segments, x, w, out=multiply(segments, x, w), accumulate=True)
    assert relative(twice, 2 * reference(segments, x, w)) < 5e-7


@on_devices("k,n", [(36, 20), (7, 9), (48, 24)], [(512, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_matrices_in_place(device, either, k, n, dtype):
    segments, x, w = make(device, LENGTHS, k, n, dtype)
    turned = w.transpose(2, 3).contiguous()
    got = multiply(segments, x, turned[:, 0], transposed=True)
    judge("transposed", got, segments, x, w)
    assert same_bits(got, multiply(segments, x, w))


@pytest.mark.parametrize("transposed", [False, True])
@on_devices("blocks,k,n", [(4, 8, 8), (3, 10, 5)], [(8, 64, 64), (2, 64, 200)])
def test_block_diagonal_with_strides(device, either, blocks, k, n, transposed):
    segments, x, _ = make(device, LENGTHS, k, n, blocks=blocks)
    shape = (n, k) if transposed else (k, n)
    w = torch.randn(2 * len(LENGTHS), 2 * blocks, *shape).to(device)[::2, 1::2]
    got = multiply(segments, x, w, blocks=blocks, transposed=transposed)
    judge("blocks", got, segments, x, w.transpose(2, 3) if transposed else w)


@on_devices("blocks,k,n", [(3, 16, 8)], [(3, 16, 64), (2, 32, 96), (2, 64, 128)])
def test_rows_that_all_blocks_take(device, blocks, k, n):
    segments, x, _ = make(device, LENGTHS, k, n)
    w = torch.randn(len(LENGTHS), blocks, n, k).to(device)
    bias = torch.randn(blocks * n).to(device)
    got = multiply(segments, x, w, blocks=blocks, bias=bias, transposed=True)
    exact = reference(segments, x.repeat(1, blocks), w.transpose(2, 3)) + bias.double()
    assert relative(got, exact) < 4e-7
    x[1, 0] = float("inf")  # not split: by another way
    got = multiply(segments, x, w, blocks=blocks, transposed=True)
    exact = reference(segments, x.repeat(1, blocks), w.transpose(2, 3), None, torch.float32)
    torch.testing.assert_close(got, exact, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_rows_that_all_blocks_take_need_small_matrices(device):
    segments, x, _ = make(device, LENGTHS, 10, 6)
    w = torch.randn(len(LENGTHS), 2, 6, 10).to(device)
    with pytest.raises(ValueError, match="x has 10 columns for 2 blocks"):
        multiply(segments, x, w, blocks=2, transposed=True)


def test_misaligned_memory(device, either, poison):
    # one element on: no copy or store of more than 4 bytes is possible
    segments, x, w = make(device, LENGTHS, 16, 16)
    x1, w1, out = (poison.guard(torch.empty(t.numel() + 1, device=device))[1:].view(t.shape)
                   for t in (x, w, torch.empty(segments.rows, 16)))
    x1.copy_(x), w1.copy_(w)
    assert same_bits(multiply(segments, x1, w1, out=out), multiply(segments, x, w))


# ---- the epilogue ----

@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu"])
@pytest.mark.parametrize("shared_bias", [False, True])
def test_bias_scale_and_activation(device, either, activation, shared_bias):
    segments, x, w = make(device, LENGTHS, 12, 10, blocks=2)
    bias = torch.randn(*([] if shared_bias else [len(LENGTHS)]), 20).to(device)
    scale = torch.randn(segments.rows).to(device)
    got = multiply(segments, x, w, blocks=2, bias=bias, scale=scale, activation=activation,
                   slope=0.2)
    counts = segments.ptr.diff().long()
    each = bias.double().expand(len(LENGTHS), 20).repeat_interleave(counts, 0)
    exact = (reference(segments, x, w) + each) * scale.double()[:, None]
    exact = {"none": exact, "relu": exact.relu(),
             "leaky_relu": torch.where(exact > 0, exact, 0.2 * exact)}[activation]
    assert relative(got, exact) < 4e-7
    if activation == "none":
        alone = multiply(segments, x, w, blocks=2, scale=scale)
        assert relative(alone, reference(segments, x, w) * scale.double()[:, None]) < 4e-7


@on_devices("blocks,n,heads,width",
            [(1, 64, 4, 16), (1, 94, 2, 47), (4, 5, 4, 5), (3, 8, 2, 12), (1, 140, 7, 20)],
            [(8, 64, 8, 64), (1, 512, 1, 512), (1, 1, 1, 1)])
def test_inner_products_with_the_output(device, either, blocks, n, heads, width):
    segments, x, w = make(device, LENGTHS, 16, n, blocks=blocks)
    att = torch.randn(len(LENGTHS), heads, width).to(device)
    alone = multiply(segments, x, w, blocks=blocks)
    for vectors in (att, att[0].clone()):
        y, a = multiply(segments, x, w, blocks=blocks, dots=vectors)
        assert same_bits(y, alone) and a.shape == (segments.rows,
                                                   heads) and a.dtype == torch.float32
        each = vectors.expand(len(LENGTHS), heads,
                              width).repeat_interleave(segments.ptr.diff().long(), 0)
        exact = (reference(segments, x, w).view(-1, heads, width) * each.double()).sum(-1)
        plain = (reference(segments, x, w,
                           dtype=torch.float32).view(-1, heads, width) * each).sum(-1)
        assert_accurate("dots", a, plain, exact)


def test_inner_products_before_rounding_after_activation(device, either):
    segments, x, w = make(device, LENGTHS, 64, 64, torch.float16)
    att = torch.randn(2, 32).to(device)
    y, a = multiply(segments, x, w, dots=att, activation="relu")
    exact = (reference(segments, x, w).relu().view(-1, 2, 32) * att.double()).sum(-1)
    assert y.dtype == torch.float16 and relative(a, exact) < 5e-7


# ---- numbers that are none ----

@pytest.mark.parametrize("precision,dtype",
                         [("fp32", torch.float32), ("tf32", torch.float32), ("fma", torch.float32),
                          ("fp32", torch.bfloat16)])
def test_bad_numbers_stay_in_their_row(device, either, precision, dtype):
    # powers of two, whose small part is 0: inf * 0 would be NaN where fp32 gives inf
    segments, x, w = make(device, (40, 30), 24, 16, dtype)
    w = torch.exp2(w.float().round()).to(dtype)
    clean = multiply(segments, x, w, precision=precision, out_dtype=torch.float32)
    inf = float("inf")
    x[3, 5], x[17, 0], x[45, 23], x[50, 1], x[50, 2] = inf, float("nan"), -inf, inf, -inf
    got = multiply(segments, x, w, precision=precision, out_dtype=torch.float32)
    want = reference(segments, x, w, dtype=torch.float32)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got[want.isinf()], want[want.isinf()])
    bad = [3, 17, 45, 50]
    assert not want[bad].isfinite().any()
    good = [i for i in range(70) if i not in bad]
    assert relative(got[good], clean[good]) < 3e-7 * (2000 if precision == "tf32" else 1)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_activations_keep_bad_numbers(device, either, activation):
    segments, x, w = make(device, (20,), 16, 8)
    w = w.abs()
    x[3, 2], x[9, 0] = float("nan"), float("-inf")
    got = multiply(segments, x, w, activation=activation, slope=0.5)
    assert got[3].isnan().all() and (got[9] == (0.0
                                                if activation == "relu" else float("-inf"))).all()


def test_infinite_weights_and_the_largest_numbers(device, either):
    segments, x, w = make(device, (20, 20), 24, 16)
    w[1, 0, 7, 3] = float("inf")
    got, want = multiply(segments, x, w), reference(segments, x, w, dtype=torch.float32)
    assert torch.equal(got.isfinite(), want.isfinite()) and want[:20].isfinite().all()
    assert not want[20:, 3].isfinite().any() and torch.equal(got[20:, 3], want[20:, 3])
    # rounds to infinity in tf32
    x[:], w[:] = 0.0, 0.0
    x[4, 2], w[0, 0, 2] = torch.finfo(torch.float32).max, 0.5
    assert (multiply(segments, x, w)[4] == torch.finfo(torch.float32).max / 2).all()


# ---- many segments, few rows, the same bits ----

def test_thousands_of_segments_mostly_empty(device, either):
    lengths = torch.zeros(5000, dtype=torch.long)
    lengths[torch.randperm(5000)[:60]] = torch.randint(1, 6, (60,))
    lengths[4999] = 0
    segments, x, w = make(device, lengths.tolist(), 8, 8)
    got = multiply(segments, x, w)
    judge("product", got, segments, x, w)
    tiles = segments.tile_ptr(16)
    assert tiles[-1] == 60 and segments.tile_bound(16) >= 60


@pytest.mark.parametrize("sms", [1, 7])
def test_blocks_walk_over_segments(device, monkeypatch, sms):
    fixed_rows(monkeypatch, 16)
    segments, x, w = make(device, LENGTHS * 5, 12, 10)
    alone = multiply(segments, x, w)
    judge("product", alone, segments, x, w)
    monkeypatch.setattr(segment_plan, "_SMS", sms)
    monkeypatch.setattr(segment_plan.Tile, "blocks_per_sm", lambda self, shared: 1)
    assert same_bits(multiply(segments, x, w), alone)


@pytest.mark.parametrize("k", [40, 600])
def test_same_bits_in_any_order(device, monkeypatch, k):
    monkeypatch.setattr(segment_plan, "_SMS", 2)
    segments, x, w = make(device, LENGTHS, k, 20)
    first = multiply(segments, x, w)
    judge("product", first, segments, x, w)
    again(device, lambda: multiply(segments, x, w), first)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
def test_no_rows(device, either, lengths):
    segments, x, w = make(device, lengths, 4, 6)
    assert multiply(segments, x, w).shape == (0, 6)
    y, a = multiply(segments, x, w, dots=torch.randn(2, 3).to(device))
    assert y.shape == (0, 6) and a.shape == (0, 2)
    out = torch.ones(3, 6, device=device)
    empty = torch.empty(0, dtype=torch.int32, device=device)
    assert (multiply(segments, x, w, out=out, out_index=empty) == 1).all()


def test_tiles_are_counted_once(device):
    segments = make_segments(device, (0, 1, 16, 17, 0, 40))
    assert segments.tile_ptr(16).tolist() == [0, 0, 1, 2, 4, 4, 7]
    assert segments.tile_ptr(16) is segments.tile_ptr(16) and segments.tile_ptr(
        16).dtype == torch.int32
    assert segments.tile_ptr(128).tolist() == [0, 0, 1, 2, 3, 3, 4]


# ---- what is refused ----

@pytest.mark.parametrize("change,message", [
    (dict(w=torch.randn(9, 4, 6)), "w has shape"),
    (dict(w=torch.randn(10, 4, 6).half()), "x torch.float32"),
    (dict(w=torch.randn(10, 4, 12)[:, :, ::2]), "strides"), (dict(blocks=0), "at least one"),
    (dict(blocks=2), "w has shape"),
    (dict(x=torch.randn(249, 5)), "x has shape"), (dict(x=torch.randn(248, 4)), "without an index"),
    (dict(index=torch.zeros(249, dtype=torch.int64)), "index of x"),
    (dict(out_index=torch.zeros(249, dtype=torch.int32)), "out is None"),
    (dict(blend=(torch.zeros(3), torch.zeros(249, 6))), "share of a blend"),
    (dict(blend=(torch.zeros(10), torch.zeros(3, 6))), "rest of a blend"),
    (dict(gelu_grad=torch.zeros(3, 6)), "gelu_grad is"),
    (dict(gelu_grad=torch.zeros(249, 6), blend=(torch.zeros(10), torch.zeros(249, 6))),
     "blend and gelu_grad"),
    (dict(accumulate=True), "out is None"),
    (dict(out=torch.empty(249, 6).half(), accumulate=True), "out is torch.float16"),
    (dict(out=torch.empty(249, 5)), "out is"), (dict(bias=torch.randn(5)), "bias is"),
    (dict(scale=torch.randn(248)), "scale is"),
    (dict(activation="gelu"), "activation is one of"),
    (dict(precision="bf16"), "precision is one of"),
    (dict(dots=torch.randn(2, 4)), "6 output columns"),
    (dict(out_dtype=torch.float64), "out_dtype is"),
])
def test_what_does_not_fit_is_refused(change, message):
    segments = make_segments("cpu", LENGTHS)
    given = dict(x=torch.randn(249, 4), w=torch.randn(10, 4, 6)) | change
    with pytest.raises(ValueError, match=message):
        multiply(segments, given.pop("x"), given.pop("w"), **given)


def test_what_was_found_out_for_one_call_serves_only_those_alike(device):
    segments, x, w = make(device, (20, 0, 7), 16, 16)
    first = multiply(segments, x, w)
    kept = len(segments.made)
    judge("the same again", multiply(segments, x + 1, w * 2), segments, x + 1, w * 2)
    assert len(segments.made) == kept and same_bits(multiply(segments, x, w), first)
    memory = torch.zeros(x.numel() + 1, device=device)
    memory[1:] = x.flatten()
    judge("four bytes further", multiply(segments, memory[1:].view(x.shape), w), segments, x, w)
    judge("transposed", multiply(segments, x, w, transposed=True), segments, x, w.mT.contiguous())
    out, rest, share = torch.empty_like(first), torch.randn_like(first), torch.ones(3,
                                                                                    device=device)
    judge("blend", multiply(segments, x, w, out=out, blend=(share, rest)), segments, x, w)
    for refused in (dict(x=x.double()), dict(x=x[:, :8]), dict(w=w[:2]),
                    dict(out=rest, blend=(share, rest)), dict(blend=(share[:2], rest)),
                    dict(index=torch.zeros(26, dtype=torch.int32, device=device))):
        with pytest.raises(ValueError):
            multiply(segments, **dict(x=x, w=w) | refused)


@pytest.mark.parametrize("ptr,rows",
                         [(torch.zeros(2), 0), (torch.zeros(2, 2, dtype=torch.int32), 0),
                          (torch.zeros(1, dtype=torch.int32), 3),
                          (torch.zeros(2, dtype=torch.int32), -1)])
def test_segments_that_are_none(ptr, rows):
    with pytest.raises(ValueError):
        Segments(ptr, rows)
