"""A host call's way: rules, the adapter's statement, the plan, the run, the record."""
from __future__ import annotations

import time
import warnings
from typing import Any, Protocol

import torch
from torch import Tensor

from gnnaccel.dispatch import attention, cache, counters, patterns, planner, records, rules
from gnnaccel.dispatch.config import Config
from gnnaccel.dispatch.planner import Plan
from gnnaccel.dispatch.reasons import Reason
from gnnaccel.dispatch.request import Stated
from gnnaccel.errors import FallbackError


class Adapter(Protocol):
    """What an adapter offers for one layer class."""

    host: str

    def state(self, layer: Any, args: tuple, kwargs: dict) -> Stated | Reason:
        """The call as a Program over a graph, or why it is not one. Must not change anything nor compute on tensors."""

    def run(self, layer: Any, stated: Stated, attend: attention.Attend) -> Any:
        """The call's result; ``attend(tensors)`` runs the Program."""


def route(layer: Any, adapter: Adapter, native: Any, args: tuple, kwargs: dict, config: Config) -> Any:
    """Run one call of ``layer`` on the best route. ``native`` is the host's own function, unbound."""
    listening = records.listening()
    start = time.perf_counter_ns() if listening else 0
    verdict = rules.verdict(layer, config)
    if not verdict.inside:
        return _native(layer, adapter, native, args, kwargs, config, None, ((type(layer).__name__, verdict.reason),), start)
    stated = adapter.state(layer, args, kwargs)
    if type(stated) is Reason:
        return _native(layer, adapter, native, args, kwargs, config, None, ((type(layer).__name__, stated),), start)
    grad = torch.is_grad_enabled()
    graph, hit = cache.lookup(stated.edge_index, stated.num_src, stated.num_dst, stated.loops)
    plan = planner.plan(stated.request(grad, hit != "hit"), config)
    if plan.route == "native":
        return _native(layer, adapter, native, args, kwargs, config, stated, plan.rejected, start)
    counters.count(type(layer).__name__, plan.route)
    call = attention.Call(stated.program, patterns.attention(stated.program), graph, stated.heads, stated.width, stated.out,
                          stated.exposed, plan.pmf)
    run = attention.run_cuda if plan.route == "cuda" else attention.run_torch
    if listening:
        number = _record(layer, adapter, stated, plan, graph, hit, grad, start)
        run = _recording(run, lambda _: _record_backward(layer, adapter, stated, plan, number))
    return adapter.run(layer, stated, attention.Attend(call, run))


def _recording(run: Any, on_backward: Any) -> Any:
    """``run`` whose result reports its backward."""

    def recorded(call: attention.Call, tensors: dict[str, Tensor]) -> Tensor:
        out = run(call, tensors)
        if out.requires_grad:
            out.register_hook(on_backward)
        return out

    return recorded


# --- native ------------------------------------------------------------------------------------------------------------

_warned: set[tuple[str, str]] = set()


def _native(layer, adapter, native, args, kwargs, config: Config, stated: Stated | None,
            rejected: tuple[tuple[str, Reason], ...], start: int) -> Any:
    name = type(layer).__name__
    counters.count(name, "native", rejected[0][1].code if rejected else None)
    if start:
        _record(layer, adapter, stated, Plan("native", None, False, None, None, rejected), None, "none",
                torch.is_grad_enabled(), start)
    chosen = all(r.code.startswith("GA1") for _, r in rejected)  # the user's own rules are no fallback
    if config.on_fallback != "native" and not chosen:
        _object(name, config.on_fallback, rejected)
    return native(layer, *args, **kwargs)


def _object(name: str, how: str, rejected: tuple[tuple[str, Reason], ...]) -> None:
    text = "; ".join(f"{candidate}: {r} ({r.hint})" for candidate, r in rejected)
    if how == "raise":
        raise FallbackError(f"{name} would run natively: {text}")
    key = (name, text)
    if key not in _warned:
        _warned.add(key)
        warnings.warn(f"gnnaccel: {name} runs natively: {text}", RuntimeWarning, stacklevel=4)


# --- records -----------------------------------------------------------------------------------------------------------

def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _state_of(layer, device: str) -> dict[str, Any]:
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    capturing = device == "cuda" and torch.cuda.is_current_stream_capturing()
    return dict(layer=type(layer).__name__, name=rules.qualified_name(layer), autocast=_dtype(autocast), capturing=capturing,
                deterministic=torch.are_deterministic_algorithms_enabled(), training=bool(layer.training))


def _graph_of(stated: Stated | None, graph) -> dict[str, Any] | None:
    if stated is None:
        return None
    found = dict(num_src=stated.num_src, num_dst=stated.num_dst, num_edges=stated.edge_index.shape[1], self_loops=stated.loops)
    known = graph.statistics() if graph is not None and graph.device.type == "cuda" else None
    if known is not None:
        found.update(max_degree=known.max_degree, mean_degree=known.mean_degree, super_nodes=known.super_nodes,
                     super_share=known.super_share, density=known.density, histogram=list(known.histogram))
    return found


def _record(layer, adapter, stated, plan: Plan, graph, hit: str, grad: bool, start: int) -> int:
    device = stated.edge_index.device.type if stated is not None else "cpu"
    rejected = [dict(candidate=candidate, code=r.code, text=r.text, hint=r.hint) for candidate, r in plan.rejected]
    record = records.new(
        host=adapter.host, graph=_graph_of(stated, graph), route=plan.route, kernel=plan.kernel, rejected=rejected,
        cost_us=None if plan.seconds is None else plan.seconds * 1e6, cache=hit, grad=grad,
        dtype=_dtype(stated.row) if stated else None, out_dtype=_dtype(stated.out) if stated else None,
        overhead_us=(time.perf_counter_ns() - start) / 1e3, **_state_of(layer, device))
    records.emit(record)
    return record["call"]


def _record_backward(layer, adapter, stated: Stated, plan: Plan, forward: int) -> None:
    if not records.listening():
        return
    kernel = plan.kernel if not torch.is_grad_enabled() or plan.route == "torch" else "torch backend"
    records.emit(records.new(direction="backward", forward_call=forward, host=adapter.host, route=plan.route, kernel=kernel,
                             dtype=_dtype(stated.row), out_dtype=_dtype(stated.out), grad=True,
                             **_state_of(layer, stated.edge_index.device.type)))
