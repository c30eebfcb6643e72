"""Stand-ins for results per node while a user's ``message`` or ``aggregate`` is traced.

These are reductions of messages, degrees, and what torch makes of them row by row.

All that is done to them is written down as `Steps`, and done again by the same torch functions once
the reductions of a call are there. What is picked by an index of the edges is rows at that end of
the edges (`reduced`).
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import VIEWS, Make, Param, Value, _call, applied
from gnnaccel.adapters.tracing.expressed import Once
from gnnaccel.adapters.tracing.later import other
from gnnaccel.adapters.tracing.rows import operators, pieces, pointwise
from gnnaccel.adapters.tracing.rows.pointwise import IN_PLACE
from gnnaccel.adapters.tracing.rows.pointwise_calls import OPERATIONS
from gnnaccel.adapters.tracing.rows.row_count import ROWS, RowCount
from gnnaccel.adapters.tracing.rows.specials import DEVICE, Special
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen
from gnnaccel.adapters.tracing.rows.untold import Sequence

#: operations that results per node have; none changes a tensor in place or draws numbers
NAMES = frozenset((*OPERATIONS, *VIEWS, "clone", "detach", "float", "to", "type_as",
                   "sum", "mean", "norm", "normalize", "linear", "matmul", "mm", "nan_to_num",
                   "layer_norm"))
#: those of which a row may depend on others
OF_WHOLES = frozenset(("std", "var", "amax", "amin", "logsumexp", "softmax", "log_softmax", "prod",
                       "cumsum", "flip", "expand", "expand_as", "repeat", "long", "embedding",
                       "bmm", "transpose", "permute"))
_EXTREMA = ("max", "min")
#: what makes numbers in memory of their own, which may be written over
IN_NEW_MEMORY = OPERATIONS.keys() | {
    "clone", "sum", "mean", "norm", "linear", "matmul", "mm", "nan_to_num", "layer_norm", "std",
    "var", "amax", "amin", "logsumexp", "softmax", "log_softmax", "prod", "cumsum", "flip",
    "repeat", "embedding", "bmm"}
_ELSEWHERE = {"index_select": ("nodes.reduced", "index_select"),
              "gather": ("nodes.reduced", "along"),
              "dropout": ("rows.channels", "dropout"),
              "rand_like": ("nodes.node_pieces", "rand_like"),
              "randn_like": ("nodes.node_pieces", "randn_like"),
              **{name: ("nodes.node_pieces", name) for name in ("chunk", "split", "unbind")},
              **{name: ("rows.zero_rows", name)
                 for name in ("zeros_like", "ones_like", "full_like")}}
_PLAIN = (*NUMBERS, str, type(None), torch.dtype)


class NodeCount(RowCount):
    """How many rows ``of`` has: a `NodeValue`, or the argument of ``propagate`` of this name."""

    def __init__(self, of: Any):
        self.of = of

    @property
    def of_all(self) -> bool:
        """Whether it is the number of nodes that a function is given together."""
        return type(self.of) is NodeValue and self.of.steps.wholes and self.of.rows[1]

    def __eq__(self, other: Any) -> bool:
        if self.of_all and type(other) is NodeCount and other.of_all:
            return True
        if getattr(type(other), "of_edges", False):
            return NotImplemented
        return not self > other

    def __gt__(self, of: Any) -> bool:
        """Whether there are nodes: none would not be followed; or more than ids name."""
        if getattr(type(of), "of_edges", False):
            return NotImplemented
        if not self.of_all or type(of) is int and of != 0 or type(of) not in (int, Special):
            raise Unseen
        return type(of) is int or other("layer.conditions").more_than_ids(of)

    __hash__ = object.__hash__


class Given(pointwise.Rows):
    """An argument of ``propagate`` that ``aggregate`` gets as it is, or what torch makes of such,
    row by row: beside messages it has a row for each edge, beside results one for each node.

    ``make`` computes it of the arguments; ``name``: of the argument itself, else None."""

    def __init__(self, rows: pointwise.Rows, make: Make, name: str | None = None):
        super().__init__(rows.tree, rows.meta)
        self.make, self.name, self.of_caller = make, name, True

    @property
    def shape(self) -> tuple:
        count = RowCount() if self.name is None else NodeCount(self.name)
        return Sequence((count, *self.meta.shape[1:]))

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        rows = super().operate(name, function, args, kwargs)
        operands = (*args, *kwargs.values())
        if type(rows) is not pointwise.Rows or not all(
            isinstance(one, (Given, Param)) or type(one) in _PLAIN or name == "getitem"
            for one in operands):
            return rows

        return Given(rows, other("nodes.straight").call(function, args, kwargs))


class EdgeRows(Once):
    """The rows of the edges that ``rows`` stands for, computed once in a call."""

    def __init__(self, rows: pointwise.Rows):
        self.rows = rows
        pointwise.hold([rows])
        tree, tail = rows.tree, rows.meta.shape[1:]
        super().__init__(lambda given: pointwise.whole(tree, tail, given))


class OnEdges:
    """Gives the results of the steps of a call that went on at the edges, by their places. It does
    not lead to the steps, which lead to themselves: what is computed by it, and all that it holds
    of a layer, goes with the layer."""

    def __call__(self, given: Any) -> dict[int, Tensor]:
        # nothing in there leads back to the call's arguments: they are gone with it
        return given.made.setdefault(self, {}) if hasattr(given, "made") else {}


class Steps:
    """Operations on results per node. ``reductions``: (rows, name of the reduction); ``done``: of
    each result the place of its reduction, or the function with its arguments that makes it of
    earlier ones; ``before``: reductions that are done before messages are made, by their places;
    ``square``: whether both ends of the edges are the same nodes; ``goes_on``: whether a value goes
    on at the edges; ``early``: the places of steps that are done before the messages; ``wholes``:
    whether values are of all nodes together, so that a row may be made of others."""

    square = goes_on = wholes = False
    early: Set[int] = frozenset()

    def __init__(self) -> None:
        self.reductions: list[tuple[pointwise.Rows, str]] = []
        self.done: list[Any] = []
        self.before: dict[int, Any] = {}
        self.on_edges = OnEdges()

    def reduced(self, rows: pointwise.Rows, reduce: str) -> NodeValue:
        """The stand-in for one more reduction."""
        if not torch.is_grad_enabled():
            rows = pieces.detached(rows)
        pointwise.hold([rows])
        self.reductions.append((rows, reduce))
        self.done.append(len(self.reductions) - 1)
        result = NodeValue(self, torch.empty_like(rows.meta))
        result.alone = True
        return result

    def made(self, function: Callable, args: tuple, kwargs: dict, meta: Tensor) -> NodeValue:
        """The stand-in for the result of a function."""
        for one in (*args, *kwargs.values()):
            self._check(one)
        # a value that is written over later is another one then
        args, kwargs = tuple(map(_as_now, args)), {k: _as_now(v) for k, v in kwargs.items()}
        if not torch.is_grad_enabled():
            function = torch.no_grad()(function)
        self.done.append((function, args, kwargs))
        of_nodes = meta.dim() and meta.shape[0] == ROWS
        return NodeValue(self, meta, _rows_of((*args, *kwargs.values()), self.square) if of_nodes
                         else ("", False))

    def effect(self, function: Callable, args: tuple, meta: Tensor) -> NodeValue:
        """The stand-in for the result of a function that draws numbers or keeps statistics."""
        raise Unseen

    def at_end(self, value: NodeValue, end: str) -> pointwise.Rows:
        """The values as rows at this end of the edges."""
        return other("nodes.reduced").at_end(value, end)

    def picked(self, value: NodeValue, index: Special) -> pointwise.Rows:
        """Each edge's row of the values, by an index."""
        return self.at_end(value, index.end)

    def _check(self, value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for one in value:
                self._check(one)
        elif type(value) is slice:
            if any(type(one) not in (int, type(None))
                   for one in (value.start, value.stop, value.step)):
                raise Unseen
        elif type(value) is NodeCount:
            self._check(value.of)
        elif type(value) is NodeValue:
            if value.steps is not self:
                raise Unseen
        elif not (type(value) in _PLAIN or value is Ellipsis
                  or isinstance(value, (Param, Given, EdgeRows))
                  or type(value) is Special and (value.end or value.counts)):
            raise Unseen

    def needed(self, out: Any) -> set[int]:
        """The places of the reductions of which ``out`` is made."""
        return {step for step in self._steps_of(out) if type(step) is int}

    def of_rows(self, out: Any) -> list[pointwise.Rows]:
        """Rows of the edges of which ``out`` is made by torch."""
        return [one.rows for step in self._steps_of(out) if type(step) is tuple
                for one in step[1] if type(one) is EdgeRows]

    def _steps_of(self, out: Any) -> list[Any]:
        """All steps of which ``out`` is made."""
        return [self.done[at] for at in self.places_of(out)]

    def places_of(self, out: Any) -> set[int]:
        """The places of all steps of which ``out`` is made, up to those that are done before."""
        pending, visited = [*_places(out)], set[int]()
        while pending:
            at = pending.pop()
            if at not in visited:
                visited.add(at)
                pending += () if at in self.early else _places(self.done[at])
        return visited

    def reduced_into(self) -> set[int]:
        """The places of the steps that reductions go into."""
        found: set[int] = set()
        for at, step in enumerate(self.done):
            if type(step) is int or not found.isdisjoint(_places(step)):
                found.add(at)
        return found


def _places(value: Any) -> Iterator[int]:
    """The places of the steps whose results are in ``value``."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _places(one)
    elif type(value) is dict:
        yield from _places(tuple(value.values()))
    elif type(value) is NodeCount:
        yield from _places(value.of)
    elif type(value) is NodeValue:
        yield value.at


def _as_now(value: Any) -> Any:
    """``value`` with stand-ins in it as they are now."""
    if type(value) in (tuple, list):
        return type(value)(map(_as_now, value))
    return value.as_now() if type(value) is NodeValue else value


def _rows_of(args: tuple, square: bool) -> Any:
    """The end whose nodes the rows of what is made of these belong to, and whether all of these
    nodes have one. ``square``: both ends have the same nodes."""
    parts = [part for one in args for part in (one if isinstance(one, (tuple, list)) else (one,))]
    rows = {one.rows for one in parts if type(one) is NodeValue and one.of_nodes}
    if square and rows and all(whole for end, whole in rows if end) and ("", False) not in rows:
        return "i", True
    return rows.pop() if len(rows) == 1 else ("", False) if rows else ("i", True)


class NodeValue(Value):
    """The last of ``steps``, so far: its place is ``at``. ``rows``: the end of the edges whose
    nodes its rows belong to, and whether it surely has one for each; ``alone``: whether nothing
    else lies in its memory, so that it may be written over."""

    rank = 9
    alone = False
    device = DEVICE

    def __init__(self, steps: Steps, meta: Tensor, rows: tuple[str, bool] = ("i", True)):
        self.steps, self.at, self.meta, self.rows = steps, len(steps.done) - 1, meta, rows

    def as_now(self) -> NodeValue:
        copy = NodeValue(self.steps, self.meta, self.rows)
        copy.at = self.at
        return copy

    def __getattr__(self, name: str) -> Any:
        if name in _ELSEWHERE:
            return lambda *args, **kwargs: self.operate(name, getattr(Tensor, name),
                                                        (self, *args), kwargs)
        if name in IN_PLACE:
            return lambda *args, **kwargs: self.overwritten(
                IN_PLACE[name], getattr(Tensor, IN_PLACE[name]), self, *args, **kwargs)
        if name not in NAMES and not (self.steps.wholes
                                      and (name in OF_WHOLES or name in _EXTREMA)):
            raise Unseen
        return lambda *args, **kwargs: _call(name, getattr(Tensor, name), (self, *args), kwargs)

    @property
    def of_nodes(self) -> bool:
        """Whether there is a row for each node."""
        return bool(self.meta.dim()) and self.meta.shape[0] == ROWS

    @property
    def shape(self) -> tuple:
        sizes = self.meta.shape
        if self.of_nodes or other("nodes.node_wholes").GRAPHS in sizes[:1]:
            return Sequence((NodeCount(self.as_now()), *sizes[1:]))
        return Sequence(sizes)

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    def size(self, dim: Any = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, place: Any) -> Any:
        first, *rest = place if type(place) is tuple and place else (place,)
        if getattr(type(first), "of_edges", False):
            first = first.ids()
        if type(first) is Special:
            return other("nodes.reduced").gathered(self, first, *rest)
        if self.steps.wholes and (not self.of_nodes or type(first) is NodeValue or place == -1):
            return other("nodes.node_wholes").picked(self, place)
        if not (first is Ellipsis or first == slice(None)):
            raise Unseen
        return self.operate("getitem", operator.getitem, (self, place), {})

    def __setitem__(self, mask: Any, value: Any) -> None:
        if type(mask) is not NodeValue or mask.meta.shape != self.meta.shape or (
            mask.meta.dtype != torch.bool or type(value) not in NUMBERS):
            raise Unseen
        self.overwritten("masked_fill", Tensor.masked_fill, self, mask, value)

    def overwritten(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if function.__name__.endswith("_"):  # as `torch.relu_`
            function = getattr(Tensor, name, None)  # type: ignore[assignment]  # None is refused
        if name not in IN_PLACE.values() or not self.alone or not torch.is_grad_enabled() or (
            function is None):
            raise Unseen
        result = _call(name, function, (self.as_now(), *args[1:]), kwargs)
        if type(result) is not NodeValue or (result.meta.shape, result.meta.dtype) != (
            self.meta.shape, self.meta.dtype):
            raise Unseen
        self.at, self.rows = result.at, result.rows
        return self

    def __iter__(self) -> Any:
        raise Unseen

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in _ELSEWHERE:
            place, of_that_name = _ELSEWHERE[name]
            return getattr(other(place), of_that_name)(*args, **kwargs)
        if self.steps.wholes and any(isinstance(one, pointwise.Rows) and type(one) is not Given
                                     for one in args):
            return other("nodes.node_wholes").at_edges(name, function, args, kwargs)
        of_two, wholes = name in _EXTREMA and len(args) == 2 and isinstance(args[1], Value), (
            self.steps.wholes)
        if wholes and name in _EXTREMA and not of_two:
            return other("nodes.node_wholes").extreme(self, function, args, kwargs)
        if not (name in NAMES or name == "getitem" or of_two or wholes and name in OF_WHOLES) or (
            kwargs.get("out") is not None):
            raise Unseen
        # without a dimension, the result depends on the number of rows
        if name == "squeeze" and not (len(args) == 2 and type(args[1]) is int):
            raise Unseen
        if name == "normalize" and not wholes and self._over_rows(*args[1:], *kwargs.values()):
            raise Unseen
        meta = (other("nodes.node_wholes").looks if wholes else applied)(function, args, kwargs)
        result = self.steps.made(function, args, kwargs, meta)
        result.alone = of_two or name in IN_NEW_MEMORY
        if not result.alone:
            for one in (*args, *kwargs.values()):
                if type(one) is NodeValue:
                    one.alone = False
        return result

    def _over_rows(self, *rest: Any) -> bool:
        """Whether one of an operation's numbers may be the dimension of the rows."""
        return any(type(one) not in (int, float, type(None)) or one in (0, -self.meta.dim())
                   for one in rest)

    def beside(self, tensors: Any, dim: int) -> Any:
        if type(dim) is not int or dim in (0, -self.meta.dim()) or not all(
            isinstance(one, (NodeValue, Given)) for one in tensors):
            raise Unseen
        meta = torch.cat([one.meta for one in tensors], dim)
        return self.steps.made(torch.cat, (list(tensors), dim), {}, meta)


operators.operate(NodeValue, ("pow", "gt", "lt", "ge", "le", "eq", "ne"))
operators.overwrite(NodeValue)
