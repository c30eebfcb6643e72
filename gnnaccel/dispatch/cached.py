"""Properties that are computed once for each object, without a lock.

Python's own, up to 3.11, hold one lock for all objects of a class while one of them computes. So
the structures of two graphs would not be made side by side, and a process that is forked meanwhile
would wait for that lock for ever.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):
    """What ``make`` gives, kept in the object's `__dict__`. Two threads that ask at once may both
    make it, and the last one's is kept."""

    def __init__(self, make: Callable[[Any], T]):
        self._make, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._make(instance)
        return value
