"""Maps by relation and sums over edges by torch operations: values, first and second derivatives,
segments of every size."""
from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir.program import DST, EDGE, PAIR_DST, PAIR_SRC, RELATION, SRC
from gnnaccel.dispatch.relational import torch_maps
from gnnaccel.dispatch.relational.gather import Gather
from gnnaccel.dispatch.relational.pairs import pairs_of
from tests.relational_cases import typed

SEGMENTS = [0, 1, 31, 32, 33, 0, 2]  # rows of each relation


def rand(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def segmented(sizes: list[int]):
    """Pairs of which relation r has ``sizes[r]``, and the relation of each row."""
    relation = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return pairs_of(torch.arange(len(relation)), relation, max(1, len(relation)),
                    len(sizes)), relation


def row_by_row(relation, rows, weight):
    return torch.stack([torch.einsum("bk,bkn->bn", row, weight[r])
                        for row, r in zip(rows, relation)])


# ---- multiply ----

@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("blocks, k, n", [(1, 4, 3), (1, 1, 1), (2, 3, 5), (3, 1, 2)])
def test_multiply(blocks, k, n, transposed):
    pairs, relation = segmented(SEGMENTS)
    rows = rand(len(relation), blocks, k)
    weight = rand(len(SEGMENTS), blocks, *((n, k) if transposed else (k, n)))
    got = torch_maps.multiply(pairs, rows, weight, transposed)
    expected = row_by_row(relation, rows, weight.transpose(-1, -2) if transposed else weight)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    cotangent = rand(*got.shape, grad=False)
    for a, b in zip(*(torch.autograd.grad(out, (rows, weight), cotangent)
                      for out in (got, expected))):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("sizes", [[0, 1, 3, 0], [2], [0, 0]], ids=str)
def test_multiply_to_any_derivative(sizes, blocks, transposed):
    pairs, relation = segmented(sizes)
    inputs = rand(len(relation), blocks, 2), rand(len(sizes), blocks,
                                                  *((3, 2) if transposed else (2, 3)))

    def mapped(rows, weight):
        return torch_maps.multiply(pairs, rows, weight, transposed)

    assert gradcheck(mapped, inputs) and gradgradcheck(mapped, inputs)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("coarse", [SRC, RELATION])
def test_multiply_reads_rows_of_a_coarser_domain(coarse, transposed):
    graph = typed(edges=30, num_src=6)
    view = graph.view()
    gather = Gather(view, coarse, PAIR_SRC)
    rows, weight = rand(view.statistics().rows(coarse), 2,
                        3), rand(5, 2, *((2, 3) if transposed else (3, 2)))
    pairs = view.pairs(PAIR_SRC)
    expected = torch_maps.multiply(pairs, rows[gather.index.long()], weight, transposed)
    got = torch_maps.multiply(pairs, rows, weight, transposed, gather)
    assert torch.equal(got, expected)
    for a, b in zip(*(torch.autograd.grad(out.pow(2).sum(), (rows, weight))
                      for out in (got, expected))):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    small = rand(view.statistics().rows(coarse), 1, 1), rand(5, 1, 1, 1)
    assert gradgradcheck(lambda x, w: torch_maps.multiply(pairs, x, w, transposed, gather), small)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_multiply_makes_only_the_gradients_that_are_wanted(wanted, monkeypatch):
    pairs, relation = segmented([2, 3])
    rows, weight = rand(5, 1,
                        2).requires_grad_(wanted[0]), rand(2, 1, 2, 2).requires_grad_(wanted[1])
    out, made = torch_maps.multiply(pairs, rows, weight), []
    for name in ("multiply", "outer"):
        function = getattr(torch_maps, name)
        monkeypatch.setattr(torch_maps, name, lambda *args, name=name,
                            function=function: made.append(name) or function(*args))
    out.sum().backward()
    assert made == (["multiply"]
                    if wanted[0] else ["outer"]) and [t.grad is not None
                                                      for t in (rows, weight)] == list(wanted)


def test_non_contiguous_operands():
    pairs, relation = segmented([3, 0, 4])
    rows = rand(7, 4, 2, grad=False).transpose(1, 2)
    weight = rand(3, 6, 2, 4, grad=False).permute(0, 2, 3, 1)
    expected = torch_maps.multiply(pairs, rows.contiguous(), weight.contiguous())
    torch.testing.assert_close(torch_maps.multiply(pairs, rows, weight), expected, rtol=1e-12,
                               atol=1e-12)


# ---- outer ----

@pytest.mark.parametrize("blocks", [1, 2])
def test_outer_of_segments_of_every_size(blocks):
    pairs, relation = segmented(SEGMENTS)
    left, right = rand(len(relation), blocks, 3), rand(len(relation), blocks, 5)
    got = torch_maps.outer(pairs, left, right)
    for r, size in enumerate(SEGMENTS):
        mine = relation == r
        assert int(mine.sum()) == size
        torch.testing.assert_close(got[r], torch.einsum("ubk,ubn->bkn", left[mine], right[mine]),
                                   rtol=1e-11, atol=1e-11)
    assert not got[0].any() and not got[5].any()


@pytest.mark.parametrize("blocks", [1, 2])
def test_outer_to_any_derivative(blocks):
    pairs, relation = segmented([0, 1, 3])
    inputs = rand(4, blocks, 2), rand(4, blocks, 3)
    assert gradcheck(lambda a, b: torch_maps.outer(pairs, a, b), inputs)
    assert gradgradcheck(lambda a, b: torch_maps.outer(pairs, a, b), inputs)


# ---- aggregate ----

# unsorted, a duplicate, nodes without edges
EDGES = torch.tensor([[0, 3, 1, 1, 4, 0, 2, 1], [2, 0, 2, 2, 0, 2, 4, 1]])


def view(edges=EDGES) -> GraphView:
    return GraphView(edges, 5, 6, own=True)


def edge_by_edge(edges, rows, weight):
    out = torch.zeros(6, *rows.shape[1:], dtype=rows.dtype)
    for e, (s, d) in enumerate(edges.t().tolist()):
        factor = (1.0
                  if weight is None
                  else weight[e].reshape(*weight.shape[1:], *(1,) * (rows.dim() - weight.dim())))
        out = out.index_add(0, torch.tensor([d]), (factor * rows[s]).unsqueeze(0))
    return out


FORMS = [((5, 3), None), ((5, 2, 3), None), ((5, 3), (8,)), ((5, 2, 3), (8,)), ((5, 2, 3), (8, 2)),
         ((5, 1, 1), (8, 1))]


@pytest.mark.parametrize("rows, weight", FORMS)
@pytest.mark.parametrize("build", [False, True])
def test_aggregate(rows, weight, build):
    graph = view()
    if build:
        graph.edges()
    inputs = [rand(*shape) for shape in (rows, weight) if shape is not None]
    got = torch_maps.aggregate(graph, *inputs)
    expected = edge_by_edge(EDGES, inputs[0], *(inputs[1:] or [None]))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    cotangent = rand(*got.shape, grad=False)
    for a, b in zip(*(torch.autograd.grad(out, inputs, cotangent) for out in (got, expected))):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    def summed(*operands):
        return torch_maps.aggregate(graph, *operands)

    assert gradcheck(summed, inputs) and gradgradcheck(summed, inputs)


@pytest.mark.parametrize("rows, weight", FORMS)
def test_aggregate_without_edges(rows, weight):
    inputs = [rand(*rows)] + ([] if weight is None else [rand(0, *weight[1:])])
    out = torch_maps.aggregate(view(torch.empty(2, 0, dtype=torch.long)), *inputs)
    assert out.shape == (6, *rows[1:]) and not out.any()
    grad, = torch.autograd.grad(out.sum(), inputs[:1])
    assert grad.shape == rows and not grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, weight", FORMS)
def test_aggregate_keeps_the_dtype_of_its_rows(dtype, rows, weight):
    """Shares come in fp32 whatever the rows are."""
    exact = [rand(*shape, grad=False) for shape in (rows, weight) if shape is not None]
    given = [exact[0].to(dtype).requires_grad_()] + [t.float() for t in exact[1:]]
    out = torch_maps.aggregate(view(), *given)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), edge_by_edge(EDGES, exact[0], *(exact[1:] or [None])),
                               rtol=0.05, atol=0.05)
    grad, = torch.autograd.grad(out.sum(), given[:1])
    assert grad.dtype is dtype


# ---- take ----

@pytest.mark.parametrize("coarse, fine",
                         [(SRC, PAIR_SRC), (RELATION, PAIR_SRC), (RELATION, PAIR_DST), (DST, EDGE),
                          (PAIR_DST, EDGE)])
@pytest.mark.parametrize("shape", [(2,), (2, 3)], ids=str)
def test_take(coarse, fine, shape):
    graph = typed(edges=14, num_src=4, num_dst=4, num_relations=3).view()
    rows, gather = rand(graph.statistics().rows(coarse), *shape), Gather(graph, coarse, fine)
    assert torch.equal(torch_maps.take(rows, gather), rows[gather.index.long()])
    assert gradcheck(lambda t: torch_maps.take(t, gather),
                     rows) and gradgradcheck(lambda t: torch_maps.take(t, gather), rows)


def test_gradients_of_relations_are_long_sums_in_double():
    """One edge after the other, 20,000 equal numbers come out 1e-4 off."""
    graph = typed(20_000, num_relations=2)
    gather = Gather(graph.view(), RELATION, EDGE)
    rows = torch.ones(2, 3, requires_grad=True)
    grad = torch.full((20_000, 3), 0.1)
    got, = torch.autograd.grad(torch_maps.take(rows, gather), rows, grad)
    expected = torch.zeros(2, 3).double().index_add(0, gather.index.long(), grad.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-7, atol=0)


def test_take_of_ids():
    graph = typed().view()
    gather, ids = Gather(graph, SRC, PAIR_SRC), torch.randperm(12)
    found = torch_maps.take(ids, gather)
    assert found.dtype is torch.int64 and torch.equal(found, ids[gather.index.long()])


def test_forward_mode_takes_ordinary_operations():
    graph, tangent = view(), rand(5, 3, grad=False)
    gather = Gather(typed(num_src=5).view(), SRC, PAIR_SRC)
    with forward_ad.dual_level():
        rows = forward_ad.make_dual(rand(5, 3, grad=False), tangent)
        summed, taken = torch_maps.aggregate(graph, rows), torch_maps.take(rows, gather)
        torch.testing.assert_close(forward_ad.unpack_dual(summed).tangent,
                                   torch_maps.aggregate(graph, tangent))
        assert torch.equal(forward_ad.unpack_dual(taken).tangent, tangent[gather.index.long()])
