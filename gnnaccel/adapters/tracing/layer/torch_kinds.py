"""Which of torch's classes a module of a user's class is at work: one that only says how it is
made, as ``class MLP(nn.Sequential)`` with an ``__init__`` does, runs as its base."""
from __future__ import annotations

from types import FunctionType, NoneType
from typing import Any

from torch import nn

#: what a class may say without another result of its calls
_SAID = frozenset((
    "__init__", "reset_parameters", "extra_repr", "__repr__", "__module__", "__qualname__",
    "__doc__", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",
    "__dict__", "__weakref__", "__constants__", "__orig_bases__", "__parameters__",
    "__firstlineno__", "__static_attributes__", "__type_params__"))
#: types of what it may have besides, under names that torch does not know
_OWN = (FunctionType, staticmethod, classmethod, int, float, str, tuple, NoneType)


def kind(module: nn.Module, kinds: Any) -> type:
    """The class among ``kinds`` whose work the module does: its own, or one that it extends by
    nothing that a call reads; else its own, whatever that is."""
    cls = type(module)
    if cls in kinds or cls.__module__.startswith("torch."):
        return cls
    base = next((one for one in cls.__mro__ if one in kinds), None)
    if base is None or type(cls) is not type(base):
        return cls
    own = module.__dict__
    held = own.keys() | own["_parameters"].keys() | own["_buffers"].keys() | own["_modules"].keys()
    for one in cls.__mro__:
        if one in base.__mro__:
            continue
        for name, value in vars(one).items():
            if name not in _SAID and (not isinstance(value, _OWN) or name in held
                                      or hasattr(base, name)):
                return cls
    return base
