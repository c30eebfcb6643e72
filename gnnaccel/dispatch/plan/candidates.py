"""The candidates for a call, as data: what each can do, and what it would cost."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from gnnaccel.cuda.layout import MAX_WIDTH, TYPES
from gnnaccel.dispatch.ir import patterns
from gnnaccel.dispatch.ops.plain import PlainRequest, operation
from gnnaccel.dispatch.plan import compiling, cost
from gnnaccel.dispatch.plan.compiling import device_reason
from gnnaccel.dispatch.plan.request import Request
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import costs, cuda_maps
from gnnaccel.dispatch.relational.prepare import prepare
from gnnaccel.dispatch.relational.request import RelationalRequest
from gnnaccel.dispatch.run import attention


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
        pattern = patterns.attention(request.program)
        if pattern is None or pattern.family != family:
            return [reason("GA208", f"{request.program.name} is not {family} attention")]
        why = _rows_reasons(request, config)
        if not 0.0 <= pattern.slope:
            why.append(reason("GA208", f"negative_slope={pattern.slope} is negative",
                              "use a slope of 0 or more"))
        return why or _compiles(request, pattern, config)

    return unsupported


def _compiles(request: Request, found: patterns.Attention, config: Config) -> list[Reason]:
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
        request, patterns.attention(request.program), pmf)  # type: ignore[arg-type]


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
                         lambda: prepare(request), config, request.grad,
                         lambda: prepare(request._replace(grad=False)))


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
