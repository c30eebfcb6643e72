"""Stand-ins for classes and for what asks about them while a ``message`` or an ``aggregate`` is
traced: `isinstance`, `type`, `len`.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gnnaccel.adapters.tracing.attention.traced import Value
from gnnaccel.adapters.tracing.layer import guarded
from gnnaccel.adapters.tracing.layer.traced_modules import Function
from gnnaccel.adapters.tracing.nodes.node_wholes import LargestId
from gnnaccel.adapters.tracing.rows import constants, pointwise
from gnnaccel.adapters.tracing.rows.specials import Largest, Special
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen

#: plain classes that `isinstance` may ask about
_KINDS = {bool, int, float, tuple, list}


class Kind:
    """Stand-in for a class, the ``kind``, which only `isinstance` asks about."""

    def __init__(self, kind: type):
        self.kind = kind


class _OfTensors(Kind):
    """Stand-in for `torch.Tensor`, which is what `type` gives, too: it makes tensors of numbers in
    torch's default dtype."""

    def __call__(self, *data: Any) -> constants.Constant:
        if len(data) != 1 or type(data[0]) not in (list, tuple) or not all(
            [type(one) in NUMBERS for one in data[0]]):
            raise Unseen  # a number is a size
        return constants.constant(_tensor, data, {})

    def __getattr__(self, name: str) -> Any:
        return getattr(Tensor, name)


def _tensor(data: Any, device: Any) -> Tensor:
    return torch.tensor(data, dtype=torch.get_default_dtype(), device=device)


class _OfInt(Kind):
    """Stand-in for `int`: of the largest id of an index it is that, as it is a whole number."""

    def __call__(self, *value: Any) -> Any:
        if hasattr(type(value[0]), "as_int"):
            return value[0].as_int()
        return value[0] if type(value[0]) in (Largest, LargestId) else int(*value)


TENSOR, INT = _OfTensors(Tensor), _OfInt(int)


def is_one_of(value: Any, kinds: Any) -> bool:
    """Stand-in for `isinstance`."""
    classes = kinds if type(kinds) is tuple else (kinds,)
    classes = tuple([one.kind if isinstance(one, Kind) else one for one in classes])
    if not all(one in _KINDS or one is Tensor or issubclass(one, nn.Module) for one in classes):
        raise Unseen
    if isinstance(value, Function):
        return isinstance(value._traced_module, classes)
    if isinstance(value, Value):
        return Tensor in classes
    if not isinstance(value, guarded.PLAIN):
        raise Unseen
    return isinstance(value, classes)


def type_of(value: Any) -> Any:
    """Stand-in for `type`, of one argument: what the layer or the caller holds may be of another
    type than tensors."""
    if isinstance(value, pointwise.Rows) and not value.of_caller:
        return TENSOR
    if type(value) not in guarded.PLAIN:
        raise Unseen
    return INT if type(value) is int else type(value)


def length(value: Any) -> Any:
    """What stands for `len`: a stand-in's rows are no number."""
    return value.shape[0] if isinstance(value, (Value, Special)) else len(value)
