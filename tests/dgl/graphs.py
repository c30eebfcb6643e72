"""Graphs and features for the tests of DGL's layers, all on the CPU and from torch's generator."""
from __future__ import annotations

import dgl
import torch
from torch import Tensor

N, M, E, F = 30, 20, 150, 12


def _ends(src: int, dst: int, edges: int) -> tuple[Tensor, Tensor]:
    """Random edges with a hub, duplicates, and self loops where both ends are the same nodes; every
    destination has one."""
    u, v = torch.randint(0, src, (edges,)), torch.randint(0, dst, (edges,))
    v[:edges // 3] = 3
    u[edges // 3:edges // 2] = 5
    u[10], v[10] = u[13], v[13]
    u[11] = v[11] = u[12] = v[12] = 7
    v[edges - dst:] = torch.randperm(dst)
    return u, v


def square(nodes: int = N, edges: int = E, **options) -> dgl.DGLGraph:
    """A homogeneous graph. ``options`` as of `dgl.graph`."""
    return dgl.graph(_ends(nodes, nodes, edges), num_nodes=nodes, **options)


def bipartite(src: int = N, dst: int = M, edges: int = E) -> dgl.DGLGraph:
    """A heterograph of one relation between two types of nodes."""
    return dgl.heterograph({("user", "likes", "item"): _ends(src, dst, edges)},
                           num_nodes_dict={"user": src, "item": dst})


def block(nodes: int = N, edges: int = E) -> dgl.DGLGraph:
    """What a neighbour sampler gives: the edges into 10 nodes, which come first among the
    sources."""
    seeds = torch.randperm(nodes)[:10]
    return dgl.to_block(dgl.in_subgraph(square(nodes, edges), seeds), seeds)


def features(rows: int = N, width: int = F) -> Tensor:
    return torch.randn(rows, width)
