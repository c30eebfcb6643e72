"""Sums whose calls are remembered by the form of their tensors."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.traverse import aggregate
from gnnaccel.cuda.traverse.aggregate import _made as made, total
from tests.attention_cases import graph
from tests.cuda.test_aggregate import make, run
from tests.helpers import ROUNDING, relative, same_bits

pytestmark = pytest.mark.usefixtures("poison")

TOTALS = [dict(mean=True, bias=True), dict(weight="edge"), dict(weight="head", at="place"),
          dict(weight="edge", at="place", scale=True), dict(row=torch.bfloat16, weight="edge")]


@pytest.mark.parametrize("options", TOTALS, ids=str)
@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("square", [True, False])
def test_totals_by_form(device, chunk_edges, monkeypatch, options, chunk, square):
    """The first call is checked, and gives what `forward` does; those like it give the same, without checks."""
    chunk_edges(chunk)
    rows = graph(device, 40, 40 if square else 33, 400).csc()
    p = make(rows, 40, 3, 8, **options)
    rows.launch()
    if device.type == "cuda":
        torch.cuda.synchronize()
    rows.launch()

    def call(x: Tensor, into: Tensor | None = None) -> Tensor:
        return total(rows, x, p.weight, p.variant.weight_at, p.variant.mean, p.scale, p.bias, into)

    x = p.x if options.get("weight") == "head" else p.x.flatten(1)
    expected, seen = run(p), []
    first = call(x)
    monkeypatch.setattr(aggregate, "_made", lambda *args: seen.append(1) or made(*args))
    again, other = call(x), call(x.clone())
    assert all(same_bits(got, expected.view(got.shape)) and got.shape == (rows.rows, *x.shape[1:])
               and not got._is_view()
               for got in (first, again, other))
    assert not seen and (rows.launch().heavy > 0) is (chunk == 16)
    assert again.data_ptr() != first.data_ptr()
    for _ in range(2):
        into = torch.ones_like(first)
        assert call(x, into) is into and relative(into, expected.view(into.shape).float()
                                                  + 1) < 2 * ROUNDING[x.dtype]
    assert len(seen) == 1


def test_totals_of_rows_in_any_form(device, monkeypatch):
    """Remembered too, where they are made dense first."""
    rows, seen = graph(device, 40, 33, 200).csc(), []
    if device.type == "cuda":
        torch.cuda.synchronize()
    monkeypatch.setattr(aggregate, "_made", lambda *args: seen.append(1) or made(*args))
    x = torch.randn(40, 24).to(device)
    expected = total(rows, x)
    wide, memory = torch.randn(40, 48).to(device), torch.empty(40 * 24 + 1, device=device)
    wide[:, ::2], memory[1:] = x, x.flatten()
    for like in (wide[:, ::2], memory[1:].view(40, 24), x.t().contiguous().t()):
        seen.clear()
        for _ in range(3):
            found = total(rows, like)
            assert same_bits(found, expected) and found.is_contiguous() and not found._is_view()
        assert len(seen) == 1
    with pytest.raises(ValueError, match="scale"):
        total(rows, x, scale=torch.ones(3, device=device))
    with pytest.raises(ValueError, match="into"):
        total(rows, x, into=expected.view(-1, 2, 12))
    assert same_bits(total(rows, x), expected)


def test_totals_with_a_bias_in_any_form(device):
    rows = graph(device, 40, 33, 200).csc()
    x, bias = torch.randn(40, 24).to(device), torch.randn(24).bfloat16().to(device)
    expected = total(rows, x, bias=bias.float())
    memory = torch.empty(25, device=device)
    memory[1:] = bias
    for like in (bias, memory[1:], bias.float().repeat_interleave(2)[::2]):
        for _ in range(2):
            assert same_bits(total(rows, x, bias=like), expected)


def test_what_is_remembered_of_calls_is_bounded(device):
    rows = graph(device, 4, 4, 9).csc()
    for nodes in range(4, 80):
        total(rows, torch.ones(nodes, 24, device=device))
    assert 0 < len(rows.made) <= 32
