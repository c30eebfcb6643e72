"""Learning from native calls, so that others like them are made without being read anew.

Over small graphs reading a layer, its parts and its arguments takes as long as running some of it
natively. So a layer's memory has, with gradients and without,

* the tensors of a call that stayed native although its graph was known (`NativeExact`): another
  over the same is native at once;
* the size of a call that stayed native because its graph was new (`NativeSized`): others over new
  graphs, of the same kind and no larger, are native at once. Graphs that were met before are no new
  ones (`LayerMemory.meets`): those are decided, as a graph that comes twice may come often.

What runs inside such a call asks for faster ways too. Once one call has shown that nothing in it
finds any, the next ones run as if gnnaccel were off, and count what that one counted
(`InnerCalls`).

After several calls in a row like an earlier one, most of the next ones are not compared with it,
but for the number of edges (`NativeStreak`): a difference may be noticed a few calls late.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.memory.layer_memory import LayerMemory, mode_of, of_the_host
from gnnaccel.dispatch.memory.native_cache import (MISSED, WATCHED, NativeExact, NativeSized,
                                                   plain_tensors, state_of)
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.plan.compiling import PENDING
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.quantized import settings

# edges, of all types: over fewer a call may be remembered as native whatever kept it so
_FEW = 2000
# reasons about the layer and its arguments
_LASTING = ("GA201", "GA202", "GA205", "GA206", "GA208", "GA210", "GA303")
_OF_THE_LAYER = ("GA201", "GA205", "GA208")
_OF_A_SIZE = ("GA301", "GA401", PENDING)  # of calls over graphs of about one size
_entries, _maps = settings.kept()


def _on_cpu(found: list[Tensor]) -> bool:
    return found[0].is_cpu and not driver.placed()


def remember(layer: Any, structure: tuple[Tensor, ...], args: tuple, kwargs: dict, config: Config,
             code: str | None, known: bool) -> None:
    """Keep a call that stayed native for the reason ``code``, to compare others with: its graph,
    and unless ``args`` are left out the rest. ``known``: the graph came before."""
    memory = layer_memory.of(layer)
    structure = layer_memory.graph_of(structure, args, kwargs)
    if structure and memory.of(structure) is None:
        memory.meets(structure, max(structure, key=_size))
    values = (*args, *kwargs.values())
    tensors = plain_tensors(values)
    if tensors is None:
        return
    if known:
        entry = memory.of(structure)
        if entry is not None and (_on_cpu(tensors) or code == "GA301"):
            entry[1 + mode_of(layer)] = state_of(layer, config)
        # on a GPU a call on dictionaries may stay native for a reason that passes, such as a
        # capture; when kernels are there, all is decided anew
        if ((_on_cpu(tensors) or code == PENDING or (not kwargs and len(tensors) == len(args)))
            and not any(t.is_inference() for t in tensors)):
            memory.native_exact[mode_of(layer)] = NativeExact(layer, values, kwargs, config, code)
    elif _on_cpu(tensors) or code in _OF_A_SIZE:
        like = NativeSized(layer, values, kwargs, config, code)
        memory.native_sized[mode_of(layer)] = _met(memory, like, values, kwargs)


def _size(t: Tensor) -> int:
    return math.prod(t.shape)


def _met(memory: LayerMemory, like: NativeSized, given: tuple, kwargs: dict) -> NativeSized:
    """``like``, whose own graph ``memory`` has then met."""
    graph = like.fits(given, kwargs)
    if graph:
        memory.meets(*graph)
    return like


def remember_reason(layer: Any, args: tuple, kwargs: dict, config: Config, why: Reason) -> None:
    """Remember a call that could not be understood: if that is how the layer is made; on a CPU over
    few edges whatever it is about the layer or its arguments. Not at its first call, which may
    complete the layer."""
    memory = layer_memory.of(layer)
    again, memory.why = memory.why == why, why
    values = (*args, *kwargs.values())
    tensors = plain_tensors(values) if again and why.code in _LASTING else None
    if tensors is None or any(t.is_inference() for t in tensors):
        return
    like, mode = NativeSized(layer, values, kwargs, config, why.code), mode_of(layer)
    of_layer = (why.code in _OF_THE_LAYER
                or (why.code == "GA210" and any(code in why.text for code in _OF_THE_LAYER)))
    if of_layer or (_on_cpu(tensors) and like.edges < 2 * _FEW):
        memory.native_exact[mode] = NativeExact(layer, values, kwargs, config, why.code)
        memory.native_sized[mode] = _met(memory, like, values, kwargs)


def watch(model: Any, ours: Callable, args: tuple, kwargs: dict, config: Config) -> Any:
    """``ours(model, *args, **kwargs)``, a call of a model; remembered if all of it is native: then
    `fast_path` runs the host's own code for others like it."""
    memory, mode, values = layer_memory.of(model), mode_of(model), (*args, *kwargs.values())
    tensors = (plain_tensors(values) if memory.left and config.on_fallback == "native"
               and not (_entries or _maps) else None)
    if tensors is None or any(t.is_inference() for t in tensors):
        return ours(model, *args, **kwargs)
    with counters.watched() as inside:
        out = ours(model, *args, **kwargs)
    if inside is None:
        return out
    entry: NativeExact | NativeSized | None
    entry, before = None, memory.native_sized[mode]
    if inside.native and inside.counts and of_the_host(model):
        if inside.lasting and _on_cpu(tensors):
            entry = memory.native_exact[mode] = NativeExact(model, values, kwargs, config, None)
        elif (before is None or before.state[0] != config.epoch
              or before.fits(values, kwargs) is MISSED):
            like = NativeSized(model, values, kwargs, config, None)
            entry = memory.native_sized[mode] = _met(memory, like, values, kwargs)
    if entry is None:
        memory.left -= 1
    else:
        memory.left, entry.inner.tally, entry.inner.silent = WATCHED, counters.tally(
            inside.counts), True
    return out
