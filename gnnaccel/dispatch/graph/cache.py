"""The structure cache: `GraphView`s and `RelationView`s by the caller's own tensors, such as
``edge_index``.

An entry belongs to live memory at one version each. The key holds the identity of each tensor's
storage, the place and shape of the data, dtype and the graph's sizes; so views and detached aliases
(which checkpoints make of their inputs) find the structure that their forward used. The storages
are watched by weak references and version counters compared, so neither an in-place edit nor reused
memory can give a stale answer. Writes through ``.data`` or numpy cannot be seen, as anywhere in
torch. Inference tensors have no version and are not cached.

While a CUDA graph is captured, nothing from before is used: replays read the caller's tensors anew,
so their structure has to be built within the capture. Structures built there serve that capture
alone, and are dropped when it is over. Within `capture.still`, structures from before serve, too,
and are noted there. Edges that the host keeps from being changed (`EdgeArrays`) are the same at
each replay, so this does not hold for them.
"""
from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnaccel import env
from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.graph.edge_arrays import EdgeArrays
from gnnaccel.dispatch.graph.tensor_ref import MemoryRef
from gnnaccel.dispatch.graph.view import GraphView

_DEFAULT_BYTES = 4 << 30


@dataclass
class _Entry:
    view: Any
    memory: tuple[MemoryRef, ...]
    large: bool  # for `when_large`


_lock = threading.RLock()
_entries: OrderedDict[tuple, _Entry] = OrderedDict()
_counts = {"hits": 0, "misses": 0, "evictions": 0, "uncached": 0}
_limit: int | None = None
#: called with the first structure of at least `LARGE` edges on a GPU, and with more until it gives
#: True
when_large: Callable[[], bool] | None = None
LARGE = 1 << 17
# [number of the last capture that looked something up, its thread, keys of the entries it built]
_captured: list = []
_counted_again = 0  # misses after which bytes are counted again


def _look(tensors: tuple[Tensor, ...], sizes: tuple,
          captured: int) -> tuple[tuple | None, _Entry | None]:
    """The key of a view of these tensors, None where writes into one are not counted; and the entry
    under it."""
    for t in tensors:
        if t.is_inference():
            return None, None
    key = (*[(id(t),) if type(t) is EdgeArrays else
             (id(t.untyped_storage()), t.data_ptr(), t.shape, t.stride(), t.dtype)
             for t in tensors], sizes, torch.are_deterministic_algorithms_enabled(), captured)
    entry = _entries.get(key)
    if entry is not None:
        for ref, t in zip(entry.memory, tensors):  # `MemoryRef.unwritten`, without a call for each
            if (ref.version != t._version
                or ref() is not (t.untyped_storage() if ref.tensor else t)):
                return key, None
    return key, entry


def peek(edge_index: Tensor, num_src: int, num_dst: int) -> bool:
    """Whether `lookup` would hit; counts nothing and makes nothing."""
    return peek_many((edge_index,), (num_src, num_dst, 0))


def lookup(edge_index: Tensor, num_src: int, num_dst: int, loops: int = 0) -> tuple[GraphView, str]:
    """The view of these edges and "hit", "miss" or "none" (not cacheable)."""
    return lookup_many((edge_index,), (num_src, num_dst, loops),
                       partial(GraphView, edge_index, num_src, num_dst, loops))


def peek_many(tensors: tuple[Tensor, ...], sizes: tuple) -> bool:
    """Whether `lookup_many` would hit; during a capture, also whether it would have before."""
    captured = (capture.current() if capture.capturing() and type(tensors[0]) is not EdgeArrays
                else 0)
    if _look(tensors, sizes, captured)[1] is not None:
        return True
    return captured != 0 and _look(tensors, sizes, 0)[1] is not None


def before_capture(tensors: tuple[Tensor, ...], sizes: tuple) -> Any:
    """The view that calls outside of captures find, or None. Counts nothing and makes nothing."""
    entry = _look(tensors, sizes, 0)[1]
    return None if entry is None else entry.view


def lookup_many(tensors: tuple[Tensor, ...], sizes: tuple,
                make: Callable[[bool], Any] | None) -> tuple[Any, str]:
    """The view that belongs to all of these tensors and to ``sizes``, and "hit", "miss" or "none"
    (not cacheable).

    ``make(own)`` makes it, ``own``: it must keep the tensors alive; ``make`` None: a view that is
    not there is None. A view has ``nbytes()``, ``touched`` and ``bind(*tensors)``; ``bind`` is None
    where it needs the tensors no more.
    """
    captured = (capture.current() if capture.capturing() and type(tensors[0]) is not EdgeArrays
                else 0)
    key, entry = _look(tensors, sizes, captured)
    if key is None or captured == capture.UNKNOWN:
        _counts["uncached"] += make is not None
        return None if make is None else make(True), "none"
    if _captured and captured != _captured[0]:
        _end_capture(captured)  # entries of this capture have other keys
    held = capture.here.held
    if entry is None and captured and held is not None:
        entry = _look(tensors, sizes, 0)[1]
    if entry is not None:
        view = entry.view
        if held is not None:
            held.append(view)
        _counts["hits"] += 1
        view.touched = True
        if view.bind is not None:
            view.bind(*tensors)
        return view, "hit"
    if make is None:
        return None, "none"
    _counts["misses"] += 1
    view = make(False)
    large = (tensors[0].shape[-1:] >= (LARGE,)  # a single number has no shape
             and (tensors[0].device.type == "cuda" or driver.placed()))
    if large and when_large is not None:
        _tell_of_large()
    drop = partial(_drop, key, view)
    with _lock:
        _entries[key] = _Entry(view, tuple([MemoryRef(t, drop) for t in tensors]), large)
        _entries.move_to_end(key)
        if captured:
            _captured[:] = [captured, threading.get_ident(), *_captured[2:], key]
        _evict(key)
    return view, "miss"


def _tell_of_large() -> None:
    global when_large
    call = when_large
    if call is not None and call():
        when_large = None


def has_large() -> bool:
    """Whether a structure is there of which `when_large` would be told."""
    with _lock:
        return any(entry.large for entry in _entries.values())


def _end_capture(captured: int) -> None:
    """Drop the entries of an earlier capture, unless its thread may still be capturing.

    Their memory belongs to the CUDA graph.
    """
    with _lock:
        if _captured and (captured or _captured[1] == threading.get_ident()):
            for key in _captured[2:]:
                _entries.pop(key, None)
            _captured.clear()


def _drop(key: tuple, view: GraphView, _: weakref.ref) -> None:
    """Drop an entry: the memory of one of the view's tensors is gone."""
    with _lock:
        entry = _entries.get(key)
        # the key may serve a later tensor at the same address by now
        if entry is not None and entry.view is view:
            del _entries[key]


def _evict(newest: tuple) -> None:
    """Drop the oldest entries while the arrays built so far take more than the limit; one used
    since it came up last gets a second chance. The newest stays. Where there are many, they are
    counted once an eighth more may be there, not at each miss."""
    global _counted_again
    if len(_entries) == 1:
        _counted_again = 0
        return
    if _counted_again > 0:
        _counted_again -= 1
        return
    _counted_again = len(_entries) // 8
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
    """Keep at most ``size`` bytes from the next miss on, give or take an eighth of the graphs where
    there are many; None returns to the environment's or the default."""
    global _limit, _counted_again
    _limit, _counted_again = size, 0


def info() -> dict[str, int]:
    """Entries, bytes, limit and counts of hits, misses, evictions, uncached look-ups."""
    with _lock:
        return {"entries": len(_entries),
                "bytes": sum(e.view.nbytes() for e in list(_entries.values())), "limit": limit(),
                **_counts}


def clear() -> None:
    """Forget every graph and set the counts to zero."""
    global _counted_again
    with _lock:
        _entries.clear()
        _captured.clear()
        _counted_again = 0
        ledger.forget()
        for name in _counts:
            _counts[name] = 0
