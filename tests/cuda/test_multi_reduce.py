"""Several reduces of each row's messages in one pass."""
from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse.multi_reduce import REDUCES, Variant, forward, variant
from tests.attention_cases import SIZES, graph
from tests.emulation.orders import in_any_order
from tests.helpers import FLOOR, ROUNDING, assert_accurate, forget_report, on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")

F32 = torch.float32
ALL = REDUCES
SETS = [("max",), ("min",), ("std", "mean", "min", "max"), ("mean", "sum"), ("var",),
        ("max", "std"), ALL, ("sum", "min")]
WEIGHTS = ["none", "edge", "head", "added"]


def made(v: Variant, rows: Rows, others: int, equal: bool = True) -> tuple[Tensor, Tensor | None]:
    """Random rows and weights; with ``equal`` many numbers are."""
    edges, device = rows.other.shape[0], rows.indptr.device
    x = torch.randn(others, v.heads, v.width)
    shape = {"none": None, "edge": (edges,),
             "head": (edges, v.heads), "added": (edges, v.heads, v.width)}[v.weight]
    weight = shape and torch.randn(shape)
    if equal:
        x, weight = x.mul(2).round().div(2), shape and weight.mul(2).round()
    return x.to(device, v.row), shape and weight.to(device, v.row if v.weight == "added" else F32)


def messages(v: Variant, rows: Rows, x: Tensor, weight: Tensor | None,
             dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Per edge in the order of ``rows``: its row, and its message, rounded as rows are."""
    total = int(rows.indptr[-1])
    row = torch.repeat_interleave(rows.indptr.diff().long(), output_size=total)
    value = x[rows.other[:total].long()].to(dtype)
    if v.weight == "added":
        value = (x[rows.other[:total].long()] + weight[rows.place[:total].long()]).to(dtype)
    elif weight is not None:
        value = value * weight.to(dtype)[rows.place[:total].long()].view(total,
                                                                         v.heads
                                                                         if weight.dim() == 2
                                                                         else 1, 1)
        if v.row != F32:
            value = value.to(v.row).to(dtype)
    return row, value


def reduced(name: str, row: Tensor, value: Tensor, rows: int) -> Tensor:
    """One reduce of the messages [E, H, D], as PyG's aggregations have it."""
    def total(t: Tensor) -> Tensor:
        return t.new_zeros(rows, *t.shape[1:]).index_add(0, row, t)

    count = torch.bincount(row, minlength=rows).clamp(min=1).to(value.dtype).view(-1, 1, 1)
    if name in ("max", "min"):
        index = row.view(-1, 1, 1).expand_as(value)
        return value.new_zeros(rows,
                               *value.shape[1:]).scatter_reduce(0, index, value, "a" + name,
                                                                include_self=False)
    if name in ("sum", "mean"):
        return total(value) / (count if name == "mean" else 1)
    var = total(value * value) / count - (total(value) / count) ** 2
    return var if name == "var" else _std(var)


def _std(var: Tensor) -> Tensor:
    root = var.clamp(min=1e-5).sqrt()
    return root.masked_fill(root <= 1e-5**0.5, 0.0)


def by_torch(v: Variant, rows: Rows, x: Tensor, weight: Tensor | None,
             dtype: torch.dtype) -> Tensor:
    row, value = messages(v, rows, x, weight, dtype)
    return torch.stack([reduced(name, row, value, rows.rows) for name in v.reduces], 1)


def check(v: Variant, rows: Rows, others: int, equal: bool = True) -> Tensor:
    x, weight = made(v, rows, others, equal)
    got = forward(v, rows, x, weight)
    assert got.counts is None and got.mean is None and got.out.dtype == v.row
    plain, exact = (by_torch(v, rows, x, weight, dtype) for dtype in (F32, torch.float64))
    for i, name in enumerate(v.reduces):
        if name in ("max", "min") and (weight is None or v.row != F32 or equal):
            assert torch.equal(got.out[:, i].double(), exact[:, i]), name
        else:
            assert_accurate(name, got.out[:, i], plain[:, i], exact[:, i],
                            FLOOR + (ROUNDING[v.row] if v.row != F32 else 0))
    kept = forward(v, rows, x, weight, train=True)
    assert same_bits(kept.out, got.out)
    _check_kept(v, rows, x, weight, kept)
    return got.out


def _check_kept(v: Variant, rows: Rows, x: Tensor, weight: Tensor | None, kept) -> None:
    row, value = messages(v, rows, x, weight, torch.float64)
    assert (kept.counts is None) == (not v.extrema) and (kept.mean is None) == (not v.moments)
    if v.moments:
        plain = reduced("mean", row, value.float(), rows.rows)
        assert_accurate("mean", kept.mean, plain, reduced("mean", row, value, rows.rows))
    for i, name in enumerate(name for name in ("max", "min") if name in v.reduces):
        best = reduced(name, row, value.float(), rows.rows)
        equal = (value.float() == best[row]).int()
        assert torch.equal(kept.counts[:, i], equal.new_zeros(best.shape).index_add(0, row, equal))


@on_devices("heads,width", SIZES)
def test_sizes(device, chunk_edges, heads, width):
    chunk_edges(40)
    view, i = graph(device), heads + width
    check(variant(heads, width, F32, SETS[i % len(SETS)], WEIGHTS[i % 4]), view.csc(), view.num_src)


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("reduces, weight",
                         [*itertools.product(SETS[:4], ["none"]), (ALL, "none"), (ALL, "edge"),
                          (ALL, "head"), (ALL, "added"), (("max", "std"), "added")])
def test_sets(device, chunk_edges, reduces, weight, chunk):
    chunk_edges(chunk)
    view = graph(device)
    for equal in (True, False):
        check(variant(3, 5, F32, reduces, weight), view.csc(), view.num_src, equal)


def test_by_source(device):
    view = graph(device)
    check(variant(2, 4, F32, ALL, "edge"), view.csr_by_id(), view.num_dst)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rows_and_wide_offsets(device, chunk_edges, dtype):
    chunk_edges(16)
    view = graph(device, wide=True)
    check(variant(3, 5, dtype, ("mean", "max", "min", "sum"), "head", True), view.csc(),
          view.num_src)
    check(variant(3, 8, dtype, ("min", "max"), wide=True), view.csc(), view.num_src)
    check(variant(3, 8, dtype, ("mean", "min", "max"), "added", True), view.csc(), view.num_src)


@pytest.mark.parametrize("num_src, num_dst, edges", [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    view = graph(device, num_src, num_dst, edges)
    out = check(variant(3, 5, F32, ALL), view.csc(), num_src)
    assert out.shape == (num_dst, 6, 3, 5) and (edges or not out.any())


def test_split_rows_before_the_report(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    forget_report(view.csc())
    check(variant(3, 5, F32, ALL), view.csc(), view.num_src)


def test_a_variance_far_from_zero_keeps_its_digits(device, chunk_edges):
    """The mean of squares less the square of the mean has none left here."""
    chunk_edges(16)
    view = graph(device)
    v, rows = variant(1, 8, F32, ("var", "std")), view.csc()
    x = (torch.randn(view.num_src, 1, 8) + 3000).to(device)
    exact = by_torch(v, rows, x, None, torch.float64)
    got = forward(v, rows, x).out
    assert ((got - exact).norm() / exact.norm()) < 1e-4
    assert ((by_torch(v, rows, x, None, F32) - exact).norm() / exact.norm()) > 1e-2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite(device, chunk_edges, value):
    chunk_edges(16)
    view = graph(device)
    v, rows = variant(2, 3, F32, ("max", "min", "sum")), view.csc()
    x, _ = made(v, rows, view.num_src)
    x[torch.rand(view.num_src).to(device) < 0.2] = value
    got, expected = forward(v, rows, x).out, by_torch(v, rows, x, None, F32)
    assert torch.allclose(got, expected, equal_nan=True, rtol=1e-5)


def test_scheduling_does_not_change_the_result(chunk_edges):
    chunk_edges(16)

    def run():
        view, v = graph("cpu"), variant(3, 5, F32, ALL, "head")
        x, weight = made(v, view.csc(), view.num_src, False)
        return lambda: forward(v, view.csc(), x, weight, True)

    in_any_order(run)


@pytest.mark.parametrize("change, message", [
    (dict(row=torch.float64), "row=torch.float64"), (dict(reduces=("prod",)), "reduces=.*prod"),
    (dict(reduces=()), "one or more"),
    (dict(reduces=("max", "max")), "each once"), (dict(heads=0), "heads=0"),
    (dict(weight="node"), "weight='node'")])
def test_variants_that_no_kernel_covers(change, message):
    with pytest.raises(ValueError, match=message):
        replace(variant(3, 5, F32, ALL), **change)


def test_inputs_that_do_not_fit(device):
    view = graph(device)
    rows, v = view.csc(), variant(3, 5, F32, ALL)
    x, _ = made(v, rows, view.num_src)
    for wrong, message in ((x[..., :4], "x is"), (x.double(), "x is.*float64")):
        with pytest.raises(ValueError, match=message):
            forward(v, rows, wrong)
    with pytest.raises(ValueError, match="weight is given"):
        forward(v, rows, x, torch.ones(200, device=device))
    with pytest.raises(ValueError, match="wide=True"):
        forward(replace(v, wide=True), rows, x)
    with pytest.raises(ValueError, match="weight is .*needed is .any, 3, 5"):
        forward(replace(v, weight="added"), rows, x, torch.ones(200, device=device))
    with pytest.raises(ValueError, match="places=True"):
        forward(replace(v, weight="edge"), replace(rows, place=rows.place[:0]), x,
                torch.ones(200, device=device))
