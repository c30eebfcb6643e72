"""Several sparse matrices as one."""
from __future__ import annotations

from collections.abc import Sequence

import torch


def cat(tensors: Sequence, dim):
    """The matrices one below the other (``dim=0``), side by side (1), as blocks on the diagonal
    (``(0, 1)``), or their values joined along a further dimension.

    Sizes in the other dimension may differ; the largest counts. The result has values if all have.
    Raises ValueError for no matrices, IndexError for a dimension that is not there.
    """
    if not tensors:
        raise ValueError("there is no sparse tensor to join")
    first = tensors[0]
    if isinstance(dim, (tuple, list)):
        if sorted(dim) != [0, 1]:
            raise IndexError(f"sparse tensors cannot be joined along {dim}; use (0, 1)")
        return _joined(tensors, rows=True, cols=True)
    if not -first.dim() <= dim < first.dim():
        raise IndexError(f"dimension {dim} of sparse tensors with {first.dim()} dimensions")
    dim = dim + first.dim() if dim < 0 else dim
    if dim > 1:
        return first.set_value(torch.cat([each.storage.value() for each in tensors], dim - 1),
                               layout="coo")
    return _joined(tensors, rows=dim == 0, cols=dim == 1)


def _joined(tensors: Sequence, rows: bool, cols: bool):
    """One matrix of all. ``rows``: each begins behind the rows of those before; ``cols``
    likewise."""
    size, parts = [0, 0], []
    for tensor in tensors:
        row, col, value = tensor.coo()
        parts.append((row + size[0] if rows else row, col + size[1] if cols else col, value))
        for axis, stacked in enumerate((rows, cols)):
            length = tensor.sparse_size(axis)
            size[axis] = size[axis] + length if stacked else max(size[axis], length)
    all_rows, all_cols, values = zip(*parts)
    value = torch.cat(values) if all(each is not None for each in values) else None
    return type(tensors[0])(row=torch.cat(all_rows), col=torch.cat(all_cols), value=value,
                            sparse_sizes=(size[0], size[1]), is_sorted=rows, trust_data=True)
