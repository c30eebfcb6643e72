"""Choosing among the candidates of a call: `plan`, memoised.

A candidate says what speaks against it, and what it would cost. One is taken when nothing speaks
against it and it is estimated to be the cheapest; the host's own code is always the last candidate.
Everything is decided before anything runs.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gnnaccel.cuda.runtime.launch import MAX_WIDTH, TYPES
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ops.plain import PlainRequest, operation
from gnnaccel.dispatch.plan import compiling, cost
from gnnaccel.dispatch.plan.compiling import device_reason
from gnnaccel.dispatch.plan.request import Request
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.pins import Pinned
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import costs, cuda_maps, prepare as relational
from gnnaccel.dispatch.run import attention

if TYPE_CHECKING:
    from gnnaccel.dispatch.relational.request import RelationalRequest

Rejected = tuple[tuple[str, Reason], ...]
#: candidates of aggregations and operations, as records and texts call them
KERNELS, TORCH = "kernels", "torch operations"


class Plan(NamedTuple):
    """``route``: "cuda", "torch" or "native"; ``kernel``: its name, None on the native route;
    ``rejected``: (candidate, reason) pairs of those that were not taken.

    ``seconds``, ``native_seconds``: estimates of the taken route and of the host's own code, None
    where nothing is known. ``pmf``: long rows read their scores twice. ``storage``: the format of
    the gathered rows where it is not their dtype.
    """

    route: str
    kernel: str | None = None
    rejected: Rejected = ()
    seconds: float | None = None
    native_seconds: float | None = None
    pmf: bool = False
    storage: str | None = None

    @property
    def code(self) -> str | None:
        """Code of the first reason of a native plan, which the counters show; else None."""
        return self.rejected[0][1].code if self.route == "native" and self.rejected else None


def native_plan(*rejected: tuple[str, Reason]) -> Plan:
    """Plan to run the host's own code, for these reasons."""
    return Plan("native", None, rejected)


# --- candidates -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Candidate:
    """A way to run a call. ``unsupported`` lists every reason against it; ``seconds`` is the
    estimate, None where nothing is known; ``family``: of attention kernels, by their scores."""

    name: str
    route: str
    unsupported: Callable[[Any, Config], list[Reason]]
    seconds: Callable[[Any], float | None]
    pmf: bool = False
    family: str | None = None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows_reasons(request: Request | RelationalRequest, config: Config) -> list[Reason]:
    """Why kernels cannot run here, or not on such rows."""
    against = device_reason(request.device, config)
    why = [] if against is None else [against]
    if request.row not in TYPES or request.out not in TYPES:
        why.append(reason("GA203",
                          f"{_name(request.row)} rows with a {_name(request.out)} result; "
                          "the kernels take "
                                   f"{', '.join(_name(t) for t in TYPES)}"))
    if request.width > MAX_WIDTH:
        why.append(reason("GA207",
                          f"{request.width} channels per head; the kernels take up to {MAX_WIDTH}"))
    return why


def _cuda_reasons(family: str) -> Callable[[Request, Config], list[Reason]]:
    def unsupported(request: Request, config: Config) -> list[Reason]:
        pattern = programs.attention(request.program)
        if pattern is None or pattern.family != family:
            return [reason("GA208", f"{request.program.name} is not {family} attention")]
        why = _rows_reasons(request, config)
        if not 0.0 <= pattern.slope:
            why.append(reason("GA208", f"negative_slope={pattern.slope} is negative",
                              "use a slope of 0 or more"))
        return why or _compiles(request, pattern, config)

    return unsupported


def _compiles(request: Request, found: programs.Attention, config: Config) -> list[Reason]:
    """Why the kernels are not there, if they are not; asked last, as this costs most."""
    rows = request.heads, request.width, request.row, request.out
    form = (found, *rows, request.grad)
    evaluated = dataclasses.replace(found, dropout=0.0)
    biased = attention.biased(request.program, found)
    return _there(("attention", *form, attention.size_class(request.edge_bits, request.long),
                   biased),
                  lambda: attention.prepare(*form, request.edge_bits, biased, request.long), config,
                  request.grad,
                  lambda: attention.prepare(evaluated, *rows, False, request.edge_bits,
                                            long=request.long))


def _there(key: Hashable, prepare: Callable[[], None], config: Config, trains: bool = False,
           evaluation: Callable[[], None] | None = None) -> list[Reason]:
    """Why the kernels that ``prepare`` gets cannot run. Where this call ``trains``, ``evaluation``
    gets those of the same call without gradients, which will probably follow."""
    why = compiling.problem(key, prepare, config, evaluation if trains else None)
    return [] if why is None else [why]


def _torch_reasons(request: Request | RelationalRequest, config: Config) -> list[Reason]:
    if config.backend == "cuda":
        return [reason("GA406", "backend='cuda' was asked for")]
    if not request.row.is_floating_point:
        return [reason("GA203", f"{_name(request.row)} rows")]
    return []


def _fused(pmf: bool) -> Callable[[Request], float]:
    return lambda request: cost.fused(
        request, programs.attention(request.program), pmf)  # type: ignore[arg-type]


ATTENTION = (
    Candidate("fused attention, long rows split", "cuda", _cuda_reasons("additive"), _fused(False),
              family="additive"),
    Candidate("fused attention, long rows scored first", "cuda", _cuda_reasons("additive"),
              _fused(True), pmf=True, family="additive"),
    Candidate("fused pairwise attention, long rows split", "cuda", _cuda_reasons("pairwise"),
              _fused(False), family="pairwise"),
    Candidate("torch backend", "torch", _torch_reasons, cost.torch_backend),
)


# --- relational -----------------------------------------------------------------------------------

def _relational_cuda_reasons(request: RelationalRequest, config: Config) -> list[Reason]:
    why = _rows_reasons(request, config) + _empty_reasons(request)
    slopes = [step.attr("slope") for step in request.program.ops if step.kind == "leaky_relu"]
    if not all(0.0 <= slope for slope in slopes):
        why.append(reason("GA208", f"negative_slope={slopes[0]} is negative",
                          "use a slope of 0 or more"))
    return why or _there(("relational", request._replace(fresh=False), cuda_maps.precision()),
                         lambda: relational.prepare(request), config, request.grad,
                         lambda: relational.prepare(request._replace(grad=False)))


def _empty_reasons(request: RelationalRequest) -> list[Reason]:
    """Why an operand without channels cannot be read, if there is one."""
    return [reason("GA206", f"{name} has no channels") for name, shape in request.shapes
            if 0 in shape]


def _relational_torch_reasons(request: RelationalRequest, config: Config) -> list[Reason]:
    return _torch_reasons(request, config) + _empty_reasons(request)


RELATIONAL = (
    Candidate("grouped matrix products, fused sums over edges", "cuda", _relational_cuda_reasons,
              costs.cuda),
    Candidate("torch backend, compacted and reordered", "torch", _relational_torch_reasons,
              costs.torch_backend),
)


# --- plain ----------------------------------------------------------------------------------------

def _plain_cuda_reasons(request: PlainRequest, config: Config) -> list[Reason]:
    against = device_reason(request.device, config)
    why = [] if against is None else [against]
    if request.row not in TYPES:
        why.append(reason("GA203",
                          f"{_name(request.row)} rows; the kernels take "
                          f"{', '.join(_name(t) for t in TYPES)}"))
    if request.edge_bits > 31:
        why.append(reason("GA206",
                          "2**31 edges or more; the kernels of plain layers count them in int32"))
    form = request.reduce, request.width, request.row, request.weighted
    return why or _there(("plain", *form), lambda: operation(request.reduce).prepare(*form), config)


def _plain_seconds(ours: bool) -> Callable[[PlainRequest], float | None]:
    return lambda request: operation(request.reduce).seconds(request, ours)


native_plain = _plain_seconds(False)
# most have no price over known graphs: on a GPU they pay, on a CPU the host's kernels are as good
PLAIN = (
    Candidate("fused aggregation", "cuda", _plain_cuda_reasons, _plain_seconds(True)),
    Candidate("torch operations", "torch", _torch_reasons, lambda request: None),
)


# --- the choice -----------------------------------------------------------------------------------

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
        return PLAIN, native_plain
    return (ATTENTION, cost.native) if type(request) is Request else (RELATIONAL, costs.native)


def _only(spec: Candidate, request: Any) -> bool:
    """Whether a "not this family" reason is worth telling: not when another family of kernels
    covers the Program."""
    pattern = programs.attention(request.program)
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
