"""Products of int8 rows with an int8 matrix: exact but for the rounding of two scales."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.int8.int8_gemm import MAX_INT8, product
from gnnaccel.cuda.int8.quantize import Int8Rows, int8_rows
from gnnaccel.cuda.runtime import driver
from tests.emulation.emulator import EmulatedDriver
from tests.helpers import on_devices, relative, same_bits

pytestmark = pytest.mark.usefixtures("poison")

SIZES = [(40, 128, 128), (1, 1, 1), (17, 47, 7), (33, 16, 9), (70, 64, 41), (5, 100, 130),
         (16, 602, 256), (0, 8, 8)]


def operands(device, rows: int, inner: int, columns: int) -> tuple[Int8Rows, Int8Rows]:
    return int8_rows(torch.randn(rows,
                                 inner).to(device)), int8_rows(torch.randn(columns,
                                                                           inner).to(device))


def exact(rows: Int8Rows) -> Tensor:
    return rows.data[:, :rows.width].double() * rows.scale.double().unsqueeze(1)


@on_devices("rows,inner,columns", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_sizes(device, rows, inner, columns, bias):
    x, w = operands(device, rows, inner, columns)
    added = torch.randn(columns).to(device) if bias else None
    got = product(x, w, added)
    expected = exact(x) @ exact(w).T + (added.double() if bias else 0)
    assert got.shape == (rows, columns) and got.dtype is torch.float32
    assert rows == 0 or relative(got, expected) < 2e-7


def test_whole_numbers_are_exact(device):
    x, w = (torch.randint(-127, 128, (n, 256)).float().to(device) for n in (20, 24))
    x[:, 0], w[:, 0] = 127.0, 127.0
    assert torch.equal(product(int8_rows(x), int8_rows(w)), (x.double() @ w.double().T).float())


@pytest.mark.parametrize("out", [torch.float16, torch.bfloat16])
def test_results_in_half_precision(device, out):
    x, w = operands(device, 20, 32, 24)
    got = product(x, w, out=out)
    assert got.dtype is out and same_bits(got, product(x, w).to(out))


@on_devices("rows,inner,columns", [(40, 128, 128), (33, 20, 41), (1, 1, 1), (18, 64, 8)])
def test_int8_results(device, rows, inner, columns):
    x, w = operands(device, rows, inner, columns)
    bias = torch.randn(columns).to(device)
    got, expected = product(x, w, bias, torch.int8), int8_rows(product(x, w, bias))
    assert got.width == columns and got.data.shape == expected.data.shape
    assert torch.equal(got.scale, expected.scale) and torch.equal(got.data, expected.data)
    both, full = product(x, w, bias, torch.int8, full=True)
    assert torch.equal(both.scale,
                       got.scale) and torch.equal(both.data,
                                                  got.data) and same_bits(full, product(x, w, bias))


@pytest.mark.parametrize("out", [torch.float32, torch.int8])
def test_rows_that_are_not_like_others(device, out):
    x = torch.randn(20, 33).to(device)
    x[3], x[5, 2] = 0.0, float("inf")
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    got = product(int8_rows(x), int8_rows(torch.randn(9, 33).to(device)), out=out, flag=flag)
    values = got.dequantize() if out is torch.int8 else got
    assert (values[3] == 0).all() and torch.isnan(values[5]).all()
    assert torch.isfinite(values[torch.arange(20) != 5]).all() and int(flag) == (out is torch.int8)


def test_nothing_outside_is_touched(device, poison):
    for out in (torch.float32, torch.int8):
        x, w = (replace(r, data=poison.guard(r.data), scale=poison.guard(r.scale))
                for r in operands(device, 19, 40, 21))
        product(x, w, poison.guard(torch.randn(21).to(device)), out)
        poison.check()


def test_scheduling_does_not_change_the_result():
    torch.manual_seed(0)
    with driver.using(EmulatedDriver()):
        x, w = operands("cpu", 70, 64, 41)
        expected = product(x, w)
    with driver.using(EmulatedDriver("uneven", seed=5)):
        assert same_bits(product(x, w), expected)


def test_inputs_that_do_not_fit(device):
    x, w = operands(device, 4, 8, 8)
    with pytest.raises(ValueError, match="x has 8 channels.*weight is .8, 7.*inner sizes"):
        product(x, replace(w, width=7))
    with pytest.raises(ValueError, match="out=torch.float64"):
        product(x, w, out=torch.float64)
    with pytest.raises(ValueError, match=f"torch.int8 up to {MAX_INT8}"):
        product(x, operands(device, 4, 8, MAX_INT8 + 1)[1], out=torch.int8)
    with pytest.raises(ValueError, match="bias is .7."):
        product(x, w, torch.zeros(7, device=device))
