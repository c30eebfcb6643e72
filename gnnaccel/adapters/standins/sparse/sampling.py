"""Samples, walks and orders of the rows of a sparse matrix, by torch's generator of the matrix'
device."""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.adapters.standins.cluster.walks import uniform_walk
from gnnaccel.adapters.standins.sparse.selecting import permute, ranges
from gnnaccel.adapters.standins.sparse.storage import row_major


def random_walk(src, start: Tensor, walk_length: int) -> Tensor:
    """[starts, walk_length + 1]: nodes of walks from ``start``, each step to a random column of the
    node's row. A walk stays where there is none."""
    rowptr, col, _ = src.csr()
    return uniform_walk(rowptr, col, start, walk_length)[0]


def sample(src, num_neighbors: int, subset: Tensor | None = None) -> Tensor:
    """[rows, num_neighbors]: random columns of each row, or of the rows ``subset``, with
    replacement. Raises ValueError where such a row has no entry."""
    rowptr, col, _ = src.csr()
    begin, count = rowptr[:-1], src.storage.rowcount()
    if subset is not None:
        begin, count = begin[subset], count[subset]
    if bool((count == 0).any()):
        raise ValueError("a row without entries cannot be sampled from; leave such rows out of "
                         "subset")
    chance = torch.rand(count.numel(), num_neighbors, dtype=torch.float64, device=col.device)
    return col[begin[:, None] + (chance * count[:, None]).long()]


def sample_adj(src, subset: Tensor, num_neighbors: int, replace: bool = False):
    """(matrix [len(subset), nodes], nodes): for each row of ``subset`` up to ``num_neighbors``
    random entries, all if negative.

    Columns are counted anew: first the nodes of ``subset``, then the others in the order in which
    they come. ``replace``: entries may be drawn again.
    """
    rowptr, col, value = src.csr()
    begin, count = rowptr[subset], src.storage.rowcount()[subset]
    entry = _drawn(begin, count, num_neighbors, replace)
    if num_neighbors >= 0:
        counts = count.clamp(max=num_neighbors) if not replace else (count > 0) * num_neighbors
    else:
        counts = count
    row = torch.repeat_interleave(counts, output_size=entry.numel())
    nodes, place = _numbered(subset, col[entry])
    order = row_major(row, place, (subset.numel(), nodes.numel()))
    return type(src)(row=row[order], col=place[order],
                     value=None if value is None else value[entry[order]],
                     sparse_sizes=(subset.numel(), nodes.numel()), is_sorted=True,
                     trust_data=True), nodes


def _drawn(begin: Tensor, count: Tensor, wanted: int, replace: bool) -> Tensor:
    """Entries of each row, one row after the other."""
    if replace and wanted >= 0:
        some = count > 0
        begin, count = begin[some, None], count[some, None]
        chance = torch.rand(count.numel(), wanted, dtype=torch.float64, device=count.device)
        return (begin + (chance * count).long()).flatten()
    entry = ranges(begin, count)
    if wanted < 0:
        return entry
    row = torch.repeat_interleave(count, output_size=entry.numel())
    order = torch.rand(entry.numel(), dtype=torch.float64, device=entry.device).argsort()
    order = order[row[order].argsort(stable=True)]  # a random order within each row
    rank = ranges(torch.zeros_like(count), count)
    return entry[order[rank < wanted]]


def _numbered(first: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(``first`` and the other ``ids`` in the order in which they come, the place of each id)."""
    both = torch.cat([first, ids])
    distinct, inverse = both.unique(return_inverse=True)
    place = torch.arange(both.numel(), device=both.device)
    earliest = torch.full_like(distinct, both.numel()).scatter_reduce(0, inverse, place, "amin")
    order = earliest.argsort()
    return distinct[order], order.argsort()[inverse[first.numel():]]


def saint_subgraph(src, node_idx: Tensor):
    """(the matrix between the nodes ``node_idx``, its entries' numbers in ``src``). Nodes are
    counted anew, in the order of ``node_idx``."""
    rowptr, col, value = src.csr()
    place = torch.full((max(src.sparse_sizes()),), -1, device=col.device)
    place[node_idx] = torch.arange(node_idx.numel(), device=col.device)
    count = src.storage.rowcount()[node_idx]
    entry = ranges(rowptr[node_idx], count)
    row, col = torch.repeat_interleave(count, output_size=entry.numel()), place[col[entry]]
    within = col >= 0
    row, col, entry = row[within], col[within], entry[within]
    size = (node_idx.numel(), node_idx.numel())
    order = row_major(row, col, size)
    entry = entry[order]
    return type(src)(row=row[order], col=col[order],
                     value=None if value is None else value[entry], sparse_sizes=size,
                     is_sorted=True, trust_data=True), entry


def reverse_cuthill_mckee(src, is_symmetric: bool | None = None):
    """(the matrix in an order of small bandwidth, that order), by SciPy; made symmetric first where
    it is not. Raises ImportError without SciPy."""
    from scipy.sparse import csgraph

    if not (src.is_symmetric() if is_symmetric is None else is_symmetric):
        src = src.to_symmetric()
    order = csgraph.reverse_cuthill_mckee(src.to_scipy(layout="csr"), symmetric_mode=True)
    perm = torch.as_tensor(order.copy(), device="cpu").long().to(src.device())
    return permute(src, perm), perm
