"""Messages of pointwise operations, which kernels are written for.

`form` traces the ``message`` of a layer on the stand-ins of `pointwise`, and gives what it computes
as any other `Form`. What was read of the layer is looked at again in each call.
"""
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.propagate import linear_maps, pointwise, reading, tracing
from gnnaccel.adapters.pyg.propagate.pointwise_calls import OPERATIONS
from gnnaccel.adapters.pyg.propagate.standins import Form, Unseen
from gnnaccel.cuda import driver
from gnnaccel.cuda.expression import Expression
from gnnaccel.cuda.generated import seen_as
from gnnaccel.dispatch.generated.cut import cut
from gnnaccel.dispatch.generated.messages import EXTREMA, Generated
from gnnaccel.dispatch.generated.tree import Leaf, Make, expression, leaves
from gnnaccel.dispatch.ops import aggregation_messages
from gnnaccel.dispatch.ops.aggregation import Reduce
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason

NAMES = frozenset((
    *OPERATIONS, *pointwise.NAMES, "cat", "concat", "linear", "matmul", "mm", "dropout", "dim",
    "shape", "size", "nn", "functional", "special", "multiply", "subtract", "divide", "true_divide",
    "negative", "absolute", "pi", "e", "float32"))


class Message(NamedTuple):
    """A message, ready for its calls. ``leaves``: those of the inputs of the ``expression``;
    ``shape``: of a message; ``seen``: (heads, width) for the kernels; ``after``: of a linear map of
    the sums its weight, its bias, the tensors of which these are made, and its channels;
    ``mapped``: the same message with that map in the expression, if it can be there."""

    expression: Expression
    leaves: tuple[Leaf, ...]
    numbers: tuple[float, ...]
    shape: tuple[int, ...]
    seen: tuple[int, int]
    after: tuple[Make, Make | None, tuple[Make, ...], int] | None = None
    mapped: Any = None  # a `Message`

    def reduced_by(self, reduces: tuple[Reduce, ...]) -> Message:
        """The message for these reductions: a map can be done with sums and means alone."""
        if self.mapped is None or all(one in ("sum", "mean") for one in reduces):
            return self
        return self.mapped

    def generated(self, given: dict, made: dict[Make, Tensor] | None = None) -> Generated:
        """What the kernels take, computed from the arguments of a call. ``made``: what other
        messages of the call have computed."""
        weight = bias = None
        if self.after is not None:
            weight = self.after[0](given)
            bias = None if self.after[1] is None else self.after[1](given)
        return Generated(self.expression, self.inputs(given, {} if made is None else made),
                         self.numbers, self.shape, self.seen, weight, bias)

    def stand_in(self, given: dict, graph: OpGraph) -> Generated:
        """What looks like that, of no memory."""
        weight = None
        if self.after is not None:
            weight = _nothing(self.after[2], given).expand(self.after[3], self.shape[0])
        return Generated(self.expression, self.stand_ins(given, graph), self.numbers, self.shape,
                         self.seen, weight)

    def inputs(self, given: dict, made: dict[Make, Tensor]) -> tuple[Tensor, ...]:
        """Computed from the arguments of a call, but for those that are ``made``."""
        for leaf in self.leaves:
            if leaf.make not in made:
                made[leaf.make] = leaf.make(given)
        return tuple([self._flat(leaf, one.mode, made[leaf.make])
                      for leaf, one in zip(self.leaves, self.expression.inputs)])

    def stand_ins(self, given: dict, graph: OpGraph) -> tuple[Tensor, ...]:
        """What looks like them, of no memory."""
        sizes = {"row": math.prod(self.shape), "head": self.seen[0], "one": 1}
        rows = {"j": graph.num_src, "i": graph.num_dst, "e": graph.num_edges, "p": 1}
        return tuple([_nothing(leaf.roots, given).expand(rows[one.end], sizes[one.mode])
                      for leaf, one in zip(self.leaves, self.expression.inputs)])

    def _flat(self, leaf: Leaf, mode: str, t: Tensor) -> Tensor:
        """[rows, numbers]."""
        rows = 1 if leaf.end == "p" else t.shape[0]
        if mode == "row" and not leaf.blocks and leaf.tail != self.shape:
            return t.reshape(rows, *leaf.tail).expand(rows, *self.shape).reshape(rows, -1)
        return t.reshape(rows, -1)


def _nothing(roots: tuple[Make, ...], given: dict) -> Tensor:
    """A number like those that are made of these tensors; it wants a gradient if they do."""
    tensors = [root(given) for root in roots]
    nothing = tensors[0].new_empty(())
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        nothing.requires_grad_()
    return nothing


def prepared(function: Any) -> Any:
    """``function`` as it is, where it can do nothing but compute."""
    for cell in function.__closure__ or ():
        try:
            if not may_be_read(cell.cell_contents):
                return None
        except ValueError:  # nothing is in it yet
            return None
    found = tracing.globals_in_place(function, NAMES, _number)
    return None if found is None else function


def may_be_read(value: Any) -> bool:
    return type(value) in (int, float, bool)


def _number(value: Any) -> Any:
    """A number that stands in a module, as it is."""
    return value if may_be_read(value) else None


def found(out: Any, layer: Any) -> Message | None:
    if not isinstance(out, pointwise.Rows) or not out.meta.is_floating_point():
        return None
    after = out.of_sum() if isinstance(out, linear_maps.Mapped) else None
    if after is not None:
        rows, *maps = after
        before = _of_rows(rows)
        return before and before._replace(after=(*maps, out.roots, out.meta.shape[1]),
                                        mapped=_mapped(out))
    return _of_rows(out.alone())


def _mapped(out: pointwise.Rows) -> Message | None:
    """A message that ends in a map, as one of rows that were mapped at their ends."""
    try:
        return _of_rows(out.alone())
    except Unseen:
        return None


def _of_rows(out: pointwise.Rows) -> Message | None:
    shape, tree = tuple(out.meta.shape[1:]), cut(out.tree)
    inside = list(leaves(tree))
    if not shape or not all(shape):
        return None
    blocks = {count for count in (_blocks(leaf, shape) for leaf in inside) if count}
    heads = blocks.pop() if len(blocks) == 1 else None

    def mode(leaf: Leaf) -> str:
        count = leaf.blocks or math.prod(leaf.tail)
        if leaf.tail == shape or count == math.prod(shape):
            return "row"
        if count == 1:
            return "one"
        if heads is not None and _blocks(leaf, shape) == heads:
            return "head"
        if leaf.end == "e" or leaf.blocks:
            raise Unseen  # would take memory of the size of the edges
        return "row"

    made, inputs, numbers = expression(tree, mode)
    has_heads = any(one.mode == "head" for one in made.inputs)
    seen = (heads, math.prod(shape) // heads) if has_heads and heads else seen_as(math.prod(shape))
    return Message(made, tuple(inputs), numbers, shape, seen)


def _blocks(leaf: Leaf, shape: tuple[int, ...]) -> int | None:
    """How many blocks of equal channels the numbers of a leaf are for, if it is such a one."""
    if leaf.blocks:
        return leaf.blocks
    tail = leaf.tail
    kept = len(tail)
    while kept and tail[kept - 1] == 1:
        kept -= 1
    count = math.prod(tail)
    if len(tail) == len(shape) and 0 < kept < len(shape) and tail[:kept] == shape[:kept]:
        return count if 1 < count < math.prod(shape) else None
    return None


_MANNER = tracing.Manner(NAMES, prepared, pointwise.rows, found, True)


def form(layer: Any, known: reading.Known, kwargs: dict, why: Reason) -> Form | Reason:
    """What the layer's message computes, where kernels can be written for it; ``why`` none of the
    others are its form, else."""
    if known.why is not None or not serves(kwargs):
        return why
    if known.aggregate is not None and not known.traced:
        return why
    found = tracing.trace(layer, known, kwargs, _MANNER)
    if found.message is None:
        return why
    source = next((name for name, end in found.ends if end == "j"), None)
    if source is None or not any(leaf.end == "j" for leaf in found.message.leaves):
        return why
    message = found.message.reduced_by(reading.reductions(layer, known))
    if layer.node_dim not in (0, -1 - len(message.shape)):
        return reason("GA206", f"messages of {len(message.shape) + 1} dimensions, "
                      f"node_dim={layer.node_dim}")

    def more(given: dict, layer: Any) -> Generated | Reason:
        return message.generated(given) if found.holds(layer) else why

    ends = tuple(end for end in found.ends if end != (source, "j"))
    return Form(source, None, None, more, ends, True, None, message.stand_in)


def not_summed(found: Form, layer: Any, kwargs: dict, known: reading.Known) -> Form:
    """The form of a call that may ask for more than sums and means, which ``found`` is for."""
    for one in reading.reductions(layer, known):
        if one in EXTREMA:
            why = aggregation_messages.only_summed(one)
            other = form(layer, known, kwargs, why)
            return other if type(other) is Form else found
    return found


def serves(kwargs: dict) -> bool:
    """Whether there are kernels where the tensors are: torch operations gain nothing here."""
    if driver.placed():
        return True
    for value in kwargs.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if type(one) in reading.TENSORS:
                return one.is_cuda
    return False
