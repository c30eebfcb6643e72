"""Values per node that one function of torch gives several of, such as `torch.split`; and modules
of torch that such values go through."""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnaccel.adapters.tracing.attention.traced import Value, applied
from gnnaccel.adapters.tracing.later import other
from gnnaccel.adapters.tracing.layer.traced_modules import parameter
from gnnaccel.adapters.tracing.nodes.node_values import NodeValue
from gnnaccel.adapters.tracing.rows.row_count import ROWS
from gnnaccel.adapters.tracing.rows.standins import Unseen


def chunk(input: Any, chunks: Any, dim: Any = 0) -> tuple[NodeValue, ...]:
    """`torch.chunk` of channels."""
    return _channels(torch.chunk, input, chunks, dim)


def split(input: Any, split_size: Any, dim: Any = 0) -> tuple[NodeValue, ...]:
    """`torch.split` of channels."""
    return _channels(torch.split, input, split_size, dim)


def unbind(input: Any, dim: Any = 0) -> tuple[NodeValue, ...]:
    """`torch.unbind` of channels."""
    return _channels(torch.unbind, input, dim)


def _channels(function: Callable, value: Any, *args: Any) -> tuple[NodeValue, ...]:
    dim, numbers = args[-1], args[0] if isinstance(args[0], (tuple, list)) else args[:1]
    if type(value) is not NodeValue or type(dim) is not int or dim in (0, -value.meta.dim()) or (
        any(type(one) is not int for one in numbers)):
        raise Unseen
    return several(value, function, (value, *args))


def gru_cell(x: Any, h: Any, *weights: Any) -> NodeValue:
    """`torch.gru_cell`, one step."""
    args = (*_made((x, h)), *weights)
    return _first(*args[:2]).steps.made(torch.gru_cell, args, {}, applied(torch.gru_cell, args, {}))


def lstm_cell(x: Any, states: Any, *weights: Any) -> tuple[NodeValue, ...]:
    """`torch.lstm_cell`, one step."""
    x, *states = _made((x, *states))
    return several(_first(x, *states), torch.lstm_cell, (x, tuple(states), *weights))


def _made(values: tuple) -> tuple:
    """Values of which some may be zeros."""
    zeros = other("rows.zero_rows").ZeroRows
    return tuple([one.value() if type(one) is zeros else one for one in values])


def _first(*values: Any) -> NodeValue:
    """The first value per node. All are rows of channels, as cells have them."""
    if any(not isinstance(one, Value) or one.meta.dim() != 2 for one in values):
        raise Unseen
    found = next((one for one in values if type(one) is NodeValue), None)
    if found is None:
        raise Unseen
    return found


def dropped(x: NodeValue, p: float) -> NodeValue:
    """`torch.nn.functional.dropout` in training."""
    return x.steps.effect(F.dropout, (x, p, True), torch.empty_like(x.meta))


def rand_like(input: NodeValue) -> NodeValue:
    """`torch.rand_like`."""
    return input.steps.effect(torch.rand_like, (input,), torch.empty_like(input.meta))


def randn_like(input: NodeValue) -> NodeValue:
    """`torch.randn_like`."""
    return input.steps.effect(torch.randn_like, (input,), torch.empty_like(input.meta))


def several(value: NodeValue, function: Callable, args: tuple) -> tuple[NodeValue, ...]:
    """All results of a function, one step of those of ``value``."""
    metas = _metas(function, args)
    whole = value.steps.made(function, args, {}, metas[0])
    results = [whole.steps.made(operator.getitem, (whole, at), {}, meta)
               for at, meta in enumerate(metas)]
    for one in args:
        if type(one) is NodeValue:
            one.alone = False  # what is given may lie in its memory
    return tuple(results)


def _metas(function: Callable, args: Any) -> Any:
    """How the results look."""
    try:
        metas = function(*_meta(args))
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        raise Unseen from None
    if not all(one.dim() and one.shape[0] == ROWS and ROWS not in one.shape[1:] for one in metas):
        raise Unseen
    return metas


def _meta(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_meta, value))
    return value.meta if isinstance(value, Value) else value


def through(value: NodeValue, module: nn.Module) -> NodeValue:
    """torch's BatchNorm: in evaluation by statistics that it kept, else by those of all nodes,
    where these are together. DGL gives a reduce function some of them at a time."""
    held = [parameter(one) for one in module._parameters.values() if one is not None]

    def function(rows: Tensor, *held: Tensor) -> Tensor:
        return module(rows)

    meta = torch.empty_like(value.meta)
    if module.training or getattr(module, "running_mean", None) is None:
        return value.steps.effect(function, (value, *held), meta)
    result = value.steps.made(function, (value, *held), {}, meta)
    result.alone = True
    return result
