"""Weights that are more than tensors, as quantized ones are."""
from __future__ import annotations

import torch
from torch import nn

_ROUNDING = frozenset(("linear", "mul", "__mul__", "__rmul__", "matmul", "__getitem__"))


class Rounded(nn.Parameter):
    """A weight whose numbers are rounded where a function multiplies with them; gradients go
    through."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in _ROUNDING:
                args = tuple(_rounded(a) if isinstance(a, cls) else a for a in args)
            return func(*args, **(kwargs or {}))


class RoundedTensor(torch.Tensor):
    """The same as a tensor that is no parameter."""

    __torch_function__ = classmethod(Rounded.__torch_function__.__func__)


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    return weight + (weight.round(decimals=1) - weight).detach()


def put(layer: nn.Module, part: str, name: str = "weight", swapped: bool = False) -> None:
    """Has a part of the layer, by its dotted name, hold its weight as a `Rounded` one; ``swapped``:
    in the object that it was in."""
    module = layer.get_submodule(part)
    weight = Rounded(getattr(module, name).detach().clone())
    if swapped:
        torch.utils.swap_tensors(getattr(module, name), weight)
    else:
        setattr(module, name, weight)


def put_as_attribute(layer: nn.Module, part: str, name: str = "weight",
                     kind: type[torch.Tensor] = RoundedTensor) -> None:
    """Has a part of the layer hold a copy of its weight as a plain attribute."""
    module = layer.get_submodule(part)
    weight = getattr(module, name).detach().clone().as_subclass(kind)
    delattr(module, name)
    setattr(module, name, weight)
