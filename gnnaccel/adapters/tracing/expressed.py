"""`Message`: a message as an expression, ready for the calls of its layer; and rows written for
each edge before, where a message cannot be one expression."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.tracing import noted
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.cuda.messages.expression import CHANNEL_SUM, Expression
from gnnaccel.cuda.messages.generated import seen_as
from gnnaccel.dispatch.generated.cut import cut
from gnnaccel.dispatch.generated.messages import SOFTMAX, Generated, at_edges, reduced
from gnnaccel.dispatch.generated.tree import (Call, Leaf, Make, Tree, expression, leaves,
                                                mapped)
from gnnaccel.dispatch.ops import cuda_functions
from gnnaccel.dispatch.ops.aggregation import Reduce
from gnnaccel.dispatch.ops.graph import OpGraph


KIND = object()  #: among the ``names`` of a `Leaf`: its rows are for some of the edges alone


class CallArguments(dict):
    """The arguments of one call of ``propagate``. ``graph``: its edges; ``layer``: whose call it
    is; ``made``: what was computed of the arguments, each once, by what computes it; ``grad``:
    whether autograd records; ``read``: as of `nodes_read.of_read`, once it was asked for; ``over``:
    a reference to those of the whole call, where these are for another list of edges than its."""

    __slots__ = ("__weakref__", "graph", "grad", "layer", "made", "over", "read")

    def __init__(self, arguments: dict, graph: OpGraph, layer: Any = None):
        super().__init__(arguments)
        self.graph, self.layer, self.grad = graph, layer, torch.is_grad_enabled()
        self.made: dict[Any, Any] = {}
        self.read: Any = None
        self.over: Any = None


def call_of(given: Any) -> Any:
    """The arguments of the whole call."""
    over = getattr(given, "over", None)
    return given if over is None else over()


class Once:
    """Computation done once in each call: others ask for its result again, or it draws numbers.

    It is done as the call is, with gradients or without, also where it is first asked for by
    what needs none (`dispatch.generated.cut`)."""

    def __init__(self, make: Callable[[Any], Any]):
        self.make = make

    def __call__(self, given: Any) -> Any:
        if not isinstance(given, CallArguments):
            return self.make(given)
        if self not in given.made:
            with torch.set_grad_enabled(given.grad):
                given.made[self] = self.make(given)
        return given.made[self]


def numbered(pieces: Callable[[Any], Any], at: int, given: Any) -> Tensor:
    """One of several tensors that are computed at once."""
    return pieces(given)[at]


class Effect(Once):
    """Computation done once in each call, whether or not its result is used, and in the order of
    the message: it draws numbers, or keeps statistics."""

    def __init__(self, make: Callable[[Any], Any]):
        super().__init__(make)
        noted.note_effect(self)


class Before(Once):
    """Rows computed for each edge by a kernel, before the messages are reduced."""

    def stand_in(self, given: dict, graph: OpGraph) -> tuple[Any, str]:
        """Stand-in of the result, as `Generated.before` has it."""
        raise NotImplementedError


class AtEdges(Before):
    """``message``, made of ``tree``, at each edge, [E, *shape], or the sums of its heads,
    [E, heads], if ``summed``."""

    def __init__(self, message: Message, summed: bool, tree: Tree):
        self.message, self.summed, self.tree = message, summed, tree

        def make(arguments: CallArguments) -> Tensor:
            return at_edges(arguments.graph, message.generated(arguments), summed)

        super().__init__(make)

    def stand_in(self, given: dict, graph: OpGraph) -> tuple[Any, str]:
        return self.message.stand_in(given, graph), "heads" if self.summed else "rows"


class Softmax(Before):
    """The softmax of rows of the edges, ``make`` [E, *tail], over those that enter each node, or
    that leave it where ``end`` is "j"; ``tree``: of what they are made."""

    def __init__(self, make: Make, tree: Tree, tail: tuple[int, ...], end: str = "i"):
        self.tree, self.tail, self.count, self.end = tree, tail, math.prod(tail), end
        by = "u" if end == "j" else "v"
        super().__init__(lambda given: cuda_functions.edge_softmax(given.graph, make(given), by))

    def stand_in(self, given: dict, graph: OpGraph) -> tuple[Any, str]:
        return self.count, SOFTMAX[self.end]


class Reduced(Before):
    """``message`` at each edge, reduced over those that enter a node: [num_dst, *shape]."""

    def __init__(self, message: Message, reduce: str):
        self.message, self.reduce = message, reduce
        super().__init__(lambda given: reduced(given.graph, reduce, message.generated(given)))

    def stand_in(self, given: dict, graph: OpGraph) -> tuple[Any, str]:
        return self.message.stand_in(given, graph), self.reduce


class Message(NamedTuple):
    """A message, ready for its calls. ``leaves``: those of the inputs of the ``expression``;
    ``shape``: of a message; ``seen``: (heads, width) for the kernels; ``after``: of a linear map of
    the sums its weight, its bias, the tensors of which these are made, and its channels;
    ``mapped``: the same message with that map in the expression, if it can be there; ``weighted``:
    the same with the softmax that it is multiplied with as a score of the expression, if it is;
    ``turned``: the user sees the rows in the layer's ``node_dim``, where nothing else need be;
    ``pieces``: as of `Generated`."""

    expression: Expression
    leaves: tuple[Leaf, ...]
    numbers: tuple[float, ...]
    shape: tuple[int, ...]
    seen: tuple[int, int]
    after: tuple[Make, Make | None, tuple[Make, ...], int] | None = None
    mapped: Any = None  # a `Message`
    weighted: Any = None  # likewise
    turned: bool = False
    pieces: tuple[int, ...] = ()

    @property
    def edge_arguments(self) -> set[str]:
        """The arguments with a row for each edge of which it is made."""
        names = set()
        for leaf in self.leaves:
            for one in leaf.names:
                if isinstance(one, AtEdges):
                    names |= one.message.edge_arguments
                elif leaf.end == "e" and type(one) is str:
                    names.add(one)
        return names

    def kinds(self, of: str) -> int:
        """How many of the inputs are rows for some of the edges, such as those of one kind, beyond
        the first at each of the ends ``of`` these."""
        inputs = zip(self.leaves, self.expression.inputs)
        ends = [one.end for leaf, one in inputs if one.mode == "row" and KIND in leaf.names]
        before = {one for leaf in self.leaves for one in leaf.names if isinstance(one, AtEdges)}
        return sum([max(0, ends.count(end) - 1) for end in of]
                   + [one.message.kinds(of) for one in before])

    def reduced_by(self, reduces: tuple[Reduce, ...], keeps: bool = False) -> Message:
        """The message for these reductions: a map can be done with sums and means alone, and a
        softmax with sums. ``keeps``: the weights are asked for by themselves, too."""
        if self.weighted is not None and not keeps and all(one == "sum" for one in reduces):
            return self.weighted._replace(after=self.after)
        if self.mapped is None or all(one in ("sum", "mean") for one in reduces):
            return self
        return self.mapped

    def generated(self, arguments: CallArguments) -> Generated:
        """Inputs of the kernels, computed from the arguments of a call."""
        weight = bias = None
        if self.after is not None:
            weight = self.after[0](arguments)
            bias = None if self.after[1] is None else self.after[1](arguments)
        return Generated(self.expression, self._inputs(arguments), self.numbers, self.shape,
                         self.seen, weight, bias, pieces=self.pieces)

    def stand_in(self, given: dict, graph: OpGraph) -> Generated:
        """Inputs like those of `generated`, of no memory."""
        weight = None
        if self.after is not None:
            weight = _nothing(self.after[2], given).expand(self.after[3], self.shape[0])
        before = {one: one.stand_in(given, graph) for leaf in self.leaves for one in leaf.names
                  if isinstance(one, Before)}
        return Generated(self.expression, self._stand_ins(given, graph), self.numbers, self.shape,
                         self.seen, weight, before=tuple(before.values()),
                         made=sum([len(leaf.roots) > 1 for leaf in self.leaves]),
                         kinds=self.kinds("ji"), edge_kinds=self.kinds("e"))

    def _inputs(self, arguments: CallArguments) -> tuple[Tensor, ...]:
        """Inputs of the expression, computed from the arguments of a call."""
        results, shape, tensors = arguments.made, self.shape, []
        for leaf, one in zip(self.leaves, self.expression.inputs):
            if leaf.make not in results:
                results[leaf.make] = leaf.make(arguments)
            t = results[leaf.make]
            flat = leaf.end != "p" and t.dim() == 2 and (one.mode != "row" or leaf.blocks
                                                         or leaf.tail == shape)
            tensors.append(t if flat else self._flat(leaf, one.mode, t))
        return tuple(tensors)

    def _stand_ins(self, given: dict, graph: OpGraph) -> tuple[Tensor, ...]:
        """Tensors like those of `_inputs`, of no memory."""
        sizes = {"row": math.prod(self.shape), "head": self.seen[0], "one": 1}
        rows = {"j": graph.num_src, "i": graph.num_dst, "e": graph.num_edges, "p": 1}
        return tuple([_nothing(leaf.roots, given).expand(rows[one.end], sizes[one.mode])
                      for leaf, one in zip(self.leaves, self.expression.inputs)])

    def _flat(self, leaf: Leaf, mode: str, t: Tensor) -> Tensor:
        """``t`` in the shape [rows, numbers]."""
        rows = 1 if leaf.end == "p" else t.shape[0]
        if (leaf.end == "p" and type(t) is Tensor and not t.requires_grad
            and torch.is_grad_enabled()):
            # Backward computes the message anew. A buffer may be written to before, of which the
            # host's code keeps no hold.
            t = t.clone()
        if mode == "row" and not leaf.blocks and leaf.tail != self.shape:
            return t.reshape(rows, *leaf.tail).expand(rows, *self.shape).reshape(rows, -1)
        return t.reshape(rows, -1)


def _nothing(roots: tuple[Make, ...], given: dict) -> Tensor:
    """A scalar like those made of these tensors; it requires a gradient if they do."""
    tensors = [root(given) for root in roots]
    like = ([t for t in tensors if t.is_floating_point()] or tensors)[0]
    nothing = like.new_empty((), dtype=like.dtype if like.is_floating_point() else torch.float32)
    if torch.is_grad_enabled() and any([t.requires_grad for t in tensors]):
        nothing.requires_grad_()
    return nothing


def expressed(tree: Tree, shape: tuple[int, ...], heads: int | None = None) -> Message | None:
    """The message of this ``shape`` that a tree computes; None without channels. ``heads``: in how
    many blocks the kernels are to see the channels, if not by the leaves."""
    if not shape or not all(shape):
        return None
    tree, within = _with_sums(tree, shape, heads)
    heads = within or heads
    tree = cut(tree)
    tree_leaves = list(leaves(tree))
    blocks = {count for count in (_blocks(leaf, shape) for leaf in tree_leaves) if count}
    forced = heads is not None
    if not forced:
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

    expr, inputs, numbers = expression(tree, mode)
    has_heads = any(one.mode == "head" for one in expr.inputs)
    heads_width = ((heads, math.prod(shape) // heads) if heads and (has_heads or forced)
                   else seen_as(math.prod(shape)))
    return Message(expr, tuple(inputs), numbers, shape, heads_width, pieces=pieces_of(inputs))


def pieces_of(leaves: Iterable[Leaf]) -> tuple[int, ...]:
    """The numbers of those that are cut out of others."""
    return tuple([k for k, leaf in enumerate(leaves) if leaf.cut])


def reshaped(tree: Tree, old: tuple[int, ...], new: tuple[int, ...]) -> Tree:
    """A tree of rows of shape ``old`` as one of shape ``new``; Unseen where that cannot be. Of
    fewer numbers each is for a block of channels."""

    def of_leaf(leaf: Leaf) -> Leaf:
        count = math.prod(leaf.tail)
        if leaf.blocks:
            return leaf
        if count == 1:
            return leaf.viewed((1,) * len(new))
        if leaf.tail == old:
            return leaf.viewed(new)
        leading = len(old) - next(k for k, n in enumerate((*reversed(leaf.tail), 0)) if n != 1)
        if leaf.tail[:leading] == old[:leading]:
            return leaf.viewed((), count)
        raise Unseen

    return mapped(tree, of_leaf)


def _with_sums(tree: Tree, shape: tuple[int, ...], heads: int | None) -> tuple[Tree, int | None]:
    """The tree with sums over channels in it, in place of such as would be written for each edge,
    and the heads of which these are sums; where they do not fit the message, as it is."""
    all_leaves = leaves(tree)
    sums = {leaf: leaf.make for leaf in all_leaves
            if type(leaf.make) is AtEdges and leaf.make.summed}
    head_counts = {one.message.seen[0] for one in sums.values()}
    leaf_blocks = {count for count in (_blocks(leaf, shape) for leaf in all_leaves) if count}
    if len(head_counts) != 1 or heads not in (None, *head_counts) or not leaf_blocks <= head_counts:
        return tree, None
    (count,) = head_counts
    heads_width = count, math.prod(shape) // count
    if any(one.message.seen != heads_width for one in sums.values()) or any(
        (_blocks(leaf, shape) if count > 1 else leaf.blocks or math.prod(leaf.tail)) != count
        for leaf in sums):
        return tree, None

    def inlined(leaf: Leaf) -> Any:
        if leaf not in sums:
            return leaf
        one = sums[leaf]
        inner = reshaped(one.tree, one.message.shape, shape)
        return Call(CHANNEL_SUM, (_with_sums(inner, shape, count)[0],))

    try:
        return mapped(tree, inlined), count
    except Unseen:
        return tree, None


def _blocks(leaf: Leaf, shape: tuple[int, ...]) -> int | None:
    """How many blocks of equal channels the numbers of a leaf are for, if it is such a one."""
    if leaf.blocks:
        return leaf.blocks
    tail = leaf.tail
    leading = len(tail)
    while leading and tail[leading - 1] == 1:
        leading -= 1
    count = math.prod(tail)
    if len(tail) == len(shape) and 0 < leading < len(shape) and tail[:leading] == shape[:leading]:
        return count if 1 < count < math.prod(shape) else None
    return None
