"""Rows in fewer bytes by torch operations: against the kernels, and the rules of rounding."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.int8 import quantize
from gnnaccel.dispatch.quantized import rows
from tests.routes import one_thread  # noqa: F401


def ugly(width: int = 24) -> torch.Tensor:
    """Rows of all kinds: zeros, constants, one huge outlier, tiny, large, not finite."""
    torch.manual_seed(0)
    x = torch.randn(12, width)
    x[0], x[1], x[2, 3], x[3] = 0, -2.5, 1e6, 1e-38
    x[4], x[5, 1], x[6, 2], x[7] = 3e38, float("inf"), float("nan"), x[7] * 1e-20
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 24, 64])
def test_to_nearest_it_is_what_the_kernels_give(device, dtype, width):
    x = (ugly(max(width, 4))[:, :width]).clamp(-6e4, 6e4).to(device, dtype).contiguous()
    here, there = rows.by_torch(x), quantize.int8_rows(x)
    torch.testing.assert_close(here.scale, there.scale, rtol=2e-7, atol=0, equal_nan=True)
    off = here.data.int() - there.data.int()  # where fp32 has a quotient on either side of a tie
    assert off.abs().max() <= 1 and (off != 0).double().mean() < 2e-3
    assert here.width == there.width and here.data.shape == there.data.shape


def test_rows_that_are_not_like_others():
    x, flag = ugly(), torch.zeros(1, dtype=torch.int32)
    got = rows.by_torch(x, flag=flag)
    near = got.dequantize()
    # zeros, and what lies below the smallest scale
    assert not near[[0, 3]].any() and not got.scale[[0, 3]].any()
    assert torch.equal(near[1], x[1]) and torch.allclose(near[7], x[7], rtol=0,
                                                         atol=float(got.scale[7]) * 0.51)
    # the outlier takes the scale, the others are gone
    assert near[2, 3] == 1e6 and not near[2, :3].any()
    assert near[5].isnan().all() and near[6].isnan().all() and near[[8, 9, 10,
                                                                     11]].isfinite().all() and near[
                                                                         4].isfinite().all()
    assert int(flag) == 1
    rows.by_torch(x[8:], flag=flag)
    assert int(flag) == 1, "a flag stays"
    assert int(_flag_of(x[:5])) == 0


def _flag_of(x: torch.Tensor) -> torch.Tensor:
    flag = torch.zeros(1, dtype=torch.int32)
    rows.by_torch(x, flag=flag)
    return flag


def test_no_rows_and_one_channel():
    assert rows.by_torch(torch.empty(0, 5)).data.shape == (0, 16)
    assert torch.equal(rows.by_torch(torch.tensor([[3.0], [0.0]])).dequantize(),
                       torch.tensor([[3.0], [0.0]]))


@pytest.mark.parametrize("form", ["int8", "bf16"])
def test_stochastic_rounding_is_unbiased(form):
    """The mean of n draws lies within 6 standard errors, of at most half a step each, of what was
    rounded."""
    torch.manual_seed(0)
    x, draws = torch.randn(4, 64), 2000
    total, seen = torch.zeros(4, 64, dtype=torch.float64), []
    step = (x.abs().amax(1, keepdim=True).double() / 127
            if form == "int8" else 2.0 ** (x.abs().log2().floor().double() - 7))
    for _ in range(draws):
        near = rows.read(rows.store(x, form, True, False), x.shape).double()
        assert ((near - x).abs() <= step * 1.001).all()
        total += near
        seen.append(near)
    assert ((total / draws - x).abs() <= 6 * 0.5 * step / draws**0.5).all()
    assert (torch.stack(seen[:50]).std(0) > 0).double().mean() > 0.9
    nearest = rows.read(rows.store(x, form, False, False), x.shape).double()
    assert ((nearest - x).abs() > 6 * 0.5 * step
            / draws**0.5).double().mean() > 0.5, "rounding to nearest would fail this test"


def test_draws_follow_torchs_generator(device):
    x = torch.randn(8, 32).to(device)
    kernels = device.type == "cuda"
    for form in ("int8", "bf16"):
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(rows.read(rows.store(x, form, True, kernels), x.shape))
        assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_bf16_leaves_what_is_not_finite(device):
    x = torch.tensor([[float("inf"), float("-inf"), float("nan"), 1.0]]).to(device)
    got = rows.read(rows.store(x, "bf16", True, False), x.shape)
    assert got[0, 0] == float("inf") and got[0, 1] == float("-inf") and got[0, 2].isnan() and got[0, 3] == 1


def test_scales_per_row_hold_where_one_per_tensor_fails():
    """A hub's row is a thousand times the others, as in the second layer of sums."""
    torch.manual_seed(0)
    x = torch.randn(1000, 64)
    x[0] *= 3000
    per_row = rows.by_torch(x).dequantize()
    scale = x.abs().max() / 127
    per_tensor = (x / scale).round() * scale

    def median(near):
        return float(((near - x).norm(dim=1) / x.norm(dim=1)).median())

    assert median(per_row) < 0.01
    assert median(per_tensor) > 0.99


def test_scaling_costs_no_further_rounding():
    stored, factor = rows.by_torch(torch.randn(5, 8)), torch.rand(5)
    assert torch.equal(rows.scaled(stored, factor).data, stored.data)
    torch.testing.assert_close(rows.read(rows.scaled(stored, factor), (5, 8)),
                               stored.dequantize() * factor[:, None])


def test_determinism_rounds_to_nearest():
    assert rows.stochastic()
    torch.use_deterministic_algorithms(True)
    try:
        assert not rows.stochastic()
    finally:
        torch.use_deterministic_algorithms(False)
