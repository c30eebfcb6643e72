"""Numbers of all edges in a ``message``, such as the largest score or the mean of all rows.

torch computes them, as for the host, of rows that are written for each edge: once in a call, before
its messages, in which they are parameters.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled

from gnnaccel.adapters.tracing.attention.traced import Param, Value
from gnnaccel.adapters.tracing.expressed import AtEdges, Once, Softmax
from gnnaccel.adapters.tracing.nodes.nodes_read import as_given
from gnnaccel.adapters.tracing.noted import notes
from gnnaccel.adapters.tracing.rows import channels, pieces
from gnnaccel.adapters.tracing.rows.pointwise import NODES_TOO, Rows, about, whole
from gnnaccel.adapters.tracing.rows.products import Pair
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.specials import Special
from gnnaccel.dispatch.generated.tree import Tree, leaves


_REFUSES: Any = Special("")  # in place of where the largest numbers are


def of_all(value: Rows, function: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of an operation on ``value``, the first of ``args``, over all edges; None for one
    that leaves a row for each, and where there may be other rows than all edges'."""
    rest = args[1:]
    if args[0] is not value or not value.meta.is_floating_point() or any(
        isinstance(one, Value) for one in (*rest, *kwargs.values())):
        return None
    try:
        found = function(value.meta, *rest, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        return None
    meta = found[0] if isinstance(found, tuple) else found
    if not isinstance(meta, Tensor) or ROWS in meta.shape or meta.dtype != value.meta.dtype:
        return None
    if notes().arguments is None or _may_be_of_nodes(value.alone().tree):
        return None
    rows = channels.at_edges(value if is_grad_enabled() else pieces.detached(value))
    tree, tail = rows.tree, rows.meta.shape[1:]
    _, names, roots = about(tree)

    def make(given: Any) -> Any:
        result = function(whole(tree, tail, given), *rest, **kwargs)
        return result[0] if isinstance(result, tuple) else result

    once = Once(make)
    total: Any = Param(lambda given: once(as_given(given)), meta, roots, names)
    return Pair(total, _REFUSES) if isinstance(found, tuple) else total


def _may_be_of_nodes(tree: Tree) -> bool:
    """Whether rows are made of what an ``aggregate`` is given, which may be rows of nodes."""
    for leaf in leaves(tree):
        before = [one for one in leaf.names if isinstance(one, (AtEdges, Softmax))]
        if NODES_TOO in leaf.names or any([_may_be_of_nodes(one.tree) for one in before]):
            return True
    return False
