"""DGL's DataLoader where DGL would sample on the GPU: the host samples, and each batch is copied
ahead.

DGL built with CUDA samples on the GPU in two cases: over a graph that is there, and over one on the
host with ``use_uva=True``. Here both become the third case that DGL knows: a graph on the host, and
batches on the GPU. DGL then samples and fetches features in a thread of its own, one batch ahead,
and copies on a stream of its own. The edges of each block and the ids of its nodes and edges, which
DGL would copy at their first use, are copied ahead too.
"""
from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl import graphs
from gnnaccel.adapters.dgl.bridge import limits
from gnnaccel.adapters.dgl.bridge.tags import device_of, host, is_bridged, on_host
from gnnaccel.adapters.patching import PatchSet

#: attributes of a sampler that are samplers
_PARTS = ("sampler", "negative_sampler")


def install(patches: PatchSet) -> None:
    """Replace the reading of the loader's arguments, and the fetching of a batch."""
    from dgl.dataloading import dataloader
    from dgl.storages.pytorch_tensor import PyTorchTensorStorage

    patches.set(dataloader.DataLoader, "__init__", _made(dataloader.DataLoader.__init__),
                "Samples on the host where DGL would sample on the GPU.")
    patches.set(dataloader, "is_tensor_adaptor_enabled", lambda: True,
                "Lets the loader copy batches on a stream of its own. DGL asks for a library that "
                "its own memory on the GPU needs; here all of it is torch's.")
    patches.set(dataloader, "_prefetch", _ahead(dataloader._prefetch),
                "Copies the edges and ids of a batch to the GPU together with its features.")
    patches.set(PyTorchTensorStorage, "fetch", _fetched(PyTorchTensorStorage.fetch),
                "Takes ids that are on the host of features that are on the GPU.")


# --- the loader's arguments -----------------------------------------------------------------------

def _made(native: Callable) -> Callable:
    named = inspect.signature(native)

    @functools.wraps(native)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = named.bind(self, *args, **kwargs)
        if _samples_on_gpu(bound.arguments):
            _move(bound.arguments)
        native(*bound.args, **bound.kwargs)

    return __init__


def _samples_on_gpu(given: Mapping[str, Any]) -> bool:
    """Whether DGL would sample a graph of its own on a GPU. Calls that DGL refuses are left to
    it."""
    from dgl import DGLGraph

    graph = given["graph"]
    if not isinstance(graph, DGLGraph) or given.get("kwargs", {}).get("num_workers", 0):
        return False
    on_gpu = device_of(graph._graph) is not None
    return bool(given.get("use_uva")) != on_gpu


def _move(given: dict[str, Any]) -> None:
    """Change the arguments to those of sampling on the host.

    A graph on the GPU stays as it is where that cannot be: its samples are then made call by call.
    """
    graph, sampler = given["graph"], given["graph_sampler"]
    ids = ids_on_host(given["indices"])
    device = device_of(graph._graph)
    if device is None:
        if ids is None:
            limits.refuse("uva")
        limits.tell("uva")
        given["use_uva"] = False
    else:
        if ids is None or not is_understood(sampler):
            return
        limits.tell("sampling")
        given["graph"] = graph_on_host(graph)
    given["graph_sampler"] = sampler_on_host(sampler)
    given["indices"] = ids
    if given.get("device") is None:
        given["device"] = torch.cuda.current_device() if device is None else device


def graph_on_host(graph: Any) -> Any:
    """The graph as one on the host, with the same structure and the very same frames, which stay on
    the device."""
    on_cpu = copy.copy(graph)
    on_cpu._graph = graph._graph.copy_to(on_host())
    return on_cpu


def ids_on_host(ids: Any) -> Any:
    """Tensors of ids, or what tensors are made of, on the host; None of a data set that gives ids
    from the device."""
    if isinstance(ids, Mapping):
        return {kind: ids_on_host(of_kind) for kind, of_kind in ids.items()}
    if isinstance(ids, Tensor):
        return host(ids)
    place = getattr(ids, "device", None)
    return None if place is not None and is_bridged(torch.device(place)) else ids


def is_understood(sampler: Any) -> bool:
    """Whether a sampler of a graph on the GPU can work on the host: it is DGL's own, and reads no
    weights of edges, which are on the GPU, from the graph."""
    parts = [sampler, *(getattr(sampler, name, None) for name in _PARTS)]
    return (all(part is None or type(part).__module__.partition(".")[0] == "dgl" for part in parts)
            and not any(isinstance(getattr(part, "prob", None), str) for part in parts))


def sampler_on_host(sampler: Any) -> Any:
    """The sampler, or a copy that has its tensors on the host and leaves its result there; the
    loader moves that. Results of a sampler of negative edges are moved to the host."""
    changed: dict[str, Any] = {}
    for name, value in getattr(sampler, "__dict__", {}).items():
        if isinstance(value, Tensor) and is_bridged(value.device):
            changed[name] = host(value)
        elif isinstance(value, Mapping) and any(isinstance(part, Tensor) and is_bridged(part.device)
                                                for part in value.values()):
            changed[name] = {key: host(part) for key, part in value.items()}
        elif name == "output_device" and value is not None:
            changed[name] = None
        elif name == "sampler":
            changed[name] = sampler_on_host(value)
        elif name == "negative_sampler" and value is not None:
            changed[name] = _Negatives(value)
    if all(getattr(sampler, name) is value for name, value in changed.items()):
        return sampler
    copied = copy.copy(sampler)
    vars(copied).update(changed)
    return copied


class _Negatives:
    """A sampler of negative edges, whose result goes to the host."""

    def __init__(self, sample: Callable):
        self._sample = sample

    def __call__(self, *args: Any) -> Any:
        return _moved(self._sample(*args))


def _moved(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(of_key) for key, of_key in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_moved(part) for part in value)
    return host(value) if isinstance(value, Tensor) else value


# --- a batch --------------------------------------------------------------------------------------

def _ahead(native: Callable) -> Callable:
    @functools.wraps(native)
    def _prefetch(batch: Any, dataloader: Any, stream: Any) -> Any:
        if not is_bridged(dataloader.device):
            return native(batch, dataloader, stream)
        # a new thread is on the first GPU, whose stream DGL would take for the user's
        with torch.cuda.device(dataloader.device):
            batch, feats, event = native(batch, dataloader, stream)
            user = None if stream is None else torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                _copy(batch, user)
            return batch, feats, event if stream is None else stream.record_event()

    return _prefetch


def _copy(batch: Any, user: Any) -> None:
    """Copy the edges, ids and features that graphs in the batch still have on the host. ``user``:
    the stream that will use them, if it is another."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            _copy(part, user)
        return
    if device_of(getattr(batch, "_graph", batch)) is None:
        return
    for etype in range(len(batch.canonical_etypes)):
        graphs.of_index(batch._graph, etype)
    for frame in (*batch._node_frames, *batch._edge_frames):
        for column in frame._columns.values():
            # rows of the whole graph's features are fetched when they are asked for
            if getattr(column, "device", None) is not None and column.index is None:
                column.data  # noqa: B018  (copies)
    if user is not None:
        batch.record_stream(user)


def _fetched(native: Callable) -> Callable:
    @functools.wraps(native)
    def fetch(self: Any, indices: Tensor, device: Any, *args: Any, **kwargs: Any) -> Tensor:
        place = self.storage.device
        if is_bridged(place):
            # the user's last writes may still be under way
            torch.cuda.current_stream(place).wait_stream(torch.cuda.default_stream(place))
            indices = indices.to(place)
        return native(self, indices, device, *args, **kwargs)

    return fetch
