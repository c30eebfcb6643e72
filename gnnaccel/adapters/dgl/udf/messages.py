"""What stands for a batch of edges while a message function runs, and messages as rows of tensors.

Rows at an edge's source, its destination and the edge itself are those of `pyg.propagate`, "j",
"i" and "e". What a call is given is a dict of tensors; a field is called by its place and its name,
such as "j.h".
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.propagate import generated, linear_maps, pointwise
from gnnaccel.adapters.pyg.propagate.generated import Message
from gnnaccel.adapters.pyg.propagate.pointwise import Rows
from gnnaccel.adapters.pyg.propagate.row_count import ROWS
from gnnaccel.adapters.pyg.propagate.standins import Unseen
from gnnaccel.dispatch.generated import messages as of_dispatch
from gnnaccel.dispatch.generated.tree import Call, Leaf, leaves
from gnnaccel.dispatch.ops.graph import OpGraph

#: among what a call is given: inner products of rows at both ends, as `dgl.ops.gsddmm` makes them
DOT = "dot"
_AT = {"u": "j", "v": "i", "e": "e"}  # by DGL's names
_TARGETS = {place: name for name, place in _AT.items()}
_SIDES = {"add": (True, "add"), "mul": (True, "mul"), "sub": (False, "sub")}  # may be turned round
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b}


class Fields:
    """Stands for the features at one place: "j", "i" or "e", or "m" of messages that are there.
    ``seen``: how those that are read look, by place and name; None for those that are missing or
    of a kind that is not followed."""

    def __init__(self, place: str, frame: Any, seen: dict[str, Any]):
        self._place, self._frame, self._seen = place, frame, seen
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._stand_in(name)
        return self._made[name]

    def _stand_in(self, name: str) -> Any:
        if type(name) is not str:
            raise Unseen
        key = f"{self._place}.{name}"
        self._seen[key] = None
        if name not in self._frame:
            raise Unseen
        value = self._frame[name]
        self._seen[key] = form(value)
        if self._seen[key] is None:
            raise Unseen
        meta = torch.empty(ROWS, *value.shape[1:], dtype=value.dtype, device="meta")
        return self._rows(key, name, meta)

    def _rows(self, key: str, name: str, meta: Tensor) -> Any:
        end = "e" if self._place == "m" else self._place
        # both ends' features go by one name, which tells differences of one feature
        known = f"nodes.{name}" if end in ("i", "j") else key
        return Feature.of(pointwise.rows(end, lambda given: given[key], meta, known))


class Feature(Rows):
    """Features, and what is made of them: products of both ends may be summed over channels, which
    is an operation of DGL's."""

    @staticmethod
    def of(rows: Rows) -> Feature:
        return Feature(rows.tree, rows.meta)

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        found = _dot(*args, **kwargs) if name == "sum" and args and args[0] is self else None
        if found is None:
            found = super().operate(name, function, args, kwargs)
        if type(found) is linear_maps.Mapped and all(
            leaf.end in "jip" for leaf in leaves(self.tree)) and _ends(self.tree) < 2:
            found = found.alone()  # which may be one end of a product
        return Feature.of(found) if type(found) is Rows else found


def _ends(tree: Any) -> int:
    return len({leaf.end for leaf in leaves(tree)} - {"p"})


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


def form(value: Any) -> tuple | None:
    """How features look, but for the number of rows; None of those that are not followed."""
    if (type(value) not in (Tensor, torch.nn.Parameter) or not value.is_floating_point()
        or value.dim() < 1 or value.layout != torch.strided):
        return None
    return value.shape[1:], value.dtype


class Edges:
    """Stands for DGL's ``EdgeBatch``."""

    def __init__(self, frames: dict[str, Any], seen: dict[str, Any]):
        self.src, self.dst, self.data = (Fields(place, frames[place], seen) for place in "jie")


def sent(out: Any) -> dict[str, Rows]:
    """The messages that a function gives, by name."""
    if type(out) is not dict or not out:
        raise Unseen
    for name, rows in out.items():
        if type(name) is not str or not isinstance(rows, Rows):
            raise Unseen
        if not rows.meta.is_floating_point():
            raise Unseen
    return out


def built_in(function: Any, edges: Edges) -> dict[str, Rows]:
    """The message of one of DGL's own functions."""
    op, *targets = _name(function)
    at = {"j": edges.src, "i": edges.dst, "e": edges.data}
    if op == "copy":
        return {function.out_field: at[_AT[targets[0]]][function.in_field]}
    lhs, rhs = (at[_AT[target]][field] for target, field
                in zip(targets, (function.lhs_field, function.rhs_field)))
    # of features with other numbers of dimensions DGL pads the shorter
    if op not in _BINARY or lhs.meta.dim() != rhs.meta.dim():
        raise Unseen
    return {function.out_field: _BINARY[op](lhs, rhs)}


def _name(function: Any) -> tuple[str, ...]:
    """("copy", target), or (operation, target, target)."""
    parts = function.name.split("_")
    return (parts[0], parts[1]) if len(parts) == 2 else (parts[1], parts[0], parts[2])


class Sent(NamedTuple):
    """A message, ready for its calls. ``message``: as kernels are generated for it; ``operands``:
    (operation, first, second) where one of DGL's own operations makes it, its operands at the ends
    ``targets``; ``scalar``: it is one number without a dimension; ``from_nodes``: the ends at which
    there is a linear map, or the like, of the features before an edge reads them."""

    message: Message
    operands: tuple[str, Leaf | None, Leaf | None] | None
    targets: tuple[str, str]
    scalar: bool
    from_nodes: frozenset[str]

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
    made = frozenset(leaf.end for leaf in message.leaves
                     if leaf.end in "ji" and len(leaf.roots) > 1)
    return Sent(message, operands, targets, scalar, made)


def _tree(rows: Rows) -> Any:
    """How a message is computed; None where it ends in a map that sums go through."""
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
    if "p" in (left.end, right.end) or left.end == right.end or not (
        len(left.tail) == len(right.tail) == len(shape)):
        return None, ("u", "e")
    turns, op = _SIDES[tree.op]
    if "jie".index(left.end) > "jie".index(right.end) and turns:
        left, right = right, left
    return (op, left, right), (_TARGETS[left.end], _TARGETS[right.end])
