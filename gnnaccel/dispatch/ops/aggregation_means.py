"""Softmax and power means over neighbours (Li et al., "DeeperGCN: All You Need to Train Deeper
GCNs", arXiv 2006.07739).

A power mean is a mean of the neighbours' features as they are, between two functions of nodes. A
softmax by channel is of these or of other messages (`messages`), without weights; its kernels are
in `aggregation_softmax`.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.ops import messages
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason

if TYPE_CHECKING:
    from gnnaccel.dispatch.ops.aggregation import Aggregation

    class OfSoftmax(Aggregation):
        """Aggregation by a `Softmax`."""

        reduce: Softmax

_HALF = (torch.float16, torch.bfloat16)
_SMALL = 1e-16  # added by PyG to a softmax's sum


class Softmax(NamedTuple):
    """``out[i] = sum of a_e m_e``, ``a`` the softmax of ``t m_e`` over the edges that enter i,
    channel by channel.

    ``t``: a number, or a tensor of one number or one per channel; ``whole``: gradients go through
    ``a`` too."""

    t: float | Tensor
    whole: bool

    name = "softmax"  # type: ignore[misc]

    def logits(self, message: Tensor) -> Tensor:
        """``t m``, [edges, *features]."""
        logits = message if _is_one(self.t) else message * self.t
        return logits if self.whole else logits.detach()

    def dtype(self, x: Tensor) -> torch.dtype:
        """Dtype of the result."""
        return torch.result_type(x, self.t) if isinstance(self.t, Tensor) else x.dtype


class PowerMean(NamedTuple):
    """``out[i] = (mean of x_j ** p) ** (1 / p)``, both bases first clamped to [``low``, ``high``];
    for a number p = 1 the mean. ``p``: a number, or a tensor of one number or one per channel."""

    p: float | Tensor
    low: float | None
    high: float | None

    name = "powermean"  # type: ignore[misc]

    def before(self, x: Tensor) -> Tensor:
        """Values to average."""
        return x if _is_one(self.p) else x.clamp(min=self.low, max=self.high).pow(self.p)

    def after(self, mean: Tensor) -> Tensor:
        """Result for the mean."""
        return (mean
                if _is_one(self.p) else mean.clamp(min=self.low, max=self.high).pow(1.0 / self.p))


def _is_one(value: float | Tensor) -> bool:
    return not isinstance(value, Tensor) and value == 1


def unfit(reduce: Any, x: Tensor, weight: Tensor | None, more: bool = False) -> Reason | None:
    """Why ``reduce`` of messages of these features [nodes, *features] is not computed. Numbers per
    channel are [1, F]. ``more``: messages are made of more than the features."""
    if type(reduce) is str:
        return None
    if weight is not None or (more and type(reduce) is PowerMean):
        kind = ("weighted messages"
                if weight is not None else "messages that are more than neighbours' rows")
        return reason("GA201", f"the aggregation is a {reduce.name} of {kind}")
    if type(reduce) is Softmax and x.dtype in _HALF and torch.is_autocast_enabled(x.device.type):
        return reason("GA203", f"a softmax of {x.dtype} features under autocast")
    if type(reduce) is Softmax and reduce.dtype(x) not in (x.dtype, torch.float32, *_HALF):
        return reason("GA203",
                      f"a softmax of {x.dtype} features with numbers of "
                      f"{reduce.t.dtype}")  # type: ignore[union-attr]
    number = reduce[0]
    if not isinstance(number, Tensor):
        return None
    if type(reduce) is PowerMean and torch.result_type(x, number) not in (x.dtype, torch.float32,
                                                                          *_HALF):
        return reason("GA203", f"a power mean of {x.dtype} features with a power of {number.dtype}")
    if (number.numel() not in (1, x.shape[-1]) or (number.dim() == 2 and x.dim() != 2)
        or number.device != x.device):
        return reason("GA206",
                      f"{reduce.name} with {number.numel()} numbers on {number.device}, "
                      f"for features {list(x.shape)}")
    return None


def inner(aggregation: Aggregation) -> Aggregation:
    """The mean inside a power mean, for decisions; features are not changed yet."""
    return (aggregation._replace(reduce="mean") if type(aggregation.reduce) is PowerMean
            else aggregation)


def around(run: Callable[[OpGraph, Aggregation],
                         Tensor]) -> Callable[[OpGraph, Aggregation], Tensor]:
    """Wraps ``run``, of means, in the functions of nodes of a power mean."""
    def run_power_mean(graph: OpGraph, aggregation: Aggregation) -> Tensor:
        power: PowerMean
        power, x = (aggregation.reduce,  # type: ignore[assignment]
                    aggregation.reduce.before(aggregation.x))  # type: ignore[union-attr]
        return power.after(run(graph, aggregation._replace(reduce="mean", x=x)))

    return run_power_mean


def softmax(graph: OpGraph, given: OfSoftmax) -> Tensor:
    """[num_dst, *features]: a `Softmax` on torch operations; messages have the size of the edges.
    Differentiable any number of times."""
    message, index, rows = messages.made(graph, given.x, None,
                                         given.more), graph.index("v"), graph.num_dst
    logits = given.reduce.logits(message)
    at = index.long().view(-1, *(1,) * (message.dim() - 1)).expand_as(logits)
    top = logits.new_zeros(rows,
                           *logits.shape[1:]).scatter_reduce(0, at, logits.detach(), "amax",
                                                             include_self=False)
    power = (logits - top.index_select(0, index)).exp()
    wide = power.float() if power.dtype in _HALF else power
    total = wide.new_zeros(rows, *wide.shape[1:]).index_add(0, index, wide) + _SMALL
    message = message * (wide / total.index_select(0, index))
    return message.new_zeros(rows,
                             *message.shape[1:]).index_add(0, index,
                                                           message).to(given.reduce.dtype(given.x))
