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
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gnnaccel.adapters.captured import graphs, threads, values
from gnnaccel.adapters.captured.reads import Reads
from gnnaccel.adapters.captured.state import Snapshot, random_state, waits
from gnnaccel.adapters.captured.values import Unknown
from gnnaccel.adapters.guards import context_reason
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.cuda import capture
from gnnaccel.dispatch.graph.tensor_ref import TensorRef, unversioned
from gnnaccel.dispatch.memory.checkpoints import checkpointed
from gnnaccel.dispatch.observe import records
from gnnaccel.dispatch.policy import config as configs

_CALLS = 3  # calls alike before one is captured
_KINDS = 4  # captures of one module
_TRIES = 20  # calls after which a module whose calls never repeat is left alone
_MEMORY = 8  # a capture may take 1 / 8 of the free memory
#: types of devices whose calls are captured
DEVICES = {"cuda"}
_log = logging.getLogger("gnnaccel")
_here = threads.here
_entries: dict[int, _Module] = {}
_refused: Counter[tuple[str, str]] = Counter()
_replays: Counter[str] = Counter()


class _Kind:
    """Calls of one form. ``refs``: of the tensors of the last call; ``copied``: those that differ
    from call to call; ``calls``: how many in a row repeated each other."""

    def __init__(self) -> None:
        self.refs: list[TensorRef] = []
        self.copied: list[bool] = []
        self.calls, self.tries = 0, 0
        self.snapshot: Snapshot | None = None
        self.reads: Reads | None = None
        self.captured: graphs.Captured | None = None
        self.why: str | None = None

    def repeats(self, tensors: list[Tensor]) -> bool:
        """Whether the tensors are those of the last call, or may be copied into these."""
        return len(self.refs) == len(tensors) and all(
            copied or (ref() is t and ref.version == t._version and ref.pointer == t.data_ptr())
            for ref, t, copied in zip(self.refs, tensors, self.copied))

    def stands(self) -> bool:
        """Whether the module's state is unchanged."""
        return (self.snapshot is not None and self.snapshot.holds()
                and self.reads is not None and self.reads.holds())

    def forget(self) -> None:
        self.calls, self.captured, self.snapshot, self.reads = 0, None, None, None


class _Module:
    """A module's calls, by their form. ``open``: it is never captured, but modules in it may be;
    ``closed``: neither is; ``calls``: how many in a row repeated no other one."""

    def __init__(self, module: nn.Module) -> None:
        key = id(module)
        self.ref = weakref.ref(module, lambda _: _entries.pop(key, None))
        self.kinds: dict[tuple, _Kind] = {}
        self.open = not any(_of_graphs(m) for m in module.modules())
        self.closed = False
        self.calls = 0


def _of_graphs(module: nn.Module) -> bool:
    return any(cls.__name__ in ("MessagePassing", "HeteroConv") for cls in type(module).__mro__)


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


def summary() -> dict[str, Any]:
    """``replays``: {class of the module: calls that were replayed}; ``refused``: {class: {why a
    call was not captured: times}}."""
    refused: dict[str, dict[str, int]] = {}
    for (name, why), n in _refused.items():
        refused.setdefault(name, {})[why] = n
    return {"replays": dict(_replays), "refused": refused}


def counted(name: str) -> None:
    """Count one replayed call of a module of that class."""
    _replays[name] += 1


def let_go() -> None:
    """Forget all captures, and free their memory."""
    _entries.clear()


def reset() -> None:
    """Forget all captures and counts."""
    let_go()
    _refused.clear()
    _replays.clear()


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
    entry = _entries.get(id(module))
    if entry is None or entry.ref() is not module:
        entry = _entries[id(module)] = _Module(module)
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


def _routed(native: Callable, module: nn.Module, entry: _Module, args: tuple, kwargs: dict) -> Any:
    tensors: list[Tensor] = []
    try:
        form = values.apart((args, kwargs), tensors)
    except Unknown as problem:
        return _left(native, module, entry, args, kwargs, f"its arguments hold {problem}")
    device = _device(module, tensors)
    if device is None or unversioned(tensors):
        return native(module, *args, **kwargs)
    key = _key(form, tensors, module, device)
    kind = entry.kinds.get(key)
    entry.calls += 1
    if kind is None:
        if entry.calls > _TRIES:
            entry.closed = True
            told(module, "its arguments have other forms in each call")
            return native(module, *args, **kwargs)
        for old in [old for old in entry.kinds if configs.stale(old[-1])]:
            del entry.kinds[old]  # no call will be like it
        if len(entry.kinds) >= _KINDS:
            entry.kinds.pop(next(iter(entry.kinds)))
        kind = entry.kinds[key] = _Kind()
    if kind.why is not None:
        entry.closed = entry.calls > _TRIES * _KINDS
        return native(module, *args, **kwargs)
    if kind.captured is not None:
        if kind.repeats(tensors) and kind.stands():
            entry.calls = 0
            if kind.captured.free():
                counted(type(module).__name__)
                return kind.captured.replay(tensors)
            return native(module, *args, **kwargs)
        kind.forget()
    return _watched(native, module, entry, kind, _Call(form, tensors, args, kwargs, device))


def _device(module: nn.Module, tensors: list[Tensor]) -> torch.device | None:
    """The device of the call, None if calls cannot be captured there."""
    first = tensors[0] if tensors else next(module.parameters(), None)
    return first.device if first is not None and first.device.type in DEVICES else None


class _Call(NamedTuple):
    form: Any
    tensors: list[Tensor]
    args: tuple
    kwargs: dict
    device: torch.device


def _key(form: Any, tensors: list[Tensor], module: nn.Module, device: torch.device) -> tuple:
    """Key of calls of one form; the configuration's epoch comes last."""
    config = configs.current()
    same = [*map(id, tensors)]
    given_twice = tuple(map(same.index, same)) if len(set(same)) < len(same) else ()
    return (form, given_twice,
            *[(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors],
            torch.is_grad_enabled(), module.training, torch.is_autocast_enabled(device.type),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
            config.epoch if config is not None else 0)


# --- calls that are not captured yet --------------------------------------------------------------

def _watched(native: Callable, module: nn.Module, entry: _Module, kind: _Kind,
             given: _Call) -> Any:
    """The call's result, run natively or captured now; facts of the call are noted in ``kind``."""
    _, tensors, args, kwargs, device = given
    threads.called()
    if not _again(kind, tensors):
        kind.forget()
        kind.tries += 1
        if kind.tries > _TRIES:
            kind.why = told(module, "its graph is another one in each call")
        return native(module, *args, **kwargs)
    entry.calls = 0
    try:
        if kind.snapshot is None or not kind.stands():
            kind.calls, kind.tries = 0, kind.tries + 1
            if kind.tries > _TRIES:
                raise Unknown("changes in each call")
            reads = Reads(list(module.modules()), (args, kwargs))
            kind.reads, kind.snapshot = reads, Snapshot([module, *reads.modules], device)
    except Unknown as problem:
        return _left(native, module, entry, args, kwargs, f"its state: {problem}")
    if kind.calls < _CALLS:
        return _observed(native, module, entry, kind, given)
    kind.why = _unfit(given)
    if kind.why is None:
        try:
            kind.captured = graphs.Captured(_work(native, module, kind, given))
        except graphs.Refused as problem:
            kind.why = str(problem)
            entry.open = len(entry.kinds) == 1 and len(list(module.children())) > 0
    if kind.why is not None:
        told(module, kind.why)
        return native(module, *args, **kwargs)
    if not kind.stands():  # its code, run by another way for the capture, changed the module
        kind.forget()
        kind.tries += 1
        return native(module, *args, **kwargs)
    _log.info("gnnaccel: calls of %s are replayed as CUDA graphs", type(module).__name__)
    counted(type(module).__name__)
    return kind.captured.replay(tensors)  # type: ignore[union-attr]


def _again(kind: _Kind, tensors: list[Tensor]) -> bool:
    """Whether this call has the graph of the last one. Floating-point tensors other than that one's
    are to be copied from now on."""
    new = [TensorRef(t) for t in tensors]
    before, kind.refs = kind.refs, new
    if len(before) != len(tensors):
        kind.copied = [False] * len(tensors)
        return False
    alike = True
    for i, (ref, t) in enumerate(zip(before, tensors)):
        if kind.copied[i] or ref.unmoved(t):
            continue
        if t.is_floating_point() and t.numel():
            kind.copied[i] = True
        else:
            alike = False
    return alike


def _observed(native: Callable, module: nn.Module, entry: _Module, kind: _Kind,
              given: _Call) -> Any:
    """The call's result, run natively and watched: it may not wait for the device, change the
    module, or draw a random number on the host."""
    device = given.device
    drawn = random_state(device)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with waits(device) as waited:
        out = native(module, *given.args, **given.kwargs)
    why = None
    if waited:
        why = "it waits for the device"
    elif random_state(device) != drawn:
        why = "it draws random numbers on the host"
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
            kind.why = told(module, why)
            entry.open = len(entry.kinds) == 1 and len(list(module.children())) > 0
    return out


def _unfit(given: _Call) -> str | None:
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


def _work(native: Callable, module: nn.Module, kind: _Kind, given: _Call) -> graphs.Work:
    ref: Any = weakref.ref(module)
    snapshot, reads, form = kind.snapshot, kind.reads, given.form
    assert snapshot is not None and reads is not None

    # an earlier result that is still there keeps the nodes that add up the gradients of the
    # parameters on their stream, and a capture would wait for that
    aliases = {p: nn.Parameter(p.detach()) for p in snapshot.parameters if p.requires_grad}

    def call(tensors: list[Tensor]) -> Any:
        args, kwargs = values.together(form, iter(tensors))
        with snapshot.replaced(aliases):
            return native(ref(), *args, **kwargs)

    def aside(tensors: list[Tensor]) -> Any:
        if not (snapshot.holds() and reads.holds()):
            raise RuntimeError(
                f"{type(ref()).__name__} was changed between forward and a backward with "
                "create_graph=True, which runs its code again, as its calls run as CUDA graphs; "
                "leave it out with gnnaccel.enable(capture=False)")
        args, kwargs = values.together(form, iter(tensors))
        buffers = {name: b.clone() for name, b in ref().named_buffers()}
        before, _here.inside = _here.inside, True
        try:
            return torch.func.functional_call(ref(), buffers, args, kwargs)
        finally:
            _here.inside = before

    wanted = [t for t in (*snapshot.parameters, *given.tensors) if t.requires_grad]
    fixed = [t for t, copied in zip(given.tensors, kind.copied)
             if not copied and t.is_floating_point()]
    return graphs.Work(call, aside, given.tensors, kind.copied, list(aliases),
                       list(aliases.values()), snapshot.buffers, [*snapshot.parameters, *fixed],
                       given.device, torch.is_grad_enabled() and bool(wanted))


def _left(native: Callable, module: nn.Module, entry: _Module, args: tuple, kwargs: dict,
          why: str) -> Any:
    """The native result; the module cannot be captured from now on, but those in it may."""
    entry.open = True
    told(module, why)
    _here.inside = False
    return native(module, *args, **kwargs)


def told(module: nn.Module | str, why: str) -> str:
    """``why``, after it was counted, and logged the first time."""
    name = module if isinstance(module, str) else type(module).__name__
    if not _refused[name, why]:
        _log.info("gnnaccel: calls of %s are not captured: %s", name, why)
    _refused[name, why] += 1
    return why
