"""Messages that are more than a neighbour's row, weighted or not: their further tensors, and how
messages are made edge by edge.

For an edge e from j to i, with x_j the row of the aggregation's own ``x``:

    Shifted      weight[e] * (x_j + sign * rows_i)
    Rectified    relu(x_j + edge[e]) + constant
    Gated        sigmoid(left_j + right_i + edge[e]) * (x_j + beside[e])
    Generated    any expression of rows at both ends and at the edge (`generated.messages`)
    Several      of these, each with its own reduction
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gnnaccel.dispatch.generated import messages as generated
from gnnaccel.dispatch.ops import torch_ops
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason


class Shifted(NamedTuple):
    """``rows`` [num_dst, *features], of the node that receives, times ``sign``."""

    rows: Tensor
    sign: float

    @property
    def tensors(self) -> dict[str, tuple[Tensor, str]]:
        """Each tensor with the target of its rows, as of `OpGraph.rows`."""
        return dict(rows=(self.rows, "v"))

    def __str__(self) -> str:
        return f"(x[j] {'-' if self.sign < 0 else '+'} y[i])"


class Rectified(NamedTuple):
    """``edge`` [E, *features], by edge id."""

    edge: Tensor
    constant: float = 0.0

    @property
    def tensors(self) -> dict[str, tuple[Tensor, str]]:
        return dict(edge=(self.edge, "e"))

    def __str__(self) -> str:
        return f"relu(x[j] + y[e]){f' + {self.constant}' if self.constant else ''}"


class Gated(NamedTuple):
    """``left`` [num_src, *features]; ``right`` [num_dst, *features]; ``edge`` [E, *features] by
    edge id, or None; ``beside``: likewise, and only next to ``edge``."""

    left: Tensor
    right: Tensor
    edge: Tensor | None = None
    beside: Tensor | None = None

    @property
    def tensors(self) -> dict[str, tuple[Tensor, str]]:
        at_edges = {name: (t, "e") for name, t in (("edge", self.edge), ("beside", self.beside))
                    if t is not None}
        return dict(left=(self.left, "u"), right=(self.right, "v"), **at_edges)

    def __str__(self) -> str:
        gate = "q[j] + k[i]" if self.edge is None else "q[j] + k[i] + y[e]"
        return f"sigmoid({gate}) * {'x[j]' if self.beside is None else '(x[j] + z[e])'}"


More: TypeAlias = "Shifted | Rectified | Gated | generated.Generated | generated.Several"


def unfit(graph: OpGraph, x: Tensor, weight: Tensor | None, more: Any) -> Reason | None:
    """Why this is none of these messages with tensors that fit ``x`` [num_src, *features]."""
    if type(more) is generated.Generated:
        return generated.unfit(graph, x, more)
    if type(more) is generated.Several:
        return next(filter(None, [generated.unfit(graph, x, part) for part in more.parts]), None)
    if weight is not None and type(more) is not Shifted:
        return reason("GA208", "weights beside other features of edges")
    counts = {"u": graph.num_src, "v": graph.num_dst, "e": graph.num_edges}
    for name, (t, target) in more.tensors.items():
        wanted = (counts[target], *x.shape[1:])
        if (not isinstance(t, Tensor) or t.layout != torch.strided or t.shape != wanted
            or t.device != x.device):
            form = f"{list(t.shape)}, on {t.device}" if isinstance(t, Tensor) else type(t).__name__
            return reason("GA206",
                          f"{name} of messages is {form}; the neighbours' rows want {list(wanted)}")
        if t.dtype != x.dtype:
            return reason("GA203",
                          f"{name} of messages is {t.dtype}, the neighbours' rows are {x.dtype}")
    return None


def made(graph: OpGraph, x: Tensor, weight: Tensor | None, more: More | None,
         take: Callable = torch_ops.take) -> Tensor:
    """[E, *features]: the messages, on torch operations. ``take``: how the rows of nodes are read
    at the edges."""
    if type(more) is generated.Generated:
        return generated.made(graph, more, take)
    message = take(graph, x, "u")
    if type(more) is Gated:
        score = take(graph, more.left, "u") + take(graph, more.right, "v")
        values = message if more.beside is None else message + more.beside
        return (score if more.edge is None else score + more.edge).sigmoid() * values
    if type(more) is Rectified:
        message = (message + more.edge).relu()
        return message + more.constant if more.constant else message
    if type(more) is Shifted:
        message = torch.add(message, take(graph, more.rows, "v"), alpha=more.sign)
    return message if weight is None else weight * message


def split(run: Callable[[OpGraph, Any], Tensor], graph: OpGraph, given: Any) -> Tensor:
    """Sum or mean of `Shifted` messages, by ``run`` of aggregations without: ``sum of w x_j +
    sign * rows_i * (sum of w)``."""
    out = run(graph, given._replace(more=None))
    return torch.addcmul(out, given.more.rows, run(graph, weights_alone(given)),
                         value=given.more.sign)


def weights_alone(given: Any) -> Any:
    """The aggregation with ones for features: of a sum the sum of the weights, [num_dst, *1]."""
    tail = (1,) * (given.x.dim() - 1) if given.weight is None else tuple(given.weight.shape[1:])
    return given._replace(x=given.x.new_ones(given.x.shape[0], *tail), shape=tail, more=None)
