"""Stand-ins that are a tuple, a dictionary or a function to the code that is traced. Their texts
are others than those of what they stand for, so code that asks for one is not followed."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gnnaccel.adapters.tracing.rows.standins import Unseen


class _Untold:
    def _refuses(self, *args: Any, **kwargs: Any) -> Any:
        raise Unseen

    __str__ = __repr__ = __format__ = _refuses


class Sequence(_Untold, tuple):
    """Stand-in for a `torch.Size`, or for a list of modules."""

    def __getitem__(self, place: Any) -> Any:
        item = super().__getitem__(place)
        return Sequence(item) if type(place) is slice else item

    def __add__(self, other: Any) -> Any:
        return Sequence((*self, *other)) if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return Sequence((*other, *self)) if isinstance(other, tuple) else NotImplemented


class Mapping(_Untold, dict):
    """Stand-in for a dictionary that the layer holds, which is not to be changed, or for modules by
    their names."""

    __setitem__ = __delitem__ = __ior__ = _Untold._refuses
    clear = pop = popitem = setdefault = update = _Untold._refuses


class Function(_Untold):
    """Stand-in for a function of the user's own, by what is ``called`` in its place."""

    def __init__(self, called: Callable):
        self._traced_called = called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._traced_called(*args, **kwargs)
