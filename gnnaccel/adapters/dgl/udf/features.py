"""Messages as rows of tensors, and their stand-ins while a function runs.

Rows at an edge's source, its destination and the edge itself are those of `pyg.propagate`, "j", "i"
and "e", and so are most operations on them. DGL's functions may ask for messages as such. Products
of both ends that are summed over channels are an operation of DGL's.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gnnaccel.adapters.tracing import expressing
from gnnaccel.adapters.tracing.expressed import AtEdges, CallArguments, Message
from gnnaccel.adapters.tracing.kept_values import Own
from gnnaccel.adapters.tracing.rows import beside, channels, linear_maps, pointwise
from gnnaccel.adapters.tracing.rows.pointwise import Rows
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.dispatch.generated import messages as of_dispatch
from gnnaccel.dispatch.generated.tree import Call, Leaf
from gnnaccel.dispatch.ops.graph import OpGraph

#: key of a call's arguments: inner products of rows at both ends, as `dgl.ops.gsddmm` makes them
DOT = "dot"
PLACES = {"u": "j", "v": "i", "e": "e"}  # by DGL's names
_TARGETS = {place: name for name, place in PLACES.items()}
_SIDES = {"add": (True, "add"), "mul": (True, "mul"), "sub": (False, "sub")}  # may be turned round


# --- stand-ins ------------------------------------------------------------------------------------

class _Own(Rows):
    """Rows whose operations give rows of this module."""

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        return _own(super().operate(name, function, args, kwargs))

    def beside(self, tensors: Any, dim: int) -> Any:
        return _own(super().beside(tensors, dim))

    def __setitem__(self, place: Any, value: Any) -> None:
        raise Unseen

    def alone(self) -> Any:
        return _own(super().alone())


def _own(found: Any) -> Any:
    if type(found) is tuple:
        return tuple(map(_own, found))
    if type(found) is Rows:
        return Feature.of(found)
    if type(found) is beside.Beside:
        return Beside(found.parts, found.meta, found.along)
    if type(found) is not linear_maps.Mapped:
        return found
    mapped = Mapped(found.parts, found.name, found.function, (found.weight, found.bias), {})
    # a map of one end may be a part of a product
    one_end = len(mapped.parts) == 1 and channels.ends(mapped.parts[0]) in ({"j"}, {"i"})
    return mapped.alone() if one_end else mapped


class Feature(_Own):
    """Features, and results of operations on them."""

    @staticmethod
    def of(rows: Rows) -> Feature:
        feature = Feature(rows.tree, rows.meta)
        rows.sharing(feature)
        return feature

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name == "sum" and args and args[0] is self:
            product = _dot(*args, **kwargs)
            if product is not None:
                return _own(product)
        return super().operate(name, function, args, kwargs)


class Beside(_Own, beside.Beside):
    """Rows side by side."""


class Mapped(_Own, linear_maps.Mapped):
    """The linear map of rows, or of several side by side."""


def _dot(rows: Rows, dim: Any = None, keepdim: Any = False) -> Rows | None:
    """The inner product of rows at the source and at the destination, as rows of edges; None where
    ``rows`` are no such product."""
    tree, last = rows.tree, rows.meta.dim() - 1
    if type(dim) in (tuple, list) and len(dim) == 1:
        dim = dim[0]
    if type(dim) is not int or dim not in (-1, last) or last == 0 or type(keepdim) is not bool:
        return None
    if type(tree) is not Call or tree.op != "mul":
        return None
    tail = tuple(rows.meta.shape[1:])
    if not all(isinstance(one, Leaf) and not one.blocks and one.tail == tail for one in tree.args):
        return None
    left, right = tree.args
    if {left.end, right.end} != {"i", "j"}:
        return None

    def make(given: Any) -> Tensor:
        sides = (_computed(side, given) for side in (left, right))
        out = given[DOT](*sides, _TARGETS[left.end], _TARGETS[right.end])
        return out if keepdim else out.squeeze(-1)

    return pointwise.made_rows("e", make, rows.meta.sum(dim, keepdim), left.names | right.names,
                           tuple(dict.fromkeys((*left.roots, *right.roots))))


# --- messages -------------------------------------------------------------------------------------

class Sent(NamedTuple):
    """A message, ready for its calls. ``message``: in the form that kernels are generated from;
    ``operands``: (operation, first, second) where one of DGL's own operations makes it, its
    operands at the ends ``targets``; ``scalar``: it is one number without a dimension; ``apart``:
    it is to lie in memory of its own; ``written``: the name of a feature of the edges that it is,
    too."""

    message: Message
    operands: tuple[str, Leaf | None, Leaf | None] | None
    targets: tuple[str, str]
    scalar: bool
    apart: bool = False
    written: str | None = None

    @property
    def from_nodes(self) -> bool:
        """Whether there is a linear map, or the like, of nodes before an edge reads them."""
        return any(len(leaf.roots) > 1 for leaf in _all_leaves(self.message) if leaf.end in "ji")

    @property
    def kept(self) -> list[int]:
        """How many numbers an edge reads of each of the rows of nodes."""
        return [math.prod(leaf.tail) for leaf in _all_leaves(self.message) if leaf.end in "ji"]

    @property
    def by_dgl(self) -> bool:
        """Whether DGL's own operation makes it, and what it is made of is no result of others."""
        return self.operands is not None and all(
            [name.gathers for leaf in self.message.leaves for name in leaf.names
             if isinstance(name, Own)])

    def made_of(self, own: Own) -> bool:
        """Whether it is made of the tensor of rows that the user gets."""
        return any([own in leaf.names for leaf in _all_leaves(self.message)])

    def made(self, arguments: CallArguments, graph: OpGraph) -> Tensor:
        """[E, *shape]: the messages on torch operations, linear maps where their rows are."""
        message = self.message.mapped or self.message
        out = of_dispatch.made(graph, message.generated(arguments))
        return out.squeeze(-1) if self.scalar else out

    def sides(self, arguments: CallArguments) -> tuple[str, Tensor | None, Tensor | None]:
        """``operands``, computed."""
        assert self.operands is not None
        op, *sides = self.operands
        left, right = (None if side is None else _computed(side, arguments) for side in sides)
        return op, left, right


def _all_leaves(message: Message) -> list[Leaf]:
    """The leaves of ``message``, and of messages that are written for each edge before."""
    before = {one for leaf in message.leaves for one in leaf.names if isinstance(one, AtEdges)}
    return [*message.leaves, *(leaf for one in before for leaf in _all_leaves(one.message))]


def _computed(leaf: Leaf, given: Any) -> Tensor:
    t = leaf.make(given)
    return t if t.shape[1:] == leaf.tail else t.reshape(t.shape[0], *leaf.tail)


def ready(rows: Rows) -> Sent:
    """A message for its calls; Unseen where nothing computes it."""
    scalar = rows.meta.dim() == 1
    message = expressing.found(rows.unsqueeze(-1) if scalar else rows, None)
    if message is None:
        raise Unseen
    operands, targets = _operands(_tree(rows), tuple(rows.meta.shape[1:]))
    return Sent(message, operands, targets, scalar)


def _tree(rows: Rows) -> Any:
    """The tree that computes a message; None where it is no sum over the ends of the edge."""
    try:
        return rows.alone().tree
    except Unseen:
        return None


_COPIED = {"j": ("copy_lhs", True), "e": ("copy_rhs", False)}


def _operands(tree: Any, shape: tuple[int, ...]) -> tuple[Any, tuple[str, str]]:
    """``operands`` and ``targets`` of a `Sent`."""
    if isinstance(tree, Leaf) and tree.end in _COPIED and not tree.blocks and tree.tail == shape:
        op, first = _COPIED[tree.end]
        return (op, tree, None) if first else (op, None, tree), ("u", "e")
    if not isinstance(tree, Call) or tree.op not in _SIDES or len(tree.args) != 2:
        return None, ("u", "e")
    left, right = tree.args
    if not (isinstance(left, Leaf) and isinstance(right, Leaf)) or left.blocks or right.blocks:
        return None, ("u", "e")
    if "p" in (left.end, right.end) or left.end == right.end or (
        tuple(map(max, left.tail, right.tail)) != shape or len(left.tail) != len(right.tail)):
        return None, ("u", "e")  # others repeat channels after it
    turns, op = _SIDES[tree.op]
    if "jie".index(left.end) > "jie".index(right.end) and turns:
        left, right = right, left
    return (op, left, right), (_TARGETS[left.end], _TARGETS[right.end])
