"""Choosing among the candidates of a call: `plan`, memoised.

A candidate is taken when nothing speaks against it and it is estimated to be the cheapest; the
host's own code is always the last candidate. Everything is decided before anything runs.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gnnaccel.dispatch.ir import patterns
from gnnaccel.dispatch.ops.plain import PlainRequest
from gnnaccel.dispatch.plan import candidates, compiling, cost
from gnnaccel.dispatch.plan.candidates import Candidate
from gnnaccel.dispatch.plan.plan import Plan
from gnnaccel.dispatch.plan.request import Request
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.pins import Pinned
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import costs
from gnnaccel.dispatch.relational.request import RelationalRequest

_LIMIT = 4096  # memo entries; more means sizes that never repeat, so starting anew costs nothing


_memo: dict[tuple, Plan] = {}


def plan(request: Request | RelationalRequest | PlainRequest, config: Config) -> Plan:
    """The route for ``request`` under ``config``."""
    key = (config.epoch, request)
    decision = _memo.get(key)
    if decision is None or (decision.route == "native" and decision.code == compiling.PENDING
                            and not compiling.may_run_natively(config)):
        if len(_memo) >= _LIMIT:
            _memo.clear()
        decision = _memo[key] = _decide(request, config)
    return decision


def forget() -> None:
    """Drop every memoised plan, and the states of kernels; for when the environment changes (tests
    put another driver in place)."""
    _memo.clear()
    compiling.forget()


def _decide(request: Request | RelationalRequest | PlainRequest, config: Config) -> Plan:
    rejected: list[tuple[str, Reason]] = []
    able: list[tuple[float, int, Candidate, float | None]] = []
    candidates, native_cost = asked(request)
    for rank, spec in enumerate(candidates):
        why = spec.unsupported(request, config)
        if why:
            rejected += [(spec.name, r) for r in why if r.code != "GA208" or spec.route != "cuda"
                         or _only(spec, request)]
        else:
            seconds = spec.seconds(request)
            able.append((seconds if seconds is not None else float("inf"), rank, spec, seconds))
    able.sort(key=lambda item: item[:2])
    native = native_cost(request)
    pending = tuple(entry for entry in rejected if entry[1].code == compiling.PENDING)
    if pending:
        return Plan("native", None, pending, native, native)
    pinned = None if config.decisions is None else config.decisions.of(request)
    if pinned is not None:
        held = _held(pinned, able, native, rejected)
        if held is not None:
            return held
    for position, (_, _, spec, seconds) in enumerate(able):
        if position:
            rejected.append((spec.name, _slower(seconds, able[0])))
        elif config.when == "profitable" and not _pays(seconds, native, request):
            rejected += [(s.name, _unprofitable(t, native)) for _, _, s, t in able]
            break
    else:
        if able:
            _, _, spec, seconds = able[0]
            return Plan(spec.route, spec.name, tuple(rejected), seconds, native, spec.pmf)
    return Plan("native", None, tuple(rejected), native, native)


def _held(pinned: Pinned, able: list, native: float | None, rejected: list) -> Plan | None:
    """The pinned plan; None where it cannot run here."""
    why = reason("GA105", f"decided beforehand: {pinned.kernel or 'native'}")
    others = [(spec.name, why) for _, _, spec, _ in able if spec.name != pinned.kernel]
    # the user chose it, so reasons against other ways are no fallback
    if pinned.route == "native":
        return Plan("native", None, tuple(others or rejected), native, native)
    for _, _, spec, seconds in able:
        if spec.name == pinned.kernel:
            return Plan(spec.route, spec.name, (*rejected, *others), seconds, native, spec.pmf)
    return None


def asked(request: Request | RelationalRequest
          | PlainRequest) -> tuple[tuple[Candidate, ...], Callable[..., float | None]]:
    """The candidates, and the cost of the host's own code."""
    if type(request) is PlainRequest:
        return candidates.PLAIN, candidates.native_plain
    return ((candidates.RELATIONAL, costs.native)
            if type(request) is RelationalRequest else (candidates.ATTENTION, cost.native))


def _only(spec: Candidate, request: Any) -> bool:
    """Whether a "not this family" reason is worth telling: not when another family of kernels
    covers the Program."""
    pattern = patterns.attention(request.program)
    return pattern is None or spec.family == pattern.family


def _pays(seconds: float | None, native: float | None,
          request: Request | RelationalRequest | PlainRequest) -> bool:
    """Whether a candidate gains. An unknown cost on the GPU does (the host takes dozens of
    launches); elsewhere only a measured one."""
    if seconds is None or native is None:
        return request.device == "cuda"
    return seconds < native


def _slower(seconds: float | None, best: tuple) -> Reason:
    if seconds is None:
        return reason("GA301", f"its cost is unknown here, {best[2].name} was taken")
    return reason("GA302",
                  f"estimated {seconds * 1e6:.0f} us, {best[2].name} {best[0] * 1e6:.0f} us")


def _unprofitable(seconds: float | None, native: float | None) -> Reason:
    if seconds is None or native is None:
        return reason("GA301", "no gain over the host's own code was measured on this device")
    return reason("GA301",
                  f"estimated {seconds * 1e6:.0f} us, the host's own code {native * 1e6:.0f} us")
