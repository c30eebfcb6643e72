"""The number of rows of stand-ins for tensors while users' functions are traced: to these it is a
number, but not one to calculate with."""
from __future__ import annotations

from typing import Any

from gnnaccel.adapters.tracing.rows.standins import Unseen

#: rows that a stand-in claims to have: a prime, so that no view mixes rows without being noticed
ROWS = 7919


class RowCount:
    """How many rows a stand-in claims to have: good for a view, not to calculate with. No integer,
    of which `math.log` and `int` would take the value."""

    def __index__(self) -> int:
        return ROWS

    def _refuses(self, *args: Any) -> Any:
        raise Unseen

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuses
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __neg__ = _refuses
    __str__ = __format__ = __repr__ = _refuses  # its text is another
    __float__ = __int__ = __bool__ = __lt__ = __le__ = __ge__ = __mod__ = _refuses

    def __gt__(self, other: Any) -> bool:
        """Whether there are rows: no call over no edges runs by what is traced."""
        return _none(self, other) or self._refuses()

    def __eq__(self, other: Any) -> bool:
        return type(other) is RowCount or not (_none(self, other) or self._refuses())

    def __ne__(self, other: Any) -> bool:
        return not self == other

    __hash__ = object.__hash__


class Elements(RowCount):
    """How many elements rows have in all: some, if there are rows."""

    def __gt__(self, other: Any) -> bool:
        return (type(other) is int and other == 0) or self._refuses()

    def __eq__(self, other: Any) -> bool:
        return not self > other

    __index__ = RowCount._refuses
    __hash__ = object.__hash__


def _none(rows: Any, other: Any) -> bool:
    """Whether rows, of edges or of nodes that have some, are compared with none at all."""
    return type(rows) is RowCount and type(other) is int and other == 0


def counted(value: Any) -> bool:
    """Whether there is a `RowCount` in ``value``."""
    if type(value) is slice:
        value = value.start, value.stop, value.step
    if isinstance(value, (tuple, list)):
        return any(map(counted, value))
    return isinstance(value, RowCount)
