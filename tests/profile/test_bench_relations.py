"""Graphs with typed edges: sizes, degree and relation laws, the view by type, and files."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gnnaccel.profile.bench import relation_graph

TINY = relation_graph.SHAPES["tiny-typed"]


def scaled(shape, factor: float):
    """``shape`` with nodes, edges and degrees times ``factor``, and all its relations."""
    nodes = tuple(max(1, round(count * factor)) for count in shape.nodes)
    sizes = tuple(max(1, round(count * factor)) for count in shape.sizes)
    edges = sum(sizes) or max(1, round(shape.num_edges * factor))
    largest = max(round(shape.max_degree * factor), 4 * edges // sum(nodes), 1)
    return dataclasses.replace(shape, nodes=nodes, sizes=sizes, num_edges=edges, max_degree=largest)


@pytest.mark.parametrize("name", relation_graph.SHAPES)
def test_relation_sizes_are_exact_and_skewed(name):
    shape = relation_graph.SHAPES[name]
    sizes = relation_graph.relation_sizes(shape)
    assert len(sizes) == shape.num_relations and int(sizes.sum()) == shape.num_edges and int(
        sizes.min()) > 0
    if not shape.sizes:
        assert int(sizes[0]) == pytest.approx(2 * int(sizes[1]), rel=0.01, abs=2)


@pytest.mark.parametrize("name", relation_graph.SHAPES)
def test_recipes_are_complete(name):
    shape = relation_graph.SHAPES[name]
    assert len(shape.ends) in (0, shape.num_relations)
    assert all(0 <= kind < len(shape.nodes) for ends in shape.ends for kind in ends)
    assert shape.max_degree > 0


def test_half_of_the_relations_of_the_fb15k_shape_are_small():
    sizes = relation_graph.relation_sizes(relation_graph.SHAPES["fb15k-size"])
    assert 350 < int(sizes.median()) < 450


@pytest.mark.parametrize("name, factor",
                         [("aifb-size", 1.0), ("fb15k-size", 0.1), ("am-size", 0.01),
                          ("mag-size", 0.002), ("mag-inverse-size", 0.002), ("dblp-size", 0.2),
                          ("tiny-typed", 1.0)])
def test_graph_follows_its_shape(name, factor):
    shape = scaled(relation_graph.SHAPES[name], factor)
    graph = relation_graph.make(shape, "cpu", seed=3)
    assert graph.edge_index.shape == (2,
                                      shape.num_edges) and graph.edge_type.shape == (
                                          shape.num_edges,)
    assert graph.edge_index.dtype == graph.edge_type.dtype == torch.int64
    assert 0 <= int(graph.edge_index.min()) and int(graph.edge_index.max()) < shape.num_nodes
    assert torch.equal(torch.bincount(graph.edge_type), relation_graph.relation_sizes(shape))
    assert bool((graph.edge_type.diff() < 0).any()), "edges must not come grouped by relation"
    degrees = torch.bincount(graph.edge_index[1], minlength=shape.num_nodes)
    assert int(degrees.max()) > 4 * shape.num_edges / shape.num_nodes, "no hubs"


def test_blocks_leave_compaction_what_real_graphs_leave():
    facts = relation_graph.make(relation_graph.SHAPES["fb15k-size"], "cpu").facts()
    assert 0.2 < facts["pairs_src"] < 0.35 and 0.2 < facts["pairs_dst"] < 0.35
    plain = dataclasses.replace(relation_graph.SHAPES["fb15k-size"], block=(1, 1))
    assert relation_graph.make(plain, "cpu").facts()["pairs_src"] > 0.5


def test_blocks_that_do_not_divide_the_edges():
    shape = relation_graph.RelationShape("odd", (50,), 101, 3, 20, block=(3, 4))
    assert relation_graph.make(shape, "cpu").edge_index.shape == (2, 101)


def test_same_seed_same_graph_and_another_seed_another():
    first, again, other = (relation_graph.make(TINY, "cpu", seed) for seed in (5, 5, 6))
    assert torch.equal(first.edge_index,
                       again.edge_index) and torch.equal(first.edge_type, again.edge_type)
    assert not torch.equal(first.edge_index, other.edge_index)


def test_order_by_destination_keeps_edges_and_types():
    loose, grouped = (relation_graph.make(TINY, "cpu", 1, order) for order in ("random", "dst"))
    assert bool((grouped.edge_index[1].diff() >= 0).all())
    codes = [((g.edge_type * 1000 + g.edge_index[0]) * 1000 + g.edge_index[1]).sort().values
             for g in (loose, grouped)]
    assert torch.equal(*codes)


def test_typed_view_has_every_edge_once_between_the_right_types():
    graph = relation_graph.make(TINY, "cpu", 2)
    starts = {"t0": 0, "t1": 80, "t2": 150}
    assert set(graph.typed) == {(f"t{a}", f"r{r}", f"t{b}") for r, (a, b) in enumerate(TINY.ends)}
    rebuilt = []
    for (source, relation, target), edges in graph.typed.items():
        assert edges.is_contiguous()
        assert 0 <= int(edges.min()) and int(edges[0].max()) < graph.node_counts[source]
        assert int(edges[1].max()) < graph.node_counts[target]
        rebuilt += [(int(relation[1:]), int(a) + starts[source], int(b) + starts[target])
                    for a, b in edges.T]
    edges = zip(graph.edge_type.tolist(), *graph.edge_index.tolist())
    assert sorted(rebuilt) == sorted(edges)


def test_typed_view_splits_a_relation_between_several_types():
    shape = relation_graph.RelationShape("mixed", (2, 2), 3, 1, 1)
    graph = relation_graph.RelationGraph(shape, torch.tensor([[0, 3, 1], [2, 0, 3]]),
                                         torch.zeros(3, dtype=torch.int64))
    assert {triple: edges.tolist() for triple, edges in graph.typed.items()} == {
        ("t0", "r0", "t1"): [[0, 1], [0, 1]], ("t1", "r0", "t0"): [[1], [0]]}


def saved(path, edges, **more):
    np.savez(path, edge_index=np.array(edges, np.int32), num_nodes=4, **more)
    return path


def test_file_with_one_direction_gets_its_inverses(tmp_path):
    saved(tmp_path / "mine.npz", [[0, 1, 3], [1, 1, 2]], edge_type=np.array([0, 1, 1], np.int16),
          num_relations=2)
    shape = relation_graph.in_file(tmp_path, "mine")
    assert (shape.name, shape.nodes, shape.num_edges, shape.num_relations,
            shape.max_degree) == ("mine", (4,), 6, 4, 3)
    graph = relation_graph.make(shape, "cpu")
    assert graph.edge_index.tolist() == [[0, 1, 3, 1, 1, 2], [1, 1, 2, 0, 1, 3]]
    assert graph.edge_type.tolist() == [0, 1, 1, 2, 3, 3]


def test_file_with_both_directions_stays_and_its_nodes_are_grouped_by_type(tmp_path):
    saved(tmp_path / "typed.npz", [[0, 1, 2, 3], [1, 0, 3, 2]], edge_type=np.array([0, 1, 0, 1]),
          num_relations=2, node_type=np.array([1, 0, 1, 0], np.int8))
    graph = relation_graph.make(relation_graph.in_file(tmp_path, "typed"), "cpu")
    assert graph.shape.nodes == (2, 2) and graph.num_relations == 2
    assert graph.edge_index.tolist() == [[2, 0, 3, 1], [0, 2, 1, 3]]
    assert set(graph.typed) == {("t1", "r0", "t0"), ("t0", "r1", "t1")}


def test_files_that_will_not_do_are_named(tmp_path):
    saved(tmp_path / "plain.npz", [[0], [1]])
    with pytest.raises(ValueError, match="plain.npz.*edge_type"):
        relation_graph.in_file(tmp_path, "plain")
    with pytest.raises(ValueError, match="nosuch.npz"):
        relation_graph.in_file(tmp_path, "nosuch")
