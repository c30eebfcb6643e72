"""The benchmark's graphs: sizes, degree law, determinism."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from gnnaccel.profile.bench import shapes


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_degree_law_has_the_size_and_the_maximum(name):
    shape = shapes.SHAPES[name]
    degrees = shapes.degree_law(shape)
    assert len(degrees) == shape.num_nodes
    assert int(degrees.sum()) == shape.num_edges
    assert int(degrees.min()) >= 0
    expected = shape.hub or shape.max_degree or -(-shape.num_edges // shape.num_nodes)
    assert int(degrees.max()) == pytest.approx(expected, rel=0.01, abs=1)


def test_one_hub_towers_over_a_power_law():
    degrees = shapes.degree_law(shapes.SHAPES["reddit"]).sort(descending=True).values
    assert int(degrees[0]) == 330_000
    assert int(degrees[1]) == pytest.approx(21_000, rel=0.01)


@pytest.mark.parametrize("name, factor",
                         [("cora", 1.0), ("arxiv", 0.05), ("proteins", 0.002), ("reddit", 0.002)])
def test_graph_follows_its_shape(name, factor):
    shape = shapes.scaled(shapes.SHAPES[name], factor)
    graph = shapes.make(shape, "cpu", seed=3)
    assert graph.edge_index.dtype == torch.int64 and graph.edge_index.shape == (2, shape.num_edges)
    assert 0 <= int(graph.edge_index.min()) and int(graph.edge_index.max()) < shape.num_nodes
    expected = shape.hub or shape.max_degree or -(-shape.num_edges // shape.num_nodes)
    assert graph.facts()["max_in_degree"] == pytest.approx(expected, rel=0.02, abs=1)
    hottest = int(torch.bincount(graph.edge_index[0]).max())
    assert hottest == graph.facts()["max_in_degree"]


def test_same_seed_same_graph_and_another_seed_another():
    first, again, other = (shapes.make(shapes.SHAPES["tiny"], "cpu", seed).edge_index
                           for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_order_by_destination_keeps_the_edges():
    shape = shapes.SHAPES["tiny"]
    loose, grouped = (shapes.make(shape, "cpu", 1, order).edge_index for order in ("random", "dst"))
    assert bool((grouped[1].diff() >= 0).all())
    assert bool((loose[1].diff() < 0).any())
    codes = [(edges[0] * shape.num_nodes + edges[1]).sort().values for edges in (loose, grouped)]
    assert torch.equal(*codes)


def test_uniform_degrees_differ_by_at_most_one():
    shape = shapes.uniform(shapes.SHAPES["cora"])
    degrees = shapes.degree_law(shape)
    assert int(degrees.sum()) == shape.num_edges
    assert int(degrees.max() - degrees.min()) <= 1


def test_npz_is_a_shape(tmp_path):
    path = tmp_path / "mine.npz"
    edges = np.array([[0, 1, 2, 3], [1, 1, 1, 4]], dtype=np.int32)
    np.savez(path, edge_index=edges, num_nodes=6)
    shape = shapes.resolve(str(path))
    assert (shape.name, shape.num_nodes, shape.num_edges, shape.max_degree) == ("mine", 6, 4, 3)
    graph = shapes.make(shape, "cpu")
    assert graph.edge_index.tolist() == edges.tolist()


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="cora"):
        shapes.resolve("corra")
