"""Plain modules that make the list of edges by which they sum of the one that they are given: with
self loops, in both directions, of some of the edges. Kernels run over that list."""
from __future__ import annotations

import types
from typing import Any

from gnnaccel.adapters import own
from gnnaccel.adapters.plain import pairs
from gnnaccel.adapters.plain.arguments import EDGES, Given
from gnnaccel.adapters.tracing.derived import reduced
from gnnaccel.adapters.tracing.derived.ends import Ends
from gnnaccel.adapters.tracing.derived.program import DERIVED, Program
from gnnaccel.adapters.tracing.derived.values import EdgeValue
from gnnaccel.adapters.tracing.rows import zero_rows
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.policy.reasons import Reason, reason

_OTHER = reason("GA211", "what its forward makes of its edges is of another kind")
_CAPTURED = reason("GA204", "a list of edges that its forward makes, while calls are captured")


class Derived:
    """What a ``forward`` makes of its list of edges. ``at_edges``, ``at_nodes``: the places of
    results that have a row for each of the edges that it sums over, or for each node."""

    def __init__(self, given: Given):
        device = given.edge_index.device
        self.program, self.ends = Program(given.values, given.nodes, device), Ends()
        self.at_edges: set[int] = set()
        self.at_nodes: set[int] = set()
        self.nodes = given.nodes

    def of_call(self, given: Given) -> Given | Reason:
        """The arguments of a call with the list that its ``forward`` makes."""
        if capture.capturing():
            return _CAPTURED
        results = self.program.run(given.values, given.nodes, given.edge_index.device)
        if results is None:
            return _OTHER
        edges = self.ends.listed(results, pairs.stacked, pairs.turned)
        if edges is None or edges.shape[1] < 2 or edges.device != given.edge_index.device or any(
            results[at].shape[:1] != edges.shape[1:] for at in self.at_edges) or any(
                results[at].shape[:1] != (given.nodes,) for at in self.at_nodes):
            return _OTHER
        given.values[DERIVED] = results
        return given._replace(edge_index=edges)

    def returned(self, at: int) -> Any:
        """Gives the result at a place to the caller, who may write to it."""
        self.program.read.add(at)

        def make(given: Any) -> Any:
            result = given[DERIVED][at]
            return result.clone() if self.program.is_kept(at) else result

        return make


def stand_ins(steps: Any, given: Given) -> dict[str, Any]:
    """What stands for the arguments that belong to edges."""
    found: dict[str, Any] = {}
    for name in given.ends:
        value = given.values[name]
        if isinstance(value, (tuple, list)):
            found[name] = type(value)([_argument(steps, name, part) for part in range(2)])
        else:
            found[name] = _argument(steps, name)
    for name, kind in given.kinds.items():
        if kind is EDGES:
            found[name] = _argument(steps, name)
    return found


def _argument(steps: Any, name: str, part: int | None = None) -> EdgeValue:
    return EdgeValue(steps, steps.program.argument(name, part))


class Torch(zero_rows.Torch):
    """With functions that make something of edges."""

    def __init__(self, stand_in: zero_rows.Torch, steps: Any):
        super().__init__(stand_in._traced_module, stand_in._traced_names,
                         stand_in._traced_watched)
        self._traced_steps = steps

    def __getattr__(self, name: str) -> Any:
        stand_in = super().__getattr__(name)
        function = getattr(self._traced_module, name)
        if reduced.wrapped(function):
            return reduced.instead(self._traced_steps, function,
                                   stand_in)
        return stand_in


def instead(steps: Any, value: Any, stand_in: Any) -> Any:
    """What stands for a global value that ``stand_in`` stands for elsewhere."""
    if type(stand_in) is zero_rows.Torch:
        return Torch(stand_in, steps)
    if reduced.wrapped(value):
        return reduced.instead(steps, value, stand_in)
    if type(value) is not types.FunctionType:
        return stand_in
    name = own.original(value).__name__
    home = own.home(value)
    if (home == "torch_geometric" and name in reduced.OF_PYG
        or name in reduced.OF_TORCH_SCATTER and stand_in is not None):
        return reduced.instead(steps, own.original(value), stand_in)
    return stand_in


__all__ = ["Derived", "Torch", "Unseen", "instead", "stand_ins"]
