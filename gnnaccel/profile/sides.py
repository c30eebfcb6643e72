"""What would become of a call: asked of rules, adapter and planner, without running, counting or
recording anything.

And one call run on the side, by the host's own code, by the host's own code in fp64, or as planned:
same inputs, same random numbers, nobody's gradients touched. To be used inside
`undisturbed(layer)`.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.observe.watch import Run, Visit
from gnnaccel.dispatch.ops import route as operations
from gnnaccel.dispatch.ops.aggregation_stated import AggregationSpec
from gnnaccel.dispatch.plan import planner
from gnnaccel.dispatch.plan.planner import Plan, Rejected
from gnnaccel.dispatch.plan.request import EXPECTED
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.run.autograd import checkpointed
from gnnaccel.profile.undisturbed import RandomState

HOST, OURS, EXACT = "host", "ours", "exact"
Results = dict[str, "Tensor | None"]


class Decided(NamedTuple):
    """``plan``: for a graph that comes again; ``first``: for one seen for the first time, whose
    structure has to be built; both None where the call was not stated. ``stated``, ``given``: as of
    adapters."""

    rejected: Rejected
    plan: Plan | None = None
    first: Plan | None = None
    stated: Any = None
    given: Any = None

    @property
    def route(self) -> str:
        return "native" if self.plan is None else self.plan.route


def decided(visit: Visit, grad: bool) -> Decided:
    """The decision on a layer's call; ``grad``: as a part of training."""
    name = type(visit.layer).__name__
    verdict = rules.verdict(visit.layer, visit.config)
    if not verdict.inside:
        assert verdict.reason is not None
        return Decided(((name, verdict.reason),))
    found = visit.adapter.state(visit.layer, visit.args, visit.kwargs)
    if isinstance(found, Reason):
        return Decided(((name, found),))
    spec, given = found
    plan, first = (_plan(spec, given, visit.config, grad, fresh) for fresh in (0, EXPECTED))
    return Decided(plan.rejected, plan, first, spec, given)


def _plan(spec: Any, inputs: Any, config: Config, grad: bool, fresh: int) -> Plan:
    if isinstance(spec, AggregationSpec):
        return spec.plan(inputs, config, grad, fresh > 0)
    return planner.plan(spec.request(inputs.device.type, grad, fresh), config)


def decided_operation(visit: Visit) -> Decided:
    plan = operations.choose(visit.args[0], visit.native is not None, visit.config)
    return Decided(plan.rejected, plan)


# --- on the side ----------------------------------------------------------------------------------

def planned(visit: Visit, plan: Plan, args: tuple, kwargs: dict) -> Any:
    """The layer's result by the route of ``plan``; uncounted, unrecorded, and nothing remembered
    but the graph's structure.

    Raises RuntimeError when the adapter does not understand the call.
    """
    found = visit.adapter.state(visit.layer, args, kwargs)
    if isinstance(found, Reason):
        raise RuntimeError(f"the call cannot be repeated: {found}")
    spec, given = found
    graph, _ = spec.lookup(given)
    call = spec.call(graph, plan)
    call.run = spec.runner(plan.route)
    return visit.adapter.run(visit.layer, spec, given, call)


def native(visit: Visit, args: tuple, kwargs: dict) -> Any:
    """The layer's result by the host's own code, and so of every layer inside it."""
    with configs.override(None):
        return visit.native(visit.layer, *args, **kwargs)


def quietly(visit: Visit, run: Run) -> Any:
    """The result of a call inside one that is run on the side: as it would be decided, uncounted
    and unrecorded."""
    if visit.adapter is None:
        return run(visit)
    decision = decided(visit, torch.is_grad_enabled())
    if decision.plan is None or decision.route == "native":
        return visit.native(visit.layer, *visit.args, **visit.kwargs)
    return planned(visit, decision.plan, visit.args, visit.kwargs)


class Sides:
    """The ways of running ``visit``; ``grad``: with the gradients of every floating input and
    parameter."""

    def __init__(self, visit: Visit, plan: Plan, grad: bool):
        self.visit, self.plan, self.grad = visit, plan, grad
        self.device = device_of(visit) or torch.device("cpu")
        self._modules = list(visit.layer.modules())
        self._tables = [(dict(m._parameters), dict(m._buffers)) for m in self._modules]
        self._generators = RandomState()

    def once(self, side: str, seed: int = 0,
             upstream: list[Tensor | None] | None = None) -> Results:
        """The output ("out", or "out[key]" each) and the gradients, by name. ``seed`` above 0: with
        the rows of features in an order of its own; ``upstream``: gradients of the outputs, random
        ones otherwise."""
        self._generators.restore()
        args, kwargs, leaves = self._made(torch.float64 if side == EXACT else None, seed)
        with self._context(side):
            outs = named_tensors(self._run(side, args, kwargs), "out")
            found: Results = {k: t.detach() for k, t in outs.items()}
            if self.grad:
                found.update(_gradients(outs, leaves, upstream, seed))
        return found

    def drew(self) -> bool:
        """Whether the last run drew random numbers."""
        return self._generators.moved()

    def timed(self) -> dict[str, Callable[[], object]]:
        """Calls of the host's side and of ours, to be timed: forward, or with gradients and
        backward."""
        args, kwargs, leaves = self._made(None, 0)

        def run(side: str) -> object:
            with self._context(side):
                out = self._run(side, args, kwargs)
                ends = [t for t in named_tensors(out, "out").values() if t.requires_grad]
                if not ends:
                    return out
                return torch.autograd.grad(ends, list(leaves.values()),
                                           [torch.ones_like(t) for t in ends], allow_unused=True)

        return {side: functools.partial(run, side) for side in (HOST, OURS)}

    def _run(self, side: str, args: tuple, kwargs: dict) -> Any:
        return (planned(self.visit, self.plan, args, kwargs) if side == OURS
                else native(self.visit, args, kwargs))

    def _context(self, side: str) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.grad))
        if checkpointed():  # a checkpoint around the call counts what it saves
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        if side == EXACT and torch.is_autocast_enabled(self.device.type):
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
        return stack

    def _made(self, dtype: torch.dtype | None, seed: int) -> tuple[tuple, dict, dict[str, Tensor]]:
        """Arguments as tensors of their own, the layer's parameters and buffers put in as such, and
        those that get gradients."""
        copies: dict[int, Tensor] = {}
        for module, (parameters, buffers) in zip(self._modules, self._tables):
            for name, tensor in parameters.items():
                module._parameters[name] = _copied(tensor, dtype, 0, copies, self.grad)
            for name, tensor in buffers.items():
                module._buffers[name] = _copied(tensor, dtype, 0, copies, False)
        args, kwargs = (placed(part, dtype, seed, copies, self.grad)
                        for part in (self.visit.args, self.visit.kwargs))
        leaves = {f"input {k}": t for k, t in named_tensors((args, kwargs), "").items()
                  if t.requires_grad}
        leaves.update({k: p for k, p in self.visit.layer.named_parameters() if p.requires_grad})
        return args, kwargs, leaves


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _gradients(outs: dict[str, Tensor], leaves: dict[str, Tensor], upstream: list | None,
               seed: int) -> Results:
    ends, weights = [], []
    generator = torch.Generator("cpu").manual_seed(seed + 1000)
    for place, out in enumerate(outs.values()):
        weight = (torch.randn(out.shape, generator=generator, dtype=torch.float32, device="cpu")
                  if upstream is None else upstream[place])
        if out.requires_grad and weight is not None:
            ends.append(out)
            weights.append(weight.to(out))
    if not ends:
        return {}
    found = torch.autograd.grad(ends, list(leaves.values()), weights, allow_unused=True)
    # of a sparse matrix the numbers alone: of its whole torch has no norm
    numbers = (t.values() if t is not None and t.layout is torch.sparse_csr else t for t in found)
    return dict(zip((f"grad {name}" for name in leaves), numbers))


# --- tensors --------------------------------------------------------------------------------------

def _plain(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value) in (Tensor, torch.nn.Parameter)


def _copied(tensor: Tensor | None, dtype: torch.dtype | None, seed: int, copies: dict[int, Tensor],
            grad: bool) -> Tensor | None:
    """A leaf of the same numbers and strides; ids and masks stay the caller's own, since structures
    are found by them."""
    if tensor is None or not _plain(tensor) or not tensor.is_floating_point():
        return tensor
    if id(tensor) not in copies:  # the same object stays one, as layers ask for that
        with torch.inference_mode(False), torch.no_grad():
            rows, strided = tensor.detach(), tensor.layout is torch.strided
            if seed and rows.dim() and strided:  # the rows of a sparse matrix are the graph
                generator = torch.Generator("cpu").manual_seed(seed)
                rows = rows[torch.randperm(rows.shape[0], generator=generator,
                                           device="cpu").to(rows.device)]
            copies[id(tensor)] = rows.to(dtype or rows.dtype, copy=True).requires_grad_(
                grad and tensor.layout is not torch.sparse_csc)  # of which torch has none
    return copies[id(tensor)]


def placed(value: Any, dtype: torch.dtype | None, seed: int, copies: dict[int, Tensor],
           grad: bool) -> Any:
    """``value`` with the floating tensors in it copied."""
    if _plain(value):
        return _copied(value, dtype, seed, copies, grad)
    if isinstance(value, tuple):
        parts = [placed(v, dtype, seed, copies, grad) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        return [placed(v, dtype, seed, copies, grad) for v in value]
    if isinstance(value, dict):
        return {k: placed(v, dtype, seed, copies, grad) for k, v in value.items()}
    return value


def named_tensors(value: Any, path: str) -> dict[str, Tensor]:
    """The floating tensors in nested tuples, lists and dicts, by their way there."""
    if isinstance(value, Tensor):
        return {path: value} if value.is_floating_point() else {}
    parts = (value.items() if isinstance(value, dict)
             else enumerate(value) if isinstance(value, (tuple, list)) else ())
    return {k: t for i, v in parts for k, t in named_tensors(v, f"{path}[{i}]").items()}


def device_of(visit: Visit) -> torch.device | None:
    """Where a call's tensors are: those of its arguments, else its parameters'."""
    return (_device((visit.args, visit.kwargs))
            or _device(list(getattr(visit.layer, "parameters", tuple)())))


def _device(value: Any) -> torch.device | None:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return next((found for found in map(_device, value) if found is not None), None)
    found = getattr(value, "device", None)
    return found if isinstance(found, torch.device) else None
