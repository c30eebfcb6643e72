"""The stand-ins of a batch of edges while a message function runs.

The arguments of a call are a dict of tensors; a field is called by its place and its name, such as
"j.h".
"""
from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl.udf.features import PLACES, Feature
from gnnaccel.adapters.tracing import kept_values
from gnnaccel.adapters.tracing.nodes.nodes_read import node_rows
from gnnaccel.adapters.tracing.rows import channels, pointwise
from gnnaccel.adapters.tracing.rows.pointwise import Rows
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.standins import Unseen

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
    """Features of edges, which a message function may write: ``written``, by name; ``given``: the
    values that it gave for them."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.written: dict[str, Feature] = {}
        self.given: dict[str, Rows] = {}
        self.removed: list[str] = []
        self._read: list[Feature] = []

    def lie_apart(self, rows: Rows) -> bool:
        """Whether ``rows`` that the function gives are no features, which would be changed with
        them. Torch's views of parts of features are left to the host."""
        near = [one for one in self._read if rows.memory and one.memory is rows.memory]
        if any(one.meta[0].numel() != rows.meta[0].numel() for one in near):
            raise Unseen
        return not near

    def written_as(self, rows: Rows) -> str | None:
        """The first name that these very rows were written by."""
        return next((name for name, one in self.given.items()
                     if rows is one or rows is self.written[name]), None)

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

    def _stand_in(self, name: str) -> Any:
        self._read.append(super()._stand_in(name))
        return self._read[-1]

    def __setitem__(self, name: str, value: Any) -> None:
        if type(name) is not str or not isinstance(value, Rows) or name in self.removed:
            raise Unseen
        if not value.meta.is_floating_point():
            raise Unseen
        kept_values.get(value)
        rows = channels.at_edges(value)  # written there, and read from there
        self._made[name] = self.written[name] = Feature.of(rows)
        self.given[name] = value


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
