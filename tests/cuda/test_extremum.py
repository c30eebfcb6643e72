"""The largest or smallest message of each row, and the gradient of what it was made of."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse import extremum
from gnnaccel.cuda.traverse.extremum import Variant, variant
from tests.attention_cases import SIZES, graph
from tests.emulation.orders import in_any_order
from tests.helpers import FLOOR, ROUNDING, assert_accurate, forget_report, on_devices

pytestmark = pytest.mark.usefixtures("poison")

FORMS = [("copy", "none"), ("mul", "head"), ("add", "edge"), ("mul", "edge"), ("add", "head")]
F32 = torch.float32


def made(v: Variant, rows: Rows, others: int) -> tuple[Tensor, Tensor | None]:
    """Random rows, some of them equal, and weights."""
    edges, device = rows.other.shape[0], rows.indptr.device
    x = torch.randn(edges if v.identity else others, v.heads, v.width).mul(2).round().div(2)
    shape = {"none": None, "edge": (edges,), "head": (edges, v.heads)}[v.weight]
    return x.to(device, v.row), shape and torch.randn(shape).mul(2).round().to(device)


def messages(v: Variant, rows: Rows, x: Tensor,
             weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Per edge in the order of ``rows``: its row, its place, its message in fp32."""
    total = int(rows.indptr[-1])
    row = torch.repeat_interleave(rows.indptr.diff().long(), output_size=total)
    place = torch.arange(total, device=row.device) if v.identity else rows.place[:total].long()
    value = x.float()[place if v.identity else rows.other[:total].long()]
    if weight is not None:
        w = weight[place].view(total, -1, 1)
        value = value + w if v.op == "add" else value * w
    return row, place, value


def by_torch(v: Variant, rows: Rows, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    row, place, value = messages(v, rows, x, weight)
    worst = float("-inf" if v.largest else "inf")
    out = torch.full((rows.rows, v.heads, v.width), worst, device=x.device)
    arg = torch.full(out.shape, -1, dtype=torch.int32, device=x.device)
    for e in place.argsort().tolist():
        r, number = row[e], ~value[e].isnan()
        found = number & ((value[e] > out[r]) if v.largest else (value[e] < out[r]))
        found |= number & (arg[r] == -1)
        out[r], arg[r] = torch.where(found, value[e],
                                     out[r]), torch.where(found, place[e].int(), arg[r])
    return out.to(v.row), arg


def check(v: Variant, rows: Rows, others: int) -> tuple[Tensor, Tensor]:
    x, weight = made(v, rows, others)
    got, expected = extremum.forward(v, rows, x, weight), by_torch(v, rows, x, weight)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    return got


@on_devices("heads,width", SIZES)
def test_sizes(device, chunk_edges, heads, width):
    chunk_edges(40)
    view = graph(device)
    op, weight = FORMS[(heads + width) % 5]
    check(variant(heads, width, F32, op, weight, heads % 2 == 0), view.csc(), view.num_src)


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("op, weight", FORMS)
def test_forms(device, chunk_edges, op, weight, largest, chunk):
    chunk_edges(chunk)
    view = graph(device)
    check(variant(3, 5, F32, op, weight, largest), view.csc(), view.num_src)
    check(variant(3, 5, F32, op, weight, largest), view.csr_by_id(), view.num_dst)


@pytest.mark.parametrize("chunk", [1024, 16])
def test_rows_by_position(device, chunk_edges, chunk):
    chunk_edges(chunk)
    view = graph(device)
    check(variant(2, 4, F32, identity=True), replace(view.csc(), place=view.csc().place[:0]),
          view.num_src)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rows_and_wide_offsets(device, chunk_edges, dtype):
    chunk_edges(16)
    view = graph(device, wide=True)
    check(variant(3, 5, dtype, "mul", "head", True, False, True), view.csc(), view.num_src)
    check(variant(3, 8, dtype, wide=True), view.csc(), view.num_src)


@pytest.mark.parametrize("num_src, num_dst, edges", [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    view = graph(device, num_src, num_dst, edges)
    out, arg = check(variant(3, 5, F32), view.csc(), num_src)
    assert out.shape == (num_dst, 3, 5) and (edges or (arg == -1).all())


def test_split_rows_before_the_report(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    forget_report(view.csc())
    check(variant(3, 5, F32), view.csc(), view.num_src)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("largest", [True, False])
def test_numbers_that_are_not_finite(device, chunk_edges, value, largest):
    chunk_edges(16)
    view = graph(device)
    v = variant(2, 3, F32, largest=largest)
    x, _ = made(v, view.csc(), view.num_src)
    x[torch.rand(view.num_src).to(device) < 0.7] = value
    got, expected = extremum.forward(v, view.csc(), x), by_torch(v, view.csc(), x, None)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


# ---- gradients ----

@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("op, weight", FORMS)
@pytest.mark.parametrize("dtype", [F32, torch.float16])
def test_pick(device, chunk_edges, op, weight, dtype, chunk):
    chunk_edges(chunk)
    view = graph(device)
    v = variant(3, 5, dtype, op, weight)
    x, w = made(v, view.csc(), view.num_src)
    _, arg = extremum.forward(v, view.csc(), x, w)
    grad = torch.randn(arg.shape).to(device, dtype)
    src = torch.empty(view.num_edges, dtype=torch.long, device=device)
    src[view.csc().place.long()] = view.csc().other.long()
    expected = []
    for exact in (torch.float32, torch.float64):
        some = (arg >= 0).to(exact)
        at = arg.clamp(min=0).long()
        value = grad.to(exact) * some
        if op == "mul":
            per_head = (w if w.dim() == 2 else w.unsqueeze(1).expand(-1, 3)).to(exact)
            value = value * torch.stack(
                [per_head[at[:, h], h] for h in range(3)], 1)
        out = torch.zeros(x.shape, dtype=exact, device=device)
        expected.append(out.scatter_add(0, src[at], value))
    got = extremum.pick(v, view.csr_by_id(), arg, grad, w)
    assert got.dtype == dtype
    assert_accurate("x", got, *expected, FLOOR + (ROUNDING[dtype] if dtype != F32 else 0))


def test_scheduling_does_not_change_the_result(chunk_edges):
    chunk_edges(16)

    def run():
        view, v = graph("cpu"), variant(3, 5, F32, "mul", "head")
        x, w = made(v, view.csc(), view.num_src)
        by_src, (out, arg) = view.csr_by_id(), extremum.forward(v, view.csc(), x, w)
        grad = torch.randn(out.shape)
        return lambda: (*extremum.forward(v, view.csc(), x, w),
                        extremum.pick(v, by_src, arg, grad, w))

    in_any_order(run)


@pytest.mark.parametrize("change, message", [
    (dict(row=torch.float64), "row=torch.float64"), (dict(op="sub"), "op='sub'"),
    (dict(op="mul"), "without weights"),
    (dict(heads=0), "heads=0"), (dict(weight="node"), "weight='node'")])
def test_variants_that_no_kernel_covers(change, message):
    with pytest.raises(ValueError, match=message):
        replace(variant(3, 5, F32), **change)


def test_inputs_that_do_not_fit(device):
    view = graph(device)
    rows, v = view.csc(), variant(3, 5, F32)
    x, _ = made(v, rows, view.num_src)
    for wrong, message in ((x[..., :4], "x is"), (x.double(), "x is.*float64")):
        with pytest.raises(ValueError, match=message):
            extremum.forward(v, rows, wrong)
    with pytest.raises(ValueError, match="weight is given"):
        extremum.forward(v, rows, x, torch.ones(200, device=device))
    with pytest.raises(ValueError, match="wide=True"):
        extremum.forward(variant(3, 5, F32, wide=True), rows, x)
    with pytest.raises(ValueError, match="places=True"):
        extremum.forward(v, replace(rows, place=rows.place[:0]), x)
    with pytest.raises(ValueError, match="identity"):
        extremum.pick(variant(3, 5, F32, identity=True), rows, x.int(), x)
