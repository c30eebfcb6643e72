"""A user's attention that repeats, bound to its kernels and to the parameters that its vectors are
slices of."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.propagate.standins import rows
from gnnaccel.adapters.pyg.propagate.traced import Param
from gnnaccel.dispatch.graph.isolated import isolated
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.run import attention_slices
from gnnaccel.dispatch.run.attention import Call
from gnnaccel.dispatch.run.attention_slices import BoundAttention, BoundRows


class BoundMessage:
    """``name``: of the argument with the rows; ``read``: whether edges are known to read all of
    them."""

    __slots__ = ("bound", "name", "read")

    def __init__(self, bound: BoundRows, name: str):
        self.bound, self.name, self.read = bound, name, False

    def __call__(self, kwargs: dict, view: GraphView) -> Tensor | None:
        """The attention of a call like the one that was bound; None where its parameters lie
        otherwise."""
        x, bound = kwargs[self.name], self.bound
        x = x[0] if isinstance(x, (tuple, list)) else x
        if not bound.valid():
            return None
        if not bound.wants_grad(x):
            return bound(x, view)
        unread = None if self.read else isolated(view)
        self.read = unread is None
        return BoundAttention(bound, view, None if unread is None else unread[0]).apply(
            x, *bound.bases)


def bind(message: Any, kwargs: dict, call: Call) -> BoundMessage | None:
    """The call of such a `traced_scores.Weighted`, bound; None where only the general way can do
    it. Without hooks on saved tensors: repetitions save others than the first call."""
    if call.program.name != "gat":
        return None
    parts, name = message.alpha.score.of["ends"].parts, message.values.views[0]
    x = rows(kwargs, name, "j")
    if parts.keys() != {"i", "j"} or x.numel() != call.graph.num_src * call.heads * call.width:
        return None
    vectors = [_vector(parts[end].dot[1], kwargs, call.heads, call.width) for end in "ji"]
    if vectors[0] is None or vectors[1] is None:
        return None
    shape = call.graph.num_dst, *message.meta.shape[1:]
    bound = attention_slices.bind(call, x, vectors[0], vectors[1], shape)
    return None if bound is None else BoundMessage(bound, name)


def _vector(param: Param, kwargs: dict, heads: int, width: int) -> tuple[Tensor, Tensor] | None:
    """The layer's tensor of which a vector is a view, and the vector [heads, width] in its memory;
    None where it is made of several, or computed."""
    if len(param.roots) != 1:
        return None
    with torch.no_grad():
        base, vector = param.roots[0](kwargs), param.make(kwargs)  # type: ignore[arg-type]
        if vector.numel() != heads * width:
            return None
        vector = vector.reshape(heads, width)
    same = base.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    return (base, vector) if same else None
