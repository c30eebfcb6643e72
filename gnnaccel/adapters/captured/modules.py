"""Choosing the modules whose calls are captured: the outermost ones with graph layers in them, once
their calls repeat.

A call repeats another one if its arguments have the same form, its integer tensors are the same
tensors, unwritten, and everything else that the module's code reads is as it was (`state`,
`reads`). After `_CALLS` such calls, during which nothing waited for the device, no attribute
changed and no random number was drawn on the host, the next one is captured. It is replayed for as
long as calls repeat it. All others run as without gnnaccel.
"""
from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gnnaccel.adapters.captured import counts, graphs, host, threads, values
from gnnaccel.adapters.captured.kinds import SMALL, Call, Kind, Module, entries, key_of
from gnnaccel.adapters.captured.reads import Reads
from gnnaccel.adapters.captured.state import Snapshot
from gnnaccel.adapters.captured.values import Unknown
from gnnaccel.adapters.guards import context_reason
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.graph.tensor_ref import unversioned
from gnnaccel.dispatch.observe import records
from gnnaccel.dispatch.plan import compiling
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.run.autograd import checkpointed

_CALLS = 3  # calls alike before one is captured
_KINDS = 4  # captures of one module
_TRIES = 20  # calls after which a module whose calls never repeat is left alone
_MEMORY = 8  # a capture may take 1 / 8 of the free memory
#: types of devices whose calls are captured
DEVICES = {"cuda"}
_log = logging.getLogger("gnnaccel")
_here = threads.here


def asked(patches: PatchSet) -> None:
    """Put the wrapper of ``Module.__call__`` in or out, as the configurations ask."""
    if configs.capturing and not patches.holds(nn.Module, "__call__"):
        replace(patches)
    elif not configs.capturing:
        patches.undo(nn.Module, "__call__")


def replace(patches: PatchSet) -> None:
    """Put the wrapper in."""
    patches.set(
        nn.Module, "__call__", _wrapped(nn.Module.__call__),
        "Replays the calls of a module as CUDA graphs, once they repeat.",
        active="While `enable(capture=True)` holds anywhere.",
        cost="Under a microsecond for each call of a module; some 30 for one that is replayed.")


def let_go() -> None:
    """Forget all captures, and free their memory."""
    entries.clear()


def reset() -> None:
    """Forget all captures and counts."""
    let_go()
    counts.reset()


def _wrapped(native: Callable) -> Callable:
    from torch.compiler import is_compiling

    @functools.wraps(native)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _here.inside or is_compiling():
            return native(self, *args, **kwargs)
        return outermost(native, self, args, kwargs)
    return call


def outermost(native: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """A call ``native(module, ...)``, which is replayed, watched or just run."""
    if _here.inside:
        return native(module, *args, **kwargs)
    entry = entries.get(id(module))
    if entry is None or entry.ref() is not module:
        entry = entries[id(module)] = Module(module)
    if entry.open or not _asked():
        return native(module, *args, **kwargs)
    _here.inside = True
    try:
        return (native(module, *args, **kwargs) if entry.closed
                else _routed(native, module, entry, args, kwargs))
    finally:
        _here.inside = False


def _asked() -> bool:
    config = configs.current()
    return config is not None and config.capture and possible()


def possible() -> bool:
    """Whether calls may be captured here."""
    return (configs.current() is not None and not records.sinks
            and not capture.capturing() and not torch.is_inference_mode_enabled()
            and not torch.is_anomaly_enabled()
            and not checkpointed() and context_reason() is None)


def _routed(native: Callable, module: nn.Module, entry: Module, args: tuple, kwargs: dict) -> Any:
    tensors: list[Tensor] = []
    try:
        form = values.apart((args, kwargs), tensors)
    except Unknown as problem:
        return _left(native, module, entry, args, kwargs, f"its arguments hold {problem}")
    device = _device(module, tensors)
    if device is None or unversioned(tensors):
        return native(module, *args, **kwargs)
    key = key_of(form, tensors, module, device)
    kind = entry.kinds.get(key)
    entry.calls += 1
    if kind is None:
        if entry.calls > _TRIES:
            entry.closed = True
            counts.told(module, "its arguments have other forms in each call")
            return native(module, *args, **kwargs)
        for old in [old for old in entry.kinds if configs.stale(old[-1])]:
            del entry.kinds[old]  # no call will be like it
        if len(entry.kinds) >= _KINDS:
            entry.kinds.pop(next(iter(entry.kinds)))
        kind = entry.kinds[key] = Kind()
    if kind.why is not None:
        entry.closed = entry.calls > _TRIES * _KINDS
        return native(module, *args, **kwargs)
    if kind.captured is not None:
        if kind.repeats(tensors) and kind.stands():
            entry.calls = 0
            if kind.captured.free(tensors) and kind.copyable(tensors):
                counts.counted(type(module).__name__)
                return kind.captured.replay(tensors)
            return native(module, *args, **kwargs)
        kind.forget()
    return _watched(native, module, entry, kind, Call(form, tensors, args, kwargs, device))


def _device(module: nn.Module, tensors: list[Tensor]) -> torch.device | None:
    """The device of the call, None if calls cannot be captured there."""
    first = tensors[0] if tensors else next(module.parameters(), None)
    return first.device if first is not None and first.device.type in DEVICES else None


# --- calls that are not captured yet --------------------------------------------------------------

def _watched(native: Callable, module: nn.Module, entry: Module, kind: Kind,
             given: Call) -> Any:
    """The call's result, run natively or captured now; facts of the call are noted in ``kind``."""
    _, tensors, args, kwargs, device = given
    threads.called()
    if not kind.again(tensors):
        kind.forget()
        kind.tries += 1
        if kind.tries > _TRIES:
            kind.why = counts.told(module, "its graph is another one in each call")
        return native(module, *args, **kwargs)
    entry.calls = 0
    try:
        if kind.snapshot is None or not kind.stands():
            kind.calls, kind.tries = 0, kind.tries + 1
            if kind.tries > _TRIES:
                raise Unknown("changes in each call")
            reads = Reads(list(module.modules()), (args, kwargs))
            kind.notes(Snapshot([module, *reads.modules], device), reads, device)
    except Unknown as problem:
        return _left(native, module, entry, args, kwargs, f"its state: {problem}")
    if kind.calls < _CALLS or not kind.copyable(tensors):
        return _observed(native, module, entry, kind, given)
    if compiling.waiting():  # a capture would wait for its kernels, and go when others come
        return native(module, *args, **kwargs)
    kind.why = _unfit(given)
    if kind.why is None:
        try:
            kind.captured = graphs.Captured(_work(native, module, kind, given))
        except graphs.Refused as problem:
            kind.why = str(problem)
            entry.open = len(entry.kinds) == 1 and len(list(module.children())) > 0
    if kind.why is not None:
        counts.told(module, kind.why)
        return native(module, *args, **kwargs)
    if not kind.stands():  # its code, run by another way for the capture, changed the module
        kind.forget()
        kind.tries += 1
        return native(module, *args, **kwargs)
    _log.info("gnnaccel: calls of %s are replayed as CUDA graphs", type(module).__name__)
    counts.counted(type(module).__name__)
    return kind.captured.replay(tensors)  # type: ignore[union-attr]


def _observed(native: Callable, module: nn.Module, entry: Module, kind: Kind,
              given: Call) -> Any:
    """The call's result, run natively and watched: it may not wait for the device, change the
    module or gradients, or draw a random number on the host."""
    device = given.device
    numbers, grads = host.Numbers(device), kind.gradients(given.tensors)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with host.waits(device) as waited:
        out = native(module, *given.args, **given.kwargs)
    why = None
    if waited:
        why = "it waits for the device"
    elif numbers.drawn():
        why = "it draws random numbers on the host"
    elif grads.moved():
        why = "it goes back through its own results"
    elif not values.same((given.args, given.kwargs), given.form, given.tensors):
        why = "it changes its arguments"
    elif device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if (torch.cuda.memory_allocated(device) - held) * _MEMORY > free:
            why = "what its backward needs takes too much memory"
    # the first calls may compile, measure and build, and keep what they have made
    if why is None and kind.stands():
        kind.calls += 1
    else:
        kind.calls, kind.tries, kind.snapshot = 0, kind.tries + 1, None
        if kind.tries > _TRIES // 4:
            why = why or "its state changes in each call"
            kind.why = counts.told(module, why)
            entry.open = len(entry.kinds) == 1 and len(list(module.children())) > 0
    return out


def _unfit(given: Call) -> str | None:
    """Why a call that repeats others is not captured; None where it is."""
    device = given.device
    if any(t.device != device for t in given.tensors):
        return "its arguments are on several devices"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    if parametrize._cache_enabled:
        return "parametrizations are cached"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "the process is one of several"
    return None


def _work(native: Callable, module: nn.Module, kind: Kind, given: Call) -> graphs.Work:
    ref: Any = weakref.ref(module)
    snapshot, reads, form = kind.snapshot, kind.reads, given.form
    assert snapshot is not None and reads is not None

    # an earlier result that is still there keeps the nodes that add up the gradients of the
    # parameters on their stream, and a capture would wait for that
    aliases: dict[Tensor, Tensor] = {
        p: nn.Parameter(p.detach()) for p in snapshot.parameters if p.requires_grad}

    def call(tensors: list[Tensor]) -> Any:
        args, kwargs = values.together(form, iter(tensors))
        with snapshot.replaced(aliases):
            return native(ref(), *args, **kwargs)

    def own(tensors: list[Tensor]) -> Any:
        args, kwargs = values.together(form, iter(tensors))
        return native(ref(), *args, **kwargs)

    def aside(tensors: list[Tensor], others: dict[Tensor, Tensor]) -> Any:
        if not (snapshot.holds() and reads.holds()):
            raise RuntimeError(
                f"{type(ref()).__name__} was changed between forward and a backward with "
                "create_graph=True, which runs its code again, as its calls run as CUDA graphs; "
                "leave it out with gnnaccel.enable(capture=False)")
        args, kwargs = values.together(form, iter(tensors))
        before, _here.inside = _here.inside, True
        try:
            with snapshot.replaced(others):
                return native(ref(), *args, **kwargs)
        finally:
            _here.inside = before

    wanted = [t for t in (*snapshot.parameters, *given.tensors) if t.requires_grad]
    fixed = [t for t, copied in zip(given.tensors, kind.copied)
             if not copied and t.is_floating_point()]
    read = [t for t in (*snapshot.read, *reads.read)
            if t.device == given.device or t.numel() <= SMALL]
    return graphs.Work(call, own, aside, given.tensors, kind.copied, list(aliases),
                       list(aliases.values()), snapshot.buffers, [*snapshot.parameters, *fixed],
                       read, given.device, torch.is_grad_enabled() and bool(wanted))


def _left(native: Callable, module: nn.Module, entry: Module, args: tuple, kwargs: dict,
          why: str) -> Any:
    """The native result; the module cannot be captured from now on, but those in it may."""
    entry.open = True
    counts.told(module, why)
    _here.inside = False
    return native(module, *args, **kwargs)
