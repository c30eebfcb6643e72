"""Measuring the ways that a layer's call can go, where the cost model would only estimate: opt-in,
kept, reused."""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gnnaccel import adapters, session, store
from gnnaccel.dispatch import router
from gnnaccel.dispatch.observe import counters, records, watch
from gnnaccel.dispatch.observe.records import Record
from gnnaccel.dispatch.observe.watch import Run, Visit
from gnnaccel.dispatch.plan import planner
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy import rules, tuned
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.policy.pins import Pinned
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.run.autograd import checkpointed
from gnnaccel.profile.bench import timing
from gnnaccel.profile.frames import Naming, who
from gnnaccel.profile.sides import named_tensors
from gnnaccel.profile.undisturbed import repeatable, undisturbed

_MARGIN = 0.95  # of native's time, which another way has to stay under
_MOST = 256  # kinds of calls in one run


@dataclass(frozen=True)
class Tuning:
    """``times``: milliseconds per call by way ("native" or a kernel's name), the host's own first;
    ``taken``: the way kept."""

    layer: str
    grad: bool
    times: dict[str, float]
    taken: str

    def __str__(self) -> str:
        ways = ", ".join(f"{way} {ms:.3g} ms" for way, ms in self.times.items())
        return f"{self.layer}, {'training' if self.grad else 'forward'}: {self.taken} ({ways})"


def autotune(layer: Any, *inputs: Any, **kwargs: Any) -> list[Tuning]:
    """Time every way in which ``layer(*inputs, **kwargs)`` can run, and keep the fastest in the
    user's cache.

    In training mode of the layer a forward and backward is timed, and a forward alone without
    gradients; otherwise only the latter. Calls like these (of the same class, computation, heads,
    widths and dtypes, over graphs of the same sizes to the next power of two) go the way kept under
    ``enable(decisions=True)``, in this environment: the same GPU or kind of CPU, versions of torch,
    CuPy and gnnaccel. A way is kept only if it takes less than 95 % of the host's own time.

    Gradients, random numbers, counts and the layer are as before. Raises TypeError for a layer that
    gnnaccel does not know, ValueError for a call that it would not take over or that does not go by
    the planner (message passing of layers without an adapter), GnnaccelError or OSError where the
    cache cannot be written.
    """
    adapter = adapters.adapter_of(layer)
    if adapter is None:
        raise TypeError(f"{type(layer).__name__} is no layer that gnnaccel knows; it knows "
                        f"{', '.join(adapters.known_layers())}")
    found = []
    for grad in (True, False) if layer.training else (False,):
        with torch.set_grad_enabled(grad):
            spec, given = _stated(adapter, layer, inputs, kwargs)
            found.append(tune(lambda: layer(*inputs, **kwargs), layer, (inputs, kwargs), spec,
                              given))
    return found


def _stated(adapter: Any, layer: Any, inputs: tuple, kwargs: dict) -> tuple[Any, Any]:
    found = adapter.state(layer, inputs, kwargs)
    if isinstance(found, Reason):
        raise ValueError(f"{type(layer).__name__} runs natively here whatever it takes: {found} "
                         f"({found.hint})")
    return found


def tune(call: Callable[[], Any], layer: Any, inputs: Any, spec: Any, given: Any,
         name: str | None = None) -> Tuning:
    """Time the ways of one call of ``layer``, with gradients if they are on, and keep the fastest.
    ``inputs``: of the call, wherever they lie in it; ``spec``, ``given``: as of adapters;
    ``name``: for `Tuning.layer`. Raises as `autotune`."""
    grad = torch.is_grad_enabled()
    request = spec.request(given.device.type, grad, False)
    key, ways = tuned.key_of(request), {pinned.kernel or "native": pinned
                                        for pinned in candidates(request)}
    wanted = [t for t in (*layer.parameters(), *named_tensors(inputs, "").values())
              if t.requires_grad]

    def step() -> None:
        out = call()
        if grad and wanted:
            parts = [t for t in named_tensors(out, "").values() if t.requires_grad]
            torch.autograd.grad([t.float().square().sum() for t in parts], wanted,
                                allow_unused=True)

    # enabled: so that turns need not patch
    with (session.enabled(first_use="wait"), undisturbed(layer), records.muted(),
          counters.uncounted()):
        timed = timing.measure_rounds({way: (step, _only(key, pinned))
                                       for way, pinned in ways.items()}, given.device,
                                      timing.Effort(batches=12, batch_ms=10.0, seconds=1.0))
    times = {way: timed[way].ms for way in ways}
    best = min(times, key=times.__getitem__)
    taken = best if times[best] < _MARGIN * times["native"] else "native"
    tuned.keep(tuned.environment(given.device.type),
               {key: _entry(request, spec, ways[taken], times)})
    planner.forget()
    return Tuning(name or type(layer).__name__, grad, times, taken)


def candidates(request: Any) -> list[Pinned]:
    """The host's own code, and every way that nothing speaks against."""
    config = Config(when="supported")
    known, _ = planner.asked(request)
    return [Pinned("native", None), *(Pinned(spec.route, spec.name)
                                      for spec in known if not spec.unsupported(request, config))]


def _only(key: str, pinned: Pinned) -> Any:
    """A block in which calls of this key go this way."""

    @contextmanager
    def block():
        with session.enabled(backend="auto", when="supported", on_fallback="native", include=[],
                             exclude=[], decisions=tuned.Only(key, pinned)):
            yield

    return block


def _entry(request: Any, spec: Any, pinned: Pinned, times: dict[str, float]) -> dict[str, Any]:
    """As JSON has it: the way, and of what it is, for a reader."""
    facts = {name: value for name, value in spec.facts().items() if isinstance(value, int)}
    return dict(route=pinned.route, kernel=pinned.kernel, layer=request.native, **facts,
                heads=getattr(request, "heads", None), width=request.width,
                dtype=str(request.row).removeprefix("torch."), grad=request.grad,
                times_ms={way: round(ms, 6) for way, ms in times.items()})


# --- while a script runs: --autotune --------------------------------------------------------------

class Tuner:
    """A context manager. Each kind of calls that an earlier run has not timed here is timed before
    the second call of a layer over the same graph: graphs that come once are decided as usual, so
    there is nothing to keep for them. Random numbers, gradients and counts of the script stay what
    they are without it."""

    def __init__(self) -> None:
        self.found: list[Tuning] = []
        self.notes: list[str] = []
        self.known = 0  # kinds of calls that an earlier run has timed
        self._done: set[str] = set()
        self._graphs: IdentityMap[tuple] = IdentityMap()
        self._naming, self._lock = Naming(), threading.RLock()
        self._sink = self._recorded

    def __enter__(self) -> Tuner:
        watch.add(self._watch, self._sink, repeats=True)
        return self

    def __exit__(self, *_: Any) -> None:
        watch.remove(self._watch, self._sink)

    @staticmethod
    def _recorded(record: Record) -> None:
        """Watchers are asked only while somebody listens."""

    def _watch(self, visit: Visit, run: Run) -> Any:
        if visit.adapter is not None and self._possible():
            with self._lock:
                self._look(visit)
        return run(visit)

    def _possible(self) -> bool:
        """Whether here is where a call can be repeated, backward included."""
        return (repeatable() and len(self._done) < _MOST and not checkpointed()
                and not torch.is_inference_mode_enabled())

    def _look(self, visit: Visit) -> None:
        layer = visit.layer
        if (not rules.verdict(layer, visit.config).inside
            or settings.asked(layer, visit.config) is not None):
            return
        found = visit.adapter.state(layer, visit.args, visit.kwargs)
        if isinstance(found, Reason) or not hasattr(found[0], "request"):
            return  # message passing without an adapter has an estimate of its own
        spec, given = found
        key = tuned.key_of(spec.request(given.device.type, torch.is_grad_enabled(), False))
        if key in self._done or not self._again(layer, given.structure):
            return
        self._done.add(key)
        if key in tuned.kept(tuned.environment(given.device.type)):
            self.known += 1
        else:
            self._time(visit, spec, given)

    def _again(self, layer: Any, structure: tuple[torch.Tensor, ...]) -> bool:
        """Whether the layer's last call was over these very tensors."""
        last, now = self._graphs.get(layer), [(t, t._version) for t in structure]
        self._graphs.set(layer, tuple((weakref.ref(t), version) for t, version in now))
        return last is not None and len(last) == len(now) and all(
            ref() is t and version == held for (ref, held), (t, version) in zip(last, now))

    def _time(self, visit: Visit, spec: Any, inputs: Any) -> None:
        layer, name = visit.layer, who(self._naming.of(visit.layer), type(visit.layer).__name__)

        def call() -> Any:
            config = configs.current()
            assert config is not None
            return router.route(layer, visit.adapter, visit.native, visit.args, visit.kwargs,
                                config)

        try:
            self.found.append(tune(call, layer, (visit.args, visit.kwargs), spec, inputs, name))
        except torch.cuda.OutOfMemoryError:
            self.notes.append(f"{name}: not timed, as one of the ways ran out of memory; it is "
                              "decided as usual")
        except OSError as problem:  # the folder could be written when the run began
            self.notes.append(f"{name}: timed, but not kept ({problem}); it is decided as usual")

    def __str__(self) -> str:
        lines = [str(one) for one in self.found] + self.notes
        if self.known:
            lines.append(f"{self.known} kinds of calls go as an earlier run has timed")
        if self.found:
            lines.append(f"kept in {store.folder() / tuned.NAME}")
        return "\n".join(lines or ["nothing was timed: no layer was called twice over the same "
                                   "graph"]) + "\n"
