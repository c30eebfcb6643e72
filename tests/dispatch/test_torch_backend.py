"""The torch backend against a loop over nodes, and its derivatives against differences."""
from __future__ import annotations

import math

import pytest
import torch

from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.run import torch_backend
from tests.attention_cases import skewed_edges

H, D, NUM_SRC, NUM_DST = 2, 3, 12, 9
SLOPE, SCALE = 0.2, 0.7


def leaky(x):
    return x if x > 0 else SLOPE * x


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def dot(a, b):
    return float((a * b).sum())


# the score of an edge for one head, from the rows and terms of its ends; what is not there is zero
SCORES = {
    "gat": lambda t, s, d, e,
    h: leaky(dot(t["x"][s, h], t["att_src"][0, h]) + t.get("a_edge", ZERO)[e, h] + (
        dot(t.get("x_dst", t["x"])[d, h], t["att_dst"][0, h]) if "att_dst" in t else 0.0)),
    "gatv2": lambda t, s, d, e, h: sum(float(a) * leaky(float(k)) for a, k in zip(
        t["att"][0, h], t["keys"][s, h] + t["queries"][d, h] + t.get("edges", ZERO)[e, h])),
    "dot_product": lambda t, s, d, e,
    h: SCALE * dot(t["queries"][d, h], t["keys"][s, h] + t.get("edges", ZERO)[e, h]),
    "cosine": lambda t, s, d, e,
    h: dot(t["queries"][d, h], t["keys"][s, h]) * float(t["c_src"][s, h]),
    "supergat_mx": lambda t, s, d, e, h: leaky(float(t["c_src"][s, h] + t["c_dst"][d, h]) * sigmoid(
        dot(t["queries"][d, h], t["keys"][s, h]))),
    "supergat_sd": lambda t, s, d, e, h: leaky(SCALE * dot(t["queries"][d, h], t["keys"][s, h])),
}
ZERO = torch.zeros(200, H, dtype=torch.float64)


def naive(program, pairs, t, factor):
    """``pairs``: (source, destination, edge id); ``factor[e][h]``: dropout."""
    out = torch.zeros(NUM_DST, H, D, dtype=torch.float64)
    for node in range(NUM_DST):
        into = [(s, e) for s, d, e in pairs if d == node]
        for h in range(H):
            scores = [float(SCORES[program.name](t, s, node, e, h)) for s, e in into]
            total = sum(math.exp(x) for x in scores)
            for (s, e), x in zip(into, scores):
                row = t["x"][s, h] if "x" in t else t.get("values", t["keys"])[s, h]
                if program.name == "dot_product" and "edges" in t:
                    row = row + t["edges"][e, h]
                out[node, h] += math.exp(x) / total * float(factor[e, h]) * row
    return out


def tensors_of(program, edges):
    shapes = {"x": (NUM_DST, H, D), "x_dst": (NUM_DST, H, D), "att_src": (1, H, D),
              "att_dst": (1, H, D), "a_edge": (edges, H), "keys": (NUM_SRC, H, D),
              "queries": (NUM_DST, H, D), "values": (NUM_SRC, H, D), "edges": (edges, H, D),
              "att": (1, H, D), "c_src": (NUM_SRC, H), "c_dst": (NUM_DST, H)}
    return {name: torch.randn(shapes[name], dtype=torch.float64) for name, _ in program.inputs}


PROGRAMS = [programs.gat(SLOPE, 0.0, True, True, False), programs.gat(SLOPE, 0.5, True, True, True),
            programs.gat(SLOPE, 0.0, False, True, True),
            programs.gat(SLOPE, 0.0, True, False, False), programs.gatv2(SLOPE, 0.0, False),
            programs.gatv2(SLOPE, 0.5, True), programs.dot_product(SCALE, 0.0, False),
            programs.dot_product(SCALE, 0.5, True), programs.cosine(),
            programs.supergat_mx(SLOPE, 0.5), programs.supergat_sd(SCALE, SLOPE, 0.5)]
each_program = pytest.mark.parametrize("program", PROGRAMS,
                                       ids=[f"{p.name}-{i}" for i, p in enumerate(PROGRAMS)])


each_way = pytest.mark.parametrize("way", [torch_backend.run, torch_backend.plain],
                                   ids=["run", "plain"])


def problem(program, loops=0, edges=40):
    torch.manual_seed(1)
    num_src = NUM_DST if program.name == "gat" else NUM_SRC
    edge_index = skewed_edges(num_src, NUM_DST, edges)
    view = GraphView(edge_index, num_src, NUM_DST, loops, own=True)
    pairs = [(s, d, e) for e, (s, d) in enumerate(edge_index.t().tolist())
             if not (loops and s == d)]
    pairs += [(node, node, edges + node) for node in range(loops)]
    factor = (torch.rand(edges + loops, H, dtype=torch.float64) > 0.5) * 2.0
    return (view, tensors_of(program, edges + loops), pairs,
            factor if "dropout" in {op.kind for op in program.ops} else None)


@each_way
@each_program
@pytest.mark.parametrize("loops", [0, 6])
def test_against_a_loop_over_nodes(program, loops, way):
    view, tensors, pairs, factor = problem(program, loops)
    expected = naive(program, pairs, tensors, torch.ones(200, H) if factor is None else factor)
    edges = view.edges()
    out = way(program, edges, tensors, None if factor is None else factor[edges.eid])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    assert expected.abs().sum() > 1 and (out[-1] == 0).all() == (
        len([1 for _, d, _ in pairs if d == NUM_DST - 1]) == 0)


@each_way
@each_program
def test_first_and_second_derivatives(program, way):
    view, tensors, _, factor = problem(program, edges=9)
    edges = view.edges()
    keep = None if factor is None else factor[edges.eid]

    def run(*values):
        return way(program, edges, dict(zip(tensors, values)), keep)

    values = [t.requires_grad_() for t in tensors.values()]
    assert torch.autograd.gradcheck(run, values, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, values, fast_mode=True)


def test_softmax_of_large_and_lonely_scores():
    edges = torch_backend.Edges(torch.tensor([0, 1, 0, 0]), torch.tensor([0, 0, 2, 3]), None, 5)
    alpha = torch_backend.segment_softmax(torch.tensor([[1e4], [1e4 - 1], [-1e4], [0.0]],
                                                       dtype=torch.float64), edges)
    expected = torch.tensor([1 / (1 + math.exp(-1)), 1 / (1 + math.e), 1.0, 1.0],
                            dtype=torch.float64)
    torch.testing.assert_close(alpha[:, 0], expected)


@each_program
def test_inputs_are_not_changed(program):
    view, tensors, _, factor = problem(program)
    before = {name: t.clone() for name, t in tensors.items()}
    torch_backend.run(program, view.edges(), tensors,
                      None if factor is None else factor[view.edges().eid])
    assert set(tensors) == set(before) and all(torch.equal(tensors[name], before[name])
                                               for name in before)


@each_way
@pytest.mark.parametrize("num_edges", [0, 1])
def test_hardly_any_edges(num_edges, way):
    view = GraphView(torch.zeros(2, num_edges, dtype=torch.long), 3, NUM_DST, own=True)
    program = programs.dot_product(SCALE, 0.0, False)
    tensors = tensors_of(program, num_edges)
    out = way(program, view.edges(), tensors)
    assert out.shape == (NUM_DST, H, D) and (out[num_edges:] == 0).all()
    if num_edges:
        torch.testing.assert_close(out[0], tensors["values"][0])


@each_way
@each_program
def test_the_order_of_the_callers_edges_does_not_matter(program, way):
    view, tensors, _, factor = problem(program)
    expected = way(program, view.edges(), tensors,
                   None if factor is None else factor[view.edges().eid])
    torch.manual_seed(1)
    edge_index = skewed_edges(view.num_src, NUM_DST, 40)  # the edges of `problem` again
    order = torch.randperm(40)
    other = GraphView(edge_index[:, order], view.num_src, NUM_DST, own=True)
    tensors = {name: t[order] if name in ("a_edge", "edges") else t for name, t in tensors.items()}
    keep = None if factor is None else factor[order][other.edges().eid]
    torch.testing.assert_close(way(program, other.edges(), tensors, keep), expected, rtol=1e-12,
                               atol=1e-13)
