"""Stand-ins for ``super`` and for classes of the layer in methods that are traced: ways to the
methods of its other classes."""
from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gnnaccel.adapters.tracing.rows.standins import Unseen

if TYPE_CHECKING:
    from gnnaccel.adapters.tracing.layer.traced_layer import Layer

CELL = "__class__"  # the variable in which a method that names `super` has its class


class Class:
    """Stand-in for one of the classes of the object that ``layer`` stands for."""

    def __init__(self, cls: type, layer: Layer):
        self._traced_class, self._traced_layer = cls, layer

    def __getattr__(self, name: str) -> Callable:
        method = _found(self._traced_layer, name, self._traced_class.__mro__)

        def called(held: Any, *args: Any, **kwargs: Any) -> Any:
            if held is not self._traced_layer:
                raise Unseen
            return method(*args, **kwargs)

        return called


class _Above:
    """Stand-in for the result of ``super``: the methods of the classes after this one."""

    def __init__(self, cls: Any, layer: Layer):
        order = type(layer._traced_layer).__mro__
        if cls not in order:
            raise Unseen
        self._traced_classes, self._traced_layer = order[order.index(cls) + 1:], layer

    def __getattr__(self, name: str) -> Callable:
        return _found(self._traced_layer, name, self._traced_classes)


def above(function: types.FunctionType, layer: Layer) -> Callable:
    """Stand-in for ``super`` in ``function``."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))

    def of(cls: Any = None, held: Any = None) -> Any:
        if cls is None and CELL in cells:
            return _Above(cells[CELL].cell_contents, layer)
        if type(cls) is not Class or held is not layer:
            raise Unseen
        return _Above(cls._traced_class, layer)

    return of


def _found(layer: Layer, name: str, classes: Iterable[type]) -> Callable:
    """The method of the first class that has one; that those before have none is noted, too."""
    for cls in classes:
        method = vars(cls).get(name, Unseen)
        layer._traced_watched.append((vars(cls), name, method))
        if type(method) is types.FunctionType:
            return layer._traced_method(method)
        if method is not Unseen:
            break
    raise Unseen
