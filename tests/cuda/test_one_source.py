"""Rows whose edges all come from one source: their output does not depend on the softmax, so
every gradient through a score is zero, as it is with the host's operations."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnaccel.dispatch.graph.view import GraphView
from tests.attention_cases import Problem, additive, by_kernels, check, pairwise, terms
from tests.helpers import on_devices

pytestmark = pytest.mark.usefixtures("poison")

SIZES = [(8, 8), (1, 1), (3, 5), (2, 40), (1, 128)]
#: by kind: the problem over a graph, and the inputs that act through scores alone
KINDS = {
    "additive": (lambda g, h, d: additive(g, h, d, "bipartite"), ("att_src", "att_dst", "x_dst")),
    "additive with edges": (lambda g, h, d: additive(g, h, d, "source", edge=True),
                            ("att_src", "a_edge")),
    "terms": (lambda g, h, d: terms(g, h, d, edge=True), ("a_src", "a_dst", "a_edge")),
    "gatv2 with edges": (lambda g, h, d: pairwise("gatv2", g, h, d, True),
                         ("queries", "att", "edges")),
    **{score: (lambda g, h, d, score=score: pairwise(score, g, h, d), ("queries", *more))
       for score, more in {"gatv2": ("att",), "dot": ("keys",), "cosine": ("c_src",),
                           "mx": ("c_src", "c_dst"), "sd": ()}.items()}}


def copies(device: torch.device, longest: int = 70) -> Tensor:
    """Edges to 40 destinations, each from one source, one to ``longest`` times; in any order."""
    dst = torch.arange(40).repeat_interleave(torch.linspace(1, longest, 40).long())
    return torch.stack([dst * 7 % 30, dst])[:, torch.randperm(dst.shape[0])].to(device)


def view(edges: Tensor) -> GraphView:
    return GraphView(edges, 30, 45, own=True)


@on_devices("kind,heads,width", [(kind, *SIZES[i % len(SIZES)]) for i, kind in enumerate(KINDS)],
            [(kind, *size) for kind in KINDS for size in SIZES])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_no_gradient_through_scores(device, chunk_edges, kind, heads, width, chunk):
    chunk_edges(chunk)
    make, names = KINDS[kind]
    problem = make(view(copies(device)), heads, width)
    grads = by_kernels(problem)[0]
    assert {name: float(grads[name].abs().max()) for name in names} == dict.fromkeys(names, 0.0)
    assert all(grads[name].any() for name in set(grads) - set(names)), "values have gradients"


def one_other(device: torch.device) -> Tensor:
    """`copies`, where the last edge of every other destination comes from another source."""
    edges = copies(device)
    edges = edges[:, edges[1].argsort(stable=True)]
    last = [int((edges[1] == i).nonzero()[-1]) for i in range(0, 40, 2)]
    edges[0, last] = (edges[0, last] + 1) % 30
    return edges


@on_devices("kind,heads,width", [(kind, *SIZES[i % len(SIZES)]) for i, kind in enumerate(KINDS)],
            [(kind, *size) for kind in KINDS for size in SIZES])
def test_one_edge_from_another_source_is_seen(device, kind, heads, width):
    """Wherever it stands in its row."""
    for order in (lambda e: e, lambda e: e.flip(1)):
        problem = KINDS[kind][0](view(order(one_other(device))), heads, width)
        grads = check(problem)
        if "queries" in grads:
            assert bool(grads["queries"][2:40:2].flatten(1).any(1).all())


@on_devices("kind", ["additive", "gatv2", "dot"])
@pytest.mark.parametrize("edge", [False, True])
def test_dropout(device, kind, edge):
    """Copies of an edge are dropped one by one. Their scores are equal all the same, and only with
    edge terms do their gradients reach something that they do not share."""
    problem = (additive(view(copies(device)), 3, 5, "source", edge, dropout=0.3)
               if kind == "additive" else pairwise(kind, view(copies(device)), 3, 5, edge, 0.3))
    grads = check(problem)
    if edge:
        assert grads["a_edge" if kind == "additive" else "edges"].any()
    else:
        assert not grads["att_src" if kind == "additive" else "queries"].any()


@on_devices("heads,width", [(8, 8), (1, 40)])
def test_values_of_edges_differ(device, heads, width):
    """Where an edge's row adds to the value, copies of an edge are not alike."""
    assert check(pairwise("dot", view(copies(device)), heads, width, edge=True))["queries"].any()


def shared(device: torch.device, most: int = 5) -> Tensor:
    """Edges to 40 destinations: 1 to ``most`` copies of one, among others; in any order."""
    dst = torch.arange(40).repeat_interleave(torch.arange(40) % most + 1)
    best = torch.stack([dst * 7 % 30, dst])
    rest = torch.stack([torch.randint(0, 30, (160,)), torch.arange(40).repeat(4)])
    rest = rest[:, rest[0] != rest[1] * 7 % 30]
    edges = torch.cat([best, rest], 1)
    return edges[:, torch.randperm(edges.shape[1])].to(device)


def scored(edges: Tensor, scores: Tensor, heads: int, width: int) -> Problem:
    """Attention with these scores of the edges, above zero."""
    problem = terms(view(edges), heads, width, edge=True)
    problem.tensors["a_src"].zero_()
    problem.tensors["a_dst"].zero_()
    problem.tensors["a_edge"] = scores.view(-1, 1).repeat(1, heads)
    return problem


@on_devices("heads,width", [(8, 8), (1, 1), (2, 40)], SIZES)
@pytest.mark.parametrize("chunk", [1024, 16])
def test_copies_that_share_a_softmax(device, chunk_edges, heads, width, chunk):
    """The host subtracts equal numbers: no gradient through scores."""
    chunk_edges(chunk)
    edges = shared(device)
    scores = torch.where(edges[0] == edges[1] * 7 % 30, 300.0, 1.0)
    grads = check(scored(edges, scores, heads, width))
    assert not any(grads[name].any() for name in ("a_src", "a_dst", "a_edge"))


@on_devices("heads,width", [(8, 8), (1, 1), (2, 40)], SIZES)
def test_edges_from_several_sources_that_share_a_softmax(device, heads, width):
    """The sum of each softmax is a whole number, and yet scores have gradients."""
    edges = shared(device)
    grads = check(scored(edges, torch.ones_like(edges[0], dtype=torch.float32), heads, width))
    assert grads["a_edge"].abs().min() > 0
    # two copies of an edge, and two other edges that share the softmax
    edges = torch.tensor([[4, 4, 1, 2, 3], [0, 0, 0, 0, 0]], device=device)
    scores = torch.tensor([1.0, 1.0, 300.0, 300.0, 1.0], device=device)
    problem = scored(edges, scores, heads, width)
    assert check(problem)["a_edge"][2:4].abs().min() > 0
    # and the value of a third is what theirs come to
    for source, value in ((1, 1.0), (2, -1.0), (3, 0.0)):
        problem.tensors["x"][source] = value
    assert check(problem)["a_edge"][2:4].abs().min() > 0


def equal(kind: str, graph: GraphView, edge: bool, apart: float) -> Problem:
    """All sources, and all edges, have the same rows but for a share ``apart`` of each number."""
    problem = pairwise(kind, graph, 2, 8, edge)
    for name in ("keys", "values", "edges"):
        rows = problem.tensors.get(name)
        if rows is not None:
            rows.copy_((rows[:1] + 2) * (1 + apart * torch.randn_like(rows)))
    return problem


@on_devices("kind,edge", [("gatv2", False), ("gatv2", True), ("dot", False), ("dot", True),
                          ("sd", False), ("mx", False)])
@pytest.mark.parametrize("most", [1, 30])
def test_equal_neighbours(device, kind, edge, most):
    """Each of another source: t and delta differ by roundings alone, which is no gradient."""
    problem = equal(kind, view(shared(device, most)), edge, 0.0)
    # of one sign, so that inner products do not cancel
    grad = problem.grad_out().abs() + 0.5
    problem.grad_out = lambda: grad
    grads = by_kernels(problem)[0]
    assert not grads["queries"].any()
    assert grads["values" if "values" in grads else "keys"].any()


@on_devices("kind,edge", [("gatv2", False), ("dot", True), ("mx", False)])
def test_neighbours_that_are_nearly_equal(device, kind, edge):
    """What is above the roundings keeps its gradient."""
    problem = equal(kind, view(shared(device)), edge, 1e-4)
    assert check(problem, floor=3e-3)["queries"].any()


@on_devices("score", ["gatv2", "dot", "cosine", "mx", "sd"])
def test_copies_that_share_a_softmax_of_pairs(device, score):
    """Scores of hundreds: one source wins each softmax, with all of its copies."""
    graph = view(shared(device))
    problem = pairwise(score, graph, 2, 8)
    winner = torch.randn(2, 8, device=device)
    keys = problem.tensors["keys"]
    keys.copy_(keys * 0.1 - winner)
    problem.tensors["queries"].copy_(winner * 3)
    assert torch.isfinite(check(problem, floor=1e-4)["keys"]).all()
