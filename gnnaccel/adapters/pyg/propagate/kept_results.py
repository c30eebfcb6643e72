"""Results of functions of the graph alone, kept with the tensors that these were given, and handed
out again for as long as those stay as they are.

Nothing is kept that depends on weights: code writes to those through ``.data`` and through numpy,
which nobody sees.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, compiler
from torch.compiler import is_compiling, is_dynamo_compiling

from gnnaccel.adapters import own
from gnnaccel.adapters.guards import context_reason
from gnnaccel.adapters.pyg.propagate import graph_loops
from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.dispatch.graph import cache, ledger, ordered_weights
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.config import current, silenced
from gnnaccel.dispatch.uncompiled import kept_apart, uncompiled

_PLAIN = (int, float, bool, str, torch.dtype, type(None))
#: results without use after which those of a graph's first call are not kept
TRIED = 8
#: count of results of functions of edges kept since one was used again
unused = [0]


def keeping(native: Callable, method: bool = False, captured: Callable | None = None,
            weighted: Callable | None = None, weights: int | None = None) -> Callable:
    """``native``, a function of tensors and plain values; the tensors that it gives are kept.

    They are kept from the first call over edges on a GPU, and from the second on a CPU.
    ``method``: ``native`` is a method, whose result does not depend on the instance. ``captured``:
    a function that runs in place of ``native`` while a CUDA graph is captured; its first argument
    is ``native``. ``weights``: the place of the weights among the arguments; where they are given
    there, as PyG's layers do, nothing of the whole is kept, and ``weighted`` runs, a function that
    gives None where it does not apply.

    Not kept: what is computed while one of the functions that ``native`` calls is not the host's;
    what depends on a floating tensor (such as weights), on a sparse or an inference tensor, or on
    one of a subclass; what is computed while something traces.
    """
    first = 1 if method else 0
    named = own.Named(own.original(native))
    name = f"{native.__module__}.{native.__qualname__}"

    unkept = without(native)

    @kept_apart
    @functools.wraps(native)
    def kept(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or compiler._is_compiling_flag:  # `is_compiling`
            return native(*args, **kwargs)
        plain = weights is None or not args[weights:] or args[weights] is None
        result = find(name, native, args, kwargs, first, named) if plain else None
        if result is not None:
            return result
        if (captured is not None and capture.capturing() and current() is not None
            and named.why() is None):
            return captured(native, *args, **kwargs)
        if weights is not None and plain:
            return unkept(*args, **kwargs)  # which would find nothing for its parts either
        if weighted is not None and named.why() is None:
            result = weighted(*args, **kwargs)
        if result is None:
            result = native(*args, **kwargs)
            if weights is not None and current() is not None:
                _told_over_weights(native, args, kwargs, result)
        return result

    return kept


def without(native: Callable) -> Callable:
    """``native``, within which nothing is kept."""

    @functools.wraps(native)
    @uncompiled
    def unkept(*args: Any, **kwargs: Any) -> Any:
        before, graph_loops.computing.now = graph_loops.computing.now, True
        try:
            return native(*args, **kwargs)
        finally:
            graph_loops.computing.now = before

    return unkept


@uncompiled
def find(name: str, native: Callable, args: tuple, kwargs: dict, first: int = 0,
         named: own.Named | None = None, unused: list[int] = unused) -> tuple | None:
    """``native(*args, **kwargs)``, kept under ``name``; None where it is not to be kept.

    ``args[first]`` are the edges. ``named``: what ``native`` calls, which has to be the host's own.
    ``unused``: how many results were kept since one was used again; what is computed for other
    purposes counts apart. Nothing is compiled where this is called.
    """
    edges = args[first] if len(args) > first else None
    cell = configs.held()  # `current`, without its call
    config = (cell.config if cell is not None else current() if configs.cells
              else configs.of_process)
    if config is None and not silenced():
        return None
    if graph_loops.computing.now or not _worth_keeping(edges, name, unused):
        return None
    key = _key(name, args[first:], kwargs)
    if (key is None or context_reason() is not None
        or (named is not None and named.why() is not None)):
        return None
    tensors, values = key
    if capture.capturing() and not _stands(tensors, values):
        return None
    computed = None

    def make(own: bool) -> _Kept:
        nonlocal computed
        computed = _computed(native, args, kwargs)
        return _Kept(tensors, computed)

    entry = cache.lookup_many(tensors, values, make)[0]
    if computed is not None:
        unused[0] += 1
        return computed
    unused[0] = 0
    result = entry.get(tensors)
    if result is None:  # somebody has changed what was handed out
        result = _computed(native, args, kwargs)
        entry.keep(tensors, result)
    return result


def _stands(tensors: tuple[Tensor, ...], values: tuple) -> bool:
    """Whether a capture finds what was kept before it."""
    entry = cache.before_capture(tensors, values)
    return entry is not None and entry.get(tensors) is not None


def _computed(native: Callable, args: tuple, kwargs: dict) -> Any:
    graph_loops.computing.now = True
    try:
        # not in inference mode: what is kept may take part in training later
        with torch.inference_mode(False), torch.no_grad():
            result = native(*args, **kwargs)
            _told(native, args, kwargs, result)
            return result
    finally:
        graph_loops.computing.now = False


def _told(native: Callable, args: tuple, kwargs: dict, found: Any) -> None:
    """Mark floating results as made of the graph alone, those of 16 bits with what they are in
    fp32."""
    input_storages = {t.untyped_storage().data_ptr() for t in (*args, *kwargs.values())
                      if type(t) is Tensor and t.numel()}
    weights = [i for i, t in enumerate(found) if type(t) is Tensor and t.is_floating_point()
               and t.untyped_storage().data_ptr() not in input_storages]
    exact: Any = found
    if any(found[i].element_size() == 2 for i in weights):
        exact = native(*map(_in_fp32, args), **{k: _in_fp32(v) for k, v in kwargs.items()})
        for i in weights:
            ordered_weights.of_the_graph(exact[i])
    for i in weights:
        ordered_weights.of_the_graph(found[i], None if exact is found else exact[i])


@uncompiled
def _told_over_weights(native: Callable, args: tuple, kwargs: dict, found: Any) -> None:
    """Mark weights of 16 bits on a GPU, normalised by the host's sums in 16 bits, with what they
    are in fp32, or, where they have gradients, as none that kernels may read."""
    for weight in found if type(found) is tuple else ():
        if (type(weight) is Tensor and weight.is_floating_point() and weight.element_size() == 2
            and (weight.is_cuda or driver.placed()) and not is_compiling()):
            if weight.requires_grad:
                ordered_weights.inexact(weight)
            else:
                _told(native, args, kwargs, found)
            return


def _in_fp32(argument: Any) -> Any:
    small = type(argument) is torch.dtype and argument in (torch.bfloat16, torch.float16)
    if type(argument) is Tensor and argument.is_floating_point():
        return argument.float()
    return torch.float32 if small else argument


def _worth_keeping(edge_index: Any, name: str, unused: list[int]) -> bool:
    """Whether these edges came before: for those that come once, keeping anything only costs. On a
    GPU that is little next to some 25 launches and a wait, which the second layer over a sampled
    batch then saves; unless of the last results none was asked for again."""
    if type(edge_index) is not Tensor or edge_index.is_inference():
        return False
    if capture.capturing():  # what a capture makes holds nothing until it is replayed
        return capture.here.held is not None
    if edge_index.is_cuda and unused[0] < TRIED:
        return True
    record = ledger.ledgers.get(id(edge_index))
    if record is None or record() is not edge_index or record.version != edge_index._version:
        record = ledger.of(edge_index)
    if name in record.functions:
        unused[0] = 0
        return True
    record.functions += (name,)
    return False


def _key(name: str, args: tuple, kwargs: dict) -> tuple[tuple[Tensor, ...], tuple] | None:
    """The tensors among the arguments, and all else that the result depends on; None where it is
    not to be kept."""
    tensors, values = [], [name, *kwargs]
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor:
            if (value.is_floating_point() or value.layout != torch.strided or value.is_inference()
                or value.is_meta):
                return None
            tensors.append(value)
            values.append("tensor")
        elif type(value) in _PLAIN:
            values.append(value)
        else:
            return None
    if not tensors:
        return None
    device = tensors[0].device.type
    values += (torch.get_default_dtype(), torch.get_autocast_dtype(device)
               if torch.is_autocast_enabled(device) else None)
    return tuple(tensors), tuple(values)


class _Kept:
    """The tensors ``found``, derived from ``given``, as `cache.lookup_many` keeps them."""

    touched = False
    bind = None  # all is computed already
    _found: tuple[list[Any], list[int], Any, int]

    def __init__(self, given: tuple[Tensor, ...], found: tuple):
        self.keep(given, found)

    def keep(self, given: tuple[Tensor, ...], found: tuple) -> None:
        memory = {t.untyped_storage().data_ptr(): i for i, t in enumerate(given) if t.numel()}
        results: list[Any] = []
        for t in found:
            at = None if t is None else memory.get(t.untyped_storage().data_ptr())
            results.append(t if at is None else at if given[at] is t else False)
        built, number = None, 0
        if given[0].is_cuda and not capture.capturing():
            stream = torch.cuda.current_stream(given[0].device)
            built, number = torch.cuda.Event(), stream.cuda_stream
            built.record(stream)
        #: for each: the tensor; or the place of a given one, which must not keep itself alive;
        #: False where it is a part of one. With their versions, and the event after which they are
        #: there on their stream; replaced as one: threads see the old or the new
        self._found = (results, [t._version if type(t) is Tensor else 0 for t in results], built,
                       number)

    def get(self, given: tuple[Tensor, ...]) -> tuple | None:
        """The kept tensors; None where they cannot be used again."""
        found, versions, built, stream = self._found
        for t, version in zip(found, versions):
            if t is False or (type(t) is Tensor and (t._version != version or t.requires_grad)):
                return None
        if built is not None and stream != torch._C._cuda_getCurrentRawStream(
                given[0].device.index):
            _follow(found, built, given[0].device)
        return tuple([given[t] if type(t) is int else t for t in found])

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in self._found[0] if type(t) is Tensor)


def _follow(found: list[Any], built: torch.cuda.Event, device: torch.device) -> None:
    """Wait for tensors of another stream, as `GraphView` does with structures."""
    if torch.cuda.is_current_stream_capturing():
        return
    stream = torch.cuda.current_stream(device)
    stream.wait_event(built)
    for t in found:
        if type(t) is Tensor:
            t.record_stream(stream)
