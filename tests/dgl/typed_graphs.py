"""Graphs with edge types for the tests of DGL's relational layers, and what these tests share."""
from __future__ import annotations


import dgl
import torch
from torch import Tensor

from tests.dgl.graphs import E, N

R = 6
ORDERINGS = {"as stated": (), "chosen": ("compaction", "reordering"),
             "uncompacted": ("reordering",), "unordered": ("compaction",)}


def types(edges: int = E, relations: int = R) -> Tensor:
    """Relation 1 is empty, and not all are as frequent."""
    found = torch.randint(0, relations, (edges,))
    found[found == 1] = 0
    return found


def ends(src: int = N, dst: int = N, edges: int = E) -> tuple[Tensor, Tensor]:
    """Random edges with a hub, duplicates and self loops; the last node at each end has none."""
    u, v = torch.randint(0, src - 1, (edges,)), torch.randint(0, dst - 1, (edges,))
    v[:edges // 3] = 3
    u[10], v[10] = u[13], v[13]
    u[11] = v[11] = u[12] = v[12] = 7
    return u, v


def homogeneous(kind: str = "coo") -> dgl.DGLGraph:
    """A graph of N nodes, made in one of DGL's ways. Edge ids are in the order of the COO, of the
    CSC for "csc", and in any order for "csc ids" and "csr ids"."""
    u, v = ends()
    if kind == "coo":
        return dgl.graph((u, v), num_nodes=N)
    by = u if kind.startswith("csr") else v
    order = torch.argsort(by, stable=True)
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(by, minlength=N).cumsum(0)])
    ids = torch.randperm(E) if kind.endswith("ids") else torch.empty(0, dtype=torch.long)
    return dgl.graph((kind[:3], (ptr, (v if by is u else u)[order], ids)), num_nodes=N)
