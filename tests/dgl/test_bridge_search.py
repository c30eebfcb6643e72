"""Nearest neighbours of points on the device, and filters of ids there."""
from __future__ import annotations

import dgl
import pytest
import torch

from tests.dgl.bridged import place  # noqa: F401  (a fixture)


@pytest.mark.parametrize("algorithm", ["bruteforce", "bruteforce-sharemem", "kd-tree"])
@pytest.mark.parametrize("dist", ["euclidean", "cosine"])
def test_as_by_brute_force_on_the_host(algorithm, dist, place):
    points = torch.randn(40, 5)
    got = dgl.functional.knn(3, points.to(place), [15, 25], algorithm=algorithm, dist=dist)
    want = dgl.functional.knn(3, points, [15, 25], algorithm="bruteforce", dist=dist)
    assert got.device == place
    for side in (0, 1):
        assert torch.equal(got[side].cpu().reshape(-1, 3).sort(1)[0],
                           want[side].reshape(-1, 3).sort(1)[0])


def test_what_dgl_has_for_gpus_alone_is_not_on_the_host(place):
    with pytest.raises(dgl.DGLError):
        dgl.functional.knn(3, torch.randn(10, 5), [10], algorithm="bruteforce-sharemem")


@pytest.mark.parametrize("algorithm", ["bruteforce-blas", "bruteforce", "bruteforce-sharemem"])
def test_the_points_themselves_left_out(algorithm, place):
    """Of points that coincide one neighbour too many may remain, which DGL takes away by
    sampling."""
    points = torch.randn(12, 3).repeat_interleave(3, 0)
    g = dgl.knn_graph(points.to(place), 2, algorithm=algorithm, exclude_self=True)
    src, dst = g.edges()
    assert g.device == place and torch.equal(g.in_degrees().cpu(),
                                             torch.full((36,), 2)) and bool((src != dst).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_filters(dtype, place):
    ids = torch.tensor([3, 2, 9], dtype=dtype, device=place)
    found = dgl.utils.Filter(ids)
    ids.zero_()
    asked = torch.tensor([0, 2, 8, 9, 2], dtype=dtype, device=place)
    included, excluded = found.find_included_indices(asked), found.find_excluded_indices(asked)
    assert (included.tolist(), excluded.tolist()) == ([1, 3, 4], [0, 2])
    assert included.device == excluded.device == place and included.dtype == excluded.dtype == dtype
