"""What a message does besides: tensors and others that it keeps on the layer, such as
``self.alpha``, and what it computes once in each call.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Value
from gnnaccel.adapters.tracing.expressed import AtEdges, Once
from gnnaccel.adapters.tracing.noted import notes
from gnnaccel.adapters.tracing.rows import channels
from gnnaccel.adapters.tracing.rows.pointwise import Changed, Deferred, Rows, whole
from gnnaccel.adapters.tracing.rows.specials import Special
from gnnaccel.adapters.tracing.rows.stacks import Stacked
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.adapters.tracing.tracing import Trace
from gnnaccel.dispatch.generated.tree import Leaf, Tree, leaves


class Own(Once):
    """The tensor of rows of the edges that the user gets: ``tree``, with rows of the shape
    ``tail``. ``function``: what makes it of the rows computed; ``place``: the dimension in which
    the user sees the rows."""

    place: int | None = None
    function: Callable[[Tensor], Tensor]

    def __init__(self, tree: Tree, tail: Any):
        self.tree, self.tail, self.function = tree, tail, _no_view

    def make(self, given: Any) -> Tensor:
        """The tensor. A method, as an attribute would lead in a circle."""
        rows = whole(self.tree, self.tail, given)
        return self.function(rows.movedim(0, self.place) if self.place else rows)

    @property
    def gathers(self) -> bool:
        """Whether the rows are no more than those of nodes, for each edge."""
        make = self.tree.make if type(self.tree) is Leaf else None
        return type(make) is AtEdges and not make.message.expression.steps

    def rows(self, given: Any) -> Tensor:
        """The rows as the kernels see them, of which others are made."""
        tensor = self(given)
        return tensor.movedim(self.place, 0) if self.place else tensor

    def as_given(self, value: Rows, place: int, copies: bool) -> Own:
        """This, as the user gets ``value``, in this dimension; ``copies``: what lies in the
        caller's memory, too."""
        if self.place not in (None, place):
            raise Unseen  # two views
        self.place = place
        if type(self.tree) is Leaf:
            if value.of_caller and not (value.copied or copies):
                self.function = _view
            elif value.of_caller or value.copied or self.tree.base is not self.tree:
                self.function = _copy  # others may have the rows
        if place and self.function is _no_view:
            self.function = Tensor.contiguous
        return self


def make_own(value: Rows) -> None:
    """Make ``value``, which is made now, a tensor of its own. Where nothing computes its rows it
    stays as it is."""
    with contextlib.suppress(Unseen):
        alone = value.alone()
        if alone is not value:
            number = value.number
            value.__class__, value.__dict__ = type(alone), {**vars(alone), "number": number}
        tree, tail = channels.at_edges(Rows(value.tree, value.meta)).tree, value.meta.shape[1:]
        value.own, of = Own(tree, tail), leaves(tree)
        value.tree = Leaf("e", value.own.rows, tuple(tail),
                          frozenset((value.own,)).union(*[leaf.names for leaf in of]),
                          tuple(dict.fromkeys(root for leaf in of for root in leaf.roots)))


def note(value: Any) -> None:
    """Note what the message sets on the layer: of the rows that the user gets others are made."""
    if type(value) is tuple:
        for part in value:
            note(part)
    rows, place = _rows_of(value)
    if rows is not None and _has_own(rows, place, False) and rows.number not in notes().own:
        notes().late.add(rows.number)


def get(rows: Rows) -> None:
    """Note rows that the user gets, as `note` does, and how they are given."""
    note(rows)
    if rows.own is not None:
        rows.own.as_given(rows, 0, False)


def _rows_of(value: Any) -> tuple[Rows | None, int]:
    """The rows that a stand-in is for, and the dimension in which the user sees them."""
    if isinstance(value, Rows):
        return value, 0
    return (value.rows, value.place) if type(value) is Stacked else (None, 0)


def _has_own(rows: Rows, place: int, copies: bool) -> bool:
    """Whether rows that the user gets are a tensor of their own, of which gradients may be asked
    for; not a tensor that the caller passed."""
    if type(rows) is Changed or not rows.meta.is_floating_point():
        return False
    if copies or place or not rows.of_caller or isinstance(rows, Deferred):
        return True
    tree = rows.tree if rows.own is None else rows.own.tree
    return type(tree) is not Leaf or tree.base is not tree or tree.roots != (tree.make,)


def kept(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` by their names as `begin` keeps them on the layer; Unseen where it cannot."""
    found: dict[int, tuple[Value, Any]] = {}
    return {name: _kept(value, found) for name, value in values.items()}


def _kept(value: Any, found: dict[int, tuple[Value, Any]]) -> Any:
    """``value`` as it is kept. ``found``: what is kept of stand-ins already, by their ids: what is
    one tensor for the host is one here, which the user may change in place."""
    if isinstance(value, Value):
        if id(value) not in found:
            if _lies_with(value, found):
                raise Unseen
            found[id(value)] = value, _given(value, False)
        return found[id(value)][1]
    if value is None or type(value) in (int, float, bool, str):
        return value
    if type(value) is tuple and value:
        parts = [_kept(one, found) for one in value]
        return Once(lambda given: tuple([_kept_now(one, given) for one in parts]))
    if type(value) is Special and value.end:
        return Once(functools.partial(_ids, value.end))
    raise Unseen


def _lies_with(value: Value, found: dict[int, tuple[Value, Any]]) -> bool:
    """Whether rows lie in the memory of others that are kept, where ours would not."""
    memory = _memory(value)
    if memory is None:
        return False
    return any([_memory(one) is memory for one, _ in found.values()])


def _memory(value: Value) -> Any:
    """The rows in the memory of ``value``; None for these alone, and where theirs is the
    caller's, as ours is then."""
    rows, _ = _rows_of(value)
    tree = None if rows is None else rows.own.tree if rows.own else rows.tree
    if rows is None or rows.of_caller and type(tree) is Leaf and tree.end == "e":
        return None
    return rows.memory


def given_back(rows: Rows) -> Once:
    """Computation of rows that the user gets, and may change in place."""
    return _given(rows, True)


def _given(value: Value, copies: bool) -> Once:
    """Computation of rows that the user gets. ``copies``: a copy of what lies in the caller's
    memory."""
    rows, place = _rows_of(value)
    if rows is None:
        raise Unseen
    if _has_own(rows, place, copies):
        if rows.own is not None:
            return rows.own.as_given(rows, place, copies)
        if rows.number in notes().own:
            raise Unseen  # nothing computes it
        notes().late.add(rows.number)
    rows = channels.at_edges(rows)
    tree, tail = rows.tree, rows.meta.shape[1:]
    function = _copy if copies or rows.copied else _itself
    if place:
        return Once(lambda given: whole(tree, tail, given).movedim(0, place).contiguous())
    return Once(lambda given: function(whole(tree, tail, given)))


def _itself(t: Tensor) -> Tensor:
    return t


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _view(t: Tensor) -> Tensor:
    return t.view_as(t)


def _no_view(t: Tensor) -> Tensor:
    """``t``, or a copy: torch refuses to change some views."""
    return t.clone() if t._is_view() else t


def _kept_now(value: Any, given: Any) -> Any:
    return value(given) if isinstance(value, Once) else value


def _ids(end: str, given: Any) -> Any:
    """The caller's ids of the nodes at one end of the edges."""
    graph = given.graph
    return graph.edge_index[int((end == "i") is not graph.flipped)]


def begin(layer: Any, trace: Trace, given: Any) -> None:
    """Do what precedes the messages of a call: compute all effects, and set what the message sets
    on the layer, such as ``self.alpha``."""
    for effect in trace.effects:
        effect(given)
    for name, value in trace.kept.items():
        setattr(layer, name, _kept_now(value, given))
