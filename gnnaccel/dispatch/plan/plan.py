"""`Plan`: the decision for one call, of a layer, an aggregation or a single operation."""
from __future__ import annotations

from typing import NamedTuple

from gnnaccel.dispatch.policy.reasons import Reason

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


def native(*rejected: tuple[str, Reason]) -> Plan:
    """Plan to run the host's own code, for these reasons."""
    return Plan("native", None, rejected)
