"""Plain modules that make the list of edges by which they sum of the one that they are given: with
self loops, in both directions, of some of the edges. Kernels run over that list."""
from __future__ import annotations

import types
from typing import Any

from torch import Tensor

from gnnaccel.adapters import own
from gnnaccel.adapters.plain import pairs
from gnnaccel.adapters.plain.arguments import EDGES, Given
from gnnaccel.adapters.plain.steps import Ways
from gnnaccel.adapters.tracing.derived import reduced
from gnnaccel.adapters.tracing.derived.ends import Ends
from gnnaccel.adapters.tracing.derived.program import DERIVED, Program
from gnnaccel.adapters.tracing.derived.values import EdgeValue
from gnnaccel.adapters.tracing.expressed import CallArguments
from gnnaccel.adapters.tracing.rows import zero_rows
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.ops import messages
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason

_LISTS = 16
_LOOKS = 4 * _LISTS
_OTHER = reason("GA211", "what its forward makes of its edges is of another kind")
_CAPTURED = reason("GA204", "a list of edges that its forward makes, while calls are captured")


class List:
    """A list of edges. ``ends``: what it is made of; ``rows``: the places of results that have a
    row for each of its edges; ``sends``: whether rows of nodes are picked at the end that edges
    come from."""

    def __init__(self) -> None:
        self.ends = Ends()
        self.rows: set[int] = set()
        self.sends = False


class Results(list):
    """The results of a call. ``graphs``: of its lists of edges after the first."""

    graphs: list[Any]


class Derived:
    """What a ``forward`` makes of its lists of edges. ``flipped``: the numbers of those of its
    ``lists`` whose edges go to the first of their ends; ``at_edges``, ``at_nodes``: the places of
    results that have a row for each of the edges that it sums over, or for each node; ``over``:
    sums over other lists than the first."""

    def __init__(self, given: Given, ways: Ways):
        device = given.edge_index.device
        self.program, self.flipped = Program(given.values, given.nodes, device), ways.flipped
        self.lists = [List() for _ in range(ways.first + 1)]
        self._met, self._first = 0, ways.first
        self._looks: int | None = _LOOKS
        self.at_edges: set[int] = set()
        self.at_nodes: set[int] = set()
        self.over: list[Any] = []

    def place(self, key: tuple) -> tuple[int, int]:
        """The number of the list that an end belongs to, and its place there."""
        values = self.program.values
        while True:
            for at in self._numbers()[:self._met]:
                place = self.lists[at].ends.place(key, values)
                if place is not None:
                    return at, place
            if self._met == _LISTS:
                raise Unseen
            self._met += 1
            if self._met > len(self.lists):
                self.lists.append(List())

    def _numbers(self) -> list[int]:
        """The numbers of the lists, in the order in which they are met."""
        first = self._first
        return [first, *range(1, first), *[0] * bool(first), *range(first + 1, len(self.lists))]

    def of_call(self, given: Given) -> Given | Reason:
        """The arguments of a call with the lists that its ``forward`` makes."""
        if capture.capturing():
            return _CAPTURED
        results = self.program.run(given.values, given.nodes, given.edge_index.device)
        if results is None or any(results[at].shape[:1] != (given.nodes,) for at in self.at_nodes):
            return _OTHER
        made = given.values[DERIVED] = Results(results)
        made.graphs, found = [], list[Tensor]()
        for at, one in enumerate(self.lists):
            edges = one.ends.listed(results, pairs.stacked, pairs.turned)
            if edges is None or edges.shape[1] < 2 or edges.device != given.edge_index.device or (
                any(results[row].shape[:1] != edges.shape[1:] for row in one.rows)):
                return _OTHER
            if self._counts_from_behind(edges):
                return _OTHER
            found.append(edges)
            made.graphs.append(self._graph(at, edges, given.nodes) if at else None)
        return given._replace(edge_index=found[0])

    def _counts_from_behind(self, edges: Tensor) -> bool:
        """Whether a list has negative ids. The device is asked for some of the first lists."""
        if self._looks:
            self._looks = self._looks - 1 if int(edges.amin()) >= 0 else None
        return self._looks is None

    def _graph(self, at: int, edges: Tensor, nodes: int) -> OpGraph:
        """The graph of the list with this number."""
        flipped, sources = at in self.flipped, nodes
        if not self.lists[at].sends:
            sources = max(sources, int(edges[int(flipped)].amax()) + 1)
        return OpGraph(edges, sources, nodes, flipped)

    def unfit(self, module: Any, given: Given, x: Tensor) -> Reason | None:
        """Why kernels do not take the sums over other lists than the first."""
        for one in self.over:
            graph = given.values[DERIVED].graphs[one.at]
            arguments = CallArguments(given.values, graph, module)
            why = messages.unfit(graph, x, None, one.message.stand_in(arguments, graph))
            if why is not None:
                return why
        return None

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
