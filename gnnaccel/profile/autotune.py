"""Measuring the ways that a layer's call can go, where the cost model would only estimate: opt-in, kept, reused."""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gnnaccel import adapters, session
from gnnaccel.dispatch.pins import Decisions, Kind, Pinned, kind_of

_MARGIN = 0.95  # of native's time, which another way has to stay under


@dataclass(frozen=True)
class Tuning:
    """``times``: milliseconds per call by way ("native" or a kernel's name), the host's own first; ``taken``: the way kept."""

    layer: str
    grad: bool
    times: dict[str, float]
    taken: str

    def __str__(self) -> str:
        ways = ", ".join(f"{way} {ms:.3g} ms" for way, ms in self.times.items())
        return f"{self.layer}, {'training' if self.grad else 'forward'}: {self.taken} ({ways})"


def autotune(layer: Any, *inputs: Any, **kwargs: Any) -> list[Tuning]:
    """Time every way in which ``layer(*inputs, **kwargs)`` can run, and keep the fastest in the user's cache.

    In training mode of the layer a forward and backward is timed, and a forward alone without gradients; otherwise only the
    latter. Calls like these, of the same class, sizes of graph (to the next power of two) and dtype, go the way kept under
    ``enable(decisions=True)``, in this environment: the same GPU or kind of CPU, versions of torch, CuPy and gnnaccel. A
    way is kept only if it takes less than 95 % of the host's own time.

    Gradients, random numbers and the layer's mode are as before. Raises TypeError for a layer that gnnaccel does not know,
    ValueError for a call that it would not take over, GnnaccelError or OSError where the cache cannot be written.
    """
    import torch

    from gnnaccel.dispatch import planner, tuned

    adapter = adapters.adapter_of(layer)
    if adapter is None:
        raise TypeError(f"{type(layer).__name__} is no layer that gnnaccel knows; it knows {', '.join(adapters.known_layers())}")
    found, decisions = [], []
    for grad in (True, False) if layer.training else (False,):
        with torch.set_grad_enabled(grad):
            stated, given = _stated(adapter, layer, inputs, kwargs)
            request = stated.request(given.device.type, grad, False)
            tuning, pinned = _tune(layer, inputs, kwargs, request, given.device)
        found.append(tuning)
        decisions.append(_decision(stated, kind_of(request), pinned))
    tuned.keep(tuned.environment(given.device.type), decisions)
    planner.forget()
    return found


def _stated(adapter: Any, layer: Any, inputs: tuple, kwargs: dict) -> tuple[Any, Any]:
    from gnnaccel.dispatch.reasons import Reason

    found = adapter.state(layer, inputs, kwargs)
    if isinstance(found, Reason):
        raise ValueError(f"{type(layer).__name__} runs natively here whatever it takes: {found} ({found.hint})")
    return found


def _tune(layer: Any, inputs: tuple, kwargs: dict, request: Any, device: Any) -> tuple[Tuning, Pinned]:
    import torch

    from gnnaccel.profile.bench import timing

    kind = kind_of(request)
    ways = {pinned.kernel or "native": pinned for pinned in candidates(request)}
    wanted = [t for t in (*layer.parameters(), *_tensors(inputs)) if t.requires_grad]

    def step() -> None:
        out = layer(*inputs, **kwargs)
        if request.grad and wanted:
            parts = [t for t in _tensors(out if isinstance(out, (tuple, dict)) else (out,)) if t.requires_grad]
            torch.autograd.grad([t.float().square().sum() for t in parts], wanted, allow_unused=True)

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        timed = timing.measure_rounds({way: (step, _only(kind, pinned)) for way, pinned in ways.items()}, device,
                                      timing.Effort(batches=12, batch_ms=10.0, seconds=1.0))
    times = {way: timed[way].ms for way in ways}
    best = min(times, key=times.get)
    taken = best if times[best] < _MARGIN * times["native"] else "native"
    return Tuning(type(layer).__name__, request.grad, times, taken), ways[taken]


def candidates(request: Any) -> list[Pinned]:
    """The host's own code, and every way that nothing speaks against."""
    from gnnaccel.dispatch import specs
    from gnnaccel.dispatch.config import Config
    from gnnaccel.dispatch.relational.request import RelationalRequest

    known = specs.RELATIONAL if type(request) is RelationalRequest else specs.ATTENTION
    config = Config(when="supported")
    return [Pinned("native", None), *(Pinned(spec.route, spec.name) for spec in known if not spec.unsupported(request, config))]


def _only(kind: Kind, pinned: Pinned) -> Any:
    """A block in which calls of this kind go this way."""

    @contextmanager
    def block():
        with session.enabled(backend="auto", when="supported", on_fallback="native", include=[], exclude=[],
                             decisions=Decisions("autotune", {kind: pinned})):
            yield

    return block


def _tensors(found: Any) -> list[Any]:
    """Floating-point tensors in nested tuples, lists and dicts."""
    import torch

    if isinstance(found, torch.Tensor):
        return [found] if found.is_floating_point() else []
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, (tuple, list)) else ()
    return [t for part in parts for t in _tensors(part)]


def _decision(stated: Any, kind: Kind, pinned: Pinned) -> dict[str, Any]:
    """As JSON has it; sizes are those of the call."""
    edges = stated.num_edges + getattr(stated, "loops", 0)
    return dict(layer=kind.layer, num_src=stated.num_src, num_dst=stated.num_dst, num_edges=edges, dtype=kind.dtype,
                grad=kind.grad,
                route=pinned.route, kernel=pinned.kernel)
