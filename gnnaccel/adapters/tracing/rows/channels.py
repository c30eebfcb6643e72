"""Operations in messages that mix the channels of a row, such as sums and norms; dropout; and the
softmax over neighbours.

Where all that a row is made of is at one end of the edge, torch computes them there, once for a
node. Where both ends meet, kernels write the rows for each edge before (`expressed.AtEdges`), or no
more than their sums over channels.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnaccel.adapters.tracing.attention.traced import Param, Value, applied
from gnnaccel.adapters.tracing.expressed import AtEdges, Before, Effect, Once, Softmax, expressed
from gnnaccel.adapters.tracing.later import other
from gnnaccel.adapters.tracing.layer.traced_modules import parameter
from gnnaccel.adapters.tracing.nodes.nodes_read import of_read, protected
from gnnaccel.adapters.tracing.rows.pieces import cut, of_leaf, viewed
from gnnaccel.adapters.tracing.rows.pointwise import FEW, Rows, about, made_rows, whole
from gnnaccel.adapters.tracing.rows.specials import UP_TO_LAST, Special
from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.cuda.runtime.launch import MAX_WIDTH
from gnnaccel.dispatch.generated.cut import make_without_gradient
from gnnaccel.dispatch.generated.tree import Call, Leaf, Number, Tree, leaves, mapped

_KEEPING = ("softmax", "log_softmax", "softmin", "cumsum")  # as many channels as there were
_OVER_EDGES = ("softmax", "log_softmax", "softmin")  # which may also be taken over all edges
_INPUTS = 9  # rows that channels which are apart may bring to a kernel


def ends(value: Rows) -> set[str]:
    """The ends of the edge that the rows are made of."""
    return {leaf.end for leaf in leaves(value.alone().tree)} - {"p"}


def mixed(value: Rows, name: str, function: Callable, args: tuple, kwargs: dict) -> Rows:
    """An operation that makes one row of each, of ``value``, the first of ``args``."""
    if args[0] is not value or any(isinstance(a, Value) and not isinstance(a, Param)
                                   for a in (*args[1:], *kwargs.values())):
        raise Unseen
    if name in _KEEPING and type(_dim(args, kwargs)) is not int:
        raise Unseen  # torch picks a dimension, or it has another name
    if name in _OVER_EDGES and _dim(args, kwargs) in (0, -value.meta.dim()):
        return _over_edges(at_edges(value), function, args, kwargs)
    at = ends(value)
    if name == "layer_norm" and at not in ({"j"}, {"i"}):
        normed = _layer_norm(value, *args[1:], **kwargs)
        if normed is not None:
            return normed
    if len(at) == 1:
        return by_torch(value, function, args, kwargs)
    if name in ("sum", "mean") and _dim(args, kwargs) in (-1, value.meta.dim() - 1):
        return _over_channels(value, name, function, args, kwargs)
    return by_torch(at_edges(value), function, args, kwargs)


def _dim(args: tuple, kwargs: dict) -> Any:
    dim: Any = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim


def _over_edges(value: Rows, function: Callable, args: tuple, kwargs: dict) -> Rows:
    """The operation on all rows of the edges, along these."""
    rest = args[1:]
    return by_torch(value, lambda rows: function(rows, *rest, **kwargs), (value,), {})


def by_torch(value: Rows, function: Callable, args: tuple, kwargs: dict,
              once: type[Once] = Once) -> Rows:
    """The operation on rows at one end."""
    end, names, roots = about(value.tree)
    dims = [kwargs.get("dim"), *args[1:]]
    if any(0 in one or -value.meta.dim() in one for one in
           ((d,) if type(d) is int else d for d in dims) if isinstance(one, (tuple, list))):
        raise Unseen
    tree, tail, rest = value.tree, value.meta.shape[1:], args[1:]
    argument_roots = tuple(root for a in (*rest, *kwargs.values()) if isinstance(a, Param)
                           for root in a.roots)
    of_nodes = (*roots, *argument_roots) if end in "ji" else ()
    # rows made of truth values are floats here
    dtype = None if value.meta.is_floating_point() else value.meta.dtype

    def call(rows: Tensor, *tensors: Tensor) -> Any:
        each, rows = iter(tensors), rows if dtype is None else rows.to(dtype)
        now = [next(each) if isinstance(a, Param) else a for a in (*rest, *kwargs.values())]
        return function(rows, *now[:len(rest)], **dict(zip(kwargs, now[len(rest):])))

    parameters = [a for a in (*rest, *kwargs.values()) if isinstance(a, Param)]
    run = protected(call, [(tree, tail)], end)

    def make(given: Any) -> Tensor:
        given = of_read(given, of_nodes, bool(of_nodes) and dtype is not None)
        return run(given, *[a.make(given) for a in parameters])

    return made_rows(end, once(make), applied(function, args, kwargs), names,
                     (*roots, *argument_roots))


def turned(value: Rows, function: Callable, args: tuple, kwargs: dict) -> Any:
    """Channels in another order of their dimensions, by torch; or rows that are no longer first."""
    from gnnaccel.adapters.tracing.rows import stacks  # which needs this module

    if args[0] is not value or any(isinstance(a, Value) for a in (*args[1:], *kwargs.values())):
        raise Unseen
    if stacks.place_of(function, args, kwargs):
        return stacks.turned(value, function, args, kwargs)
    meta = applied(function, args, kwargs)
    rows = value if len(ends(value)) == 1 else at_edges(value)
    result = by_torch(rows, lambda t: function(t, *args[1:], **kwargs).contiguous(), (rows,), {})
    result.meta = meta  # which has no such view as one in this order
    return result


def _layer_norm(value: Rows, normalized_shape: Any, weight: Any = None, bias: Any = None,
                eps: float = 1e-5) -> Rows | None:
    """Layer norm by sums over channels, which kernels compute with the rest of a message; None
    over other dimensions than the last."""
    count = value.meta.shape[-1]
    if tuple(normalized_shape) != (count,) or not 0 < count <= MAX_WIDTH:
        return None
    rows: Any = value.alone()  # whose operators are set for all stand-ins
    mean: Any = summed(rows)
    centered = rows - mean / count
    squares: Any = summed(centered * centered)
    result = centered * (squares / count + eps).rsqrt()
    result = result if weight is None else result * weight
    return result if bias is None else result + bias



# --- where both ends meet -------------------------------------------------------------------------

def at_edges(value: Rows) -> Rows:
    """``value`` as rows of the edges, which torch may go on with: as it is where it is at most one
    operation on such rows, else written by a kernel."""
    value = value.alone()
    if ends(value) == {"e"} and not _more_than_one(value.tree):
        return value
    shape = tuple(value.meta.shape[1:])
    if not shape:  # one number
        return at_edges(value.unsqueeze(-1)).squeeze(-1)
    return Rows(_written(value, shape, shape, None), value.meta)


def _more_than_one(tree: Tree) -> bool:
    """Whether there is more than one operation, with sums over channels, or something that has to
    be repeated in blocks."""
    if isinstance(tree, Leaf):
        return bool(tree.blocks)
    calls = [] if not isinstance(tree, Call) else [tree, *(a for a in tree.args
                                                           if isinstance(a, Call))]
    return len(calls) > 1 or any(leaf.blocks or (type(leaf.make) is AtEdges and leaf.make.summed)
                                 for leaf in leaves(tree))


def summed(value: Rows) -> Rows:
    """[edges, heads, 1] of [edges, heads, channels]: the sums over channels. There may be no heads,
    or several dimensions of them."""
    shape = tuple(value.meta.shape[1:])
    if not shape or not 0 < shape[-1] <= MAX_WIDTH or not math.prod(shape):
        raise Unseen
    meta = value.meta[..., :1]
    return Rows(_written(value, shape, tuple(meta.shape[1:]), math.prod(shape[:-1])), meta)


def _written(value: Rows, shape: tuple[int, ...], tail: tuple[int, ...],
             heads: int | None) -> Leaf:
    """Rows that a kernel writes for each edge; ``heads``: whose channels are summed, if any."""
    if not value.meta.is_floating_point() or not ends(value) or not math.prod(shape):
        raise Unseen
    tree = value.alone().tree
    message = expressed(tree, shape, heads)
    if message is None:
        raise Unseen
    make = AtEdges(message, heads is not None, tree)
    roots = dict.fromkeys(root for leaf in leaves(tree) for root in leaf.roots)
    return Leaf("e", make, tail, frozenset((make,)), tuple(roots))


def _over_channels(value: Rows, name: str, function: Callable, args: tuple, kwargs: dict) -> Rows:
    """A sum or a mean over channels where both ends meet. Few, such as those of positions, are
    apart from then on."""
    count = value.meta.shape[-1]
    tree: Tree | None = None
    if fit_apart(value):
        for k in range(count):
            one = channel(value, k).tree
            tree = one if tree is None else Call("add", (tree, one))
    else:
        tree = summed(value).tree
    assert tree is not None
    if name == "mean":
        tree = Call("div", (tree, Number(float(count))))
    return viewed(Rows(tree, value.meta[..., :1]), applied(function, args, kwargs))


def fit_apart(value: Rows) -> bool:
    """Whether channels are few enough for a kernel to get each as rows of its own."""
    count, shape = value.meta.shape[-1], tuple(value.meta.shape[1:])
    wide = [leaf for leaf in leaves(value.alone().tree) if math.prod(leaf.tail) > 1]
    return (count <= FEW and count * len(wide) <= _INPUTS
            and not any(leaf.tail != shape or leaf.blocks for leaf in wide))


def channel(value: Rows, k: int) -> Rows:
    """One channel of rows."""
    return cut(value, value.meta[..., k:k + 1], _columns, "channels", k)


def _columns(t: Tensor) -> tuple[Tensor, ...]:
    return t.movedim(-1, 0).contiguous().unbind(0)


def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """torch's dropout with a mask for each edge, which torch draws as for the host: in the order
    of edges. On a GPU it draws other numbers in place."""
    if type(p) not in (int, float):
        raise Unseen
    if not training or p == 0:
        return x
    if not inplace and type(x) is other("nodes.node_values").NodeValue:
        return other("nodes.node_pieces").dropped(x, p)
    if inplace or not isinstance(x, Rows):
        raise Unseen
    rows: Any = x.alone()  # whose operators are set for all stand-ins
    if isinstance(rows.tree, Leaf) and type(rows.tree.make) is Softmax:
        return rows * _mask(rows, p)
    x = at_edges(rows)
    return by_torch(x, F.dropout, (x, p, True), {}, Effect)


def _mask(x: Rows, p: float) -> Rows:
    """Mask that dropout multiplies weights with: kernels that make weights take it as it is."""
    leaf, tail, dtype = x.tree, tuple(x.meta.shape[1:]), x.meta.dtype
    assert isinstance(leaf, Leaf)

    def make(given: Any) -> Tensor:
        device = leaf.roots[0](given).device
        ones = torch.ones((given.graph.num_edges, *tail), dtype=dtype, device=device)
        return F.dropout(ones, p, True)

    names = frozenset(one for one in leaf.names if not isinstance(one, Before))
    roots = tuple(map(make_without_gradient, leaf.roots))
    return made_rows("e", Effect(make), x.meta, names, roots)


def through(value: Rows, module: nn.Module) -> Rows:
    """A module of torch's, which is called once in each call: it may keep statistics of what it
    sees, of all edges together."""
    value = at_edges(value)
    end, names, roots = about(value.tree)
    tree, tail = value.tree, value.meta.shape[1:]
    parameters = tuple(parameter(t).make for t in module._parameters.values() if t is not None)
    make = Effect(lambda given: module(whole(tree, tail, given)))
    return made_rows(end, make, value.meta, names, (*roots, *parameters))


def looked_up(function: Callable, table: Param, *place: Any, **named: Any) -> Rows:
    """The rows of a parameter that numbers name, as ``table[rows]`` or by `torch.index_select`."""
    *dim, rows = *place, *named.values()
    if dim not in ([], [0]) or list(named) not in ([], ["index"], ["dim", "index"]) or (
        not isinstance(rows, Rows)) or rows.meta.dtype != torch.int64:
        raise Unseen
    return by_torch(rows, lambda rows, table: function(table, *dim, rows), (rows, table), {})


# --- neighbours -----------------------------------------------------------------------------------

def softmax(src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None,
            dim: int = 0, square: bool = False) -> Rows:
    """PyG's ``softmax``, over the edges that enter a node, or that leave one. ``square``: whether
    there are as many nodes at both ends."""
    if not isinstance(src, Rows) or not (type(index) is Special and index.end
                                         and type(dim) is int and dim in (0, -src.meta.dim())):
        raise Unseen
    if not is_ptr(ptr) or not counts_nodes(num_nodes, index.end, square):
        raise Unseen
    if ptr is not None and index.end != "i":
        raise Unseen  # it is of the edges that enter
    rows = at_edges(src)
    tail = tuple(rows.meta.shape[1:])
    end, names, roots = about(rows.tree)
    if end != "e" or not math.prod(tail):
        raise Unseen
    tree = rows.tree
    make = Softmax(lambda given: whole(tree, tail, given), src.alone().tree, tail, index.end)
    return made_rows("e", make, rows.meta, names | {make}, roots)


def is_ptr(value: Any) -> bool:
    """Whether ``value`` is message passing's ``ptr`` of sorted edges, or None."""
    return value is None or (type(value) is Special and value.name == "ptr")


def counts_nodes(value: Any, end: str = "i", square: bool = False) -> bool:
    """Whether ``value`` is the number of nodes at this end of the edges, or None."""
    return value is None or type(value) is Special and (
        value.name == UP_TO_LAST + end
        or bool(value.counts) and (value.counts == end or square))


def noted(num_nodes: Any, counts: list[int]) -> Any:
    """How many nodes there are; None in place of a number, which is added to ``counts``. A softmax
    of more nodes than there are is the same."""
    if type(num_nodes) is not int:
        return num_nodes
    counts.append(num_nodes)
    return None


def apart(value: Rows) -> tuple[list[Rows], int]:
    """The few rows within each row, such as those of vectors in space, each for itself; and the
    dimension that they are in, the second or the last."""
    shape = tuple(value.meta.shape)
    dim = next((dim for dim in (1, len(shape) - 1) if len(shape) > 2 and shape[dim] <= FEW), None)
    if dim is None:
        raise Unseen
    tree = value.alone().tree
    return [Rows(mapped(tree, functools.partial(_one_of, shape[1:], dim, at)),
                 value.meta.select(dim, at)) for at in range(shape[dim])], dim


def _one_of(shape: tuple[int, ...], dim: int, at: int, leaf: Leaf) -> Leaf:
    """The row ``at`` in this dimension of a leaf of rows of this ``shape``, or one for all."""
    tail = leaf.tail
    if leaf.blocks or len(tail) != len(shape) or tail[dim - 1] not in (1, shape[dim - 1]):
        raise Unseen
    rest = tail[:dim - 1] + tail[dim:]
    if tail[dim - 1] == 1:
        return leaf.viewed(rest)

    return of_leaf(leaf, lambda t: t.unbind(dim), tail, rest, f"rows of {dim}", at)
