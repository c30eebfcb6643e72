"""A softmax of one term, or with a term that takes all of it, has no gradient through its scores.

No kernel may leave the rounding of a difference there: with large features it would be larger than
the other gradients.
"""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.traverse import edge_softmax
from gnnaccel.dispatch.graph.view import GraphView
from tests.attention_cases import Problem, additive, by_kernels, by_torch, pairwise, terms
from tests.helpers import on_devices, relative

pytestmark = pytest.mark.usefixtures("poison")

#: few lanes per head, many, and a head so wide that its inner products are summed twofold
SHAPES = [(8, 8), (3, 5), (1, 130)]
#: inputs that only scores are made of
_SCORES = ("x_dst", "att_src", "att_dst", "a_src", "a_dst", "a_edge", "queries", "att", "c_src",
           "c_dst")


def one_each(device, times: int = 1) -> GraphView:
    """Each of 30 destinations has one neighbour, joined by ``times`` edges.

    One source has many edges, so that its row is split.
    """
    torch.manual_seed(3)
    src = torch.randint(0, 20, (30,))
    src[:12] = 4
    edges = torch.stack([src, torch.randperm(30)]).repeat(1, times)
    return GraphView(edges[:, torch.randperm(edges.shape[1])].to(device), 20, 30, own=True)


def made(kind: str, view: GraphView, heads: int, width: int, edge: bool, dropout: float,
         row: torch.dtype) -> Problem:
    if kind == "additive":
        problem = additive(view, heads, width, "bipartite", edge, dropout, row=row)
    elif kind == "terms":
        problem = terms(view, heads, width, True, edge, dropout, row=row)
    else:
        problem = pairwise(kind, view, heads, width, edge, dropout, row=row)
    for name in ("x", "values", "keys"):  # the rows that are added up
        if name in problem.tensors:
            problem.tensors[name] *= 1e3
            break
    return problem


def check(problem: Problem) -> None:
    got, call = by_kernels(problem)
    exact = by_torch(problem, call, torch.float64)
    rows = "values" if "values" in got else "x" if "x" in got else "keys"
    allowed = 1e-6 if problem.tensors[rows].dtype is torch.float32 else 1e-2
    assert relative(got[rows], exact[rows]) <= allowed
    for name in _SCORES:
        assert name not in got or not got[name].any(), f"the gradient of {name} is not zero"


KINDS = [("additive", False), ("additive", True), ("terms", False), ("terms", True),
         ("gatv2", False), ("dot", False), ("dot", True), ("cosine", False), ("mx", False),
         ("sd", False)]


@on_devices("kind,edge,heads,width", [(*kind, *SHAPES[i % 3]) for i, kind in enumerate(KINDS)],
            [(*kind, *shape) for kind in KINDS for shape in SHAPES])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [1024, 8])
def test_one_neighbour(device, chunk_edges, kind, edge, heads, width, dropout, chunk):
    chunk_edges(chunk)
    check(made(kind, one_each(device), heads, width, edge, dropout if kind != "cosine" else 0.0,
               torch.float32))


@on_devices("kind,edge,heads,width", [("additive", True, 8, 8), ("dot", True, 3, 5)],
            [(*kind, *shape) for kind in KINDS for shape in SHAPES])
def test_one_neighbour_in_half_precision(device, kind, edge, heads, width):
    """Where the saved output is rounded otherwise than the sum of a value and an edge's row."""
    check(made(kind, one_each(device), heads, width, edge, 0.0, torch.bfloat16))


@on_devices("kind,edge,heads,width", [("additive", False, 8, 8), ("additive", True, 3, 5),
                                      ("dot", False, 3, 5)])
def test_one_neighbour_among_many_takes_all(device, kind, edge, heads, width):
    """Source 0 outweighs all others by far; every destination has it."""
    torch.manual_seed(5)
    others = torch.stack([torch.randint(1, 20, (90,)), torch.randint(0, 30, (90,))])
    first = torch.stack([torch.zeros(30, dtype=torch.int64), torch.arange(30)])
    view = GraphView(torch.cat([others, first], 1).to(device), 20, 30, own=True)
    problem = made("terms" if kind == "additive" else kind, view, heads, width, edge, 0.0,
                   torch.float32)
    if kind == "additive":
        problem.tensors["a_src"][0] = 1e4
    else:
        problem.tensors["queries"].abs_()
        problem.tensors["keys"].abs_().mul_(1e-3)[0] = 1e4
    check(problem)


@on_devices("kind,edge", [("additive", True), ("gatv2", False), ("dot", False)])
@pytest.mark.parametrize("times", [2, 4])
def test_one_neighbour_several_times(device, kind, edge, times):
    """Weights of 1 / 2 and 1 / 4 are exact, so equal terms cancel to the last bit.

    That holds where each edge has a term of its own.
    """
    problem = made(kind, one_each(device, times), 3, 5, edge, 0.0, torch.float32)
    if edge:
        problem.tensors["a_edge"].fill_(0.5)
    check(problem)


@on_devices("heads", [1, 3, 8])
@pytest.mark.parametrize("times", [1, 3, 9])
def test_softmax_of_edges(device, heads, times):
    rows = one_each(device, times).csc()
    grad = (1e6 * torch.randn(30, heads)).to(device)
    row = torch.repeat_interleave(rows.indptr.diff().long(), output_size=30 * times)
    of_edges = torch.empty(30 * times, heads, device=device).index_copy(0, rows.place.long(),
                                                                        grad[row])
    out = edge_softmax.forward(rows, torch.zeros_like(of_edges))
    found = edge_softmax.backward(rows, out, of_edges)
    assert found.abs().max() <= (0.0 if times == 1 else 1e-6)
