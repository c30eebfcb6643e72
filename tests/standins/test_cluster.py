"""torch_cluster's functions against naive loops, by SciPy's tree and by blocks."""
from __future__ import annotations

import math

import pytest
import torch

from gnnaccel.adapters.standins.cluster import grouping, neighbours, search, walks
from tests.standins import naive

BATCH_X = torch.tensor([0] * 9 + [1] * 2 + [3] * 14)
BATCH_Y = torch.tensor([0] * 4 + [2] * 3 + [3] * 5)


@pytest.fixture(params=["tree", "blocks", "small blocks"])
def way(request, monkeypatch):
    if request.param == "tree":
        pytest.importorskip("scipy")
        monkeypatch.setattr(search, "_by_blocks", None)
        monkeypatch.setattr(search, "_TREE_DIMENSIONS", 99)
    else:
        monkeypatch.setattr(search, "_has_scipy", lambda: False)
    if request.param == "small blocks":
        monkeypatch.setattr(search, "_DISTANCES", 40)
        monkeypatch.setattr(search, "_QUERIES", 3)


def points(dims=3, batched=True, dtype=torch.float64):
    torch.manual_seed(0)
    x, y = torch.rand(25, dims).to(dtype), torch.rand(12, dims).to(dtype)
    return (x, y, BATCH_X, BATCH_Y) if batched else (x, y, None, None)


def lists(pairs, size):
    found = [[] for _ in range(size)]
    for query, point in pairs.t().tolist():
        found[query].append(point)
    return found


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("k", [1, 4, 40])
@pytest.mark.parametrize("dims", [1, 3, 40])
def test_knn(way, k, dims, batched):
    x, y, batch_x, batch_y = points(dims, batched)
    one_x, one_y = (BATCH_X, BATCH_Y) if batched else (torch.zeros(25), torch.zeros(12))
    expected = [[j for _, j in row[:k]] for row in naive.neighbours(x, y, one_x, one_y)]
    assert lists(neighbours.knn(x, y, k, batch_x, batch_y), len(y)) == expected
    assert lists(neighbours.knn(x.float(), y.float(), k, batch_x, batch_y), len(y)) == expected


def test_by_angle(way):
    x, y, *batches = points()
    wide = x * torch.rand(25, 1) * 10
    unit = [p / p.norm(dim=-1, keepdim=True) for p in (x, y)]
    expected = [[j for _, j in row[:3]] for row in naive.neighbours(*unit, *batches)]
    assert lists(neighbours.knn(wide, y, 3, *batches, cosine=True), len(y)) == expected


@pytest.mark.parametrize("most", [2, 32])
@pytest.mark.parametrize("batched", [True, False])
def test_radius(way, most, batched):
    x, y, batch_x, batch_y = points(batched=batched)
    one_x, one_y = (BATCH_X, BATCH_Y) if batched else (torch.zeros(25), torch.zeros(12))
    expected = [[j for d, j in row if d < 0.5][:most]
                for row in naive.neighbours(x, y, one_x, one_y)]
    assert lists(neighbours.radius(x, y, 0.5, batch_x, batch_y, most), len(y)) == expected


def test_a_point_at_the_radius_is_outside(way):
    x = torch.tensor([[0.0], [1.0], [3.0]])
    assert neighbours.radius_graph(x, 2.0).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_graphs(way, loop, flow):
    x, _, batch, _ = points()
    near = naive.neighbours(x, x, batch, batch)
    near = [[(d, j) for d, j in row if loop or j != i] for i, row in enumerate(near)]
    centre = 1 if flow == "source_to_target" else 0
    for got, expected in (
            (neighbours.knn_graph(x, 3, batch, loop, flow), [[j for _, j in r[:3]] for r in near]),
            (neighbours.radius_graph(x, 0.6, batch, loop, 4, flow),
             [[j for d, j in r if d < 0.6][:4] for r in near])):
        assert lists(torch.stack([got[centre], got[1 - centre]]), len(x)) == expected


def test_no_more_than_k_where_points_are_equal(way):
    x = torch.zeros(6, 2)
    for edge_index in (neighbours.knn_graph(x, 3), neighbours.radius_graph(
            x, 1.0, max_num_neighbors=3)):
        assert torch.bincount(edge_index[1]).tolist() == [3] * 6
        assert bool((edge_index[0] != edge_index[1]).all())


def test_nearest(way):
    x, y = torch.rand(20, 2), torch.rand(6, 2)
    batch_x, batch_y = torch.arange(20) // 10, torch.arange(6) // 3
    expected = [row[0][1] for row in naive.neighbours(y, x, batch_y, batch_x)]
    assert neighbours.nearest(x, y, batch_x, batch_y).tolist() == expected
    with pytest.raises(ValueError, match="has no point in batch_y"):
        neighbours.nearest(x, y, batch_x, torch.zeros(6, dtype=torch.int64))


def test_empty_and_odd_input(way):
    x = torch.rand(5, 2)
    assert neighbours.knn(x[:0], x, 2).shape == (2, 0)
    assert neighbours.radius(x, x[:0], 1.0).shape == (2, 0)
    assert neighbours.knn(torch.tensor([0, 5, 9]), torch.tensor([6]), 1).tolist() == [[0], [1]]
    for call, text in (
            (lambda: neighbours.knn(x, x[:, :1], 1), "points of 2 and of 1 dimensions"),
            (lambda: neighbours.knn(x, x, 1, torch.tensor([1, 0, 0, 0, 0])), "batch_x is not sorted"),
            (lambda: neighbours.knn(x, x, 1, torch.tensor([1, 0])), "batch_x is \\[2\\] for 5"),
            (lambda: neighbours.knn_graph(x, 1, flow="up"), "flow='up' is not known"),
            (lambda: neighbours.knn(x[None], x, 1), "must be \\[points, dimensions\\]")):
        with pytest.raises(ValueError, match=text):
            call()


def test_tiny_distances_are_not_rounded_away(way):
    x = torch.rand(100, 20) + 100
    assert torch.equal(neighbours.knn(x, x, 1)[1], torch.arange(100))


# --- choosing and grouping ------------------------------------------------------------------------

def farthest(x, count):
    chosen = [0]
    while len(chosen) < count:
        distances = [min(float(((p - x[c]) ** 2).sum()) for c in chosen) for p in x]
        chosen.append(distances.index(max(distances)))
    return chosen


@pytest.mark.parametrize("ratio", [None, 0.25, torch.tensor(0.5)])
def test_farthest_points(ratio):
    torch.manual_seed(0)
    x, sizes = torch.rand(23, 3, dtype=torch.float64), [9, 0, 1, 13]
    batch = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    expected, begin = [], 0
    for size in sizes:
        count = math.ceil(size * float(0.5 if ratio is None else ratio))
        expected += [begin + i for i in farthest(x[begin:begin + size], count)] if size else []
        begin += size
    got = grouping.fps(x, batch, ratio, random_start=False)
    assert got.tolist() == expected
    assert grouping.fps(x, ratio=ratio, random_start=False, ptr=[0, 9, 9, 10, 23]).tolist() == expected
    starts = {int(grouping.fps(x, ratio=0.1)[0]) for _ in range(40)}
    assert len(starts) > 5
    assert grouping.fps(x[:0]).tolist() == []


def test_grid():
    pos = torch.tensor([[0.0, 0], [11, 9], [2, 8], [2, 2], [8, 3]])
    assert grouping.grid_cluster(pos, torch.tensor([5.0, 5])).tolist() == [0, 5, 3, 0, 1]
    assert grouping.grid_cluster(pos, torch.tensor([5.0, 5]), end=torch.tensor([19.0, 9.0])
                                 ).tolist() == [0, 6, 4, 0, 1]
    with pytest.raises(ValueError, match="size has 1 entries for points of 2"):
        grouping.grid_cluster(pos, torch.tensor([5.0]))


@pytest.mark.parametrize("weighted", [True, False])
def test_matching(weighted):
    torch.manual_seed(0)
    row, col = torch.randint(0, 30, (2, 60))
    row, col = torch.cat([row, col]), torch.cat([col, row])
    weight = torch.rand(60).repeat(2) if weighted else None
    cluster = grouping.graclus_cluster(row, col, weight, 31)
    edges = set(zip(row.tolist(), col.tolist()))
    for number in cluster.unique().tolist():
        members = (cluster == number).nonzero().flatten().tolist()
        assert members[0] == number and len(members) <= 2
        assert len(members) == 1 or tuple(members) in edges
    alone = [n for n in range(31) if int((cluster == cluster[n]).sum()) == 1]
    assert 30 in alone and not any((a, b) in edges for a in alone for b in alone if a != b)


def test_matching_takes_the_heaviest():
    row, col = torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 2, 1])
    seen = {tuple(grouping.graclus_cluster(row, col, torch.tensor([1.0, 1, 9, 9])).tolist())
            for _ in range(30)}
    assert seen == {(0, 1, 1), (0, 0, 2)}  # the latter where node 0 comes first


# --- walks ----------------------------------------------------------------------------------------

def test_walks_follow_edges_and_stay_at_ends():
    row, col = torch.tensor([2, 0, 1, 4]), torch.tensor([3, 1, 2, 0])  # 4 0 1 2 3
    for p, q in ((1, 1), (0.5, 2)):
        nodes, edges = walks.random_walk(row, col, torch.tensor([4, 2, 3]), 5, p, q,
                                         return_edge_indices=True)
        assert nodes.tolist() == [[4, 0, 1, 2, 3, 3], [2, 3, 3, 3, 3, 3], [3] * 6]
        assert edges.tolist() == [[3, 0, 1, 2, -1], [2, -1, -1, -1, -1], [-1] * 5]
    assert walks.random_walk(row, col, torch.tensor([1]), 0).tolist() == [[1]]
    assert walks.random_walk(row, col, torch.tensor([1]), 1, 2, 1).tolist() == [[1, 2]]


@pytest.mark.parametrize("p, q", [(1, 1), (4, 1), (0.25, 1), (1, 4), (0.5, 0.25)])
def test_walks_are_biased_as_node2vec_says(p, q):
    """From 0 over 1: back to 0 with 1 / p, to 2, which is next to 0, with 1, to 3 with 1 / q."""
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1], [1, 0], [1, 2], [2, 1], [1, 3], [3, 1], [0, 2], [2, 0]]).t()
    walk = walks.random_walk(*edges, torch.zeros(40000, dtype=torch.int64), 2, p, q)
    second = walk[walk[:, 1] == 1, 2]
    seen = torch.bincount(second, minlength=4)[[0, 2, 3]] / len(second)
    likely = torch.tensor([1 / p, 1.0, 1 / q])
    torch.testing.assert_close(seen, likely / likely.sum(), atol=0.015, rtol=0)
