"""Sums of weighted rows straight from a list of edges."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnnaccel.cuda.traverse import edge_list
from tests.helpers import assert_accurate, on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")

FROM, INTO = 40, 30


def edges(device, count, index=torch.int64, order="any"):
    """[2, count], sources first; the last node at both ends has none."""
    src, dst = torch.randint(0, FROM - 1, (count,)), torch.randint(0, INTO - 1, (count,))
    dst[:count // 3] = 2
    if order == "grouped":
        dst = dst.sort().values
    return torch.stack([src, dst]).to(device, index)


def plain(ends, source, x, rows, weight, scale, dtype):
    message = x.to(dtype) if scale is None else x.to(dtype) * scale.to(dtype)[:, None]
    message = message[ends[source].long()]
    message = message if weight is None else message * weight.to(dtype)[:, None]
    return message.new_zeros(rows, x.shape[1]).index_add(0, ends[1 - source].long(), message)


def judge(ends, source, x, rows, weight=None, scale=None):
    got = edge_list.add_edges(ends, source, x, rows, weight, scale)
    want = (plain(ends, source, x, rows, weight, scale, dtype)
            for dtype in (torch.float32, torch.float64))
    assert_accurate("sum", got, *want)
    assert not edge_list.alarmed(x.device)
    return got


@pytest.mark.parametrize("order", ["any", "grouped"])
@on_devices("width", [1, 6, 64, 300], [2, 4, 7, 33, 130, 1024])
def test_widths(device, width, order):
    ends, x = edges(device, 700, order=order), torch.randn(FROM, width).to(device)
    weight, scale = torch.randn(700).to(device), torch.randn(FROM).to(device)
    judge(ends, 0, x, INTO)
    judge(ends, 0, x, INTO, weight, scale)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_against_the_edges_and_parts_of_a_list(device, index):
    ends = edges(device, 500, index)
    x = torch.randn(INTO, 16).to(device)
    scale = torch.rand(INTO).to(device)
    judge(ends[:, 7:431], 1, x, FROM, torch.randn(424).to(device), scale)


def test_many_edges(device, monkeypatch):
    monkeypatch.setattr(edge_list, "_BLOCKS", 1)  # so that runs are long
    for order in ("any", "grouped"):
        judge(edges(device, 9001, order=order), 0, torch.randn(FROM, 8).to(device), INTO,
              torch.randn(9001).to(device))


@settings(max_examples=15, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40), st.integers(1, 9))
def test_any_edges(device, pairs, width):
    ends = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous().to(device)
    judge(ends, 0, torch.randn(4, width).to(device), 4, torch.randn(len(pairs)).to(device))


def test_means(device):
    ends = edges(device, 300)
    x = torch.randn(FROM, 12).to(device)
    count = torch.zeros(INTO, device=device)
    out = edge_list.add_edges(ends, 0, x, INTO, count=count)
    degree = torch.bincount(ends[1], minlength=INTO).float()
    assert torch.equal(count, degree) and degree[-1] == 0
    total = out.clone()
    inverse = edge_list.average(out, count, ends.dtype)
    assert same_bits(out,
                     total
                     / degree.clamp(min=1)[:, None]) and same_bits(inverse, 1 / degree.clamp(min=1))


def test_ids_outside_the_graph_are_left_out_and_told_of(device):
    ends, x = edges(device, 60), torch.randn(FROM, 5).to(device)
    good = edge_list.add_edges(ends[:, 2:], 0, x, INTO)
    ends[:, 0], ends[:, 1] = torch.tensor([FROM, 0]), torch.tensor([0, -1])
    assert not edge_list.alarmed(x.device)
    got = edge_list.add_edges(ends, 0, x, INTO)
    if x.is_cuda:
        torch.cuda.synchronize()
    assert torch.allclose(got, good, atol=1e-5)
    assert edge_list.alarmed(x.device) and not edge_list.alarmed(x.device)


def test_numbers_that_are_not_finite_stay_with_their_rows(device):
    ends, x = edges(device, 200), torch.randn(FROM, 6).to(device)
    x[3, 1] = float("nan")
    got = edge_list.add_edges(ends, 0, x, INTO)
    assert torch.equal(got.isnan(),
                       plain(ends, 0, x, INTO, None, None,
                             torch.float32).isnan()) and got.isnan().any()


def test_inputs_and_outputs_keep_their_bounds(device, poison):
    ends, x, weight = edges(device, 99), torch.randn(FROM, 8).to(device), torch.randn(99).to(device)
    judge(*(poison.guard(ends), 0, poison.guard(x)), INTO, poison.guard(weight))


@pytest.mark.parametrize("change,message", [
    (dict(x=torch.randn(FROM, 4).double()), "x is"), (dict(x=torch.randn(FROM, 8)[:, ::2]), "x is"),
    (dict(x=torch.randn(FROM)), "x is"),
    (dict(ends=torch.zeros(3, 9, dtype=torch.int64)), "ends is"),
    (dict(ends=torch.zeros(9, 2, dtype=torch.int64).T), "ends is"),
    (dict(ends=torch.zeros(2, 9)), "ends is"),
    (dict(source=2), "ends is"), (dict(weight=torch.zeros(8)), "weight is"),
    (dict(scale=torch.zeros(3)), "scale is"),
    (dict(count=torch.zeros(FROM + 1)), "count is"),
])
def test_what_does_not_fit_is_refused(change, message):
    fits = dict(ends=torch.zeros(2, 9, dtype=torch.int64), source=0, x=torch.randn(FROM, 4),
                rows=INTO)
    with pytest.raises(ValueError, match=message):
        edge_list.add_edges(**fits | change)
