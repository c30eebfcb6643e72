"""The stand-ins of a batch of nodes while a reduce function runs.

A message in a mailbox (`Mail`) is rows of edges with one more dimension, the edges of a node.
Operations edge by edge make other rows of edges; a sum, a mean, a maximum or a minimum over the
edges of a node makes a value of that node (`node_values`), of which torch computes the rest. One
that keeps the dimension goes on at the edges, each of which has its node's (`KEPT`). A softmax over
these edges is DGL's ``edge_softmax``. The size of a mailbox is a `counts.Degree`.
"""
from __future__ import annotations

import operator
import types
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.dgl.udf import counts, features
from gnnaccel.adapters.dgl.udf.messages import Fields
from gnnaccel.adapters.tracing.attention.traced import Param, Value, _call, meta_of
from gnnaccel.adapters.tracing.expressed import Once
from gnnaccel.adapters.tracing.nodes import node_values
from gnnaccel.adapters.tracing.nodes.node_values import Given, NodeCount, NodeValue
from gnnaccel.adapters.tracing.nodes.nodes_read import node_rows
from gnnaccel.adapters.tracing.rows import channels, pointwise
from gnnaccel.adapters.tracing.rows.pointwise import Rows
from gnnaccel.adapters.tracing.rows.pointwise_calls import OPERATIONS
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.standins import Refuses, Unseen
from gnnaccel.adapters.tracing.rows.untold import Sequence

#: the degree that a stand-in shows: a prime other than `ROWS`, the number of rows
DEGREE = 7907
#: key of a call's arguments: a function of scores [E, ...] that gives their softmax
SOFTMAX = "softmax"
#: key of a call's arguments: a function of rows [E, ...] and the name of a reduction, which gives
#: each edge the result of its destination
KEPT = "kept"
_OTHERS = ("softmax", "unsqueeze", "matmul")
_REDUCES = ("sum", "mean", "max", "min")


class Steps(node_values.Steps):
    """The steps of a reduce function. ``sized``: whether the size of a mailbox was read, or the
    number of nodes; ``kept``: how many reductions go on at the edges."""

    sized = False
    kept = 0


class Nodes:
    """Stand-in of DGL's ``NodeBatch``. ``sent``: the messages."""

    def __init__(self, sent: dict[str, Rows] | Fields, frame: Any, seen: dict[str, Any]):
        self.steps = Steps()
        self.mailbox, self.data = _Mailbox(sent, self.steps), _Data("n", frame, seen)
        self.data.steps = self.steps

    def batch_size(self) -> NodeCount:
        self.steps.sized = True
        return NodeCount(counts.KEY)


class _Data(Fields):
    """Features of the nodes of a batch. ``steps``: of the reduce function."""

    steps: Steps

    def _rows(self, key: str, name: str, meta: Tensor) -> Given:
        rows = pointwise.rows("i", node_rows(itemgetter(key), "i"), meta, f"nodes.{name}")
        return _OfNodes(Given(rows, lambda given: given[key], key), self.steps)


class _OfNodes(Given):
    """Features of the nodes, which may be repeated for each edge of a node."""

    def __init__(self, given: Given, steps: Steps):
        super().__init__(given, given.make, given.name)
        self.steps = steps

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        result = super().operate(name, function, args, kwargs)
        return _OfNodes(result, self.steps) if type(result) is Given else result

    def expand(self, *sizes: Any) -> Any:
        sizes = _one(sizes)
        new = [-1 if type(one) is int and one == was else one
               for one, was in zip(sizes, self.meta.shape)]
        mail = self._for_edges(sizes, new, -1)
        return self.__getattr__("expand")(*sizes) if mail is None else mail

    def expand_as(self, other: Any) -> Any:
        return self.expand(other.shape)

    def repeat(self, *sizes: Any) -> Any:
        sizes = _one(sizes)
        mail = self._for_edges(sizes, sizes, 1)
        return self.__getattr__("repeat")(*sizes) if mail is None else mail

    def _for_edges(self, sizes: Any, new: Any, same: int) -> Mail | None:
        """These, once for each edge of a node; None where that is not asked for. ``same``: how a
        dimension is named that stays."""
        meta = self.meta
        if len(sizes) != meta.dim() or meta.dim() < 2 or meta.shape[1] != 1 or not (
            type(sizes[1]) is counts.Degree and sizes[1].is_size):
            return None
        if type(new[0]) is not NodeCount and new[0] != same or any(
            type(one) is not int or one != same for one in new[2:]):
            raise Unseen
        return Mail(features.Feature.of(self.squeeze(1)), self.steps)


def _one(sizes: tuple) -> Any:
    """Sizes that may be given as one argument."""
    return sizes[0] if len(sizes) == 1 and type(sizes[0]) is not int else sizes


class _Mailbox:
    def __init__(self, sent: Any, steps: Steps):
        self._sent, self._steps = sent, steps

    def __getitem__(self, name: str) -> Mail:
        return Mail(self._sent[name], self._steps)


class Mail(Value):
    """A message in a mailbox. ``rows``: of the edges; the mailbox has one more dimension, of
    `DEGREE`, or of ``size`` 1 where the edges of a node have equal rows."""

    rank = 10

    def __init__(self, rows: Rows, steps: Steps, size: int = DEGREE):
        self.rows, self.steps = rows, steps
        self.meta = rows.meta.new_empty(ROWS, size, *rows.meta.shape[1:])

    def __getattr__(self, name: str) -> Any:
        if not (name in OPERATIONS or name in _REDUCES or name in _OTHERS):
            raise Unseen
        return lambda *args, **kwargs: _call(name, getattr(Tensor, name), (self, *args), kwargs)

    def __getitem__(self, place: Any) -> Any:
        """Some of the channels."""
        places = place if type(place) is tuple else (place,)
        skipped = 1 if places[0] is Ellipsis else 2
        rest = places[skipped:]
        if not all(type(one) in (int, slice, type(None)) for one in rest) or not (
            places[0] is Ellipsis and len(rest) - rest.count(None) <= self.meta.dim() - 2
            or len(places) > 1 and all(type(one) is slice and one == slice(None)
                                       for one in places[:2])):
            raise Unseen
        mail = Mail(self.rows[places[:1] + rest], self.steps, self.meta.shape[1])
        if operator.getitem(self.meta, place).shape != mail.meta.shape:
            raise Unseen
        return mail

    @property
    def shape(self) -> tuple:
        if self.meta.shape[1] == 1:
            raise Unseen
        self.steps.sized = True
        return Sequence((NodeCount(counts.KEY), counts.Degree.of_nodes(), *self.meta.shape[2:]))

    def size(self, dim: Any = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in _REDUCES and args and args[0] is self:
            return self._reduced(name, *args[1:], **kwargs)
        if name == "softmax" and args and args[0] is self:
            return self._softmax(*args[1:], **kwargs)
        if name == "dropout" and args and args[0] is self and self.meta.shape[1] != 1:
            dropped = channels.dropout(self.rows, *args[1:], **kwargs)
            return Mail(features.Feature.of(dropped), self.steps)
        if name == "unsqueeze":
            return self._unsqueezed(*args[1:], **kwargs)
        if name not in OPERATIONS and name not in ("linear", "matmul"):
            raise Unseen
        return self._each(function, args, kwargs)

    def _each(self, function: Callable, args: tuple, kwargs: dict) -> Mail:
        looks = function(*map(meta_of, args), **{k: meta_of(v) for k, v in kwargs.items()})
        operands = [*map(self._rows, args)]
        if type(function) is types.MethodDescriptorType:  # of a tensor
            function = getattr(operands.pop(0), function.__name__)
        rows = function(*operands, **{k: self._rows(v) for k, v in kwargs.items()})
        if not isinstance(rows, Rows):
            raise Unseen
        mail = Mail(rows, self.steps, looks.shape[1])
        if looks.shape != mail.meta.shape or looks.dtype != mail.meta.dtype:
            raise Unseen  # what broadcasts over edges would do so over other rows
        return mail

    def _rows(self, value: Any) -> Any:
        """Rows of edges in place of a value in the mailbox."""
        if isinstance(value, Mail):
            return value.rows
        if isinstance(value, Given):  # the same for each edge of a node
            if value.meta.dim() != self.meta.dim() or value.meta.shape[1] != 1:
                raise Unseen
            return features.Feature.of(value.squeeze(1))
        if isinstance(value, Value) and not isinstance(value, Param):
            raise Unseen  # a result beside messages
        return value

    def _unsqueezed(self, dim: Any) -> Mail:
        """The message with a new dimension behind that of the edges."""
        if type(dim) is not int:
            raise Unseen
        at = dim if dim >= 0 else dim + self.meta.dim() + 1
        if at < 2:
            raise Unseen
        return Mail(self.rows.unsqueeze(at - 1), self.steps, self.meta.shape[1])

    def beside(self, tensors: Any, dim: Any) -> Mail:
        """Messages side by side, in a dimension of channels."""
        size = self.meta.shape[1]
        if type(dim) is not int or not all(type(one) is Mail and one.meta.shape[1] == size
                                           for one in tensors):
            raise Unseen
        meta = torch.cat([one.meta for one in tensors], dim)
        rows: Any = torch.cat([one.rows for one in tensors],  # stand-ins
                              dim - 1 if dim > 0 else dim)
        mail = Mail(rows, self.steps, size)
        if mail.meta.shape != meta.shape:
            raise Unseen
        return mail

    def _over_edges(self, dim: Any) -> None:
        if self.meta.shape[1] == 1:
            raise Unseen
        if type(dim) in (tuple, list) and len(dim) == 1:
            dim = dim[0]
        if type(dim) is not int or dim not in (1, 1 - self.meta.dim()):
            raise Unseen

    def _reduced(self, name: str, dim: Any = None, keepdim: Any = False) -> Any:
        dims = self.meta.dim()
        if name in ("sum", "mean") and type(dim) is int and -dims <= dim < dims and dim % dims > 1:
            rows = getattr(self.rows, name)(dim % dims - 1, keepdim)  # over channels
            return Mail(rows, self.steps, self.meta.shape[1])
        self._over_edges(dim)
        if type(keepdim) is not bool:
            raise Unseen
        value = (self._through(KEPT, 1, name) if keepdim
                 else self.steps.reduced(self.rows, name))
        return Extremum(value, Refuses()) if name in ("max", "min") else value

    def _softmax(self, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> Mail:
        self._over_edges(dim)
        if dtype is not None:
            raise Unseen
        return self._through(SOFTMAX, DEGREE)

    def _through(self, key: str, size: int, *args: Any) -> Mail:
        """The message that a function of the call's arguments makes of this one."""
        rows = channels.at_edges(self.rows)
        self.steps.kept += size == 1
        end, names, roots = pointwise.about(rows.tree)
        tree, tail = rows.tree, rows.meta.shape[1:]
        make = Once(lambda given: given[key](pointwise.whole(tree, tail, given), *args))
        made = pointwise.made_rows(end, make, rows.meta, names, roots)
        return Mail(features.Feature.of(made), self.steps, size)


def _binary(name: str) -> None:
    function = getattr(operator, name)
    setattr(Mail, f"__{name}__", lambda self, other: self.operate(name, function, (self, other),
                                                                  {}))


for _operator in ("pow", "gt", "lt", "ge", "le"):
    _binary(_operator)


class Extremum(NamedTuple):
    """The result of torch's max and min over a dimension."""

    values: NodeValue | Mail
    indices: Any


def reduced(out: Any) -> dict[str, NodeValue]:
    """The results of a reduce function, by name."""
    if type(out) is not dict or not out:
        raise Unseen
    if not all(type(name) is str and type(one) is NodeValue for name, one in out.items()):
        raise Unseen
    return out
