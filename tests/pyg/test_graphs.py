"""Any graph, any width, any memory layout of the features: drawn by hypothesis, for every layer."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gnnaccel
from tests.pyg.judge import compare, place, run
from tests.pyg.layers import NAMES, WITH_EDGES, build

SETTINGS = settings(max_examples=30, deadline=None, derandomize=True, database=None,
                    suppress_health_check=[HealthCheck.function_scoped_fixture,
                                           HealthCheck.too_slow])
# in graphs of a few edges gradients are what is left of larger terms
ROUGH = dict(floor=1e-5, nothing=1.0)
SIZES = st.sampled_from([(1, 1), (3, 5), (2, 8), (1, 7)])
FORMS = ["plain", "transposed", "columns", "offset", "rows", "expanded"]


def strided(form: str, rows: int, width: int) -> torch.Tensor:
    """[rows, width] of random numbers, laid out as ``form`` says."""
    if form == "transposed":
        return torch.randn(width, rows).t()
    if form == "columns":
        return torch.randn(rows, 2 * width)[:, ::2]
    if form == "offset":
        return torch.randn(rows, width + 1)[:, 1:]
    if form == "rows":
        return torch.randn(2 * rows, width)[1::2]
    return (torch.randn(1, width).expand(rows, width)
            if form == "expanded" else torch.randn(rows, width))


@st.composite
def edges(draw, src: int, dst: int) -> torch.Tensor:
    """At least one edge: any, all into one node, all out of one node, all the same, self loops
    only."""
    pair = st.tuples(st.integers(0, src - 1), st.integers(0, dst - 1))
    kind = draw(st.sampled_from(["any", "any", "hub", "fan", "same", "loops"]))
    found = draw(st.lists(pair, min_size=1, max_size=70 if kind in ("any", "hub") else 20))
    a, b = found[0]
    if kind == "hub":
        found = [(s, b) for s, _ in found]
    elif kind == "fan":
        found = [(a, d) for _, d in found]
    elif kind == "same":
        found = [(a, b)] * len(found)
    elif kind == "loops":
        found = [(min(s, d), min(s, d)) for s, d in found]
    return torch.tensor(found).t().contiguous()


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(data=st.data())
@pytest.mark.long
def test_one_set_of_nodes(route, name, data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**20)))
    nodes, width = draw(st.integers(1, 14)), draw(st.sampled_from([1, 3, 8]))
    heads, channels = draw(SIZES)
    options = {} if name == "TransformerConv" else dict(add_self_loops=draw(st.booleans()))
    x = strided(draw(st.sampled_from(FORMS)), nodes,
                width).requires_grad_(name == "AGNNConv" or draw(st.booleans()))
    layer = build(name, heads, channels, width, **options)
    compare(route, layer, x, draw(edges(nodes, nodes)), require=False, train=False, **ROUGH)


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_EDGES)
@SETTINGS
@given(data=st.data())
def test_two_sets_of_nodes_and_edge_features(route, name, data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**20)))
    src, dst = draw(st.integers(1, 14)), draw(st.integers(1, 14))
    heads, channels = draw(SIZES)
    edge = draw(st.sampled_from([None, 1, 3]))
    options = (dict(edge_dim=edge)
               if name == "TransformerConv" else dict(edge_dim=edge, add_self_loops=False))
    layer = build(name, heads, channels, (3, 4), **options)
    pair = tuple(strided(draw(st.sampled_from(FORMS)), n, w).requires_grad_(draw(st.booleans()))
                 for n, w in ((src, 3), (dst, 4)))
    index = draw(edges(src, dst))
    attr = [] if edge is None else [strided(draw(st.sampled_from(FORMS)), index.shape[1], edge)]
    compare(route, layer, pair, index, *attr, require=False, **ROUGH)


@pytest.mark.parametrize("nodes", [0, 1, 5])
@pytest.mark.parametrize("name", NAMES)
def test_no_edges(route, name, nodes):
    layer, x = build(name, device=route.device).eval(), torch.randn(nodes, 12, requires_grad=True)
    none = torch.empty(2, 0, dtype=torch.long, device=route.device)
    native = run(layer, [place(x, route.device), none], {})
    with route.on(on_fallback="native"):
        got = run(layer, [place(x, route.device), none], {})
    assert gnnaccel.stats()[name]["reasons"] == {"GA303": 1}
    assert all(torch.equal(got[k], native[k]) for k in native if native[k] is not None)
