"""`explain`: before any training, which layers of a model would be taken over, by what, and why the
others would not."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from gnnaccel import adapters, session
from gnnaccel.dispatch.observe import exchanges
from gnnaccel.dispatch.observe.exchanges import Exchange
from gnnaccel.dispatch.observe.watch import Run, Visit
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.names import original
from gnnaccel.profile.compare import OFF, watching
from gnnaccel.profile.exchanged import megabytes
from gnnaccel.profile.frames import who
from gnnaccel.profile.shadow import both_ms
from gnnaccel.profile.sides import (Decided, Sides, decided, decided_operation, planned,
                                    quietly)
from gnnaccel.profile.tables import milliseconds, table, times
from gnnaccel.profile.undisturbed import check_model, undisturbed

TAKEN, NATIVE, INSIDE, UNCALLED, UNKNOWN = ("taken over", "native", "inside another", "not called",
                                            "not recognised")


@dataclass(frozen=True)
class Layer:
    """What would become of one layer. ``status``: "taken over", "native", "inside another" (that is
    taken over), "not called", "not recognised"; ``reasons``: what speaks against each candidate,
    each {candidate, code, text, hint}; ``sent_bytes``: what the calls sent to other processes, over
    a part of a graph, forward (None: nothing is exchanged); estimates and measurements in
    milliseconds, of forward, or in training mode of forward and backward."""

    name: str
    layer: str
    status: str
    route: str = "native"
    kernel: str | None = None
    calls: int = 0
    graph: dict[str, int] | None = None
    estimated_ms: float | None = None
    estimated_native_ms: float | None = None
    measured_ms: float | None = None
    measured_native_ms: float | None = None
    reasons: tuple[dict[str, str], ...] = ()
    note: str = ""
    sent_bytes: int | None = None

    @property
    def who(self) -> str:
        return who(self.name, self.layer)

    @property
    def times(self) -> tuple[float | None, float | None]:
        """Natively and by us: measured, else estimated."""
        if self.measured_ms is not None:
            return self.measured_native_ms, self.measured_ms
        return self.estimated_native_ms, self.estimated_ms


@dataclass
class Explained:
    """``layers`` in the order in which they are called, the others after them. ``str()`` of it is a
    table, ``as_dicts()`` is data."""

    layers: list[Layer] = field(default_factory=list)
    training: bool = False
    enabled: bool = True

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self.layers]

    def __str__(self) -> str:
        rows = []
        over_part = any(one.sent_bytes is not None for one in self.layers)
        for one in self.layers:
            edges = one.graph["num_edges"] if one.graph else None
            host, ours = one.times
            rows.append((one.who, one.status, one.kernel or "-", edges, one.calls or None,
                         milliseconds(host), milliseconds(ours), times(host, ours),
                         *[megabytes(one.sent_bytes)] * over_part))
        measured = any(one.measured_ms is not None for one in self.layers)
        title = (f"what gnnaccel would do; times {'measured' if measured else 'estimated'}, "
                 f"{'forward and backward' if self.training else 'forward only'}")
        numbers = ("edges", "calls", "native ms", "ours ms", "faster", *["sent MB"] * over_part)
        text = table(title, ("layer", "", "kernel", *numbers), rows, right=numbers)
        lines = [] if self.enabled else [OFF]
        for one in self.layers:
            lines += [f"{one.who}: {why}" for why in _whys(one)]
        if any(one.status == UNKNOWN for one in self.layers):
            lines.append(f"known are {', '.join(dict.fromkeys(adapters.known_layers()))}, and what "
                         "derives from them; and the message passing of PyG's other layers and "
                         "your own")
        return text + "".join(f"{line}\n" for line in lines)


def _whys(one: Layer) -> Iterator[str]:
    """For a reader: the reasons of a layer that is not taken over, notes of any."""
    if one.status == NATIVE:
        by_reason: dict[tuple, list[str]] = {}
        for item in one.reasons:
            by_reason.setdefault((item["code"], item["text"], item["hint"]),
                                 []).append(item["candidate"])
        for (code, text, hint), candidates in by_reason.items():
            what = "" if candidates == [one.layer] else f"not {', '.join(candidates)}: "
            yield f"{what}{code} {text}; {hint}"
    if one.note:
        yield one.note


def explain(model: torch.nn.Module, *inputs: Any, measure: bool = False,
            **kwargs: Any) -> Explained:
    """Which layers of ``model`` gnnaccel would take over when called as ``model(*inputs,
    **kwargs)``, by which kernel on this graph, with what gain; which not, why, and what would
    change that; and which it does not know at all.

    The model runs once, without gradients. Estimates are for its mode: forward and backward in
    training, else forward. ``measure``: each layer taken over is timed as well, natively and by its
    kernel. Decisions are those for a graph that comes again, as in every step but the first. Works
    with ``enable()``, under its options, and without. Nothing is counted or recorded, and the model
    is as before: parameters, buffers, modes, random numbers. Raises TypeError for what is no model,
    ValueError for a model whose lazy parameters are not initialised.
    """
    check_model(model, "explain")
    with undisturbed(model), session.enabled(first_use="wait"):
        looker = _Looker(model, measure)
        result = Explained(training=model.training, enabled=configs.current() is not None)
        exchanges.add(looker.exchange)
        try:
            with watching(looker, lambda record: None), torch.no_grad():
                model(*inputs, **kwargs)
        finally:
            exchanges.remove(looker.exchange)
        result.layers = [replace(one, sent_bytes=looker.sent.get((one.name, one.layer)))
                         for one in (*looker.found.values(), *_uncalled(model, looker))]
    return result


class _Looker:
    """A watcher that decides every call itself and runs it on the route decided."""

    def __init__(self, model: torch.nn.Module, measure: bool):
        self.found: dict[tuple, Layer] = {}
        self.called: set[int] = set()
        self.sent: dict[tuple[str, str], int] = {}  # bytes by the layer's name and class
        self.inside: set[int] = set()  # modules inside of layers taken over
        self._measuring = False
        self._names = {id(module): name for name, module in model.named_modules()}
        self._measure, self._training, self._thread = measure, model.training, threading.get_ident()

    def __call__(self, visit: Visit, run: Run) -> Any:
        if self._thread != threading.get_ident():
            return run(visit)
        if self._measuring:
            return quietly(visit, run)
        if visit.adapter is None:
            return self._operation(visit, run)
        self.called.add(id(visit.layer))
        decision = decided(visit, self._training)
        key = (id(visit.layer), decision.route, decision.plan and decision.plan.kernel,
               [r.code for _, r in decision.rejected])
        self._note(key, visit, decision, self._names.get(id(original(visit.layer)), ""),
                   type(visit.layer).__name__)
        if decision.plan is None or decision.route == "native":
            # layers inside it are looked at one by one
            return visit.native(visit.layer, *visit.args, **visit.kwargs)
        self.inside.update(id(part) for part in visit.layer.modules() if part is not visit.layer)
        return planned(visit, decision.plan, visit.args, visit.kwargs)

    @contextlib.contextmanager
    def exchange(self, exchange: Exchange) -> Iterator[None]:
        """A watcher of exchanges: adds up what each layer sends."""
        key = self._names.get(id(exchange.layer), ""), type(exchange.layer).__name__
        self.sent[key] = self.sent.get(key, 0) + exchange.bytes
        yield

    def _operation(self, visit: Visit, run: Run) -> Any:
        decision = decided_operation(visit)
        assert decision.plan is not None  # operations always have one
        self._note((visit.layer, decision.route, decision.plan.kernel), visit, decision, "",
                   visit.layer)
        if visit.native is None:
            return run(visit)
        with configs.override(None):
            return visit.native()

    def _note(self, key: tuple, visit: Visit, decision: Decided, name: str, layer: str) -> None:
        key = tuple(map(str, key))
        known = self.found.get(key)
        if known is not None:
            self.found[key] = replace(known, calls=known.calls + 1)
            return
        self.found[key] = _layer(decision, name, layer)
        if self._measure and decision.route != "native" and visit.adapter is not None:
            self._measuring = True
            self.found[key] = _measured(self.found[key], visit, decision, self._training)
            self._measuring = False


def _layer(decision: Decided, name: str, layer: str) -> Layer:
    plan = decision.plan
    reasons = tuple(dict(candidate=candidate, code=r.code, text=r.text, hint=r.hint)
                    for candidate, r in decision.rejected)
    note = ""
    if plan is not None and decision.first is not None and decision.first.route != plan.route:
        note = (f"the first call over a new graph goes to {decision.first.route}, as its structure "
                "has to be built")
    kernel, seconds, native = ((None, None, None) if plan is None
                               else (plan.kernel, plan.seconds, plan.native_seconds))
    return Layer(name, layer, NATIVE if decision.route == "native" else TAKEN, decision.route,
                 kernel, 1, decision.stated.facts() if decision.stated is not None else None,
                 _ms(seconds), _ms(native), reasons=reasons, note=note)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _measured(one: Layer, visit: Visit, decision: Decided, training: bool) -> Layer:
    assert decision.plan is not None  # of a layer that is taken over
    with undisturbed(visit.layer), torch.enable_grad() if training else contextlib.nullcontext():
        sides = Sides(visit, decision.plan, training)
        try:
            native, ours = both_ms(sides, sides.timed())
        except torch.cuda.OutOfMemoryError:
            return replace(one, note="the host's own code ran out of memory, so there is nothing "
                                     "to measure against")
    return replace(one, measured_ms=ours, measured_native_ms=native)


# --- layers that no call told of ------------------------------------------------------------------

def _uncalled(model: torch.nn.Module, looker: _Looker) -> Iterator[Layer]:
    inside = looker.inside
    for name, module in model.named_modules():
        layer = type(module).__name__
        if id(module) in looker.called:
            continue
        known = adapters.adapter_of(module) is not None
        if known and id(module) in inside:
            yield Layer(name, layer, INSIDE)
        elif (known or id(module) not in inside and _watched(module)
              and type(module).__module__.startswith("torch_geometric.")):
            yield Layer(name, layer, UNCALLED,
                        note="the model did not call it, or where it cannot be seen: inside "
                             "torch.compile or torch.jit")
        elif id(module) not in inside and passes_messages(module):
            yield Layer(name, layer, UNKNOWN, note=_unknown(module))


def _watched(module: Any) -> bool:
    """Whether its message passing would have been seen."""
    return getattr(getattr(type(module), "propagate", None), "routed", False)


def passes_messages(module: Any) -> bool:
    """Whether it is a layer of PyG's or DGL's making, or derived from one."""
    for cls in type(module).__mro__:
        package = cls.__module__.partition(".")[0]
        if cls.__name__ == "MessagePassing" and package == "torch_geometric":
            return True
        if package == "dgl" and cls.__module__.startswith("dgl.nn.pytorch.conv"):
            return True
    return False


def _unknown(module: Any) -> str:
    if type(module).__module__.startswith("dgl."):
        return "not known as a layer; its message passing goes operation by operation"
    if _watched(module):
        return "it did not propagate here, so there was nothing to take over"
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__} is not known, so it runs the host's own code"
