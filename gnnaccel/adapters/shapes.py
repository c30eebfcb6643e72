"""The shapes in which kernels read a layer's parameters, which follow from its sizes.

Where somebody assigned another parameter, or another size, the host raises or broadcasts, and
kernels would read beyond an end. A layer's module declares the shapes (`Contract.shapes`), and
`checked` compares them in every call that is stated.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gnnaccel.adapters.contract import Contract
from gnnaccel.adapters.guards import declared
from gnnaccel.dispatch.policy.reasons import Reason, reason

#: dotted name of a parameter -> its shape; None: any number
Shapes = dict[str, "tuple[int | None, ...]"]


def of_heads(layer: Any, heads: int, width: int, maps: Iterable[str], vectors: Iterable[str],
             plain: Callable[[Any], bool], columns: int | None = None) -> Shapes:
    """Shapes of an attention layer's ``vectors``, and of those of its modules ``maps`` that are
    linear maps, for which ``plain`` holds. Results of other modules are checked when they are
    computed."""
    shapes: Shapes = dict.fromkeys(vectors, (1, heads, width))
    for name in maps:
        module = layer.get_submodule(name) if "." in name else layer._modules.get(name)
        if module is not None and plain(module):
            for own, shape in (("weight", (heads * width, columns)), ("bias", (heads * width,))):
                if module._parameters.get(own) is not None:
                    shapes[f"{name}.{own}"] = shape
    return shapes


def checked(found: Any, layer: Any, contract: Contract) -> Any:
    """``found``, the result of ``contract.state`` for a call, or why kernels would misread the
    layer's parameters."""
    if contract.shapes is None or type(found) is Reason:
        return found
    spec, inputs = found
    return unfit(layer, contract.shapes(layer, inputs), inputs.device,
                 spec.row if contract.ONE_DTYPE else None) or found


def unfit(layer: Any, shapes: Shapes, device: torch.device | None = None,
          dtype: torch.dtype | None = None) -> Reason | None:
    """Why the layer's parameters are not of these shapes, on this device and of this dtype, if
    these are given; autocast casts all but float64."""
    for name, shape in shapes.items():
        path, _, own = name.rpartition(".")
        t = declared(layer.get_submodule(path) if path else layer, own)
        if t is None:
            return reason("GA206", f"{name} is None")
        if t.dim() != len(shape) or [1 for size, one in zip(shape, t.shape)
                                     if size is not None and size != one]:
            expected = str(list(shape)).replace("None", "any")
            return reason("GA206", f"{name} is {list(t.shape)}, not {expected}")
        if 0 in t.shape:
            return reason("GA206", f"{name} is {list(t.shape)}: there is nothing to read")
        if device is not None and t.device != device:
            return reason("GA206", f"{name} is on {t.device}, the call on {device}")
        if dtype is not None and t.dtype is not dtype and (
                torch.float64 in (t.dtype, dtype) or not torch.is_autocast_enabled(t.device.type)):
            return reason("GA203", f"rows are {dtype}, {name} is {t.dtype}", "convert one of them")
    return None
