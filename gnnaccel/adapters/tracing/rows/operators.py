"""Python's operators on stand-ins."""
from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor

_BY_TORCH = {"and_": "logical_and", "or_": "logical_or"}
_OVERWRITING = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}


def operate(cls: Any, names: Iterable[str]) -> None:
    """Operators of a class, such as ``a < b``: operations of which ``a`` decides. ``names``: of the
    functions of `operator`."""
    for name in names:
        setattr(cls, f"__{name.strip('_')}__", _operation(name))


def _operation(name: str) -> Any:
    function, of_torch = getattr(operator, name), _BY_TORCH.get(name, name)

    def call(self: Any, other: Any) -> Any:
        if other is None and name in ("eq", "ne"):  # no tensor is
            return name == "ne"
        return self.operate(of_torch, function, (self, other), {})

    return call


def overwrite(cls: Any) -> None:
    """Operators of a class that write over a stand-in, such as ``a += b``."""
    for sign, name in _OVERWRITING.items():
        setattr(cls, f"__{sign}__", _overwriting(name))


def _overwriting(name: str) -> Any:
    function = getattr(Tensor, f"{name}_")

    def call(self: Any, other: Any) -> Any:
        return self.overwritten(name, function, self, other)

    return call
