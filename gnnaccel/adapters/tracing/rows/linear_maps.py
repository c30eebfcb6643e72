"""Linear maps in messages of pointwise operations: before the kernels at each end of the edge, or
after them where a map is the last that a message does."""
from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Make, Param, applied
from gnnaccel.adapters.tracing.attention.traced_bias import checked_bias
from gnnaccel.adapters.tracing.expressed import Once, numbered
from gnnaccel.adapters.tracing.nodes.nodes_read import of_read, protected
from gnnaccel.adapters.tracing.rows import channels, pointwise
from gnnaccel.adapters.tracing.rows.pieces import viewed
from gnnaccel.adapters.tracing.rows.pointwise import Deferred, Rows, about, hold, whole
from gnnaccel.adapters.tracing.rows.products import product
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.cuda.segment import segment_backward
from gnnaccel.cuda.traverse.activation import Activation
from gnnaccel.dispatch.generated.tree import (Call, Leaf, Number, Tree, computed, expression,
                                              leaves, of_one)
from gnnaccel.dispatch.run import mlp, skinny_matmul
from gnnaccel.dispatch.run.skinny_matmul import Pointwise

_STEPS = 4  # operations of a function that kernels compute while they read rows
_Term = tuple[Tree, Any, Param]  # what is mapped, the shape of its rows, the weight


def map_of(parts: list[Any], name: str, function: Callable, rest: tuple, kwargs: dict) -> Rows:
    """The map of rows by a parameter; or a product with a matrix for each row, or from the left."""
    rows = isinstance(parts[0], Rows) + any(isinstance(one, Rows) for one in rest)
    if name in ("matmul", "bmm") and (rows == 2 or not isinstance(parts[0], Rows)):
        if len(parts) > 1 or kwargs:
            raise Unseen
        return product(function, (*parts, *rest))
    return Mapped(parts, name, function, rest, kwargs)


class Mapped(Deferred):
    """The linear map of rows, or of several side by side, ``parts``."""

    def __init__(self, parts: list[Any], name: str, function: Callable, rest: tuple, kwargs: dict):
        weight, bias = (*rest, *kwargs.values(), None)[:2]
        if not isinstance(weight, Param) or not all(isinstance(part, Rows) for part in parts):
            raise Unseen
        if not (bias is None or isinstance(bias, Param)):
            raise Unseen
        self.parts, self.weight, self.bias, self.name = hold(parts), weight, bias, name
        self.function, self._widths = function, [part.meta.shape[-1] for part in parts]
        self._dim = -1 if name == "linear" else -2 if weight.meta.dim() > 1 else 0
        if weight.meta.shape[self._dim] != sum(self._widths):
            raise Unseen
        wide = parts[0].meta.new_empty(*parts[0].meta.shape[:-1], sum(self._widths))
        super().__init__(applied(function, (wide, weight.meta), {}))
        checked_bias(weight, bias, self.meta)

    def of_sum(self) -> tuple[Rows, Make, Make | None] | None:
        """Rows that may be summed before they are mapped, the weight [out, in] and the bias."""
        if len(self.parts) != 1 or self.parts[0].meta.dim() != 2 or self.weight.meta.dim() != 2:
            return None
        if self.bias is not None and self.bias.meta.shape != self.meta.shape[1:]:  # broadcast
            return None
        make = self.weight.make
        weight_make: Make = make if self.name == "linear" else lambda given: make(given).t()
        return self.parts[0].alone(), weight_make, None if self.bias is None else self.bias.make

    @property
    def roots(self) -> tuple[Make, ...]:
        """The parameters of which the map is made."""
        return (*self.weight.roots, *(() if self.bias is None else self.bias.roots))

    def joined(self) -> Rows:
        """The map as a sum over the ends of the edge, and of terms of no end."""
        ends: dict[str, list[_Term]] = {}
        sums: list[Tree] = []
        make, widths, dim = self.weight.make, self._widths, self._dim
        pieces = Once(lambda given: make(given).split(widths, dim))
        for k, part in enumerate(self.parts):
            piece = self.weight
            if len(self.parts) > 1:
                meta = self.weight.meta.split(widths, dim)[k]
                piece = Param(partial(numbered, pieces, k), meta, self.weight.roots)
            if not channels.ends(part):
                sums.append(self._of_all(part, piece))
                continue
            by_end = self._ends_of(k, part)
            if by_end is None:
                in_kernels = self._in_kernels(part, piece)
                sums += in_kernels
                # written for each edge before
                by_end = {} if in_kernels else {"e": channels.at_edges(part).tree}
            for end, tree in by_end.items():
                ends.setdefault(end, []).append((tree, part.meta.shape[1:], piece))
        bias, total = self.bias, None
        for end in sorted(ends, key="jie".index):  # the bias is added where there are nodes
            sums.append(self._at(end, ends[end], bias))
            bias = None
        if bias is not None:
            sums.append(pointwise.tree_of(bias, self.meta))
        for tree in sums:
            total = tree if total is None else Call("add", (total, tree))
        if total is None:
            raise Unseen
        return Rows(total, self.meta)

    def _of_all(self, part: Rows, weight: Param) -> Leaf:
        """The map of rows that are the same for all edges, such as one number."""
        function, tree, tail = self.function, part.alone().tree, part.meta.shape[1:]

        def make(given: Any) -> Tensor:
            matrix = weight.make(given)
            row = (matrix.new_full((1, *tail), tree.value) if type(tree) is Number
                   else computed(tree, given).expand(1, *tail))
            return function(row, matrix)

        roots = (root for leaf in leaves(tree) for root in leaf.roots)
        return Leaf("p", make, tuple(self.meta.shape[1:]), frozenset(), (*roots, *weight.roots))

    def _ends_of(self, k: int, part: Rows) -> dict[str, Tree] | None:
        """The terms of a part by the end that they are at; None where it is no sum of such, or one
        whose terms are far larger than it is."""
        try:
            by_end, cancels = _apart(part.alone().tree)
        except Unseen:
            return None
        if by_end.keys() == {"e"}:
            tree = part.alone().tree
            return {"e": tree if self._of_pointwise(tree) else channels.at_edges(part).tree}
        return by_end if all(self._beside(k, name) for name in cancels) else None

    def _in_kernels(self, part: Rows, weight: Param) -> list[Tree]:
        """The map of a part by the kernels of the message: to a single channel, or of few; else
        none."""
        count = part.meta.shape[-1]
        if self.meta.numel() * count == part.meta.numel():
            product = operator.mul(part, weight.view(-1))
            return [viewed(channels.summed(product), self.meta).tree]
        if not channels.fit_apart(part) or part.meta.dim() != 2 or weight.meta.dim() != 2:
            return []
        out_first = self.name == "linear"
        columns = Once(lambda given: weight.make(given).unbind(1 if out_first else 0))
        return [operator.mul(channels.channel(part, c), Param(
            partial(numbered, columns, c),
            weight.meta.select(1 if out_first else 0, c), weight.roots)).tree for c in range(count)]

    def _beside(self, at: int, name: str) -> bool:
        """Whether features that part ``at`` has the difference of are in another part as well."""
        return any(name in leaf.names for k, part in enumerate(self.parts) if k != at
                   for leaf in leaves(part.alone().tree))

    def _at(self, end: str, terms: list[_Term], bias: Param | None) -> Leaf:
        """The terms of the map at one end."""
        _, names, roots = about(*[tree for tree, _, _ in terms])
        roots = (*roots, *(root for _, _, weight in terms for root in weight.roots),
                 *(() if bias is None else bias.roots))
        of_nodes = roots if end in "ji" else ()
        function = skinny_matmul.by_size if self.function is F.linear else self.function
        # the host maps rows that it gathered
        runs = [(protected(function, [(tree, tail)], end), weight.make)
                for tree, tail, weight in terms]
        first, of_first = runs[0]

        def make(given: Any) -> Tensor:
            given, out = of_read(given, of_nodes), None
            offset = None if bias is None else bias.make(given)
            for run, of_weight in runs:
                one = run(given, of_weight(given))
                out = one if out is None else out + one
            return out if offset is None else out + offset  # type: ignore[operator,return-value]

        def make_at_once(given: Any) -> Tensor:
            given = of_read(given, of_nodes)
            return first(given, of_first(given), None if bias is None else bias.make(given))

        how: Make = make
        if len(terms) == 1 and self.name == "linear":
            how = make_at_once if end != "e" else self._of_edges(*terms[0], bias)
        return Leaf(end, how, tuple(self.meta.shape[1:]), names, roots)

    def _of_edges(self, tree: Tree, tail: Any, weight: Param, bias: Param | None) -> Make:
        matrices = weight.make, None if bias is None else bias.make
        function = self._of_pointwise(tree)
        return (OfEdges(tree, tail, *matrices) if function is None
                else OfFunction(leaves(tree)[0], function, *matrices))

    def _of_pointwise(self, tree: Tree) -> Pointwise | None:
        """The function of each number of a leaf that a part is, which kernels compute as they read
        it; None where it is no such function, or one of many operations."""
        of = leaves(tree)
        if (type(tree) is not Call or len(of) != 1 or of[0].end != "e" or len(self.parts) > 1
            or self.name != "linear" or of[0].tail != tuple(self.parts[0].meta.shape[1:])):
            return None
        return pointwise_of(tree, *self.weight.meta.shape[::-1])


def pointwise_of(tree: Tree, k: int, n: int) -> Pointwise | None:
    """The function of its only leaf that ``tree`` is, where kernels compute it as they read rows of
    k columns that are mapped to n; None where it is one of many operations."""
    expr, _, numbers = expression(tree, lambda leaf: "row")
    act = Activation(expr, numbers)
    if (not act.serves or len(expr.steps) > _STEPS
        or not segment_backward.as_one(k, n, torch.float32)):
        return None
    return Pointwise(act, partial(of_one, tree))


class OfEdges:
    """A linear map of rows of the edges: ``tree``, with rows of the shape ``tail``."""

    def __init__(self, tree: Tree, tail: Any, weight: Make, bias: Make | None):
        self.tree, self.tail, self.weight, self.bias = tree, tail, weight, bias

    def __call__(self, given: Any) -> Tensor:
        rows, bias = whole(self.tree, self.tail, given), self.bias
        return skinny_matmul.by_size(rows, self.weight(given),
                                     None if bias is None else bias(given))


class OfFunction:
    """A linear map of a function of each number of ``leaf``, rows of the edges. Where these are a
    linear map themselves, ``first``, kernels make both at once."""

    def __init__(self, leaf: Leaf, function: Pointwise, weight: Make, bias: Make | None):
        self.leaf, self.function, self.weight, self.bias = leaf, function, weight, bias
        # not one that is seen in another shape
        self.first = leaf.make if type(leaf.make) is OfEdges and leaf.base is leaf else None

    def __call__(self, given: Any) -> Tensor:
        first, function, weight = self.first, self.function, self.weight(given)
        bias = None if self.bias is None else self.bias(given)
        if first is None:
            rows = whole(self.leaf, self.leaf.tail, given)
        else:
            rows, shift = whole(first.tree, first.tail, given), first.bias
            maps = first.weight(given), None if shift is None else shift(given)
            if rows.shape[0] >= skinny_matmul.TALL:
                return mlp.two(rows, *maps, function, weight, bias)
            rows = F.linear(rows, *maps)
        if rows.shape[0] < skinny_matmul.TALL:
            return F.linear(function.by_torch(rows), weight, bias)
        return skinny_matmul.mapped(rows, weight, bias, function)


def _apart(tree: Tree) -> tuple[dict[str, Tree], list[str]]:
    """The terms of a sum, added up by the end that they are at; and the arguments of which there
    are differences of both ends.

    Neighbours are often alike. The maps of both are then far larger than that of their difference,
    which they would leave to rounding, unless larger terms are beside it anyway.
    """
    sums: dict[str, Tree] = {}
    signs: dict[str, set[tuple[str, int]]] = {}
    shared: list[Tree] = []
    for sign, term in _terms(tree, 1):
        term = Call("neg", (term,)) if sign < 0 else term
        if not {leaf.end for leaf in leaves(term)} - {"p"}:
            shared.append(term)
            continue
        end, names, _ = about(term)
        for name in names:
            signs.setdefault(name, set()).add((end, sign))
        sums[end] = Call("add", (sums[end], term)) if end in sums else term
    for term in shared:
        first = next(iter(sums), None)
        if first is None:
            raise Unseen
        sums[first] = Call("add", (sums[first], term))
    return sums, [name for name, uses in signs.items()
                  if any(a[0] != b[0] and a[1] != b[1] for a in uses for b in uses)]


def _terms(tree: Tree, sign: int) -> list[tuple[int, Tree]]:
    if type(tree) is Call and tree.op in ("add", "sub", "neg"):
        last = -sign if tree.op in ("sub", "neg") else sign
        first = [] if tree.op == "neg" else _terms(tree.args[0], sign)
        return first + _terms(tree.args[-1], last)
    return [(sign, tree)]
