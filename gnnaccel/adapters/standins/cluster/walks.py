"""Random walks over a graph in CSR form, on any device, by torch's generator."""
from __future__ import annotations

import torch
from torch import Tensor


def random_walk(row: Tensor, col: Tensor, start: Tensor, walk_length: int, p: float = 1,
                q: float = 1, coalesced: bool = True, num_nodes: int | None = None,
                return_edge_indices: bool = False):
    """[starts, walk_length + 1]: the nodes of walks from ``start``, as in node2vec
    (arXiv:1607.00653); a walk stays where no edge goes on.

    ``row``, ``col``: int64, sorted by row unless ``coalesced``, which sorts them. ``p``: the
    likelihood of going back is 1 / p, that of going away 1 / q. ``return_edge_indices``: also
    [starts, walk_length], the edge of each step after sorting, -1 where it stayed.
    """
    if num_nodes is None:
        num_nodes = max(int(ids.max()) + 1 if ids.numel() else 0 for ids in (row, col, start))
    if coalesced:
        order = (row * num_nodes + col).argsort(stable=True)
        row, col = row[order], col[order]
    rowptr = row.new_zeros(num_nodes + 1)
    rowptr[1:] = torch.bincount(row, minlength=num_nodes).cumsum(0)
    if p == 1 and q == 1:
        nodes, edges = uniform_walk(rowptr, col, start, walk_length)
    else:
        nodes, edges = _biased_walk(rowptr, col, start, walk_length, p, q)
    return (nodes, edges) if return_edge_indices else nodes


def uniform_walk(rowptr: Tensor, col: Tensor, start: Tensor,
                 walk_length: int) -> tuple[Tensor, Tensor]:
    """(nodes [starts, walk_length + 1], edges [starts, walk_length]) of walks that take each edge
    of a node alike."""
    nodes, edges = [start], []
    for _ in range(walk_length):
        edge = _step(rowptr, nodes[-1])
        nodes.append(_arrived(col, edge, nodes[-1]))
        edges.append(edge)
    return _stacked(nodes, edges)


def _biased_walk(rowptr: Tensor, col: Tensor, start: Tensor, walk_length: int, p: float,
                 q: float) -> tuple[Tensor, Tensor]:
    """`uniform_walk` with node2vec's ``p`` and ``q``. Steps are drawn alike and taken with the
    probability of their kind, until each walk has taken one."""
    edge = _step(rowptr, start)
    nodes, edges = [start, _arrived(col, edge, start)], [edge]
    size = rowptr.numel() - 1
    pairs = torch.repeat_interleave(rowptr.diff(), output_size=col.numel()) * size + col
    pairs = pairs.sort()[0]
    greatest = max(1 / p, 1.0, 1 / q)
    for _ in range(walk_length - 1):
        before, here = nodes[-2], nodes[-1]
        edge = _step(rowptr, here)
        waiting = (rowptr[here + 1] - rowptr[here] > 1).nonzero().flatten()
        while waiting.numel():
            drawn = _step(rowptr, here[waiting])
            there, back = col[drawn], before[waiting]
            kind = torch.where(_contains(pairs, there * size + back), 1.0, 1 / q)
            kind = torch.where(there == back, 1 / p, kind) / greatest
            accepted = torch.rand(kind.shape, dtype=torch.float64, device=kind.device) < kind
            edge[waiting[accepted]] = drawn[accepted]
            waiting = waiting[~accepted]
        nodes.append(_arrived(col, edge, here))
        edges.append(edge)
    return _stacked(nodes[:walk_length + 1], edges[:walk_length])


def _step(rowptr: Tensor, node: Tensor) -> Tensor:
    """A random edge of each node, -1 where it has none."""
    begin, count = rowptr[node], rowptr[node + 1] - rowptr[node]
    chance = torch.rand(node.shape, dtype=torch.float64, device=node.device)
    return torch.where(count > 0, begin + (chance * count).long(), -1)


def _arrived(col: Tensor, edge: Tensor, node: Tensor) -> Tensor:
    if not col.numel():
        return node
    return torch.where(edge >= 0, col[edge.clamp(min=0)], node)


def _contains(ordered: Tensor, wanted: Tensor) -> Tensor:
    place = torch.searchsorted(ordered, wanted).clamp(max=ordered.numel() - 1)
    return ordered[place] == wanted


def _stacked(nodes: list[Tensor], edges: list[Tensor]) -> tuple[Tensor, Tensor]:
    none = nodes[0].new_empty(nodes[0].numel(), 0)
    return torch.stack(nodes, 1), torch.stack(edges, 1) if edges else none
