"""Native calls like earlier ones, made again without reading them anew.

Over small graphs reading a layer, its parts and its arguments takes as long as running some of it natively. So it is
remembered of a layer, with gradients and without,

* which tensors a call was over that stayed native although its graph was known (`Settled`): another over the same is native
  at once;
* how large a call was that stayed native because its graph was new (`Alike`): others over new graphs, of the same kind and no
  larger, are native at once. On a CPU only: on a GPU reading costs little beside what it may find.

What runs inside such a call asks for faster ways too. Once one call has shown that nothing in it finds any, the next ones run
as if gnnaccel were off, and count what that one counted (`Inside`).
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import compress
from operator import attrgetter, is_
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

_version, _numel, _call = attrgetter("_version"), Tensor.numel, weakref.ref.__call__
MISSED = object()  # in the place of a result: this call is like no earlier one
_HOSTS = ("torch.", "torch_geometric.")
_MORE = 1.25  # times as large as the call that was decided: estimates know sizes by powers of two
_FEW = 2000  # edges, of all types: over fewer a call may be remembered as native whatever kept it so
_SILENT = 25_000  # edges, of all types: over more new ones what runs inside is asked each time
_WATCHED = 4  # calls of which one has to show that nothing inside gains
_LASTING = ("GA201", "GA202", "GA205", "GA206", "GA208", "GA210", "GA303")  # about the layer and its arguments
_ESTIMATED = ("GA301", "GA401")
_entries, _maps = settings.kept()
_tracing = torch._C._get_tracing_state
_grad, _autocast = torch.is_grad_enabled, torch.is_autocast_enabled


def tensors_of(args: tuple, kwargs: dict) -> list | None:
    """What may be tensors among the arguments, dictionaries and pairs opened; None where there is something else. An object may
    say by ``tensors()`` what it holds."""
    found: list[Any] = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = type(a)
        if kind is Tensor or kind is Parameter:
            found.append(a)
        elif kind is dict:
            found += a.values()
        elif kind is tuple:
            found += a
        elif a is not None:
            if not hasattr(kind, "tensors"):
                return None
            found += a.tensors()
    return found


class Inside:
    """What the calls inside a native call came to. ``counts``: with how many each, the call itself among them, once it is
    known that all are native, and ``silent`` then says whether there are any; ``lasting``: only such count that would be native
    again over the same tensors; ``left``: calls that may yet show this."""

    __slots__ = ("counts", "silent", "lasting", "left")

    def __init__(self, lasting: bool, watched: bool = True):
        self.counts: tuple | None = None
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
        if seen is not None and (seen.lasting or not self.lasting) and seen.native and _of_the_host(layer):
            self.counts, self.left = tuple(seen.counts.items()), 0
            self.silent = sum(seen.counts.values()) > 1
        return out


def _of_the_host(layer: Any) -> bool:
    """Whether nothing of the user's own runs inside the layer."""
    return all(type(module).__module__.startswith(_HOSTS) and not module._forward_pre_hooks and not module._forward_hooks
               for module in layer.modules())


class Settled:
    """A call over known tensors, held weakly. ``plain``: those of its graph that are arguments themselves, by place and with
    their versions; ``held``: the same of arguments that hold several; ``rows``: place, type and look of the first argument of
    features."""

    __slots__ = ("epoch", "training", "autocast", "names", "count", "plain", "held", "gone", "rows", "code", "inside")

    def __init__(self, layer: Any, given: tuple, kwargs: dict, config: Config, code: str | None):
        """``given``: all arguments, those of ``kwargs`` last."""
        self.epoch, self.training, self.autocast = config.epoch, layer.training, _autocast("cpu")
        self.code, self.inside, self.names, self.count = code, Inside(True), tuple(kwargs), len(given)
        self.plain, self.held, self.rows = [], [], None
        self.gone: list[weakref.ref] = []  # of the tensors, those that are no more
        for at, a in enumerate(given):
            tensors = tensors_of((a,), {})
            if not tensors:
                continue
            first = tensors[0]
            if first.is_floating_point():
                self.rows = self.rows or (at, type(a), first.shape, first.dtype)
            elif first is a:
                self.plain.append((at, weakref.ref(a, self.gone.append)))
            else:
                self.held.append((at, type(a), [weakref.ref(t, self.gone.append) for t in tensors]))
        if self.plain or self.held:
            self.rows = None

    def fits(self, given: tuple, kwargs: dict) -> bool:
        """Native code is never wrong, so it is enough that nothing has changed that could make another route pay: the sizes of the
        graph, which its tensors keep whatever is written into them."""
        if self.gone or len(given) != self.count:
            return False
        for at, ref in self.plain:
            if ref() is not given[at]:
                return False
        for at, kind, refs in self.held:
            a = given[at]
            if type(a) is not kind:
                return False
            tensors = a.values() if kind is dict else a if kind is tuple else a.tensors()
            if len(tensors) != len(refs) or not all(map(is_, map(_call, refs), tensors)):
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
    """A call over a new graph: of how many numbers at most others are like it."""

    __slots__ = ("epoch", "training", "autocast", "where", "names", "types", "graph", "edges", "largest", "all", "code", "inside")

    def __init__(self, layer: Any, found: list[Tensor], kwargs: dict, config: Config, code: str | None):
        self.epoch, self.training, self.autocast = config.epoch, layer.training, _autocast("cpu")
        self.names, self.code, self.where = tuple(kwargs), code, _where(found)
        self.types = list(map(type, found))
        self.graph = [not t.is_floating_point() for t in found]
        sizes = list(map(_numel, found))
        graph = list(compress(sizes, self.graph))
        self.edges, self.largest, self.all = sum(graph) * _MORE, max(graph, default=0) * _MORE, sum(sizes) * _MORE
        self.inside = Inside(False, sum(graph) < 2 * _SILENT)

    def fits(self, found: list, kwargs: dict) -> tuple[Tensor | None] | None:
        """The largest tensor of a call's graph, None if it has none, where the call is of the same kind and no larger."""
        if list(map(type, found)) != self.types or (kwargs and tuple(kwargs) != self.names):
            return None
        sizes = list(map(_numel, found))
        graph = list(compress(sizes, self.graph))
        if not graph:
            return (None,) if sum(sizes) <= self.all else None
        largest = max(graph)
        if largest > self.largest or sum(graph) > self.edges or sum(sizes) > self.all:
            return None
        return (list(compress(found, self.graph))[graph.index(largest)],)


class Memory:
    """Of one layer. ``settled``, ``alike``: a call with gradients off, and one with gradients on; ``seen``: the tensors of the
    last call's graph, or one of them where the call was not read, with their versions; ``why``: of the last call that was not
    understood."""

    __slots__ = ("settled", "alike", "seen", "versions", "why", "left")

    def __init__(self) -> None:
        self.settled: list[Settled | None] = [None, None]
        self.alike: list[Alike | None] = [None, None]
        self.seen: tuple[weakref.ref, ...] = ()
        self.versions: tuple[int, ...] = ()
        self.why: Reason | None = None
        self.left = _WATCHED  # of calls of a model: how many may yet show something

    def see(self, structure: tuple[Tensor, ...]) -> None:
        self.seen, self.versions = tuple(map(weakref.ref, structure)), tuple(map(_version, structure))

    def has(self, structure: tuple[Tensor, ...]) -> bool:
        """Whether the last call was over these tensors, unchanged since."""
        if len(self.seen) == 1:
            return any(self._last(t) for t in structure)
        return len(structure) == len(self.seen) and all(
            ref() is t and version == t._version for ref, version, t in zip(self.seen, self.versions, structure))

    def _last(self, tensor: Tensor) -> bool:
        for ref, version in zip(self.seen, self.versions):
            if ref() is tensor and version == tensor._version:
                return True
        return False

    def meets(self, tensor: Tensor | None) -> bool:
        """Whether this tensor of a graph was in the last call; keeps it otherwise."""
        if tensor is None or tensor.is_inference():
            return False
        if self._last(tensor):
            return True
        self.seen, self.versions = (weakref.ref(tensor),), (tensor._version,)
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
    like = memory.settled[grad]
    if like is None or like.epoch != config.epoch or like.training is not layer.training or (
            like.autocast is not _autocast("cpu") or not like.fits((*args, *kwargs.values()) if kwargs else args, kwargs)):
        like = memory.alike[grad]
        if like is None or not _is_alike(like, layer, memory, args, kwargs, config):
            return MISSED
    inside = like.inside
    if inside.counts is None or _entries or _maps:
        return inside.look(native, layer, args, kwargs, like.code)
    counters.add(inside.counts)
    if not inside.silent:
        return native(layer, *args, **kwargs)
    native = getattr(native, "host", native)
    token = configs.silence()
    try:
        return native(layer, *args, **kwargs)
    finally:
        configs.end_silence(token)


def _is_alike(like: Alike, layer: Any, memory: Memory, args: tuple, kwargs: dict, config: Config) -> bool:
    """Whether a call over a graph that was not in the last one is like ``like``."""
    if like.epoch != config.epoch or like.training is not layer.training or like.autocast is not _autocast("cpu"):
        return False
    found = tensors_of(args, kwargs)
    largest = like.fits(found, kwargs) if found else None
    return largest is not None and like.where == _where(found) and not checkpointed() and not memory.meets(*largest)


def _where(found: list[Tensor]) -> tuple:
    return found[0].device, driver.placed()


def _on_cpu(found: list[Tensor]) -> bool:
    return found[0].is_cpu and not driver.placed()


def was_over(layer: Any, structure: tuple[Tensor, ...]) -> bool:
    """Whether the layer's last native call was over this graph."""
    memory = memories.get(layer)
    return memory is not None and memory.has(structure)


def remember(layer: Any, structure: tuple[Tensor, ...], args: tuple, kwargs: dict, config: Config, code: str | None,
             known: bool) -> None:
    """Keep of a call that stayed native for the reason ``code`` what others are to be held against: its graph, and unless
    ``args`` are left out the rest. ``known``: the graph came before."""
    memory = _memory_of(layer)
    if structure and not any(t.is_inference() for t in structure):
        memory.see(structure)
    found = _plain(args, kwargs)
    if found is None:
        return
    if known:
        # on a GPU a call on dictionaries may stay native for a reason that passes, such as a capture
        if (_on_cpu(found) or (not kwargs and len(found) == len(args))) and not any(t.is_inference() for t in found):
            memory.settled[_grad()] = Settled(layer, (*args, *kwargs.values()), kwargs, config, code)
    elif _on_cpu(found) or code in _ESTIMATED:
        memory.alike[_grad()] = Alike(layer, found, kwargs, config, code)


def remember_reason(layer: Any, args: tuple, kwargs: dict, config: Config, why: Reason) -> None:
    """The same of a call that could not be understood, on a CPU: if that is how the layer is made; and over few edges whatever
    it is about the layer or its arguments. Not at its first call, which may complete the layer."""
    memory = _memory_of(layer)
    again, memory.why = memory.why == why, why
    found = _plain(args, kwargs) if again and why.code in _LASTING else None
    if found is None or not _on_cpu(found) or any(t.is_inference() for t in found):
        return
    alike = Alike(layer, found, kwargs, config, why.code)
    if alike.edges < 2 * _FEW or why.code == "GA208" or (why.code == "GA210" and "GA208" in why.text):
        grad, given = _grad(), (*args, *kwargs.values())
        memory.settled[grad], memory.alike[grad] = Settled(layer, given, kwargs, config, why.code), alike


def watch(model: Any, ours: Callable, args: tuple, kwargs: dict, config: Config) -> Any:
    """``ours(model, *args, **kwargs)``, a call of a model of which it shall be remembered if all of it is native: then `run`
    runs the host's own code for others like it."""
    memory, grad = _memory_of(model), _grad()
    found = _plain(args, kwargs) if memory.left and config.on_fallback == "native" and not (_entries or _maps) else None
    if found is None or not _on_cpu(found) or any(t.is_inference() for t in found):
        return ours(model, *args, **kwargs)
    with counters.watched() as seen:
        out = ours(model, *args, **kwargs)
    if seen is None:
        return out
    kept, before = None, memory.alike[grad]
    if seen.native and seen.counts and _of_the_host(model):
        if seen.lasting:
            kept = memory.settled[grad] = Settled(model, (*args, *kwargs.values()), kwargs, config, None)
        elif before is None or before.epoch != config.epoch or before.fits(found, kwargs) is None:
            kept = Alike(model, found, kwargs, config, None)
            memory.alike[grad] = kept if kept.inside.left else None
            memory.meets(*kept.fits(found, kwargs))
    if kept is None:
        memory.left -= 1
    else:
        memory.left, kept.inside.counts, kept.inside.silent = _WATCHED, tuple(seen.counts.items()), True
    return out


def _memory_of(layer: Any) -> Memory:
    memory = memories.get(layer)
    if memory is None:
        memory = Memory()
        memories.set(layer, memory)
    return memory


def _plain(args: tuple, kwargs: dict) -> list[Tensor] | None:
    """The tensors of a call on nothing else."""
    found = tensors_of(args, kwargs)
    return found if found and all(type(t) is Tensor or type(t) is Parameter for t in found) else None
