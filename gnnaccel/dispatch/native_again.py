"""Native calls like earlier ones, made again without reading them anew.

Over small graphs reading a layer, its parts and its arguments takes as long as running some of it natively. So it is
remembered of a layer, with gradients and without,

* which tensors a call was over that stayed native although its graph was known (`Settled`): another over the same is native
  at once;
* how large a call was that stayed native because its graph was new (`Alike`): others over new graphs, of the same kind and no
  larger, are native at once. Graphs that were met before are no new ones (`Memory.meets`): those are decided, as what comes a second
  time may come often.

What runs inside such a call asks for faster ways too. Once one call has shown that nothing in it finds any, the next ones run
as if gnnaccel were off, and count what that one counted (`Inside`).
"""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gnnaccel.cuda import driver
from gnnaccel.dispatch import config as configs
from gnnaccel.dispatch import counters
from gnnaccel.dispatch.checkpoints import checkpointed
from gnnaccel.dispatch.config import Config
from gnnaccel.dispatch.names import IdentityMap
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.reasons import Reason

_version, _numel = attrgetter("_version"), Tensor.numel
MISSED = object()  # in the place of a result: this call is like no earlier one
_HOSTS = ("torch.", "torch_geometric.")
_MORE = 1.25  # times as large as the call that was decided: estimates know sizes by powers of two
_FEW = 2000  # edges, of all types: over fewer a call may be remembered as native whatever kept it so
_MET = 512  # graphs that a layer remembers to have met
_WATCHED = 4  # calls of which one has to show that nothing inside gains
_LASTING = ("GA201", "GA202", "GA205", "GA206", "GA208", "GA210", "GA303")  # about the layer and its arguments
_OF_THE_LAYER = ("GA201", "GA205", "GA208")
_ESTIMATED = ("GA301", "GA401")
_entries, _maps = settings.kept()
_watching, _drivers = counters.watching, driver.in_place
_tracing = torch._C._get_tracing_state
_grad = torch.is_grad_enabled
_autocast = getattr(torch._C, "_is_any_autocast_enabled", functools.partial(torch.is_autocast_enabled, "cpu"))


def tensors_of(given: tuple) -> list | None:
    """What may be tensors among the arguments, dictionaries and pairs opened; None where there is something else. An object may
    say by ``tensors()`` what it holds."""
    found: list[Any] = []
    for a in given:
        kind = type(a)
        if kind is dict:
            found += a.values()
        elif kind is Tensor or kind is Parameter:
            found.append(a)
        elif kind is tuple:
            found += a
        elif a is not None:
            if not hasattr(kind, "tensors"):
                return None
            found += a.tensors()
    return found


class Inside:
    """What the calls inside a native call came to. ``tally``: counts them, the call itself among them, once it is known that all
    are native, and ``silent`` then says whether there are any; ``lasting``: only where nothing was decided anew, so that over the
    same tensors nothing will be; ``left``: calls that may yet show this."""

    __slots__ = ("tally", "silent", "lasting", "left")

    def __init__(self, lasting: bool, watched: bool = True):
        self.tally: counters.Tally | None = None
        self.silent, self.lasting, self.left = False, lasting, _WATCHED if watched else 0

    def look(self, native: Callable, layer: Any, args: tuple, kwargs: dict, code: str | None) -> Any:
        """``native(layer, *args, **kwargs)``, watched where that may show something."""
        if not self.left or _entries or _maps:
            counters.again(type(layer).__name__, code)
            settings.native_again(layer)
            return native(layer, *args, **kwargs)
        with counters.watched() as seen:
            counters.again(type(layer).__name__, code)
            out = native(layer, *args, **kwargs)
        self.left -= seen is not None
        if seen is not None and seen.native and not (seen.decided and self.lasting) and _of_the_host(layer):
            self.tally, self.left = counters.tally(seen.counts), 0
            self.silent = sum(seen.counts.values()) > 1
        return out


def _of_the_host(layer: Any) -> bool:
    """Whether nothing of the user's own runs inside the layer."""
    return all(type(module).__module__.startswith(_HOSTS) and not module._forward_pre_hooks and not module._forward_hooks
               for module in layer.modules())


def _state(layer: Any, config: Config) -> tuple:
    """What has to be the same besides the arguments. `run` has this in place."""
    return config.epoch, layer.training, _autocast(), len(_drivers)


class Settled:
    """A call over known tensors, held weakly by ``refs``. ``plain``: those of its graph that are arguments themselves, by place and
    id, which is nobody else's as long as none is ``gone``; ``held``: the same of arguments that hold several; ``rows``: place,
    type and look of the first argument of features."""

    __slots__ = ("state", "names", "count", "plain", "held", "refs", "gone", "rows", "code", "inside")

    def __init__(self, layer: Any, given: tuple, kwargs: dict, config: Config, code: str | None):
        """``given``: all arguments, those of ``kwargs`` last."""
        self.state, self.names, self.count = _state(layer, config), tuple(kwargs), len(given)
        self.code, self.inside = code, Inside(True)
        self.plain, self.held, self.rows = [], [], None
        self.refs: list[weakref.ref] = []
        self.gone: list[weakref.ref] = []  # of the tensors, those that are no more
        for at, a in enumerate(given):
            tensors = tensors_of((a,))
            if not tensors:
                continue
            first = tensors[0]
            if first.is_floating_point():
                self.rows = self.rows or (at, type(a), first.shape, first.dtype)
                continue
            self.refs += [weakref.ref(t, self.gone.append) for t in tensors]
            if first is a:
                self.plain.append((at, id(a)))
            else:
                self.held.append((at, type(a), list(map(id, tensors))))
        if self.refs:
            self.rows = None

    def fits(self, given: tuple, kwargs: dict) -> bool:
        """Native code is never wrong, so it is enough that nothing has changed that could make another route pay: the sizes of the
        graph, which its tensors keep whatever is written into them."""
        if self.gone or len(given) != self.count:
            return False
        for at, number in self.plain:
            if id(given[at]) != number:
                return False
        for at, kind, numbers in self.held:
            a = given[at]
            if type(a) is not kind:
                return False
            if list(map(id, a.values() if kind is dict else a if kind is tuple else a.tensors())) != numbers:
                return False
        if kwargs and tuple(kwargs) != self.names:
            return False
        return self.rows is None or self._same_rows(given)

    def _same_rows(self, given: tuple) -> bool:
        at, kind, shape, dtype = self.rows
        a = given[at]
        if type(a) is not kind:
            return False
        if kind is not Tensor and kind is not Parameter:
            a = next(iter(a.values() if kind is dict else a), None)
            if not isinstance(a, Tensor):
                return False
        return a.shape == shape and a.dtype is dtype


class Alike:
    """A call over a new graph: of how many numbers at most others are like it. ``flat``: its arguments are tensors; ``graph``:
    where those are, among all its tensors, that hold no features; ``known``: the one by which a graph is recognised, its edges
    where they are one argument, None for the largest."""

    __slots__ = ("state", "names", "flat", "types", "cpu", "graph", "known", "edges", "largest", "all", "code", "inside")

    def __init__(self, layer: Any, given: tuple, kwargs: dict, config: Config, code: str | None):
        """``given``: all arguments, those of ``kwargs`` last."""
        found = tensors_of(given)
        self.state, self.names, self.code = _state(layer, config), tuple(kwargs), code
        self.flat, self.types = list(map(id, found)) == list(map(id, given)), list(map(type, found))
        self.cpu = found[0].is_cpu
        at = [i for i, t in enumerate(found) if not t.is_floating_point()]
        self.graph = slice(at[0], at[-1] + 1) if at else slice(0, 0)
        pairs = [i for i in at if found[i].dim() == 2]
        self.known = pairs[0] if self.flat and len(pairs) == 1 else None
        sizes = list(map(_numel, found))
        graph = sizes[self.graph]
        largest = max(graph, default=0) if self.known is None else sizes[self.known]
        self.edges, self.largest, self.all = (int(_MORE * n) for n in (sum(graph), largest, sum(sizes)))
        self.inside = Inside(False)

    def fits(self, given: tuple, kwargs: dict) -> Any:
        """The tensors of a call's graph, that by which it is recognised last, none if it has no graph; `MISSED` where the call is of
        another kind or larger."""
        found = given if self.flat else tensors_of(given)
        if not found or list(map(type, found)) != self.types or (kwargs and tuple(kwargs) != self.names):
            return MISSED
        sizes = list(map(_numel, found))
        if sum(sizes) > self.all or found[0].is_cpu is not self.cpu:
            return MISSED
        graph = sizes[self.graph]
        if not graph:
            return ()
        largest = max(graph) if self.known is None else sizes[self.known]
        if largest > self.largest or sum(graph) > self.edges:
            return MISSED
        return found[self.graph], found[self.known] if self.known is not None else found[self.graph.start + graph.index(largest)]


class _Met:
    """A graph of a native call: its largest tensor, held weakly, with its version; the ids of all its tensors; in which state, with
    gradients off and on, it was decided as a known graph and stayed native."""

    __slots__ = ("ref", "version", "ids", "decided")

    def __init__(self, largest: Tensor, ids: tuple[int, ...]):
        self.ref, self.version, self.ids = weakref.ref(largest), largest._version, ids
        self.decided: list[tuple | None] = [None, None]


class Memory:
    """Of one layer. ``settled``, ``alike``: a call with gradients off, and one with gradients on; ``met``: graphs of native calls,
    by the id of their largest tensor, and of how many to look for those that are gone; ``why``: of the last call that was not
    understood."""

    __slots__ = ("settled", "alike", "met", "most", "why", "left")

    def __init__(self) -> None:
        self.settled: list[Settled | None] = [None, None]
        self.alike: list[Alike | None] = [None, None]
        self.met: dict[int, _Met] = {}
        self.most = _MET
        self.why: Reason | None = None
        self.left = _WATCHED  # of calls of a model: how many may yet show something

    def of(self, structure: Sequence[Tensor]) -> _Met | None:
        """The native call that was over these tensors, unchanged since."""
        for t in structure:
            found = self.met.get(id(t))
            if found is not None and found.ref() is t and found.version == t._version:
                return found if set(map(id, structure)).issubset(found.ids) else None
        return None

    def meets(self, graph: Sequence[Tensor], largest: Tensor, state: tuple | None = None, grad: bool = False) -> bool:
        """Whether the graph of these tensors, unchanged since, was in a native call, and is not known to be native in this state
        however often it comes. It was from now on. Never of inference tensors, which have no version."""
        if largest.is_inference():
            return False
        met, ids = self.met, tuple(map(id, graph))
        found = met.get(id(largest))
        if found is not None and found.ref() is largest and found.version == largest._version and found.ids == ids:
            return found.decided[grad] != state
        if len(met) >= self.most:
            self.met = met = {key: kept for key, kept in met.items() if kept.ref() is not None}
            self.most = max(_MET, 2 * len(met))
        met[id(largest)] = _Met(largest, ids)
        return False


memories: IdentityMap[Memory] = IdentityMap()


def run(layer: Any, native: Callable, args: tuple, kwargs: dict, config: Config) -> Any:
    """The result of a call that is native as an earlier one, counted; `MISSED` for any other. Not to be asked where somebody
    listens to records. ``native.host``: what it comes to where nothing in it is taken over, if it says so. This runs at every
    call of a layer that has a memory, hence its plainness."""
    entry = memories.entries.get(id(layer))
    if entry is None or entry[0]() is not layer or _tracing() is not None:  # a tracer would write the comparisons down
        return MISSED
    memory, grad = entry[1], _grad()
    state, given = (config.epoch, layer.training, _autocast(), len(_drivers)), (*args, *kwargs.values()) if kwargs else args
    like = memory.settled[grad]
    if like is None or like.state != state or not like.fits(given, kwargs):
        like = memory.alike[grad]
        if like is None or like.state != state:
            return MISSED
        graph = like.fits(given, kwargs)
        if graph is MISSED or checkpointed() or (graph and memory.meets(*graph, state, grad)):
            return MISSED
    inside = like.inside
    tally = inside.tally
    if tally is None or _entries or _maps:
        return inside.look(native, layer, args, kwargs, like.code)
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
            met.decided[_grad()] = _state(layer, config)
        # on a GPU a call on dictionaries may stay native for a reason that passes, such as a capture
        if (_on_cpu(found) or (not kwargs and len(found) == len(args))) and not any(t.is_inference() for t in found):
            memory.settled[_grad()] = Settled(layer, given, kwargs, config, code)
    elif _on_cpu(found) or code in _ESTIMATED:
        memory.alike[_grad()] = _met(memory, Alike(layer, given, kwargs, config, code), given, kwargs)


def _size(t: Tensor) -> int:
    return prod(t.shape)


def _met(memory: Memory, like: Alike, given: tuple, kwargs: dict) -> Alike:
    """``like``, whose own graph ``memory`` has then met."""
    graph = like.fits(given, kwargs)
    if graph:
        memory.meets(*graph)
    return like


def remember_reason(layer: Any, args: tuple, kwargs: dict, config: Config, why: Reason) -> None:
    """The same of a call that could not be understood: if that is how the layer is made; on a CPU over few edges whatever it is about
    the layer or its arguments. Not at its first call, which may complete the layer."""
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
        memory.left, kept.inside.tally, kept.inside.silent = _WATCHED, counters.tally(seen.counts), True
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
