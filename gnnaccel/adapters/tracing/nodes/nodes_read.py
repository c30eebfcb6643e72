"""Rows of nodes that no edge reads, where torch computes something of all rows at one end.

The host computes it edge by edge, and never meets such rows. What is infinite or no number in them,
or becomes so, such as a feature divided by a degree of 0, would reach gradients of weights, as 0
times that is no number; and a whole number in them may name no row of a table. Their place is taken
by the row of a node that an edge reads.
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from gnnaccel.adapters.tracing.expressed import CallArguments
from gnnaccel.adapters.tracing.rows.pointwise import sized, whole
from gnnaccel.dispatch.generated.tree import Make, Tree, leaves, of_leaves, rows_of
from gnnaccel.dispatch.run.autograd import Keeping

_TARGETS = {"j": "u", "i": "v"}


class OfRead(CallArguments):
    """The arguments of a call whose rows of nodes are all read by some edge."""

    def __init__(self, arguments: CallArguments):
        super().__init__(arguments, arguments.graph, arguments.layer)
        self.of_call = weakref.ref(arguments)  # which have this, and live as long as the call
        self.grad = arguments.grad
        self._kept: dict[tuple[int, str, int], Tensor] = {}
        self._unread: dict[str, tuple[Tensor, Tensor] | None] = {}

    def unread(self, end: str) -> tuple[Tensor, Tensor] | None:
        """`OpGraph.unread` of the nodes at an ``end``, asked once: the device's report may arrive
        during the call, and change the answer."""
        if end not in self._unread:
            self._unread[end] = self.graph.unread(_TARGETS[end])
        return self._unread[end]

    def of(self, t: Tensor, end: str, dim: int = 0) -> Tensor:
        """``t`` at an ``end`` of the edges, with nodes in the dimension ``dim``."""
        key = id(t), end, dim  # of an argument, which stays
        if key not in self._kept:
            # with gradients as the call has them, also if code without gradients asks first
            with torch.set_grad_enabled(self.grad):
                self._kept[key] = _replaced(t, self.unread(end), self.graph.num_edges, dim)
        return self._kept[key]


def _replaced(t: Tensor, unread: tuple[Tensor, Tensor] | None, edges: int, dim: int) -> Tensor:
    if unread is None or not math.prod(t.shape):
        # gradients are added up as below: whether nodes are known to be read is a matter of time
        return t.view_as(t)
    mask, replacement = unread
    row = (t.detach().index_select(dim, replacement) if edges
           else t.new_ones(1) if t.is_floating_point() else t.new_zeros(1))
    return torch.where(mask.view(-1, *(1,) * (t.dim() - dim - 1)), row, t)


def of_read(given: Any, roots: Iterable[Make], picks: bool = False) -> Any:
    """The arguments to compute rows of nodes of, which are made of the tensors ``roots``; ``given``
    itself where none of these wants a gradient. ``picks``: the rows may be numbers by which
    others are picked, so that those of all nodes have to be such as edges read."""
    if type(given) is not CallArguments or not picks and (not given.grad or not any(
        root(given).requires_grad for root in roots)):
        return given
    if given.read is None:
        given.read = OfRead(given)
    return given.read


def as_given(given: Any) -> Any:
    """The arguments of a call as they were given, which those of `of_read` are made of."""
    return given.of_call() if type(given) is OfRead else given


def are_copies(given: Any, end: str) -> bool:
    """Whether rows of nodes at an ``end`` are copies of the caller's, who cannot write to them."""
    return type(given) is OfRead and given.unread(end) is not None


def protected(call: Callable[..., Any], wholes: Sequence[tuple[Tree, Any]],
              end: str) -> Callable[..., Any]:
    """Gives ``call(*rows, *others)`` of torch for the arguments of a call of ``propagate`` and the
    others. ``wholes``: trees at one ``end`` and the shapes of their rows, as of `pointwise.whole`.

    torch may keep the caller's rows for gradients, those that the trees are made of too, where the
    host keeps rows that it gathered. So it gets copies where callers write to them
    (`dispatch.run.written`)."""
    if end not in "ji":
        return lambda given, *others: call(*[whole(*one, given) for one in wholes], *others)
    inputs = list({id(leaf): leaf for tree, _ in wholes for leaf in leaves(tree)}.values())
    count = len(inputs)

    def of_inputs(*tensors: Tensor) -> Any:
        rows = dict(zip(map(id, inputs), tensors))
        return call(*[sized(of_leaves(tree, rows), tail) for tree, tail in wholes],
                    *tensors[count:])

    of_rows = [tree for tree, _ in wholes] == inputs  # `whole` gives their rows, or views of them
    keeping = Keeping(call if of_rows else of_inputs)

    def run(given: Any, *others: Tensor) -> Any:
        if not is_grad_enabled() or are_copies(given, end):
            return call(*[whole(*one, given) for one in wholes], *others)
        if of_rows:
            return keeping(*[whole(*one, given) for one in wholes], *others)
        return keeping(*[rows_of(given, leaf) for leaf in inputs], *others)

    return run


def node_rows(get: Callable[[Any], Tensor], end: str, dim: int = 0) -> Callable[[Any], Tensor]:
    """``get(given)``, the rows of nodes at an ``end``, in a way that knows of `OfRead`. ``dim``:
    the dimension that nodes are in."""

    def make(given: Any) -> Tensor:
        t = get(given)
        return given.of(t, end, dim) if type(given) is OfRead else t

    return make


def argument(name: str, end: str, dim: int = 0) -> Callable[[Any], Tensor]:
    """The rows of nodes that an argument of ``propagate`` has for an ``end``."""
    at = end == "i"

    def make(given: Any) -> Tensor:
        t = given[name]  # `standins.rows`, and `node_rows` of these, without their calls
        t = t[at] if isinstance(t, (tuple, list)) else t
        return given.of(t, end, dim) if type(given) is OfRead else t

    return make
