"""The formulas of docs/scaling.md hold for partitions that are counted."""
from __future__ import annotations

import pytest

pytest.importorskip("torch_geometric")

import gnnaccel.distributed as distributed
from tests.distributed import scaling

NODES, DEGREE = 40_000, 12


@pytest.mark.parametrize("parts", [2, 8, 32])
@pytest.mark.parametrize("kind", scaling.KINDS)
def test_halos_are_as_large_as_the_formula_says(kind, parts):
    edges = scaling.graph(kind, NODES, DEGREE)
    halo, own = scaling.halos(edges, NODES, parts)
    expected = scaling.formula(kind, NODES, DEGREE, parts)
    # a range that ends within a cluster needs rows of its other half, at either end
    cut = 2 * scaling.CLUSTER if kind == "clustered" else 0
    assert 0.97 * expected <= halo.mean() <= 1.03 * expected + cut
    assert own.max() <= 1.05 * own.mean()


def test_halos_are_those_of_partitions_that_are_written(tmp_path):
    edges = scaling.graph("clustered", 3_000, 8)
    folder = distributed.partition_arrays(edges, 3_000, 4, out=tmp_path / "out")
    halo, own = scaling.halos(edges, 3_000, 4)
    for rank in range(4):
        part = distributed.load_part(folder, rank)
        rows = part.rows["node"]
        assert len(rows.halo) == halo[rank]
        assert part.data.edge_index.shape[1] == own[rank]
