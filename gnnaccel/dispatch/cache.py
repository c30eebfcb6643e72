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


def lookup(edge_index: Tensor, num_src: int, num_dst: int, loops: int = 0) -> tuple[GraphView, str]:
    """The view of these edges and "hit", "miss" or "none" (not cacheable)."""
    if edge_index.is_inference():
        _counts["uncached"] += 1
        return GraphView(edge_index, num_src, num_dst, loops, own=True), "none"
    base = edge_index._base
    owner = edge_index if base is None else base
    key = (id(owner), edge_index.data_ptr(), edge_index.shape[1], edge_index.stride(), edge_index.dtype, num_src, num_dst, loops,
           torch.are_deterministic_algorithms_enabled())
    entry = _entries.get(key)
    if entry is not None and entry.version == edge_index._version and entry.owner() is owner:
        _counts["hits"] += 1
        entry.view.uses += 1
        entry.view.bind(edge_index)
        with _lock:
            if key in _entries:
                _entries.move_to_end(key)
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
    """Oldest entries go while the arrays built so far take more than the limit. The newest stays."""
    total = sum(entry.view.nbytes() for entry in _entries.values())
    while total > limit() and len(_entries) > 1:
        key = next(iter(_entries))
        if key == newest:
            break
        total -= _entries.pop(key).view.nbytes()
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
        return {"entries": len(_entries), "bytes": sum(e.view.nbytes() for e in _entries.values()), "limit": limit(), **_counts}


def clear() -> None:
    """Forget every graph and set the counts to zero."""
    with _lock:
        _entries.clear()
        for name in _counts:
            _counts[name] = 0
