"""DGL's index objects on the device: handles on host structures that carry a tag."""
from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.adapters.dgl.bridge import arrays, results
from gnnaccel.adapters.dgl.bridge.limits import refuse
from gnnaccel.adapters.dgl.bridge.tags import (context, device_of, is_bridged, of_context,
                                               on_host, tag)
from gnnaccel.adapters.patching import PatchSet


def install(patches: PatchSet) -> None:
    """Replace the device and copies of index objects, and their answers to the queries of
    training."""
    from dgl._ffi import streams
    from dgl.heterograph import DGLGraph
    from dgl.heterograph_index import FlattenedHeteroGraph, HeteroGraphIndex, HeteroPickleStates

    for make in (copy_to, __setstate__):
        patches.set(HeteroGraphIndex, make.__name__, make(getattr(HeteroGraphIndex, make.__name__)),
                    "Moves, copies and loads a graph's structure by marking it with a device; the "
                    "structure stays on the host.")
    patches.set(HeteroGraphIndex, "ctx", context(HeteroGraphIndex.ctx),
                "Says of a marked graph that it is on the GPU.")
    patches.set(streams, "_dgl_get_stream", _stream(streams._dgl_get_stream),
                "Gives DGL the stream on which torch works.")
    for name in ("pin_memory", "pin_memory_"):
        patches.set(HeteroGraphIndex, name, lambda self: refuse("uva"), arrays.PINNED)
    for name, answer in _ANSWERS.items():
        patches.set(HeteroGraphIndex, name, _answering(getattr(HeteroGraphIndex, name), answer),
                    "Answers from tensors on the GPU that are kept with the graph, without a "
                    "copy per call.")
    patches.set(HeteroPickleStates, "__setstate__", _states(HeteroPickleStates.__setstate__),
                "Puts a pickled graph back on the device where it was.")
    patches.set(FlattenedHeteroGraph, "__getattribute__",
                _attribute(FlattenedHeteroGraph.__getattribute__, HeteroGraphIndex),
                "Marks the parts of a graph of several relations with its device.")
    for name, end in (("in_degrees", results.DST), ("out_degrees", results.SRC)):
        patches.set(DGLGraph, name, _degrees(getattr(DGLGraph, name), end),
                    "Answers from degrees on the GPU that are kept with the graph.")


def copy_to(native: Callable) -> Callable:
    """Copy between host and device: another handle on the same C++ graph, with a cache of its own,
    tagged or not."""
    host = on_host()

    @functools.wraps(native)
    def copy_to(self: Any, ctx: Any) -> Any:
        device = of_context(ctx)
        copy = native(self, ctx if device is None else host)
        tag(copy, device)
        return copy

    return copy_to


def __setstate__(native: Callable) -> Callable:
    """A pickle or copy of an index object is where its arrays are (`_states`)."""

    @functools.wraps(native)
    def __setstate__(self: Any, state: Any) -> None:
        native(self, state)
        tag(self, device_of(state) if hasattr(state, "__dict__") else None)

    return __setstate__


def _states(native: Callable) -> Callable:
    """The state in pickles: its arrays are tensors, those of a graph on the device on the device,
    as with a CUDA build."""

    @functools.wraps(native)
    def __setstate__(self: Any, state: Any) -> None:
        native(self, state)
        arrays = state[2] if isinstance(state[0], int) else ()
        tag(self, next((array.device for array in arrays if is_bridged(array.device)), None))

    return __setstate__


def _stream(native: Callable) -> Callable:
    """The stream on which a device works: torch's."""

    @functools.wraps(native)
    def _dgl_get_stream(ctx: Any) -> Any:
        device = of_context(ctx)
        return (native(ctx) if device is None
                else ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream))

    return _dgl_get_stream


def _attribute(native: Callable, graph: type) -> Callable:
    """Attributes of a graph flattened from several relations. They lie in C, where no
    ``__getattr__`` of a Python class sees them."""
    from dgl.ndarray import NDArray

    def __getattribute__(self: Any, name: str) -> Any:
        value = native(self, name)
        if type(value) in (graph, NDArray):
            tag(value, device_of(self))
        return value

    return __getattribute__


def _degrees(native: Callable, end: int) -> Callable:
    """Degrees of all nodes, which exist: DGL would wait for the device to make sure of it."""
    from dgl.base import ALL, is_all

    @functools.wraps(native)
    def of_nodes(self: Any, nodes: Any = ALL, etype: Any = None) -> torch.Tensor:
        if device_of(self._graph) is None or not is_all(nodes):
            return native(self, nodes, etype)
        return results.degrees(self._graph, self.get_etype_id(etype), end)

    return of_nodes


# --- answers from kept tensors: (native, index, *arguments) -> result -----------------------------

def _answering(native: Callable, answer: Callable) -> Callable:
    @functools.wraps(native)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (native(self, *args, **kwargs) if device_of(self) is None
                else answer(native, self, *args, **kwargs))

    return method


def _edges(native: Callable, index: Any, etype: Any, order: str | None = None) -> Any:
    if order in (None, "eid"):
        return results.edges(index, int(etype))
    return results.kept(index, ("edges", int(etype), order), lambda: native(index, etype, order))


def _find_edges(native: Callable, index: Any, etype: Any, eid: Any) -> Any:
    return results.some_edges(index, int(etype), eid)


def _in_degrees(native: Callable, index: Any, etype: Any, v: Any) -> Any:
    return results.degrees(index, int(etype), results.DST, v)


def _out_degrees(native: Callable, index: Any, etype: Any, v: Any) -> Any:
    return results.degrees(index, int(etype), results.SRC, v)


def _has_nodes(native: Callable, index: Any, ntype: Any, vids: Any) -> Any:
    return results.has_nodes(index, int(ntype), vids)


def _adjacency(native: Callable, index: Any, etype: Any, transpose: bool, fmt: str) -> Any:
    return results.kept(index, ("adjacency", int(etype), transpose, fmt),
                        lambda: native(index, etype, transpose, fmt))


def _record_stream(native: Callable, index: Any, stream: Any) -> None:
    """Record the stream for the tensors kept with the index object: another may have made them.

    The structure itself is on the host, which has no streams.
    """
    results.record_stream(index, stream)


def _is_pinned(native: Callable, index: Any) -> bool:
    return False


_ANSWERS: dict[str, Callable] = {
    "edges": _edges,
    "find_edges": _find_edges,
    "in_degrees": _in_degrees,
    "out_degrees": _out_degrees,
    "has_nodes": _has_nodes,
    "adjacency_matrix_tensors": _adjacency,
    "record_stream": _record_stream,
    "is_pinned": _is_pinned,
}
