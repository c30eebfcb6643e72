"""Lists of edges that are given as two tensors, or with a row for each edge, as one tensor [2, E]:
structures are kept by that."""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.graph.tensor_ref import TensorRef
from gnnaccel.dispatch.policy.names import IdentityMap

_MOST = 64
_stacks: IdentityMap[tuple[TensorRef, TensorRef, Tensor]] = IdentityMap(_MOST)  # by the first end
_turned: IdentityMap[tuple[TensorRef, Tensor]] = IdentityMap(_MOST)  # by lists [E, 2]


def stacked(first: Tensor, second: Tensor) -> Tensor:
    """[2, E]: both ends; the tensor whose rows they are, if there is one, else a copy that is kept
    for as long as these are as they were."""
    base = first._base
    if (base is not None and base is second._base and base.dim() == 2 and base.shape[0] == 2
        and type(base) is Tensor and base.dtype == first.dtype
        and _is_row(base, 0, first) and _is_row(base, 1, second)):
        return base
    if first.is_inference() or second.is_inference() or capture.capturing():
        return torch.stack([first, second])
    entry = _stacks.get(first)
    if entry is None or not (entry[0].unmoved(first) and entry[1].unmoved(second)):
        entry = TensorRef(first), TensorRef(second), torch.stack([first, second])
        _stacks.set(first, entry)
    return entry[2]


def _is_row(base: Tensor, at: int, end: Tensor) -> bool:
    return (end.data_ptr() == base.data_ptr() + at * base.stride(0) * base.element_size()
            and end.shape[0] == base.shape[1] and end.stride() == base.stride()[1:])


def turned(edges: Tensor) -> Tensor:
    """[2, E], of a list [E, 2]: the tensor that was turned into it, if it is that, else a copy that
    is kept for as long as this is as it was."""
    base = edges._base
    if (base is not None and base.dim() == 2 and base.shape == edges.shape[::-1]
        and type(base) is Tensor and base.dtype == edges.dtype
        and base.data_ptr() == edges.data_ptr() and base.stride() == edges.stride()[::-1]):
        return base
    if edges.is_inference() or capture.capturing():
        return edges.t().contiguous()
    entry = _turned.get(edges)
    if entry is None or not entry[0].unmoved(edges):
        entry = TensorRef(edges), edges.t().contiguous()
        _turned.set(edges, entry)
    return entry[1]
