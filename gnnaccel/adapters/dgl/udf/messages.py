"""The stand-ins of a batch of edges while a message function runs, and of a batch of nodes while a
reduce function does.

The arguments of a call are a dict of tensors; a field is called by its place and its name, such as
"j.h".

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

import torch
from torch import Tensor

from gnnaccel.adapters.dgl.udf import counts, features
from gnnaccel.adapters.dgl.udf.features import PLACES, Feature
from gnnaccel.adapters.pyg.propagate import channels, node_values, pointwise
from gnnaccel.adapters.pyg.propagate.expressed import Once
from gnnaccel.adapters.pyg.propagate.node_values import Given, NodeCount, NodeValue
from gnnaccel.adapters.pyg.propagate.nodes_read import node_rows
from gnnaccel.adapters.pyg.propagate.pointwise import Rows
from gnnaccel.adapters.pyg.propagate.pointwise_calls import OPERATIONS
from gnnaccel.adapters.pyg.propagate.row_count import ROWS
from gnnaccel.adapters.pyg.propagate.standins import Refuses, Unseen
from gnnaccel.adapters.pyg.propagate.traced import Param, Value, _call
from gnnaccel.adapters.pyg.propagate.untold import Sequence

#: place of the relation's name among frames, and its key among the forms read
KINDS, ETYPE = "t", "t.etype"
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b}


class Fields:
    """Stand-in of the features at one place: "j", "i" or "e", or "m" of messages that are there.
    ``seen``: the forms of those that are read, by place and name; None for those that are missing
    or of a kind that is not followed."""

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
        label = f"nodes.{name}" if end in ("i", "j") else key
        make = itemgetter(key) if end == "e" else node_rows(itemgetter(key), end)
        return Feature.of(pointwise.rows(end, make, meta, label))


class EdgeData(Fields):
    """Features of edges, which a message function may write: ``written``, by name."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.written: dict[str, Feature] = {}
        self.removed: list[str] = []

    def pop(self, name: str) -> Any:
        """Take a feature away. It cannot be read any more."""
        feature = self[name]
        if name in self.written:
            raise Unseen
        self.removed.append(name)
        return feature

    def __getitem__(self, name: str) -> Any:
        if name in self.removed:
            raise Unseen
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if type(name) is not str or not isinstance(value, Rows) or name in self.removed:
            raise Unseen
        if not value.meta.is_floating_point():
            raise Unseen
        rows = channels.at_edges(value)  # written there, and read from there
        self._made[name] = self.written[name] = Feature.of(rows)


def form(value: Any) -> tuple | None:
    """The form of features, but for the number of rows; None of those that are not followed."""
    if type(value) is tuple:
        return value  # names
    if (type(value) not in (Tensor, torch.nn.Parameter) or not value.is_floating_point()
        or value.dim() < 1 or value.layout != torch.strided):
        return None
    return value.shape[1:], value.dtype


class Edges:
    """Stand-in of DGL's ``EdgeBatch``."""

    def __init__(self, frames: dict[str, Any], seen: dict[str, Any]):
        self.src, self.dst = (Fields(place, frames[place], seen) for place in "ji")
        self.data = EdgeData("e", frames["e"], seen)
        self._kinds, self._seen = frames[KINDS], seen

    @property
    def canonical_etype(self) -> tuple[str, str, str]:
        """The relation of the edges, which DGL keeps as ``_etype``, too."""
        relation = self._seen[ETYPE] = self._kinds["etype"]
        return relation

    _etype = canonical_etype


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
        return {function.out_field: at[PLACES[targets[0]]][function.in_field]}
    lhs, rhs = (at[PLACES[target]][field] for target, field
                in zip(targets, (function.lhs_field, function.rhs_field)))
    # where the numbers of dimensions differ, DGL pads the shorter
    if op not in _BINARY or lhs.meta.dim() != rhs.meta.dim():
        raise Unseen
    return {function.out_field: _BINARY[op](lhs, rhs)}


def _name(function: Any) -> tuple[str, ...]:
    """("copy", target), or (operation, target, target)."""
    parts = function.name.split("_")
    return (parts[0], parts[1]) if len(parts) == 2 else (parts[1], parts[0], parts[2])


# --- a batch of nodes, while a reduce function runs -----------------------------------------------

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

    def __init__(self, sent: dict[str, Rows] | Fields, frame: Any, seen: dict[str, Any]):
        self.steps = Steps()
        self.mailbox, self.data = _Mailbox(sent, self.steps), _Data("n", frame, seen)

    def batch_size(self) -> NodeCount:
        self.steps.sized = True
        return NodeCount(counts.KEY)


class _Data(Fields):
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


for _operator in ("pow", "gt", "lt", "ge", "le"):
    _binary(_operator)


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
