"""Rows in int8 with a scale per row, and in bf16: rounding, bounds, and rows that are not like
others."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.int8 import quantize
from gnnaccel.cuda.int8.quantize import Int8Rows, bf16_rows, int8_rows, stride
from tests.helpers import on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")

WIDTHS = [1, 2, 3, 8, 16, 47, 64, 100, 128, 131, 256, 1024, 1433]


def by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and int8 of each row, to nearest, in fp64."""
    rows = x.double().flatten(1)
    top = rows.abs().amax(1)
    return top / 127, (rows * torch.where(top > 0, 127 / top, 0).unsqueeze(1)).round()


def check(x: torch.Tensor, got: Int8Rows) -> None:
    scale, whole = by_torch(x)
    width = whole.shape[1]
    assert got.width == width and got.data.shape == (x.shape[0],
                                                     stride(width)) and got.data.dtype is torch.int8
    torch.testing.assert_close(got.scale.double(), scale, rtol=1.3e-7, atol=0)
    assert (got.data[:, width:] == 0).all()
    off = got.data[:, :width].double() - whole
    # where fp32 has the quotient on the other side of a tie, the other neighbour is as near
    assert off.abs().max() <= 1 and (off != 0).double().mean() < 1e-3
    assert (got.dequantize().double() - x.double().flatten(1)).abs().sub(
        scale.unsqueeze(1) * 0.50001).max() <= 0


@on_devices("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nearest(device, width, dtype):
    x = torch.randn(23, width).to(device, dtype)
    check(x, int8_rows(x))


@pytest.mark.parametrize("rows", [0, 1, 5, 300])
def test_numbers_of_rows(device, rows):
    x = torch.randn(rows, 4, 5).to(device)
    got = int8_rows(x)
    assert got.rows == rows and got.data.shape == (rows, 32)
    if rows:
        check(x, got)


@on_devices("width", [3, 64, 131, 1433])
@pytest.mark.parametrize("stochastic", [False, True])
def test_rows_that_are_not_like_others(device, width, stochastic):
    x = torch.randn(9, width).to(device)
    x[0] = 0
    x[1] = -3.0
    x[2, -1] = 1e6
    x[3] = 1e-38  # its scale would be denormal
    x[4] = 3e38
    x[5] *= 1e-30
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    got = int8_rows(x, quantize.key(device) if stochastic else None, flag)
    back = got.dequantize()
    assert int(flag) == 0
    assert got.scale[0] == 0 and (got.data[0] == 0).all() and got.scale[3] == 0 and (
        back[3] == 0).all()
    assert (got.data[1, :width] == -127).all()
    torch.testing.assert_close(back[1], x[1])
    assert got.data[2, width - 1] == 127 and got.data[2, :width - 1].abs().max() <= 1
    assert (got.data[4, :width] == 127).all() and torch.isfinite(back).all()
    assert (back[5] - x[5]).abs().max() <= got.scale[5] * 1.0001


@on_devices("width", [3, 64, 131, 1433])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite(device, width, value):
    x = torch.randn(40, width).to(device)
    x[17, width // 2] = value
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    got = int8_rows(x, quantize.key(device), flag)
    assert int(flag) == 1 and (got.data[17] == 0).all()
    assert torch.isnan(got.dequantize()[17]).all() and torch.isfinite(
        got.dequantize()[torch.arange(40) != 17]).all()
    without = int8_rows(x)
    assert same_bits(without.scale, got.scale)


@on_devices("width", [5, 6, 64, 1100])
def test_stochastic_rounding_is_unbiased(device, width):
    """The mean of n draws lies within 6 standard errors, at most 0.5 / sqrt(n) steps each, of what
    was rounded."""
    x = torch.randn(3, width).clamp(-3.9, 3.9).to(device)
    x[:, 0] = 4.0
    x[2, 1] = 0.0
    draws = 600
    total, seen = torch.zeros(3, width, dtype=torch.float64, device=device), set()
    for _ in range(draws):
        got = int8_rows(x, quantize.key(device))
        off = got.data[:, :width].double() - x.double() * 127 / 4
        assert off.abs().max() < 1.0001
        total += off
        seen.add(bytes(got.data.cpu().numpy().tobytes()))
    assert len(seen) > 50
    assert (total / draws).abs().max() < 6 * 0.5 / draws**0.5
    share = (x.double() * 127 / 4).remainder(1)
    spread = (share * (1 - share) / draws).sqrt()
    z = (total / draws)[spread > 0.002] / spread[spread > 0.002]
    assert 0.5 < z.std() < 1.5  # neither correlated over draws nor less random than it should be
    assert total[2, 1] == 0 and (total[:, 0] == 0).all()


def test_stochastic_rounding_draws_for_each_number(device):
    """Of equal numbers half a step between two whole ones, half go up, in every row and every
    column."""
    x = torch.full((64, 64), 0.5).to(device)
    x[:, 0] = 127.0
    up = int8_rows(x, quantize.key(device)).data[:, 1:].double()
    assert set(up.unique().tolist()) == {0.0, 1.0}
    assert (up.mean(0) - 0.5).abs().max() < 0.33 and (up.mean(1) - 0.5).abs().max() < 0.33
    assert (up.mean() - 0.5).abs() < 0.04
    assert torch.unique(up, dim=0).shape[0] == 64


def test_draws_repeat_with_the_seed(device):
    x = torch.randn(40, 33).to(device)
    torch.manual_seed(3)
    first, second = int8_rows(x, quantize.key(device)), int8_rows(x, quantize.key(device))
    torch.manual_seed(3)
    again = int8_rows(x, quantize.key(device))
    assert torch.equal(first.data, again.data) and not torch.equal(first.data, second.data)


def test_whole_numbers_stay(device):
    x = torch.arange(-127, 128).float().repeat(3, 1).to(device)
    for key in (None, quantize.key(device)):
        got = int8_rows(x, key)
        assert torch.equal(got.data[:, :255].float(), x) and (got.scale == 1).all()


def test_factors_go_into_the_scale(device):
    x, factor = torch.randn(20, 7).to(device), torch.rand(20).to(device)
    rows = int8_rows(x)
    torch.testing.assert_close(rows.times(factor).dequantize(),
                               rows.dequantize() * factor.unsqueeze(1))


def test_rows_at_any_address(device):
    whole = torch.randn(20 * 64 + 1).to(device)
    x = whole[1:].view(20, 64)
    assert x.data_ptr() % 16
    assert torch.equal(int8_rows(x).data, int8_rows(x.clone()).data)


@on_devices("width", [1, 47, 64, 1433])
def test_nothing_outside_is_touched(device, width, poison):
    x = poison.guard(torch.randn(13, width).to(device))
    flag = poison.guard(torch.zeros(1, dtype=torch.int32, device=device))
    int8_rows(x, quantize.key(device), flag)
    poison.check()


# ---- bf16 ----

@pytest.mark.parametrize("shape", [(3, 8), (1,), (5, 3), (1025,), (0, 4)])
def test_bf16_lies_on_either_side(device, shape):
    x = torch.randn(*shape).to(device)
    got = bf16_rows(x, quantize.key(device))
    assert got.dtype is torch.bfloat16 and got.shape == x.shape
    down = (x.view(torch.int32) & -65536).view(torch.float32)
    away = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((got.float() == down) | (got.float() == away)).all()
    assert torch.equal(bf16_rows(x), x.bfloat16())


def test_bf16_is_unbiased(device):
    x = torch.randn(700).to(device)
    x[:3] = torch.tensor([1.0, float("inf"), -0.0])
    x[3] = float("nan")
    draws = 400
    total = torch.zeros(700, dtype=torch.float64, device=device)
    for _ in range(draws):
        got = bf16_rows(x, quantize.key(device))
        assert got[0] == 1 and got[1] == float("inf") and got[2] == 0 and torch.isnan(got[3])
        total += got.double()
    step = 2.0 ** (x.double().abs().log2().floor() - 7)
    assert ((total / draws - x)[4:].abs() <= 6 * 0.5 * step[4:] / draws**0.5).all()


# ---- refusals ----

@pytest.mark.parametrize("change, message", [
    (lambda x: x.double(), "float64.*float32, torch.float16, torch.bfloat16"),
    (lambda x: x[:, ::2], "strides"),
    (lambda x: x[:, :0], "1 or more channels"), (lambda x: x[0], r"x is \[6\]")])
def test_rows_that_do_not_fit(device, change, message):
    with pytest.raises(ValueError, match=message):
        int8_rows(change(torch.randn(4, 6).to(device)))


def test_flags_and_bf16_inputs_that_do_not_fit(device):
    x = torch.randn(4, 6).to(device)
    with pytest.raises(ValueError, match="flag is.*int64"):
        int8_rows(x, None, torch.zeros(1, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="x is torch.float16"):
        bf16_rows(x.half())
