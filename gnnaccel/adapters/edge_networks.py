"""Layers whose messages are x_j times a matrix that a network makes of each edge's features,
without these matrices.

The network ends in a linear map, so the matrix is linear in the features h before that map. Sums
over neighbours are then linear in the sums of the outer products of h and x_j (`outer_sums`): one
product per node instead of a matrix for each edge.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters import guards
from gnnaccel.dispatch.ops.outer_sums import MOST, Form
from gnnaccel.dispatch.policy.reasons import Reason, reason

#: modules that map each row by itself, or for which torch raises
_BY_ROW = frozenset(f"torch.nn.modules.{name}" for name in (
    "activation", "batchnorm", "dropout", "linear", "normalization"))


def unfit(name: str, network: Any, x: Tensor, width: int, results: int,
          linear: Callable[[Any], bool] = lambda module: False) -> Reason | None:
    """Why the sums are not linear in the features of the edges' network, the layer's ``name``, or
    the network does not fit ``x``. ``width``, ``results``: rows and columns of its matrices;
    ``linear``: which modules of the host are linear maps and nothing else."""
    if (type(network) is torch.nn.Sequential
            and not (network._modules and guards.plain(network, torch.nn.Sequential))):
        return reason("GA208", f"{name} is empty, watched, or has functions of its own")
    *before, last = modules(network)
    if not (linear(last) or guards.plain(last, torch.nn.Linear)):
        return reason("GA208", f"the last map of {name} is a {type(last).__name__}, with hooks, "
                      "lazy or of another class")
    foreign = next((one for one in before
                    if type(one).__module__ not in _BY_ROW and not linear(one)), None)
    if foreign is not None:
        return reason("GA208", f"{name} has a {type(foreign).__name__}")
    if torch.is_autocast_enabled(x.device.type):
        return reason("GA203", "autocast is on", "call the layer outside of autocast")
    if x.dtype is not torch.float32 or last.weight.dtype is not torch.float32:
        return reason("GA203", f"x is {x.dtype}, the layer's weights are {last.weight.dtype}; "
                      "the kernels take torch.float32")
    if x.shape[1] != width or last.weight.shape[0] != width * results:
        return reason("GA206", f"x has {x.shape[1]} channels, {name} makes {last.weight.shape[0]} "
                      f"numbers for {width} x {results}")
    if last.bias is not None and (last.bias.shape != (width * results,)
                                  or last.bias.dtype is not torch.float32):
        return reason("GA206", f"the bias of {name} is {list(last.bias.shape)} of "
                      f"{last.bias.dtype}")
    if width > MOST:
        return reason("GA207", f"{width} channels; the kernels take up to {MOST}")
    return None


def modules(network: Any) -> list[Any]:
    """Modules of a sequence, in order; another network is one linear map."""
    return [*network] if type(network) is torch.nn.Sequential else [network]


def operation(network: Any, mean: bool, results: int) -> str:
    """The name of the operation that makes the sums."""
    last = modules(network)[-1]
    return Form(mean, last.weight.shape[1], last.bias is not None, results).name
