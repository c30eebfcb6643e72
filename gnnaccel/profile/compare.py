"""`compare`: every layer taken over, held against the host's own code on the same inputs and random
numbers."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnaccel import session
from gnnaccel.dispatch.observe import watch
from gnnaccel.dispatch.observe.records import Sink
from gnnaccel.dispatch.observe.watch import Run, Visit
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.names import IdentityMap, original
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.profile.frames import Frames, Naming
from gnnaccel.profile.shadow import Shadow, shadowed
from gnnaccel.profile.sides import named_tensors, quietly
from gnnaccel.profile.tables import milliseconds, size, table, times
from gnnaccel.profile.undisturbed import RandomState, check_model, repeatable, undisturbed

OFF = "gnnaccel is switched off by the environment variable GNNACCEL"
_KINDS_PER_LAYER = 4  # different kinds of inputs for which one layer is compared
_KINDS = 256
_LOOKS = 3  # at calls of a kind that went native


@dataclass
class Comparison:
    """``layers``: one `Shadow` per layer and kind of input. ``str()`` of it is a table;
    ``as_dicts()`` is data."""

    layers: list[Shadow] = field(default_factory=list)
    enabled: bool = True

    @property
    def ok(self) -> bool:
        """Whether no layer was found to be wrong."""
        return not self.mismatches

    @property
    def mismatches(self) -> list[Shadow]:
        return [one for one in self.layers if one.verdict == "mismatch"]

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self.layers]

    def __str__(self) -> str:
        if not self.enabled:
            return f"{OFF}\n"
        rows = []
        for one in self.layers:
            worst = [_digits(one.worst, name) for name in ("ours", "host", "allowed")]
            rows.append((one.who, one.kernel or one.route, one.verdict, *worst,
                         milliseconds(one.native_ms), milliseconds(one.ours_ms),
                         times(one.native_ms, one.ours_ms), size(one.native_bytes),
                         size(one.ours_bytes)))
        columns = ("layer", "kernel", "verdict", "error", "host's", "allowed", "native ms",
                   "ours ms", "faster", "native MiB", "ours MiB")
        text = table("compared with the host's own code; errors relative to it in fp64, the worst "
                     "of output and gradients",
                     columns, rows, right=columns[3:])
        notes = dict.fromkeys(f"{one.who}: {note}" for one in self.layers for note in one.notes)
        return "\n".join([text.rstrip("\n"), *notes]) + "\n"


def _digits(error: Any, name: str) -> str | None:
    return None if error is None else f"{getattr(error, name):.1e}"


def compare(model: torch.nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] | None = None,
            **kwargs: Any) -> Comparison:
    """Hold each layer of ``model`` that gnnaccel takes over against the host's own code, on what
    ``model(*inputs, **kwargs)`` gives it to work on.

    Per layer: output and gradients (of inputs and parameters), each against the host's own layer
    run in fp64. Right is what is at most twice as far from that as the host is in the layer's own
    precision, plus a floor. ``loss``: what to differentiate, a function of the model's output; then
    gradients are those that reach the layer, otherwise random ones are sent back through it. Layers
    that draw random numbers are compared in eval mode: their dropout draws from the same
    distribution, but not the same mask. A layer that is wrong is excluded from here on, as by
    ``exclude(layer)``, and a warning says so.

    Works with ``enable()`` and without. The model is as before afterwards: parameters, ``.grad``,
    buffers, modes, random numbers. Raises TypeError for what is no model, ValueError for a model
    whose lazy parameters are not initialised.
    """
    check_model(model, "compare")
    with undisturbed(model), session.enabled(first_use="wait"):
        upstream = None if loss is None else _upstream(model, inputs, kwargs, loss)
        comparer = Comparer(upstream, one_thread=True, names=_names(model))
        comparer.result.enabled = configs.current() is not None
        with comparer, torch.enable_grad():
            model(*inputs, **kwargs)
    return comparer.result


def _names(model: torch.nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in model.named_modules()}


def _upstream(model: torch.nn.Module, inputs: tuple, kwargs: dict,
              loss: Callable) -> list[list[Tensor | None]]:
    """The gradient that reaches every tensor which each routed call made, call by call."""
    outs: list[list[Tensor]] = []

    def keep(visit: Visit, run: Run) -> Any:
        if visit.adapter is not None:
            # as when it is compared: a layer that goes elsewhere has other calls inside it
            _know(visit)
        place = len(outs)
        outs.append([])
        out = run(visit)
        outs[place] = list(named_tensors(out, "").values())
        return out

    generators = RandomState()
    with watching(keep, lambda record: None), torch.enable_grad():
        value = loss(model(*inputs, **kwargs))
    generators.restore()
    flat = [t for part in outs for t in part]
    wanted = [t for t in flat if t.requires_grad]
    found = torch.autograd.grad(value, wanted, allow_unused=True) if wanted else ()
    by_id = {id(t): g for t, g in zip(wanted, found)}
    return [[by_id.get(id(t)) for t in part] for part in outs]


@contextlib.contextmanager
def watching(watcher: watch.Watcher, sink: Callable):
    """A block in which ``watcher`` stands around the calls and ``sink`` gets the records."""
    watch.add(watcher, sink, repeats=True)
    try:
        yield
    finally:
        watch.remove(watcher, sink)


class Comparer:
    """Compares the first call of each layer, and of each new kind of input, while a script or model
    runs; a context manager.

    ``upstream``: gradients for the outputs of each call, in order; ``names``: what to call layers,
    by id. A script's results are those of the call itself; only where that was wrong it is repeated
    natively.
    """

    def __init__(self, upstream: list | None = None, one_thread: bool = False,
                 names: dict[int, str] | None = None):
        self.result = Comparison()
        self._frames = Frames()
        self._sink: Sink = self._frames.sink
        self._upstream, self._names, self._calls = upstream, names or {}, 0
        self.naming = Naming()
        self._thread = threading.get_ident() if one_thread else None
        self._kinds: IdentityMap[dict[tuple, tuple[int, Shadow]]] = IdentityMap()
        self._local = threading.local()
        # one comparison at a time: they exchange a layer's parameters
        self._lock = threading.RLock()

    def __enter__(self) -> Comparer:
        watch.add(self._watch, self._sink, repeats=True)
        return self

    def __exit__(self, *_: Any) -> None:
        watch.remove(self._watch, self._sink)

    def _watch(self, visit: Visit, run: Run) -> Any:
        if getattr(self._local, "busy", False):  # a call inside a comparison
            return quietly(visit, run)
        place, self._calls = self._calls, self._calls + 1
        if not self._due(visit):
            with self._frames.inside(visit):  # so that no record is taken for an outer call's
                return run(visit)
        return self._compared(visit, run, None if self._upstream is None else self._upstream[place])

    def _compared(self, visit: Visit, run: Run, upstream: list[Tensor | None] | None) -> Any:
        kind = _kind(visit)  # before the call, which may change the mode
        if self._thread is not None:
            _know(visit)
        before = RandomState()
        with self._frames.inside(visit) as frame:
            out = run(visit)
        with self._lock, self._comparing():
            after = RandomState()
            name = self._names.get(id(original(visit.layer))) or self.naming.of(visit.layer)
            found = shadowed(visit, frame.record, upstream, name)
            self._keep(visit, kind, found)
            after.restore()
        if found.verdict != "mismatch":
            return out
        found.opt_out(visit.layer)
        before.restore()
        return run(visit._replace(config=configs.current()))

    @contextlib.contextmanager
    def _comparing(self) -> Iterator[None]:
        self._local.busy = True
        try:
            yield
        finally:
            self._local.busy = False

    def _due(self, visit: Visit) -> bool:
        """Whether this is a layer's first call of its kind, and here is where it can be
        repeated."""
        if visit.adapter is None or self._thread not in (None, threading.get_ident()):
            return False
        if not repeatable() or len(self.result.layers) >= _KINDS:
            return False
        kinds, kind = self._kinds.get(visit.layer) or {}, _kind(visit)
        looks, _ = kinds.get(kind, (0, None))
        return looks < _LOOKS and (looks > 0 or len(kinds) < _KINDS_PER_LAYER)

    def _keep(self, visit: Visit, kind: tuple, found: Shadow) -> None:
        """A layer may go native over a graph that is new, and not over the same graph later; so
        that is looked at again."""
        kinds = self._kinds.get(visit.layer)
        if kinds is None:
            self._kinds.set(visit.layer, kinds := {})
        looks, earlier = kinds.get(kind, (0, None))
        kinds[kind] = looks + 1 if found.verdict == "native" else _LOOKS, found
        if earlier is not None:
            self.result.layers.remove(earlier)
        self.result.layers.append(found)


def _know(visit: Visit) -> None:
    """Build the structure of the call's graph, so that it is decided as in the second step of a
    training; a layer may stay native over a graph that it sees for the first time."""
    found = visit.adapter.state(visit.layer, visit.args, visit.kwargs)
    if not isinstance(found, Reason):
        found[0].lookup(found[1])


def _kind(visit: Visit) -> tuple:
    """What calls of a layer are told apart by: magnitudes, so that the sizes of mini-batches do not
    make kinds."""
    tensors = named_tensors((visit.args, visit.kwargs), "")
    shapes = tuple((name, t.dtype, t.shape[0].bit_length() if t.dim() else 0, t.shape[1:])
                   for name, t in tensors.items())
    autocast = tuple(map(torch.is_autocast_enabled, ("cuda", "cpu")))
    return shapes, torch.is_grad_enabled(), visit.layer.training, autocast
