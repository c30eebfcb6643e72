"""Calls of DGL's C functions: results of tagged arguments are tagged.

All C functions are objects of one Python class, so its ``__call__`` is replaced. The objects
themselves must stay: C code takes some of them as constructors, by their handles.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gnnaccel.adapters.dgl.bridge import arrays, limits
from gnnaccel.adapters.dgl.bridge.tags import device_of, tag
from gnnaccel.adapters.patching import PatchSet

_CONTAINERS = (list, tuple)


def install(patches: PatchSet) -> None:
    """Replace the call operator of DGL's C functions."""
    from dgl._ffi.function import Function
    from dgl.transforms import functional

    patches.set(Function, "__call__", _tagging(Function.__call__, _taggable()),
                "Marks what DGL's C functions make of a graph on the GPU as being on the GPU.")
    patches.set(functional, "_CAPI_DGLKNN", _on_the_host(functional._CAPI_DGLKNN),
                "Searches nearest neighbours on the host.")


def _on_the_host(knn: Callable) -> Callable:
    """The search for nearest neighbours, made by the host.

    An algorithm that DGL has for GPUs alone is replaced by another with the same result.
    """

    def _CAPI_DGLKNN(points: Any, *args: Any) -> None:
        if device_of(points) is not None and args[-1] == "bruteforce-sharemem":
            args = (*args[:-1], "bruteforce")
        knn(points, *args)

    return _CAPI_DGLKNN


def _taggable() -> frozenset[type]:
    """Classes that have a ``__dict__`` and stand for structure or data, or lead to such."""
    from dgl import container, heterograph_index, ndarray
    from dgl._ffi.function import Function

    return frozenset((Function, ndarray.NDArray, ndarray.SparseMatrix, container.List,
                      container.Map, container.StrMap, container.Value,
                      heterograph_index.HeteroGraphIndex, heterograph_index.HeteroSubgraphIndex,
                      heterograph_index.FlattenedHeteroGraph, heterograph_index.HeteroPickleStates))


def _tagging(native: Callable, taggable: frozenset[type]) -> Callable:
    def found(things: Iterable[Any]) -> torch.device | None:
        for thing in things:
            kind = type(thing)
            if kind in taggable:
                device = device_of(thing)
            else:
                device = found(thing) if kind in _CONTAINERS else None
            if device is not None:
                return device
        return None

    def __call__(self: Any, *args: Any) -> Any:
        device = device_of(self) or found(args)
        if device is None:
            return native(self, *args)
        name = self.__dict__.get("__name__")  # None for what another C function returned
        limits.check(name, args)
        result = native(self, *args)
        if type(result) in taggable:
            tag(result, device)
        arrays.write_back(name, args)
        return result

    return __call__
