"""The stand-in of a batch of nodes while a reduce function runs.

A message in a mailbox (`Mail`) is rows of edges with one more dimension, the edges of a node.
Operations edge by edge make other rows of edges; a sum, a mean, a maximum or a minimum over the
edges of a node makes a value of that node (`node_values`), of which torch computes the rest. A
softmax over these edges is DGL's ``edge_softmax``. The size of a mailbox is a `counts.Degree`.
"""
from __future__ import annotations

import operator
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from gnnaccel.adapters.dgl.udf import counts, features, messages
from gnnaccel.adapters.pyg.propagate import channels, pointwise
from gnnaccel.adapters.pyg.propagate.expressed import Once
from gnnaccel.adapters.pyg.propagate import node_values
from gnnaccel.adapters.pyg.propagate.node_values import Given, NodeCount, NodeValue
from gnnaccel.adapters.pyg.propagate.nodes_read import node_rows
from gnnaccel.adapters.pyg.propagate.pointwise import Rows
from gnnaccel.adapters.pyg.propagate.pointwise_calls import OPERATIONS
from gnnaccel.adapters.pyg.propagate.row_count import ROWS
from gnnaccel.adapters.pyg.propagate.standins import Refuses, Unseen
from gnnaccel.adapters.pyg.propagate.traced import Param, Value, _call
from gnnaccel.adapters.pyg.propagate.untold import Sequence

#: the degree that a stand-in shows: a prime other than `ROWS`, the number of rows
DEGREE = 7907
#: key of a call's arguments: a function of scores [E, ...] that gives their softmax
SOFTMAX = "softmax"
_OTHERS = ("softmax", "unsqueeze", "matmul")
_REDUCES = ("sum", "mean", "max", "min")


class Steps(node_values.Steps):
    """The steps of a reduce function. ``sized``: whether the size of a mailbox was read, or the
    number of nodes."""

    sized = False


class Nodes:
    """Stand-in of DGL's ``NodeBatch``. ``sent``: the messages."""

    def __init__(self, sent: dict[str, Rows] | messages.Fields, frame: Any, seen: dict[str, Any]):
        self.steps = Steps()
        self.mailbox, self.data = _Mailbox(sent, self.steps), _Data("n", frame, seen)

    def batch_size(self) -> NodeCount:
        self.steps.sized = True
        return NodeCount(counts.KEY)


class _Data(messages.Fields):
    """Features of the nodes of a batch."""

    def _rows(self, key: str, name: str, meta: Tensor) -> Given:
        rows = pointwise.rows("i", node_rows(itemgetter(key), "i"), meta, f"nodes.{name}")
        return Given(rows, lambda given: given[key], key)


class _Mailbox:
    def __init__(self, sent: Any, steps: Steps):
        self._sent, self._steps = sent, steps

    def __getitem__(self, name: str) -> Mail:
        return Mail(self._sent[name], self._steps)


class Mail(Value):
    """A message in a mailbox. ``rows``: of the edges; the mailbox has one more dimension, of
    `DEGREE`."""

    rank = 10

    def __init__(self, rows: Rows, steps: Steps):
        self.rows, self.steps = rows, steps
        self.meta = rows.meta.new_empty(ROWS, DEGREE, *rows.meta.shape[1:])

    def __getattr__(self, name: str) -> Any:
        if not (name in OPERATIONS or name in _REDUCES or name in _OTHERS):
            raise Unseen
        return lambda *args, **kwargs: _call(name, getattr(Tensor, name), (self, *args), kwargs)

    def __getitem__(self, place: Any) -> Any:
        raise Unseen

    @property
    def shape(self) -> tuple:
        self.steps.sized = True
        return Sequence((NodeCount(counts.KEY), counts.Degree.of_nodes(), *self.meta.shape[2:]))

    def size(self, dim: Any = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in _REDUCES and args and args[0] is self:
            return self._reduced(name, *args[1:], **kwargs)
        if name == "softmax" and args and args[0] is self:
            return self._softmax(*args[1:], **kwargs)
        if name == "dropout" and args and args[0] is self:
            dropped = channels.dropout(self.rows, *args[1:], **kwargs)
            return Mail(features.Feature.of(dropped), self.steps)
        if name == "unsqueeze":
            return self._unsqueezed(*args[1:], **kwargs)
        if name not in OPERATIONS and name not in ("linear", "matmul"):
            raise Unseen
        return self._each(function, args, kwargs)

    def _each(self, function: Callable, args: tuple, kwargs: dict) -> Mail:
        looks = function(*map(_meta, args), **{k: _meta(v) for k, v in kwargs.items()})
        rows = function(*map(self._rows, args), **{k: self._rows(v) for k, v in kwargs.items()})
        if not isinstance(rows, Rows):
            raise Unseen
        mail = Mail(rows, self.steps)
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
        return Mail(self.rows.unsqueeze(at - 1), self.steps)

    def _over_edges(self, dim: Any) -> None:
        if type(dim) in (tuple, list) and len(dim) == 1:
            dim = dim[0]
        if type(dim) is not int or dim not in (1, 1 - self.meta.dim()):
            raise Unseen

    def _reduced(self, name: str, dim: Any = None, keepdim: Any = False) -> Any:
        dims = self.meta.dim()
        if name in ("sum", "mean") and type(dim) is int and -dims <= dim < dims and dim % dims > 1:
            rows = getattr(self.rows, name)(dim % dims - 1, keepdim)  # over channels
            return Mail(rows, self.steps)
        self._over_edges(dim)
        if keepdim is not False:
            raise Unseen
        value = self.steps.reduced(self.rows, name)
        return Extremum(value, Refuses()) if name in ("max", "min") else value

    def _softmax(self, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> Mail:
        self._over_edges(dim)
        if dtype is not None:
            raise Unseen
        scores = channels.at_edges(self.rows)
        end, names, roots = pointwise.about(scores.tree)
        tree, tail = scores.tree, scores.meta.shape[1:]
        make = Once(lambda given: given[SOFTMAX](pointwise.whole(tree, tail, given)))
        rows = pointwise.made_rows(end, make, scores.meta, names, roots)
        return Mail(features.Feature.of(rows), self.steps)


def _binary(name: str) -> None:
    function = getattr(operator, name)
    setattr(Mail, f"__{name}__", lambda self, other: self.operate(name, function, (self, other),
                                                                  {}))


for _name in ("pow", "gt", "lt", "ge", "le"):
    _binary(_name)


class Extremum(NamedTuple):
    """The result of torch's max and min over a dimension."""

    values: NodeValue
    indices: Any


def _meta(value: Any) -> Any:
    return value.meta if isinstance(value, Value) else value


def reduced(out: Any) -> dict[str, NodeValue]:
    """The results of a reduce function, by name."""
    if type(out) is not dict or not out:
        raise Unseen
    if not all(type(name) is str and type(one) is NodeValue for name, one in out.items()):
        raise Unseen
    return out
