"""Layers on a GPU give the same bits for the same inputs, also with the structure built anew."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.graph import cache
from tests.pyg.graphs import F
from tests.pyg.judge import run
from tests.pyg.test_plain_layers import LAYERS, MORE

pytestmark = pytest.mark.gpu
NODES, EDGES = 3_000, 60_000


def skewed_graph() -> torch.Tensor:
    """Rows of all lengths that the kernel `order` tells apart, by destination and by source.

    Some edges are repeated, some are loops.
    """
    ei = torch.randint(0, NODES, (2, EDGES), device="cuda")
    ei[1, :9_000], ei[0, 9_000:18_000], ei[1, 18_000:18_600] = 3, 5, 9
    ei[:, -500:] = ei[:, :500]
    return ei[:, torch.randperm(EDGES, device="cuda")]


@pytest.mark.parametrize("name", [*LAYERS, *MORE])
def test_runs_repeat_bit_for_bit(gpu, name):
    ei, x = skewed_graph(), torch.randn(NODES, F, device="cuda", requires_grad=True)
    if name.startswith("Cheb"):  # the Laplacian wants a graph in both directions
        ei = torch.cat([ei, ei.flip(0)], 1)
    more = {}
    if name in MORE:
        sizes = {key: size for key, size in MORE[name][2].items() if size is not None}
        more = {key: torch.randn(ei.shape[1], size, device="cuda", requires_grad=True)
                for key, size in sizes.items()}
    layer = ((LAYERS.get(name) or MORE[name])[0]()).to(gpu.device).eval()
    found = []
    for _ in range(4):
        cache.clear()
        with gpu.on(on_fallback="native"):
            found.append(run(layer, [x, ei.clone()], more))
    first = found[0]
    for other in found[1:]:
        different = [k for k, t in first.items() if t is not None and not torch.equal(other[k], t)]
        assert not different
