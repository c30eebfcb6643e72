"""Messages as rows of tensors, and what stands for them while a function runs.

Rows at an edge's source, its destination and the edge itself are those of `pyg.propagate`, "j", "i"
and "e", and so is most of what may be done to them. Two more things may be done here, since DGL's
functions may ask for messages as such: products of both ends may be summed over channels, which is
an operation of DGL's; and what mixes channels where both ends have met is done at the edges, by
torch (`AtEdges`).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.propagate import generated, linear_maps, pointwise
from gnnaccel.adapters.pyg.propagate.generated import Message
from gnnaccel.adapters.pyg.propagate.pointwise import Rows
from gnnaccel.adapters.pyg.propagate.standins import Unseen
from gnnaccel.adapters.pyg.propagate.traced import Value, applied
from gnnaccel.dispatch.generated import messages as of_dispatch
from gnnaccel.dispatch.generated.tree import Call, Leaf, Make, leaves
from gnnaccel.dispatch.ops.graph import OpGraph

#: among what a call is given: inner products of rows at both ends, as `dgl.ops.gsddmm` makes them;
#: messages, made at the edges
DOT, MADE = "dot", "made"
#: and what `AtEdges` have made in it, with and without gradients
KEPT = "kept"
PLACES = {"u": "j", "v": "i", "e": "e"}  # by DGL's names
_TARGETS = {place: name for name, place in PLACES.items()}
_SIDES = {"add": (True, "add"), "mul": (True, "mul"), "sub": (False, "sub")}  # may be turned round
_SUMS = frozenset(("sum", "mean", "norm"))


# --- stand-ins ------------------------------------------------------------------------------------

class _Own(Rows):
    """Rows of which all that is made is rows of this module."""

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        return _own(super().operate(name, function, args, kwargs))

    def beside(self, tensors: Any, dim: int) -> Any:
        return _own(super().beside(tensors, dim))

    def alone(self) -> Any:
        return _own(super().alone())


def _own(found: Any) -> Any:
    if type(found) is tuple:
        return tuple(map(_own, found))
    if type(found) is Rows:
        return Feature.of(found)
    if type(found) is pointwise.Beside:
        return Beside(found.parts, found.meta)
    if type(found) is not linear_maps.Mapped:
        return found
    mapped = Mapped(found.parts, found.name, found.function, (found.weight, found.bias), {})
    # of one end it may be a part of a product
    one_end = len(mapped.parts) == 1 and _ends(mapped.parts[0]) in ({"j"}, {"i"})
    return mapped.alone() if one_end else mapped


def _ends(rows: Rows) -> set[str]:
    return {leaf.end for leaf in leaves(rows.alone().tree)} - {"p"}


class Feature(_Own):
    """Features, and what is made of them."""

    @staticmethod
    def of(rows: Rows) -> Feature:
        return Feature(rows.tree, rows.meta)

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in _SUMS and args and args[0] is self and len(_ends(self)) > 1:
            found = _dot(*args, **kwargs) if name == "sum" else None
            return _own(_summed(self, name, function, args[1:], kwargs) if found is None else found)
        return super().operate(name, function, args, kwargs)


class Beside(_Own, pointwise.Beside):
    """Rows side by side."""


class Mapped(_Own, linear_maps.Mapped):
    """The linear map of rows, or of several side by side."""

    def at_ends(self) -> Rows | None:
        """As a sum over the ends of the edge; None where it is none."""
        try:
            return super().joined()
        except Unseen:
            return None

    def joined(self) -> Rows:
        found = self.at_ends()
        if found is not None:
            return found
        function, weight, bias = self.function, self.weight, self.bias

        def mapped(given: dict, *parts: Tensor) -> Tensor:
            x = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            out = function(x, weight.make(given))
            return out if bias is None else out + bias.make(given)

        return at_edges(mapped, self.parts, self.meta, self.roots)


class AtEdges:
    """Rows [E, ...] of edges, made of messages ``sent`` by ``function(given, *messages)``."""

    def __init__(self, function: Callable[..., Tensor], sent: tuple[Sent, ...]):
        self.function, self.sent = function, sent

    def __call__(self, given: Any) -> Tensor:
        kept, key = given[KEPT], (id(self), torch.is_grad_enabled())
        if key not in kept:
            kept[key] = self.function(given, *(given[MADE](one, given) for one in self.sent))
        return kept[key]


def at_edges(function: Callable[..., Tensor], parts: list[Rows], meta: Tensor,
             roots: tuple[Make, ...] = ()) -> Rows:
    """Rows at the edge: what ``function(given, *messages)`` makes of those of ``parts``."""
    sent = tuple(map(ready, parts))
    inside = [leaf for one in sent for leaf in one.message.leaves]
    return pointwise._rows("e", AtEdges(function, sent), meta,
                           frozenset().union(*(leaf.names for leaf in inside)),
                           tuple(dict.fromkeys((*(root for leaf in inside for root in leaf.roots),
                                                *roots))))


def _summed(rows: Rows, name: str, function: Callable, rest: tuple, kwargs: dict) -> Rows:
    """A sum, a mean or a norm over channels."""
    if any(isinstance(one, Value) for one in (*rest, *kwargs.values())):
        raise Unseen
    try:
        return pointwise._over_few(rows, name, function, (rows, *rest), kwargs)
    except Unseen:
        meta = applied(function, (rows, *rest), kwargs)
        return at_edges(lambda given, x: function(x, *rest, **kwargs), [rows], meta)


def _dot(rows: Rows, dim: Any = None, keepdim: Any = False) -> Rows | None:
    """The inner product of rows at the source and at the destination, which is one at the edge;
    None of what is no such product."""
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

    def make(given: dict) -> Tensor:
        sides = (_computed(side, given) for side in (left, right))
        out = given[DOT](*sides, _TARGETS[left.end], _TARGETS[right.end])
        return out if keepdim else out.squeeze(-1)

    return pointwise._rows("e", make, rows.meta.sum(dim, keepdim), left.names | right.names,
                           tuple(dict.fromkeys((*left.roots, *right.roots))))


# --- messages -------------------------------------------------------------------------------------

class Sent(NamedTuple):
    """A message, ready for its calls. ``message``: as kernels are generated for it; ``operands``:
    (operation, first, second) where one of DGL's own operations makes it, its operands at the ends
    ``targets``; ``scalar``: it is one number without a dimension."""

    message: Message
    operands: tuple[str, Leaf | None, Leaf | None] | None
    targets: tuple[str, str]
    scalar: bool

    @property
    def from_nodes(self) -> bool:
        """Whether there is a linear map, or the like, of nodes before an edge reads them."""
        return any(len(leaf.roots) > 1 if leaf.end in "ji" else
                   type(leaf.make) is AtEdges and any(one.from_nodes for one in leaf.make.sent)
                   for leaf in self.message.leaves)

    @property
    def kept(self) -> list[int]:
        """How many numbers an edge reads of each of the rows of nodes."""
        return [count for leaf in self.message.leaves for count in (
            [math.prod(leaf.tail)] if leaf.end in "ji" else
            [inner for one in leaf.make.sent for inner in one.kept]
            if type(leaf.make) is AtEdges else [])]

    def made(self, given: dict, graph: OpGraph) -> Tensor:
        """[E, *shape]: the messages on torch operations, linear maps where their rows are."""
        message = self.message.mapped or self.message
        out = of_dispatch.made(graph, message.generated(given))
        return out.squeeze(-1) if self.scalar else out

    def sides(self, given: dict) -> tuple[str, Tensor | None, Tensor | None]:
        """``operands``, computed."""
        assert self.operands is not None
        op, *sides = self.operands
        left, right = (None if side is None else _computed(side, given) for side in sides)
        return op, left, right


def _computed(leaf: Leaf, given: dict) -> Tensor:
    t = leaf.make(given)
    return t if t.shape[1:] == leaf.tail else t.reshape(t.shape[0], *leaf.tail)


def ready(rows: Rows) -> Sent:
    """A message for its calls; Unseen where nothing computes it."""
    scalar = rows.meta.dim() == 1
    message = generated.found(rows.unsqueeze(-1) if scalar else rows, None)
    if message is None:
        raise Unseen
    operands, targets = _operands(_tree(rows), tuple(rows.meta.shape[1:]))
    return Sent(message, operands, targets, scalar)


def _tree(rows: Rows) -> Any:
    """How a message is computed; None where it ends in a map that sums go through first."""
    at_ends = rows.at_ends() if isinstance(rows, Mapped) else rows.alone()
    return None if at_ends is None else at_ends.tree


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
    if "p" in (left.end, right.end) or left.end == right.end or not (
        len(left.tail) == len(right.tail) == len(shape)):
        return None, ("u", "e")
    turns, op = _SIDES[tree.op]
    if "jie".index(left.end) > "jie".index(right.end) and turns:
        left, right = right, left
    return (op, left, right), (_TARGETS[left.end], _TARGETS[right.end])
