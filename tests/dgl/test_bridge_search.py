"""Nearest neighbours by DGL's C code, of points on the device."""
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
        assert torch.equal(got[side].cpu().reshape(-1, 3).sort(1)[0], want[side].reshape(-1, 3).sort(1)[0])


def test_what_dgl_has_for_gpus_alone_is_not_on_the_host(place):
    with pytest.raises(dgl.DGLError):
        dgl.functional.knn(3, torch.randn(10, 5), [10], algorithm="bruteforce-sharemem")
