"""DGL's sparse embeddings next to a GPU that DGL cannot reach, in one process.

An embedding on the GPU asks which of its rows are this process's, in C code for GPUs: of a single process all are. `SparseAdam` of
an embedding on the host pins its state in its first step if gradients come from the GPU. Here they go to the host first. Where
nothing is pinned, DGL's own way reads what it copies to the host without waiting for it.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gnnaccel.adapters.dgl.bridge.limits import refuse
from gnnaccel.adapters.dgl.bridge.tags import host, is_bridged
from gnnaccel.adapters.patching import PatchSet


def install(patches: PatchSet) -> None:
    """Replace what asks for a CUDA build of DGL where there is nothing to do."""
    from dgl.optim import SparseAdam
    from dgl.partition import NDArrayPartition

    for name in ("map_to_local", "map_to_global"):
        patches.set(NDArrayPartition, name, _of_one_part(getattr(NDArrayPartition, name)))
    patches.set(SparseAdam, "_setup_uva", lambda self, name, mem, power: refuse("adam"))
    patches.set(SparseAdam, "update", _where_the_state_is(SparseAdam.update))


def _of_one_part(native: Callable) -> Callable:
    """Ids within a part are ids of the whole where there is one part."""

    @functools.wraps(native)
    def mapped(self: Any, idxs: Tensor, *part: int) -> Tensor:
        return idxs if self.num_parts() == 1 and is_bridged(idxs.device) else native(self, idxs, *part)

    return mapped


def _where_the_state_is(native: Callable) -> Callable:
    """``update`` with the gradients on the host, if the optimizer's state is there."""

    @functools.wraps(native)
    def update(self: Any, idx: Tensor, grad: Tensor, emb: Any) -> None:
        if is_bridged(grad.device) and not is_bridged(emb.optm_state[0].device):
            idx, grad = host(idx), host(grad)
        native(self, idx, grad, emb)

    return update
