"""Softmax of numbers per edge over the rows of a graph, and its gradient."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse import edge_softmax
from tests.attention_cases import graph
from tests.emulation.orders import in_any_order
from tests.helpers import FLOOR, ROUNDING, assert_accurate, forget_report, on_devices

pytestmark = pytest.mark.usefixtures("poison")

HEADS = [1, 2, 3, 8, 31, 32, 33, 70]


def ends(rows: Rows) -> tuple[Tensor, Tensor]:
    """Per edge in the order of ``rows``: its row and its place."""
    total = int(rows.indptr[-1])
    row = torch.repeat_interleave(rows.indptr.diff().long(), output_size=total)
    return row, rows.place[:total].long()


def by_torch(rows: Rows, x: Tensor, dtype: torch.dtype) -> Tensor:
    """[edges, H] by place."""
    row, place = ends(rows)
    score = x.to(dtype)[place]
    to = row.unsqueeze(1).expand_as(score)
    top = score.new_full((rows.rows, x.shape[1]),
                         float("-inf")).scatter_reduce(0, to, score, "amax")
    part = (score - top[row]).exp()
    total = part.new_zeros(rows.rows, x.shape[1]).index_add(0, row, part)
    return torch.zeros(x.shape, dtype=dtype,
                       device=x.device).index_copy(0, place, part / total[row])


def grads_by_torch(rows: Rows, x: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype).requires_grad_()
    return torch.autograd.grad(by_torch(rows, x, dtype), x, grad.to(dtype))[0]


def made(rows: Rows, heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(rows.other.shape[0], heads)).to(rows.indptr.device, dtype)


def check(rows: Rows, x: Tensor) -> Tensor:
    """Forward and backward against torch in fp64."""
    floor = FLOOR + (ROUNDING[x.dtype] if x.dtype != torch.float32 else 0)
    got, grad = edge_softmax.forward(rows, x), torch.randn(x.shape).to(x)
    assert got.dtype == x.dtype
    if rows.other.shape[0]:
        assert_accurate("out", got, by_torch(rows, x, torch.float32),
                        by_torch(rows, x, torch.float64), floor)
        d_x = edge_softmax.backward(rows, got, grad)
        assert_accurate("grad", d_x,
                        *(grads_by_torch(rows, x, grad, t) for t in (torch.float32, torch.float64)),
                        4 * floor)
    return got


@on_devices("heads", HEADS)
@pytest.mark.parametrize("chunk", [1024, 16])
def test_heads(device, chunk_edges, heads, chunk):
    chunk_edges(chunk)
    check(graph(device).csc(), made(graph(device).csc(), heads))


@pytest.mark.parametrize("chunk", [1024, 150, 16])
@pytest.mark.parametrize("heads", [1, 4])
def test_long_rows(device, chunk_edges, heads, chunk):
    chunk_edges(chunk)
    rows = graph(device, 60, 50, 900).csc()
    assert int(rows.indptr.diff().max()) > 256
    check(rows, made(rows, heads))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(device, chunk_edges, dtype):
    chunk_edges(16)
    rows = graph(device).csc()
    check(rows, made(rows, 3, dtype))


def test_by_source_and_wide_offsets(device, chunk_edges):
    chunk_edges(16)
    view = graph(device, wide=True)
    for rows in (view.csc(), view.csr_by_id()):
        assert rows.place.dtype == torch.int64
        check(rows, made(rows, 3))


@pytest.mark.parametrize("num_src, num_dst, edges", [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    rows = graph(device, num_src, num_dst, edges).csc()
    got = check(rows, made(rows, 3))
    assert got.shape == (edges, 3) and (got == 1).all()


def test_split_rows_before_the_report(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    exact = forget_report(view.csc())
    assert view.csc().split.sizes() > exact
    check(view.csc(), made(view.csc(), 3))


def kinds(t: Tensor) -> Tensor:
    return torch.isnan(t) * 2 + torch.isinf(t)


@pytest.mark.parametrize("chunk", [1024, 8])
@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan"), -1e30, 1e30])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_numbers_at_the_edge(device, chunk_edges, value, share, chunk):
    """Masked edges weigh 0, rows of nothing else are NaN, what is not finite stays in its rows."""
    chunk_edges(chunk)
    rows = graph(device).csc()
    x = made(rows, 2)
    row, place = ends(rows)
    chosen = place[(row % 3 == 0) & (torch.rand(len(row)).to(device) < share)]
    x[chosen, 0] = value
    got, expected = edge_softmax.forward(rows, x), by_torch(rows, x, torch.float32)
    assert torch.equal(kinds(got),
                       kinds(expected)) and torch.allclose(got, expected, equal_nan=True, atol=1e-6)


def test_scheduling_does_not_change_the_result(chunk_edges):
    chunk_edges(16)

    def run():
        rows = graph("cpu").csc()
        x, grad = made(rows, 3), made(rows, 3)
        out = edge_softmax.forward(rows, x)
        return lambda: (edge_softmax.forward(rows, x), edge_softmax.backward(rows, out, grad))

    in_any_order(run)


def test_inputs_that_do_not_fit(device):
    rows = graph(device).csc()
    x = made(rows, 3)
    for wrong in (x[:199], x[:, 0], x.t().contiguous().t(), x[:, :0]):
        with pytest.raises(ValueError, match="x is"):
            edge_softmax.forward(rows, wrong)
    with pytest.raises(ValueError, match="float64"):
        edge_softmax.forward(rows, x.double())
    with pytest.raises(ValueError, match="grad is"):
        edge_softmax.backward(rows, x, x.half())
    with pytest.raises(ValueError, match="places=True"):
        edge_softmax.forward(replace(rows, place=rows.place[:0]), x)
