"""Inner products with attention vectors, and their gradients."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.traverse import head_dot
from tests.attention_cases import SIZES
from tests.helpers import assert_accurate, on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")


def make(device, rows, heads, width, dtype=torch.float32):
    x = torch.randn(rows, heads, width).to(device, dtype)
    att = torch.randn(2, heads, width).to(device)
    d = torch.randn(2, rows, heads).to(device)
    return x, att[0], att[1], d[0], d[1]


def judge_dot(name, got, x, att):
    exact, plain = (x.double() * att.double()).sum(-1), (x.float() * att).sum(-1)
    assert_accurate(name, got, plain, exact)


def judge_grad(name, got, x, d):
    exact, plain = (x.double() * d.double().unsqueeze(-1)).sum(0), (
        x.float() * d.unsqueeze(-1)).sum(0)
    assert_accurate(name, got, plain, exact, floor=5e-7)


@on_devices("heads,width", SIZES, [(8, 32), (4, 256), (100, 3), (7, 96)])
@pytest.mark.parametrize("rows", [37])
def test_dot_and_its_gradient(device, rows, heads, width):
    x, att0, att1, d0, d1 = make(device, rows, heads, width)
    a0, a1 = head_dot.dot(x, att0, att1)
    judge_dot("first", a0, x, att0)
    judge_dot("second", a1, x, att1)
    alone, none = head_dot.dot(x, att0)
    assert none is None and same_bits(alone, a0)
    grads = head_dot.dot_grad(x, d0, d1)
    judge_grad("first", grads[0], x, d0)
    judge_grad("second", grads[1], x, d1)
    alone = head_dot.dot_grad(x, d0)
    assert same_bits(alone[0], grads[0]) and (alone[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(8, 8), (3, 5)])
def test_half_rows_count_exactly(device, dtype, size):
    x, att0, att1, d0, d1 = make(device, 37, *size, dtype)
    judge_dot("dot", head_dot.dot(x, att0)[0], x, att0)
    judge_grad("gradient", head_dot.dot_grad(x, d0, d1)[1], x, d1)


@pytest.mark.parametrize("rows", [0, 1, 3, 200])
def test_row_counts(device, monkeypatch, rows):
    monkeypatch.setattr(head_dot, "_GRAD_BLOCKS", 2)  # so that blocks stride over the rows
    x, att0, _, d0, d1 = make(device, rows, 3, 5)
    a0, _ = head_dot.dot(x, att0)
    assert a0.shape == (rows, 3)
    grads = head_dot.dot_grad(x, d0, d1)
    if rows == 0:
        assert (grads == 0).all()
    else:
        judge_dot("dot", a0, x, att0)
        judge_grad("gradient", grads[0], x, d0)
        judge_grad("gradient", grads[1], x, d1)


def test_many_rows(device):
    rows = 300 if device.type == "cpu" else 100_000
    x, att0, att1, d0, d1 = make(device, rows, 8, 8)
    judge_dot("dot", head_dot.dot(x, att0, att1)[1], x, att1)
    judge_grad("gradient", head_dot.dot_grad(x, d0, d1)[0], x, d0)
    assert same_bits(head_dot.dot_grad(x, d0, d1), head_dot.dot_grad(x, d0, d1))


def test_bad_numbers_stay_in_their_row_and_head(device):
    x, att0, _, d0, _ = make(device, 20, 3, 5)
    x[7, 1, 2] = float("nan")
    bad = torch.zeros(20, 3, dtype=torch.bool, device=device)
    bad[7, 1] = True
    assert torch.equal(torch.isnan(head_dot.dot(x, att0)[0]), bad)
    grads = torch.isnan(head_dot.dot_grad(x, d0)[0])
    assert grads.nonzero().tolist() == [[1, 2]]
