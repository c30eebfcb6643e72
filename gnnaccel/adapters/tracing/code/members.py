"""Members of an `Enum`, which stand for themselves while a user's function is traced."""
from __future__ import annotations

import enum
import inspect
import types
from typing import Any

from gnnaccel.adapters.tracing.rows.standins import Unseen

#: what may run where a member is used: written in Python by nobody but `enum`
_RUNS = ("__eq__", "__ne__", "__bool__", "__len__", "__hash__", "__getattribute__", "__getattr__",
         "__format__", "__str__", "__repr__", "value", "name")
#: what members may be asked for
ASKED = ("value", "name")


def is_class(value: Any) -> bool:
    """Whether it is an `Enum` whose members Python alone compares."""
    return type(value) is enum.EnumMeta and all(
        [_is_pythons(inspect.getattr_static(value, name, None)) for name in _RUNS])


def _is_pythons(attribute: Any) -> bool:
    """Whether an attribute is Python's own, or there is none."""
    function = getattr(attribute, "fget", attribute)
    return (function.__globals__.get("__name__") == "enum"
            if isinstance(function, types.FunctionType)
            else type(function).__module__ in ("builtins", "enum", "types"))


def is_member(value: Any) -> bool:
    """Whether it is a member of such a class."""
    return isinstance(value, enum.Enum) and is_class(type(value))


class Members:
    """Stand-in for such a class, to name its members."""

    def __init__(self, of: enum.EnumMeta):
        self._traced_members: dict[str, Any] = dict(of.__members__)

    def __getattr__(self, name: str) -> Any:
        if name not in self._traced_members:
            raise Unseen
        return self._traced_members[name]

    def _refuses(self, *args: Any) -> Any:
        raise Unseen

    __eq__ = __ne__ = __str__ = __repr__ = __format__ = __contains__ = __iter__ = _refuses
    __hash__ = object.__hash__
