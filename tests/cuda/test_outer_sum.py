"""Sums and means of outer products of edges' features with rows, and their gradients."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.traverse import outer_sum
from tests.attention_cases import graph
from tests.emulation.orders import in_any_order
from tests.helpers import assert_accurate, forget_report, on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")


def made(view, features: int, width: int, ones: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, features of edges, and the gradient of the sums."""
    counts = ((view.num_src, width), (view.num_edges, features),
              (view.num_dst, features + ones, width))
    return tuple(torch.randn(*count).to(view.device) for count in counts)


def by_torch(view, x, edge, grad, ones: bool, mean: bool, dtype: torch.dtype) -> list[Tensor]:
    x, edge = (t.to(dtype).requires_grad_() for t in (x, edge))
    src, dst = view._kept
    terms = torch.cat([edge, edge.new_ones(len(edge), 1)], 1) if ones else edge
    out = x.new_zeros(grad.shape).index_add(0, dst, terms.unsqueeze(2) * x[src].unsqueeze(1))
    if mean:
        out = out / torch.bincount(dst, minlength=view.num_dst).clamp(min=1).view(-1, 1, 1)
    return [out.detach(), *torch.autograd.grad(out, [x, edge], grad.to(dtype))]


def by_kernels(view, x, edge, grad, ones: bool, mean: bool) -> list[Tensor]:
    rows = view.csc()
    out = outer_sum.forward(rows, x, edge, ones, mean)
    of_edges, edge_grad = outer_sum.backward(rows, x, edge, ones, mean, grad, (True, True))
    return [out, torch.zeros_like(x).index_add(0, view._kept[0], of_edges), edge_grad]


def check(view, features: int, width: int, ones: bool = True, mean: bool = False) -> list[Tensor]:
    given = made(view, features, width, ones)
    got = by_kernels(view, *given, ones, mean)
    plain, exact = (by_torch(view, *given, ones, mean, d) for d in (torch.float32, torch.float64))
    for name, one, near, far in zip(("out", "x", "edge"), got, plain, exact):
        assert_accurate(name, one, near, far)
    return got


@on_devices("features,width", [(5, 13), (40, 33)],
            [(1, 1), (16, 16), (31, 64), (32, 65), (64, 128), (130, 256), (15, 47)])
def test_sizes(device, chunk_edges, features, width):
    chunk_edges(40)
    check(graph(device), features, width)


@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("ones", [True, False])
@pytest.mark.parametrize("mean", [True, False])
def test_means_and_split_rows(device, chunk_edges, chunk, ones, mean):
    chunk_edges(chunk)
    check(graph(device), 6, 10, ones, mean)


def test_wide_offsets(device, chunk_edges):
    chunk_edges(16)
    check(graph(device, wide=True), 7, 12)


@pytest.mark.parametrize("num_src, num_dst, edges", [(40, 30, 0), (1, 1, 1), (5, 0, 0), (0, 5, 0)])
def test_small_and_empty_graphs(device, num_src, num_dst, edges):
    got = check(graph(device, num_src, num_dst, edges), 4, 10)
    assert edges or not any(t.any() for t in got)


def test_split_rows_before_the_report(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    forget_report(view.csc())
    check(view, 4, 10, mean=True)


def test_only_what_is_needed(device):
    view = graph(device)
    x, edge, grad = made(view, 4, 10, False)
    both = outer_sum.backward(view.csc(), x, edge, False, False, grad, (True, True))
    for k, needs in enumerate([(True, False), (False, True)]):
        found = outer_sum.backward(view.csc(), x, edge, False, False, grad, needs)
        assert found[1 - k] is None and same_bits(found[k], both[k])


def test_an_infinite_gradient_stays_in_its_row(device):
    """Edges and features that a block has no others beside add nothing to its own."""
    view = graph(device)
    x, edge, grad = made(view, 4, 10, True)
    row = view._kept[1][0]
    grad.zero_()[row] = float("inf")
    of_edges, edge_grad = outer_sum.backward(view.csc(), x, edge.abs_(), True, False, grad,
                                             (True, True))
    inside = view._kept[1] == row
    assert of_edges[inside].isinf().all() and not of_edges[~inside].any()
    assert not edge_grad[~inside].any()


def test_scheduling_does_not_change_the_result(chunk_edges):
    chunk_edges(16)

    def run():
        view = graph("cpu")
        given = made(view, 5, 10, True)
        return lambda: by_kernels(view, *given, True, True)

    in_any_order(run)


def test_inputs_that_do_not_fit(device):
    view = graph(device)
    x, edge, grad = made(view, 4, 10, False)
    rows, wide = view.csc(), torch.zeros(view.num_src, outer_sum.MOST + 1, device=device)
    for given, words in (((x.double(), edge), "x is torch.float64"),
                         ((x, edge[1:]), "edge is .*needed is"),
                         ((x.t().contiguous().t(), edge), "x is .*needed is"),
                         ((x, edge.double()), "edge is torch.float64"),
                         ((wide, edge), "width=257")):
        with pytest.raises(ValueError, match=words):
            outer_sum.forward(rows, *given, False, False)
    with pytest.raises(ValueError, match="grad is .*needed is"):
        outer_sum.backward(rows, x, edge, False, False, grad[1:], (True, True))
