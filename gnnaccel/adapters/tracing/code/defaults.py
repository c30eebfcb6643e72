"""Arguments of a user's functions that ``propagate`` was not given, and that have a default.

PyG writes defaults into the ``collect`` that it writes for a class, once, and hands on these. Its
general ``propagate`` hands on something else in their place.
"""
from __future__ import annotations

import dis
import functools
import inspect
import math
import types
from typing import Any

from gnnaccel.adapters.tracing.rows.standins import Unseen

_NUMBERS = (int, float, bool)


def default_of(layer: Any, parameter: inspect.Parameter) -> Any:
    """What the host hands on for a parameter of a layer's function: its default, None or numbers.
    Unseen for others, and where the host has another."""
    value = parameter.default
    if value is not None and (not _is_plain(value)
                              or not _same(_written(type(layer), parameter.name), value)):
        raise Unseen
    return value


def are_given(layer: Any, function: Any, names: tuple[str, ...]) -> bool:
    """Whether the host hands on the defaults of these parameters of a layer's function."""
    parameters = inspect.signature(function).parameters
    return all([parameters[name].default is _written(type(layer), name) is None
                or _same(_written(type(layer), name), parameters[name].default)
                for name in names])


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _NUMBERS and math.isfinite(value)


def _same(value: Any, other: Any) -> bool:
    """Whether two numbers, or several, are the same to the last bit."""
    return _is_plain(value) and repr(value) == repr(other)


def _written(cls: type[Any], name: str) -> Any:
    """The default that PyG wrote for the class; Unseen where it wrote none."""
    own = vars(cls)
    if own.get("_jinja_propagate") is own.get("_orig_propagate"):
        return Unseen
    code = getattr(own.get("collect"), "__code__", None)
    return Unseen if code is None else _stored(code).get(name, Unseen)


@functools.lru_cache(maxsize=256)
def _stored(code: types.CodeType) -> dict[str, Any]:
    """The constants that a function gives to its variables."""
    steps = list(dis.get_instructions(code))
    # some instructions of Python 3.13 write one variable and read another
    return {after.argval if type(after.argval) is str else after.argval[0]: step.argval
            for step, after in zip(steps, steps[1:])
            if step.opname == "LOAD_CONST" and after.opname.startswith("STORE_FAST")}
