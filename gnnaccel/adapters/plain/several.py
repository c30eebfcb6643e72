"""The `Steps` of a ``forward`` that makes its lists of edges itself, or has several.

What belongs to edges is computed by torch, up to where it meets features (`tracing.derived`). The
sums over the first list are those of the call; sums over others are done like what goes on at the
edges, each over a graph of its own.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.plain import derived
from gnnaccel.adapters.plain.arguments import Given
from gnnaccel.adapters.plain.effects import NodeEffect
from gnnaccel.adapters.plain.steps import Forward, Ways
from gnnaccel.adapters.tracing import expressing
from gnnaccel.adapters.tracing.attention.traced import Param
from gnnaccel.adapters.tracing.derived.program import DERIVED
from gnnaccel.adapters.tracing.derived.values import EdgeValue, Result
from gnnaccel.adapters.tracing.expressed import CallArguments, Message, Once, call_of
from gnnaccel.adapters.tracing.graph_functions import REDUCES, along, check_rows, is_torch_scatters
from gnnaccel.adapters.tracing.nodes import reduced
from gnnaccel.adapters.tracing.nodes.node_values import EdgeRows, NodeValue
from gnnaccel.adapters.tracing.nodes.nodes_read import as_given, node_rows
from gnnaccel.adapters.tracing.noted import notes
from gnnaccel.adapters.tracing.rows import pieces, pointwise
from gnnaccel.adapters.tracing.rows.specials import Along, Special, Spread
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated.messages import reduced as reduce_messages
from gnnaccel.dispatch.generated.tree import Leaf, Number, leaves


class OfList(int):
    """Among the ``names`` of a `Leaf`: its rows are at an end of the list of this number."""


class OfDerived(Forward):
    """``derived``: what is made of edges; ``program``, ``at_edges``, ``at_nodes``, ``nodes``: of
    it; ``some``: a value with a row for each node."""

    derived: derived.Derived
    some: NodeValue

    def begin(self, given: Given, ways: Ways) -> None:
        """Take over what belongs to edges."""
        self.derived, self._flipped = derived.Derived(given, ways), ways.flipped
        self._ends: list[list[Special]] = []
        self.program, self.nodes = self.derived.program, given.nodes
        self.at_edges, self.at_nodes = self.derived.at_edges, self.derived.at_nodes

    def other_ways(self, ways: Ways, out: Any = None) -> Ways | None:
        others = super().other_ways(ways, out)
        if others is None and out is not None and not ways.first and self.derived.over and not (
            self.needed(out)):
            first = self.derived.over[-1].at
            turned = {{0: first, first: 0}.get(one, one) for one in ways.flipped}
            return Ways(frozenset(turned), first)
        return others

    # --- lists ------------------------------------------------------------------------------------

    def end(self, key: tuple) -> Special:
        """The index of an end of the edges, by its key."""
        at, place = self.derived.place(key)
        while len(self._ends) <= at:
            self._ends.append(self.new_ends(len(self._ends) in self._flipped))
        return self._ends[at][place]

    def _list(self, index: Any) -> int:
        """The number of the list that an index belongs to."""
        if type(index) in (Along, Spread):
            index = index.of
        return next((at for at, ends in enumerate(self._ends)
                     if any(one is index for one in ends)), 0)

    def picked(self, value: NodeValue, index: Special) -> pointwise.Rows:
        at, end = self._list(index), index.end
        if not at:
            return self.at_end(value, end)
        self.derived.lists[at].sends |= end == "j"
        self.reached.append(value.as_now())
        key: Any = (value.at, end, at)
        if key not in self._picked:
            name = self._given.get(value.at)
            if name is None:
                with torch.enable_grad():
                    rows = reduced.at_end(value, end)
            else:
                rows = pointwise.rows(end, node_rows(itemgetter(name), end), value.meta,
                                      f"nodes.{name}")
            leaf: Any = rows.tree
            marked = Leaf(end, leaf.make, leaf.tail, leaf.names | {OfList(at)}, leaf.roots)
            self._picked[key] = pointwise.Rows(marked, rows.meta)
        rows = self._picked[key]
        return pieces.recorded(pointwise.Rows(rows.tree, rows.meta))

    # --- reductions -------------------------------------------------------------------------------

    def scatter(self, src: Any, index: Any, dim: Any = 0, dim_size: Any = None,
                reduce: Any = "sum") -> Any:
        at = self._list(index)
        if not at:
            return super().scatter(src, index, dim, dim_size, reduce)
        index = along(index, dim)
        if index.end == "j":
            self.by_source |= {at}
            raise Unseen
        check_rows(src, index, dim)
        if reduce not in REDUCES or not self._check_size(dim_size) or (
            is_torch_scatters() and REDUCES[reduce] in ("max", "min")):
            raise Unseen
        if src.meta.dim() > 1:
            return self._over(at, src, REDUCES[reduce])
        one: Any = self._over(at, src.unsqueeze(-1), REDUCES[reduce])
        result = one.squeeze(-1).clone()
        result.rows, result.alone = ("i", True), True
        return result

    def _over(self, at: int, src: pointwise.Rows, reduce: str) -> NodeValue:
        """A reduction over the edges of another list than the first."""
        if type(src.tree) is Number:
            raise Unseen
        if not torch.is_grad_enabled():
            src = pieces.detached(src)
        pointwise.hold([src])
        self._check_of(at, src.alone().tree)
        message = expressing.found(src, None)
        if message is None:
            raise Unseen
        once = OverList(at, message.reduced_by((reduce,)), reduce)
        self.derived.over.append(once)
        roots = tuple(dict.fromkeys(root for leaf in leaves(src.alone().tree)
                                    for root in leaf.roots))
        meta = torch.empty_like(src.meta)
        result = self.made(_itself, (Param(once, meta, roots),), {}, meta)
        result.rows, result.alone = ("i", True), True
        return result

    def softmax(self, src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None,
                dim: Any = 0) -> Any:
        at = self._list(index)
        if at or len(self.derived.lists) > 1:
            if not isinstance(src, pointwise.Rows):
                raise Unseen
            self._check_of(at, src.alone().tree)
        return super().softmax(src, index, ptr, num_nodes, dim)

    # --- checks -----------------------------------------------------------------------------------

    def _check_of(self, at: int, tree: Any) -> None:
        """Unseen where rows are not all of the edges of one list."""
        lists, results, untold = set(), set[int](), False
        for leaf in _all_leaves(tree):
            own = {int(one) for one in leaf.names if type(one) is OfList}
            of_results = {one.at for one in leaf.names if type(one) is Result}
            lists |= own
            results |= of_results
            untold |= not own and not of_results and leaf.end in "ij"
        if lists - {at} or at and untold:
            raise Unseen
        self.derived.lists[at].rows |= results

    def check(self, out: Any) -> None:
        """Unseen where something of several lists is done in a way that knows of one alone."""
        if len(self.derived.lists) == 1:
            self.derived.lists[0].rows = set(self.at_edges)
            return
        if any(type(one) is not NodeEffect for one in notes().effects) or _has_rows(out):
            raise Unseen
        for rows, _ in self.reductions:
            self._check_of(0, rows.alone().tree)
        for step in self.done:
            if type(step) is tuple:
                for one in (*step[1], *step[2].values()):
                    if type(one) is EdgeRows:
                        self._check_of(0, one.rows.alone().tree)
                    if type(one) is Special and self._list(one):
                        raise Unseen
        if self.at_edges - set().union(*[one.rows for one in self.derived.lists]):
            raise Unseen

    def instead(self, value: Any) -> Any:
        return derived.instead(self, value, super().instead(value))

    def imported(self, name: str) -> Any:
        return derived.instead(self, None, super().imported(name))


class OverList(Once):
    """``message``, reduced over the edges of the list with the number ``at``."""

    def __init__(self, at: int, message: Message, reduce: str):
        self.at, self.message, self.reduce = at, message, reduce

        def make(given: Any) -> Tensor:
            over = arguments(at, given)
            return reduce_messages(over.graph, reduce, message.generated(over))

        super().__init__(make)


def arguments(at: int, given: Any) -> CallArguments:
    """The arguments of a call for messages over the list with this number."""
    given = call_of(as_given(given))
    key = OfList, at
    if key not in given.made:
        over = given.made[key] = CallArguments(given, given[DERIVED].graphs[at], given.layer)
        over.grad, over.over = given.grad, weakref.ref(given)
    return given.made[key]


def _all_leaves(tree: Any) -> Iterator[Leaf]:
    """The leaves of a tree, and those of what is computed for each edge before."""
    for leaf in leaves(tree):
        inner = [one.tree for one in leaf.names if hasattr(one, "tree")]
        if not inner:
            yield leaf
        for one in inner:
            yield from _all_leaves(one)


def _has_rows(out: Any) -> bool:
    if isinstance(out, (tuple, list)):
        return any(map(_has_rows, out))
    if isinstance(out, dict):
        return any(map(_has_rows, out.values()))
    return isinstance(out, pointwise.Rows) and not isinstance(out, EdgeValue)


def _itself(t: Tensor) -> Tensor:
    return t
