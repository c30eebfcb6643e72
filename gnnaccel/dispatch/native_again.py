"""Native calls like earlier ones, made again without reading them anew.

Over small graphs reading a layer, its parts and its arguments takes as long as running some of it natively. So it is
remembered of a layer, with gradients and without,

* which tensors a call was over that stayed native although its graph was known (`Settled`): another over the same is native
  at once;
* how large a call was that stayed native because its graph was new (`Alike`): others over new graphs, of the same kind and no
  larger, are native at once. Graphs that were met before are no new ones (`Memory.meets`): those are decided, as what comes a
  second time may come often.

What runs inside such a call asks for faster ways too. Once one call has shown that nothing in it finds any, the next ones run
as if gnnaccel were off, and count what that one counted (`Inside`).

After several calls in a row like an earlier one, most of the next ones are not held against it at all, but for the number of
edges (`Easy`): what that might find can wait for a few calls.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gnnaccel.cuda import capture, driver
from gnnaccel.dispatch import config as configs
from gnnaccel.dispatch import counters
from gnnaccel.dispatch.checkpoints import checkpointed
from gnnaccel.dispatch.config import Config
from gnnaccel.dispatch.names import IdentityMap
from gnnaccel.dispatch.native_memory import (EASY, MISSED, WATCHED, Alike, Easy, Inside, Memory, Settled, autocast,
                                             numbers_in, state_of, tensors_of)
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.reasons import Reason

_HOSTS = ("torch.", "torch_geometric.")
_FEW = 2000  # edges, of all types: over fewer a call may be remembered as native whatever kept it so
_LASTING = ("GA201", "GA202", "GA205", "GA206", "GA208", "GA210", "GA303")  # about the layer and its arguments
_OF_THE_LAYER = ("GA201", "GA205", "GA208")
_ESTIMATED = ("GA301", "GA401")
_entries, _maps = settings.kept()
_watching, _drivers = counters.watching, driver.in_place
_tracing = torch._C._get_tracing_state
_grad = torch.is_grad_enabled
memories: IdentityMap[Memory] = IdentityMap()


def run(layer: Any, native: Callable, args: tuple, kwargs: dict, config: Config) -> Any:
    """The result of a call that is native as an earlier one, counted; `MISSED` for any other. Not to be asked where somebody
    listens to records. ``native.host``: what it comes to where nothing in it is taken over, if it says so. This runs at every
    call of a layer that has a memory, hence its plainness."""
    entry = memories.entries.get(id(layer))
    if entry is None or entry[0]() is not layer or _tracing() is not None:  # a tracer would write the comparisons down
        return MISSED
    if capture.capturing():  # few layers' own code can be captured in a CUDA graph
        return MISSED
    memory = entry[1]
    easy = memory.easy
    if easy is not None and easy.left and not kwargs and easy.epoch == config.epoch and easy.count == len(args) and (
            _numbers(args[easy.at]) <= easy.most and not checkpointed()):
        easy.left -= 1
        like = easy.like
    else:
        like = _looked_at(memory, layer, args, kwargs, config)
        if like is None:
            memory.row, memory.easy = 0, None
            return MISSED
    inside = like.inside
    tally = inside.tally
    if tally is None or _entries or _maps:
        return _watched(inside, native, layer, args, kwargs, like.code)
    tally.calls += 1
    if _watching:
        counters.note(tally.counts, inside.lasting)
    if not inside.silent:
        return native(layer, *args, **kwargs)
    native = getattr(native, "host", native)
    token = configs.silence()
    try:
        return native(layer, *args, **kwargs)
    finally:
        configs.end_silence(token)


def _numbers(edges: Any) -> float:
    kind = type(edges)
    return edges.numel() if kind is Tensor else numbers_in(edges) if kind is dict else math.inf


def _looked_at(memory: Memory, layer: Any, args: tuple, kwargs: dict, config: Config) -> Settled | Alike | None:
    """The earlier call that this one is like."""
    grad = _grad()
    state, given = (config.epoch, layer.training, autocast(), len(_drivers)), (*args, *kwargs.values()) if kwargs else args
    like: Settled | Alike | None = memory.settled[grad]
    if like is None or like.state != state or not like.fits(given, kwargs):
        like = memory.alike[grad]
        if like is None or like.state != state:
            return None
        graph = like.fits(given, kwargs)
        if graph is MISSED or checkpointed() or (graph and memory.meets(*graph, state, grad)):
            return None
    if like.edges_at is not None and not kwargs:
        memory.row += 1
        if memory.row >= EASY and like.inside.tally is not None:
            memory.easy = Easy(like, len(args), config.epoch)
    return like


def _watched(inside: Inside, native: Callable, layer: Any, args: tuple, kwargs: dict, code: str | None) -> Any:
    """``native(layer, *args, **kwargs)``, watched where that may show something."""
    if not inside.left or _entries or _maps:
        counters.again(type(layer).__name__, code)
        settings.native_again(layer)
        return native(layer, *args, **kwargs)
    with counters.watched() as seen:
        counters.again(type(layer).__name__, code)
        out = native(layer, *args, **kwargs)
    inside.left -= seen is not None
    if seen is not None and seen.native and not (seen.decided and inside.lasting) and _of_the_host(layer):
        inside.tally, inside.left = counters.tally(seen.counts), 0
        inside.silent = sum(seen.counts.values()) > 1
    return out


def _of_the_host(layer: Any) -> bool:
    """Whether nothing of the user's own runs inside the layer."""
    return all(type(module).__module__.startswith(_HOSTS) and not module._forward_pre_hooks and not module._forward_hooks
               for module in layer.modules())


def _on_cpu(found: list[Tensor]) -> bool:
    return found[0].is_cpu and not driver.placed()


def was_over(layer: Any, structure: tuple[Tensor, ...]) -> bool:
    """Whether a native call of the layer was over this graph."""
    memory = memories.get(layer)
    return memory is not None and memory.of(structure) is not None


def remember(layer: Any, structure: tuple[Tensor, ...], args: tuple, kwargs: dict, config: Config, code: str | None,
             known: bool) -> None:
    """Keep of a call that stayed native for the reason ``code`` what others are to be held against: its graph, and unless
    ``args`` are left out the rest. ``known``: the graph came before."""
    memory = _memory_of(layer)
    if structure and memory.of(structure) is None:
        memory.meets(structure, max(structure, key=_size))
    given = (*args, *kwargs.values())
    found = _plain(given)
    if found is None:
        return
    if known:
        met = memory.of(structure)
        if met is not None and (_on_cpu(found) or code == "GA301"):
            met[1 + _grad()] = state_of(layer, config)
        # on a GPU a call on dictionaries may stay native for a reason that passes, such as a capture
        if (_on_cpu(found) or (not kwargs and len(found) == len(args))) and not any(t.is_inference() for t in found):
            memory.settled[_grad()] = Settled(layer, given, kwargs, config, code)
    elif _on_cpu(found) or code in _ESTIMATED:
        memory.alike[_grad()] = _met(memory, Alike(layer, given, kwargs, config, code), given, kwargs)


def _size(t: Tensor) -> int:
    return math.prod(t.shape)


def _met(memory: Memory, like: Alike, given: tuple, kwargs: dict) -> Alike:
    """``like``, whose own graph ``memory`` has then met."""
    graph = like.fits(given, kwargs)
    if graph:
        memory.meets(*graph)
    return like


def remember_reason(layer: Any, args: tuple, kwargs: dict, config: Config, why: Reason) -> None:
    """The same of a call that could not be understood: if that is how the layer is made; on a CPU over few edges whatever it is
    about the layer or its arguments. Not at its first call, which may complete the layer."""
    memory = _memory_of(layer)
    again, memory.why = memory.why == why, why
    given = (*args, *kwargs.values())
    found = _plain(given) if again and why.code in _LASTING else None
    if found is None or any(t.is_inference() for t in found):
        return
    like, grad = Alike(layer, given, kwargs, config, why.code), _grad()
    of_layer = why.code in _OF_THE_LAYER or (why.code == "GA210" and any(code in why.text for code in _OF_THE_LAYER))
    if of_layer or (_on_cpu(found) and like.edges < 2 * _FEW):
        memory.settled[grad] = Settled(layer, given, kwargs, config, why.code)
        memory.alike[grad] = _met(memory, like, given, kwargs)


def watch(model: Any, ours: Callable, args: tuple, kwargs: dict, config: Config) -> Any:
    """``ours(model, *args, **kwargs)``, a call of a model of which it shall be remembered if all of it is native: then `run`
    runs the host's own code for others like it."""
    memory, grad, given = _memory_of(model), _grad(), (*args, *kwargs.values())
    found = _plain(given) if memory.left and config.on_fallback == "native" and not (_entries or _maps) else None
    if found is None or any(t.is_inference() for t in found):
        return ours(model, *args, **kwargs)
    with counters.watched() as seen:
        out = ours(model, *args, **kwargs)
    if seen is None:
        return out
    kept, before = None, memory.alike[grad]
    if seen.native and seen.counts and _of_the_host(model):
        if seen.lasting and _on_cpu(found):
            kept = memory.settled[grad] = Settled(model, given, kwargs, config, None)
        elif before is None or before.state[0] != config.epoch or before.fits(given, kwargs) is MISSED:
            kept = memory.alike[grad] = _met(memory, Alike(model, given, kwargs, config, None), given, kwargs)
    if kept is None:
        memory.left -= 1
    else:
        memory.left, kept.inside.tally, kept.inside.silent = WATCHED, counters.tally(seen.counts), True
    return out


def _memory_of(layer: Any) -> Memory:
    memory = memories.get(layer)
    if memory is None:
        memory = Memory()
        memories.set(layer, memory)
    return memory


def _plain(given: tuple) -> list[Tensor] | None:
    """The tensors of a call on nothing else."""
    found = tensors_of(given)
    return found if found and all(type(t) is Tensor or type(t) is Parameter for t in found) else None
