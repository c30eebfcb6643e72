"""Pairs of a node and a relation: both ways to find them, and that their arrays fit together."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnaccel.dispatch.relational import pairs as module
from gnnaccel.dispatch.relational.pairs import pairs_of
from tests.relational_cases import SETTINGS, graphs, typed

FIELDS = ("node", "relation", "ptr", "of_edge")


def check(found, node, relation, num_nodes: int, num_relations: int, compact: bool) -> None:
    """Against the definition, edge by edge."""
    edges = list(zip(relation.tolist(), node.tolist()))
    expected = sorted(set(edges)) if compact else sorted(edges)
    assert list(zip(found.relation.tolist(),
                    found.node.tolist())) == expected and found.count == len(expected)
    assert found.ptr.tolist() == [sum(r < limit for r, _ in expected)
                                  for limit in range(num_relations + 1)]
    assert [expected[p] for p in found.of_edge.tolist()] == edges
    if not compact:
        assert sorted(found.of_edge.tolist()) == list(
            range(len(edges))), "a pair of its own for each edge"
    assert {getattr(found, name).dtype for name in FIELDS} == {torch.int32}
    assert found.nbytes() == 4 * (2 * found.count + num_relations + 1 + len(edges))
    bounds = found.bounds
    assert [r for r, _, _ in bounds] == sorted(set(relation.tolist()))
    assert all(found.relation[a:b].unique().tolist() == [r] for r, a, b in bounds)
    assert sum(b - a for _, a, b in bounds) == found.count


@SETTINGS
@given(graph=graphs(), dtype=st.sampled_from([torch.int64, torch.int32]))
def test_both_ways(graph, dtype):
    node, relation = graph.src.to(dtype), graph.relation.to(dtype)
    sizes = (graph.num_src, graph.num_relations)
    before = module._MARK_AT_LEAST, module.MARK_UP_TO
    found = []
    try:
        for limits in ((1 << 20, 16), (-1, -1)):  # by marking, by sorting
            module._MARK_AT_LEAST, module.MARK_UP_TO = limits
            found.append(pairs_of(node, relation, *sizes))
    finally:
        module._MARK_AT_LEAST, module.MARK_UP_TO = before
    for pairs in found:
        check(pairs, node, relation, *sizes, True)
    assert all(torch.equal(getattr(found[0], name), getattr(found[1], name)) for name in FIELDS)
    check(pairs_of(node, relation, *sizes, compact=False), node, relation, *sizes, False)


def test_without_compaction_edges_of_a_pair_keep_their_order():
    node, relation = torch.tensor([2, 1, 2, 2, 1]), torch.tensor([0, 0, 0, 1, 0])
    assert pairs_of(node, relation, 3, 2, compact=False).of_edge.tolist() == [2, 0, 3, 4, 1]


@pytest.mark.parametrize("nodes, relations, edges, marks", [
    (1 << 10, 1 << 10, 1, True), (1 << 10, (1 << 10) + 1, 1, False),
    (1 << 10, (1 << 10) + 1, 1 << 17, True),
    (1 << 11, 1 << 11, 1 << 17, False)])
def test_which_way(nodes, relations, edges, marks, monkeypatch):
    """Marking needs an array over all keys: small in itself, or next to the edges."""
    asked, marking = [], module._by_marking
    monkeypatch.setattr(module, "_by_marking", lambda key,
                        size: asked.append(size) or marking(key, size))
    node, relation = torch.randint(0, nodes, (edges,)), torch.randint(0, relations, (edges,))
    found = pairs_of(node, relation, nodes, relations)
    assert asked == ([nodes * relations] if marks else [])
    assert found.count == len(set(zip(node.tolist(), relation.tolist())))


def test_keys_beyond_32_bits():
    node, relation = torch.tensor([70_000, 5, 70_000]), torch.tensor([69_999, 0, 69_999])
    check(pairs_of(node, relation, 70_001, 70_000), node, relation, 70_001, 70_000, True)


@pytest.mark.parametrize("nodes", [0, 4])
def test_no_edges(nodes):
    none = torch.empty(0, dtype=torch.long)
    for compact in (True, False):
        found = pairs_of(none, none, nodes, 3, compact)
        check(found, none, none, nodes, 3, compact)
        assert found.bounds == () and found.ptr.tolist() == [0, 0, 0, 0]


def test_five_thousand_relations():
    graph = typed(edges=300, num_relations=5000)
    check(pairs_of(graph.dst, graph.relation, graph.num_dst, 5000), graph.dst, graph.relation,
          graph.num_dst, 5000, True)
