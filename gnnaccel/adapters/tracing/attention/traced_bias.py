"""Linear maps with a bias of what is a sum of both ends' rows, while a ``message`` of attention is
traced: the bias is added to one part."""
from __future__ import annotations

import operator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gnnaccel.adapters.tracing.attention.traced import Ends, Param, _call
from gnnaccel.adapters.tracing.rows.standins import Unseen


def of_linear(ends: Ends, args: tuple, kwargs: dict) -> Ends:
    """A linear map of a sum: its bias is added once."""
    weight, bias = (*args[1:], *kwargs.values(), None)[:2]
    mapped = ends.mapped(F.linear, (weight,), {})
    return mapped if bias is None else biased(mapped, checked_bias(weight, bias, mapped.meta))


def checked_bias(weight: Any, bias: Any, out: Tensor) -> Any:
    """The bias of a linear map with result ``out``, to be added apart; Unseen where torch refuses
    one of its shape or dtype in the map, which it does not on the meta device."""
    if isinstance(weight, Param) and isinstance(bias, Param):
        shape = bias.meta.shape
        if (bias.meta.dtype != weight.meta.dtype or len(shape) > out.dim()
            or any(b not in (1, o) for b, o in zip(reversed(shape), reversed(out.shape)))):
            raise Unseen
    return bias


def biased(ends: Ends, bias: Any) -> Ends:
    """A sum, to one part of which ``bias`` is added."""
    first, parts = next(iter(ends.parts)), dict(ends.parts)
    parts[first] = _call("add", operator.add, (parts[first], bias), {})
    return Ends(parts, ends.once)
