"""What would become of a call: asked of rules, adapter and planner, without running, counting or
recording anything."""
from __future__ import annotations

from typing import Any, NamedTuple

from gnnaccel.dispatch.observe.watch import Visit
from gnnaccel.dispatch.ops import route as operations
from gnnaccel.dispatch.ops.aggregation_stated import AggregationSpec
from gnnaccel.dispatch.plan import planner
from gnnaccel.dispatch.plan.plan import Plan, Rejected
from gnnaccel.dispatch.plan.request import EXPECTED
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason


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
    stated, given = found
    plan, first = (_plan(stated, given, visit.config, grad, fresh) for fresh in (0, EXPECTED))
    return Decided(plan.rejected, plan, first, stated, given)


def _plan(stated: Any, given: Any, config: Config, grad: bool, fresh: int) -> Plan:
    if isinstance(stated, AggregationSpec):
        return stated.plan(given, config, grad, fresh > 0)
    return planner.plan(stated.request(given.device.type, grad, fresh), config)


def decided_operation(visit: Visit) -> Decided:
    plan = operations.choose(visit.args[0], visit.native is not None, visit.config)
    return Decided(plan.rejected, plan)
