"""Arguments, results and attributes taken apart into their form and their tensors.
"""
from __future__ import annotations

import argparse
import collections
import enum
import types
from operator import is_
from typing import Any

import torch
from torch import Tensor

_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device,
                    torch.Size, type(Ellipsis)))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type,
              types.ModuleType)
NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_DATA = "torch_geometric.data."
_IN_PYTHON = 1 << 9  # of a type's flags: made by a class statement
TENSOR = "a tensor"


class _Bare:
    """A class of Python, whose objects have a ``__dict__`` and nothing else."""


class Unknown(Exception):
    """A value holds something that cannot be compared; the message says what."""


def apart(value: Any, tensors: list[Tensor], within: tuple[int, ...] | None = None) -> Any:
    """The form of ``value``, equal to that of another value of the same structure and numbers; its
    tensors are appended to ``tensors``. Raises Unknown.

    within: the lists, dictionaries and objects of user classes, by id, that the value is in; None
    where such an object is unknown, as `together` cannot make one.
    """
    kind = type(value)
    if kind in _TENSORS:
        if value.layout is not torch.strided:
            raise Unknown(f"a tensor of layout {value.layout}")
        if value.__dict__:
            raise Unknown("a tensor with attributes of its own")
        tensors.append(value)
        return TENSOR
    if kind in _PLAIN:
        return (kind, value) if value or kind is not float else (kind, value, str(value))  # of 0
    if within is not None and kind in (list, dict):
        if id(value) in within:
            raise Unknown(f"a {kind.__name__} that holds itself")
        within = (*within, id(value))
    if kind in (tuple, list):
        return kind, *[apart(one, tensors, within) for one in value]
    if kind is dict:
        return kind, *[(_key(key), apart(one, tensors, within)) for key, one in value.items()]
    return _others(value, kind, tensors, within)


def _others(value: Any, kind: type, tensors: list[Tensor], within: tuple[int, ...] | None) -> Any:
    if kind in (set, frozenset):
        if all(type(one) in _PLAIN for one in value):
            return kind, frozenset(value)
    elif isinstance(value, _FUNCTIONS) or isinstance(value, enum.Enum):
        return value
    elif _is_named(value):
        return kind, *[apart(one, tensors, within) for one in value]
    elif kind is collections.OrderedDict:
        return kind, *[(_key(key), apart(one, tensors, within)) for key, one in value.items()]
    elif kind in NAMESPACES:
        return kind, apart(vars(value), tensors, within)
    elif kind is slice:
        return kind, *[apart(one, tensors) for one in (value.start, value.stop, value.step)]
    elif of_data(value) and hasattr(value, "to_dict"):
        return kind, apart(value.to_dict(), tensors, within)
    elif within is not None and is_object(value):
        if id(value) in within:
            raise Unknown(f"an object of class {kind.__qualname__} that holds itself")
        return kind, apart(vars(value), tensors, (*within, id(value)))
    raise Unknown(f"an object of class {kind.__module__}.{kind.__qualname__}")


def _is_named(value: Any) -> bool:
    """Whether it is a tuple with names, of `collections.namedtuple` or torch's, and no more."""
    kind = type(value)
    return (isinstance(value, tuple) and not getattr(value, "__dict__", None)
            and (hasattr(kind, "_make") or hasattr(kind, "n_sequence_fields")))


def _key(key: Any) -> Any:
    """The key of a dictionary. Raises Unknown where it is found by more than what it says."""
    if type(key) is tuple:
        for one in key:
            _key(one)
    elif type(key) not in _PLAIN and not isinstance(key, (*_FUNCTIONS, enum.Enum)):
        raise Unknown(f"a key of class {type(key).__module__}.{type(key).__qualname__}")
    return key


def is_object(value: Any) -> bool:
    """Whether all that the value holds is in its ``__dict__``, as with an object of a class that is
    written in Python alone, or a dataclass. One of C, such as `functools.partial`, is larger."""
    return type(value).__basicsize__ <= _Bare.__basicsize__ and all(
        base.__flags__ & _IN_PYTHON and not vars(base).get("__slots__")
        for base in type(value).__mro__[:-1])


def same(value: Any, form: Any, tensors: list[Tensor]) -> bool:
    """Whether `apart` of ``value``, with objects in it, still gives this form, and these very
    tensors."""
    now_tensors: list[Tensor] = []
    try:
        now = apart(value, now_tensors, ())
    except Unknown:
        return False
    return now == form and len(now_tensors) == len(tensors) and all(map(is_, now_tensors, tensors))


def of_data(value: Any) -> bool:
    """Whether it is an object of PyG's classes for data."""
    return type(value).__module__.startswith(_DATA)


def together(form: Any, tensors: Any) -> Any:
    """The value of which `apart` gave ``form``, with the next tensors of an iterator."""
    if form is TENSOR:
        return next(tensors)
    if not isinstance(form, tuple):  # a function, a class, a member of an enumeration
        return form
    kind, *parts = form
    if kind in _PLAIN:
        return parts[0]
    if kind in (set, frozenset):
        return kind(parts[0])
    if kind in (dict, collections.OrderedDict):
        return kind((key, together(part, tensors)) for key, part in parts)
    items = [together(part, tensors) for part in parts]
    if kind in (list, tuple):
        return kind(items)
    if kind in NAMESPACES:
        return kind(**items[0])
    if kind.__module__.startswith(_DATA):
        return kind.from_dict(items[0])
    if hasattr(kind, "_make"):  # a named one
        return kind._make(items)
    return kind(*items) if kind is slice else kind(items)


def result_apart(value: Any, tensors: list[Tensor]) -> Any:
    """`apart` of a module's result, which `together` can make again. Raises Unknown."""
    form = apart(value, tensors)
    _check_result(form)
    return form


def _check_result(form: Any) -> None:
    if form is TENSOR:
        return
    if not isinstance(form, tuple) or not (form[0] in _PLAIN or form[0] in (tuple, list, dict)
                                           or issubclass(form[0], tuple)):
        raise Unknown("a result of other things than tensors, tuples, lists and dictionaries")
    if form[0] in _PLAIN:
        return
    for part in form[1:]:
        _check_result(part[1] if form[0] is dict else part)
