"""Stand-ins for what attention makes of both ends of an edge: scores, their softmax, the message.

See `traced`.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from gnnaccel.adapters.tracing.attention.traced import (VIEWS, Ends, Node, Param, Value, applied,
                                                        with_first)
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.standins import Unseen


class Bent(Value):
    """A leaky ReLU of a sum of both ends, whose channels ``att`` are multiplied with."""

    rank = 4

    def __init__(self, ends: Ends, slope: float, att: Param | None = None):
        self.ends, self.slope, self.att, self.meta = ends, slope, att, ends.meta

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in VIEWS or name == "getitem":
            if self.att is not None:
                raise Unseen
            return Bent(self.ends.mapped(*with_first(function, self, args), kwargs), self.slope)
        if name == "linear":
            weight, bias = (*args[1:], *kwargs.values(), None)[:2]
            if self.att is not None or bias is not None or weight.meta.shape[0] != 1:
                raise Unseen
            return self._scored(weight.view(-1), applied(F.linear, args, kwargs))
        function, rest = with_first(function, self, args)
        if name == "mul" and isinstance(rest[0], Param) and self.att is None:
            applied(function, args, kwargs)
            return Bent(self.ends, self.slope, rest[0])
        if name == "matmul" and isinstance(rest[0], Param) and self.att is None:
            if rest[0].dim() > 2 or (rest[0].dim() == 2 and rest[0].meta.shape[1] != 1):
                raise Unseen
            return self._scored(rest[0].reshape(-1), applied(function, args, kwargs))
        if name == "sum" and self.att is not None and (rest or
                                                       tuple(kwargs.values()))[:1] == (-1,):
            return self._scored(self.att, applied(function, args, kwargs))
        raise Unseen

    def _scored(self, att: Param, meta: Tensor) -> Score:
        if self.ends.parts.keys() != {"i", "j"}:
            raise Unseen
        return Score("gatv2", meta, ends=self.ends, slope=self.slope, att=att)


class Product(Value):
    """Both ends' rows, multiplied. ``at_e``: rows of the edge that are added to the source's
    before."""

    rank = 5

    def __init__(self, at_i: Node, at_j: Node, at_e: Node | None = None):
        self.at_i, self.at_j, self.at_e = at_i, at_j, at_e
        if len({one.meta.shape for one in (at_i, at_j, at_e) if one is not None}) > 1:
            raise Unseen
        self.meta = at_i.meta

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        function, rest = with_first(function, self, args)
        if name != "sum" or (rest or tuple(kwargs.values()))[:1] not in ((-1,),
                                                                        (self.meta.dim() - 1,)):
            raise Unseen
        return Score("dot", applied(function, args, kwargs), queries=self.at_i, keys=self.at_j,
                     edges=self.at_e)


class Score(Value):
    """One number for each edge and head. ``kind``: of the attention; ``of``: what it is made
    of."""

    rank = 6

    def __init__(self, kind: str, meta: Tensor, scale: float = 1.0, **of: Any):
        self.kind, self.meta, self.scale, self.of = kind, meta, scale, of

    def nodes(self) -> list[Node]:
        """The rows of nodes, and of edges, that it is made of."""
        if "ends" in self.of:
            return list(self.of["ends"].parts.values())
        return [one for one in self.of.values() if one is not None]

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        function, rest = with_first(function, self, args)
        if name in VIEWS or name == "getitem":
            return Score(self.kind, applied(function, args, kwargs), self.scale, **self.of)
        if (name in ("mul", "div") and self.kind == "dot" and type(rest[0]) in (int, float)
            and rest[0]):
            by = float(rest[0])
            return Score("dot", self.meta, self.scale * (by if name == "mul" else 1.0 / by),
                         **self.of)
        raise Unseen


def score_of(value: Any) -> Score:
    """The score of which a softmax is taken; Unseen for what is none."""
    if (isinstance(value, Bent) and value.att is None) or isinstance(value, Ends):
        ends = value if isinstance(value, Ends) else value.ends
        slope = 1.0 if ends is value else value.slope  # 1: without a leaky ReLU
        if ("j" not in ends.parts
            or any(part.meta.shape != ends.meta.shape for part in ends.parts.values())):
            raise Unseen
        return Score("terms", value.meta, ends=ends, slope=slope)
    if isinstance(value, Score):
        return value
    raise Unseen


class Alpha(Value):
    """A softmax of ``score`` over the edges that enter each node, after dropout."""

    rank = 7

    def __init__(self, score: Score, meta: Tensor, dropout: float = 0.0):
        self.score, self.meta, self.dropout = score, meta, dropout

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name in VIEWS or name == "getitem":
            function, _ = with_first(function, self, args)
            return Alpha(self.score, applied(function, args, kwargs), self.dropout)
        if name == "dropout":
            return self.dropped(*args[1:], **kwargs)
        other = args[1] if args[0] is self else args[0]
        if name == "mul" and isinstance(other, (Node, Ends)):
            parts = dict(other.parts) if isinstance(other, Ends) else {other.end: other}
            # rows of the edge are added to keys and to values, as in TransformerConv
            if (parts.pop("e", None) is self.score.of.get("edges") and parts.keys() == {"j"}
                and parts["j"].meta.shape == other.meta.shape):
                return Weighted(self, parts["j"], applied(function, args, kwargs))
        raise Unseen

    def dropped(self, p: float = 0.5, training: bool = True) -> Alpha:
        """The weights after dropout of rate ``p``."""
        if not training or not p:
            return self
        if self.dropout or not 0.0 < p < 1.0:
            raise Unseen
        return Alpha(self.score, self.meta, float(p))


class Weighted(Value):
    """The message: rows ``values`` of the source, each head's times its `Alpha`."""

    rank = 8

    def __init__(self, alpha: Alpha, values: Node, meta: Tensor):
        self.alpha, self.values, self.meta = alpha, values, meta
        heads = alpha.meta.numel() // ROWS
        # heads come before channels, in memory as well
        if (alpha.meta.dim() != values.meta.dim() or meta.shape != values.meta.shape
            or heads != math.prod(values.meta.shape[1:-1] or (1,)) or alpha.meta.shape[-1] != 1
            or alpha.score.meta.numel() != alpha.meta.numel()):
            raise Unseen
        if alpha.score.kind == "gatv2" and alpha.score.of["ends"].parts["j"] is not values:
            raise Unseen  # the kernel's values are its keys

    def operate(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if name not in VIEWS:
            raise Unseen
        result = Weighted(self.alpha, self.values, self.values.meta)
        function, _ = with_first(function, self, args)
        result.meta = applied(function, args, kwargs)
        return result
