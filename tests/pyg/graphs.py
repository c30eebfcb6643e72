"""Graphs and inputs for the layers' tests, all on the CPU and from torch's generator."""
from __future__ import annotations

import torch
from torch import Tensor

N, M, E, F = 30, 20, 150, 12
EDGE = 4


def square(nodes: int = N, edges: int = E) -> Tensor:
    """Random edges with a hub, duplicates, self loops, and a node without edges."""
    ei = torch.randint(0, nodes - 1, (2, edges))
    ei[1, :edges // 3] = 3
    ei[0, edges // 3:edges // 2] = 5
    ei[:, 10], ei[:, 11], ei[:, 12] = ei[:, 13], 7, 7
    return ei


def bipartite(src: int = N, dst: int = M, edges: int = E) -> Tensor:
    ei = torch.stack([torch.randint(0, src, (edges,)), torch.randint(0, dst - 1, (edges,))])
    ei[1, :edges // 3] = 3
    return ei


def features(rows: int = N, width: int = F) -> Tensor:
    return torch.randn(rows, width)


def edge_features(edges: int = E, width: int | None = EDGE) -> Tensor:
    """[E, width], or [E] for None."""
    return torch.randn(edges) if width is None else torch.randn(edges, width)
