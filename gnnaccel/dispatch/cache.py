"""The structure cache: `GraphView`s by the caller's own ``edge_index``.

An entry belongs to a live tensor at one version. The key holds the identity of the tensor (of its base, for a view), the
place and shape of the data, dtype and the graph's sizes; the tensor is watched by a weak reference and its version counter
compared, so neither an in-place edit nor reused memory can give a stale answer. What cannot be seen, as anywhere in
torch: writing through ``.data`` or through numpy. Inference tensors have no version and are not cached.
"""
from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnaccel import env
from gnnaccel.dispatch.graph import GraphView

_DEFAULT_BYTES = 4 << 30


@dataclass
class _Entry:
    view: GraphView
    version: int
    owner: weakref.ref


_lock = threading.RLock()
_entries: OrderedDict[tuple, _Entry] = OrderedDict()
_counts = {"hits": 0, "misses": 0, "evictions": 0, "uncached": 0}
_limit: int | None = None


def _key(edge_index: Tensor, num_src: int, num_dst: int, loops: int) -> tuple[Tensor, tuple]:
    """The tensor whose life the entry shares, and the key."""
    base = edge_index._base
    owner = edge_index if base is None else base
    return owner, (id(owner), edge_index.data_ptr(), edge_index.shape[1], edge_index.stride(), edge_index.dtype, num_src, num_dst,
                   loops, torch.are_deterministic_algorithms_enabled())


def _find(edge_index: Tensor, owner: Tensor, key: tuple) -> _Entry | None:
    entry = _entries.get(key)
    if entry is not None and entry.version == edge_index._version and entry.owner() is owner:
        return entry
    return None


def peek(edge_index: Tensor, num_src: int, num_dst: int, loops: int = 0) -> bool:
    """Whether `lookup` would hit; counts nothing and makes nothing."""
    return not edge_index.is_inference() and _find(edge_index, *_key(edge_index, num_src, num_dst, loops)) is not None


def lookup(edge_index: Tensor, num_src: int, num_dst: int, loops: int = 0) -> tuple[GraphView, str]:
    """The view of these edges and "hit", "miss" or "none" (not cacheable)."""
    if edge_index.is_inference():
        _counts["uncached"] += 1
        return GraphView(edge_index, num_src, num_dst, loops, own=True), "none"
    owner, key = _key(edge_index, num_src, num_dst, loops)
    entry = _find(edge_index, owner, key)
    if entry is not None:
        _counts["hits"] += 1
        entry.view.touched = True
        entry.view.bind(edge_index)
        return entry.view, "hit"
    _counts["misses"] += 1
    view = GraphView(edge_index, num_src, num_dst, loops)
    with _lock:
        _entries[key] = _Entry(view, edge_index._version, weakref.ref(owner, _dropper(key, view)))
        _entries.move_to_end(key)
        _evict(key)
    return view, "miss"


def _dropper(key: tuple, view: GraphView) -> Any:
    def drop(_: weakref.ref) -> None:
        with _lock:
            entry = _entries.get(key)
            if entry is not None and entry.view is view:  # the key may serve a later tensor at the same address by now
                del _entries[key]

    return drop


def _evict(newest: tuple) -> None:
    """While the arrays built so far take more than the limit, the oldest entries go; one used since it came up last gets a
    second chance. The newest stays."""
    total = sum(entry.view.nbytes() for entry in list(_entries.values()))
    chances = len(_entries)
    while total > limit() and len(_entries) > 1:
        key, entry = next(iter(_entries.items()))
        if key == newest or (entry.view.touched and chances > 0):
            entry.view.touched = False
            chances -= 1
            _entries.move_to_end(key)
            continue
        total -= entry.view.nbytes()
        _entries.pop(key, None)  # counting may have collected garbage, and with it this entry
        _counts["evictions"] += 1


def limit() -> int:
    """Bytes of index arrays to keep: ``GNNACCEL_CACHE_BYTES``, else 4 GiB."""
    global _limit
    if _limit is None:
        _limit = env.cache_bytes() or _DEFAULT_BYTES
    return _limit


def set_limit(size: int | None) -> None:
    """Keep at most ``size`` bytes from the next miss on; None returns to the environment's or the default."""
    global _limit
    _limit = size


def info() -> dict[str, int]:
    """Entries, bytes, limit and counts of hits, misses, evictions, uncached look-ups."""
    with _lock:
        return {"entries": len(_entries), "bytes": sum(e.view.nbytes() for e in list(_entries.values())), "limit": limit(), **_counts}


def clear() -> None:
    """Forget every graph and set the counts to zero."""
    with _lock:
        _entries.clear()
        for name in _counts:
            _counts[name] = 0
