"""A user's attention that repeats, bound to its kernels and to the parameters that its vectors are
slices of."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Node, Param
from gnnaccel.adapters.tracing.rows.standins import rows
from gnnaccel.dispatch.graph.isolated import isolated
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.run import attention_slices
from gnnaccel.dispatch.run.attention import Call
from gnnaccel.dispatch.run.attention_slices import BoundAttention, BoundRows, Vector


class BoundMessage:
    """``name``: of the argument with the rows; ``edges``: what the terms of the edges are made by;
    ``read``: whether edges are known to read all rows."""

    __slots__ = ("bound", "name", "edges", "both", "read")

    def __init__(self, bound: BoundRows, name: str, edges: Node | None):
        self.bound, self.name, self.edges = bound, name, edges
        self.both, self.read = len(bound.vectors.starts) > 1, False

    def __call__(self, kwargs: dict, view: GraphView) -> Tensor | None:
        """The attention of a call like the one that was bound; None where its parameters lie
        otherwise."""
        x, bound = kwargs[self.name], self.bound
        if not bound.valid():
            return None
        if type(x) is not Tensor and isinstance(x, (tuple, list)):
            x = x[0]
        a_edge = None if self.edges is None else _terms(self.edges, kwargs, bound.heads)
        if not bound.wants_grad(x, a_edge):
            return bound.run(x, a_edge, view, bound.bases, bound.dropout(), False)[0]
        unread = None
        if not self.read:
            unread = isolated(view) if self.both else view.csr(places=False).bare()
            self.read = unread is None
        return BoundAttention(bound, view, None if unread is None else unread[0]).apply(
            x, a_edge, *bound.bases)


def bind(message: Any, kwargs: dict, call: Call) -> BoundMessage | None:
    """The call of such a `traced_scores.Weighted`, bound; None where only the general way can do
    it. Without hooks on saved tensors: repetitions save others than the first call."""
    if call.program.name != "gat":
        return None
    parts, name = message.alpha.score.of["ends"].parts, message.values.views[0]
    x, edges = rows(kwargs, name, "j"), parts.get("e")
    if x.numel() != call.graph.num_src * call.heads * call.width:
        return None
    vectors = [_vector(parts[end].dot[1], kwargs, call.heads, call.width)
               for end in "ji" if end in parts]
    if None in vectors:
        return None
    a_edge = None if edges is None else _terms(edges, kwargs, call.heads)
    shape = call.graph.num_dst, *message.meta.shape[1:]
    bound = attention_slices.bind(call, x, a_edge, vectors, shape)  # type: ignore[arg-type]
    return None if bound is None else BoundMessage(bound, name, edges)


def _terms(edges: Node, kwargs: dict, heads: int) -> Tensor:
    """The terms of the edges, [edges, heads]."""
    terms = edges.make(kwargs)
    return terms if terms.dim() == 2 else terms.reshape(-1, heads)


def _vector(param: Param, kwargs: dict, heads: int, width: int) -> Vector | None:
    """The layer's tensor of which a vector is a view, and the vector [heads, width] in its memory;
    None where it is made of several, or computed."""
    if len(param.roots) != 1:
        return None
    with torch.no_grad():
        base, vector = param.roots[0](kwargs), param.make(kwargs)
        if vector.numel() != heads * width:
            return None
        vector = vector.reshape(heads, width)
    same = base.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    return (base, vector) if same else None
