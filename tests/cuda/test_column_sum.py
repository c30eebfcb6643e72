"""Sums over rows."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.traverse.column_sum import column_sum
from tests.helpers import assert_accurate, on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")


def judge(x):
    got = column_sum(x)
    assert got.dtype == torch.float32 and got.shape == x.shape[1:]
    assert_accurate("sum", got, x.float().sum(0), x.double().sum(0))
    return got


@on_devices("columns", [1, 2, 7, 8, 64, 130, 300], [47, 512, 1000])
@pytest.mark.parametrize("rows", [1, 2, 31, 700])
def test_sizes(device, rows, columns):
    judge(torch.randn(rows, columns).to(device))


@on_devices("rows,columns", [(9000, 5)], [(200_000, 64), (1_000_000, 3)])
def test_many_rows(device, rows, columns):
    x = torch.randn(rows, columns).to(device)
    assert same_bits(judge(x), column_sum(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 9])
def test_half_types(device, dtype, columns):
    judge(torch.randn(333, columns).to(device, dtype))


def test_any_alignment(device):
    x = torch.randn(50 * 8 + 1).to(device)[1:].view(50, 8)
    judge(x)


def test_whole_numbers_count_exactly(device):
    x = torch.randint(-9, 9, (777, 24)).to(device, torch.float32)
    assert (column_sum(x) == x.sum(0)).all()
