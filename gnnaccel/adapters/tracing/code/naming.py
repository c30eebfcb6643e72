"""Names in the code of a user's function, checked before it runs on stand-ins: torch's functions,
global values, and nothing else; attributes are looked at by `named_attributes`.
"""
from __future__ import annotations

import builtins
import dis
import enum
import inspect
import math
import sys
import types
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor, nn

from gnnaccel.adapters import own
from gnnaccel.adapters.tracing.message import SPECIAL, _named, codes, special_read
from gnnaccel.adapters.tracing.rows.specials import NEVER_NONE
from gnnaccel.adapters.tracing.rows.standins import Unseen

MODULES = (torch, torch.nn, torch.nn.functional, torch.linalg, math)
#: of these, what stands for them: it has no more than what may be named
STOOD_FOR = (torch, torch.nn.functional)
#: where stands what such code names as an attribute, but for what users hold
PLACES = (torch, torch.nn.functional, torch.linalg, math, Tensor)
BUILTINS = (bool, float, int, len, range, enumerate, zip, reversed, tuple, list, sum, map, max, min,
            abs)
#: functions that may be defined in one that is traced
COMPREHENSIONS = ("<genexpr>", "<listcomp>")
#: instructions that may follow the read of a name that is handed on, or taken apart
_HANDS_ON = ("LOAD_", "CALL", "PRECALL", "KW_NAMES", "UNPACK_SEQUENCE", "BINARY_SUBSCR")
#: and those that put it in a list, of what is never None
_COLLECTS = ("BUILD_LIST", "BUILD_TUPLE")
NOT_PLAIN_CODE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CATCHES = frozenset(("SETUP_FINALLY", "SETUP_WITH", "PUSH_EXC_INFO"))
_AS_ANY_OBJECT = (object.__getattribute__, types.SimpleNamespace.__getattribute__)
_IMPORTS = ("IMPORT_NAME", "IMPORT_FROM")
_COMPARES = frozenset(("IS_OP", "COMPARE_OP", "CONTAINS_OP"))


class Torch:
    """Stands for a module of `STOOD_FOR`, of which no more than ``names`` may be named: a branch
    that is not taken may name others."""

    def __init__(self, module: types.ModuleType, names: Set[str], watched: list | None = None):
        self._traced_module, self._traced_names = module, names
        self._traced_watched = watched

    def _traced_by_name(self, name: str) -> Any:
        """What code names by a text, which no look at the code tells."""
        value = getattr(self, name)
        if self._traced_watched is None or not (callable(value) and name in self._traced_names):
            raise Unseen
        place = vars(self._traced_module)
        self._traced_watched.append((place, name, place[name]))
        if not is_torchs(place[name], frozenset(self._traced_names)):
            raise Unseen
        return value

    def __getattr__(self, name: str) -> Any:
        if name not in self._traced_names:
            raise Unseen
        return getattr(self._traced_module, name)


def globals_in_place(function: types.FunctionType, names: frozenset[str],
                     instead: Callable[[str, Any], Any],
                     imported: Callable[[str], Any] | None = None) -> dict[str, Any] | None:
    """Replacements of global names of ``function``, by ``instead(name, value)``, which is None for
    those to keep; None where the function may do more than compute. ``imported(name)``: what stands
    for a module that it imports by itself, None for others; without, it may import none."""
    code, global_values = function.__code__, function.__globals__
    inner_codes = codes(code)[1:]
    if (code.co_cellvars and not inner_codes) or code.co_flags & NOT_PLAIN_CODE:
        return None
    if any(map(_writes_around, (code, *inner_codes))):
        return None
    if any("__class__" in one.co_freevars or not _may_be_inside(one) for one in inner_codes):
        return None
    replacements = {} if imported is None else importing(function, imported)
    if replacements is None:
        return None
    for kind, name in (one for each in (code, *inner_codes) for one in _named(each)):
        if kind in _IMPORTS and imported is not None:
            continue
        if kind == "LOAD_GLOBAL":
            value = global_values.get(name, getattr(builtins, name, None))
            replacement = instead(name, value)
            if replacement is not None:
                replacements[name] = replacement
            elif not is_known(value, names):
                return None
        elif kind not in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR"):
            return None
    return replacements


def importing(function: types.FunctionType,
              imported: Callable[[str], Any]) -> dict[str, Any] | None:
    """The global name by which ``function`` gets ``imported`` modules where it imports such by
    itself; None where it imports others."""
    names = [name for code in codes(function.__code__) for kind, name in _named(code)
             if kind == "IMPORT_NAME"]
    modules = {name: imported(name) for name in names}
    if any(one is None for one in modules.values()):
        return None

    def of(name: str, global_values: Any = None, local_values: Any = None, parts: Any = (),
           level: int = 0) -> Any:
        if level or (not parts and "." in name):
            raise Unseen
        return modules[name]

    return {"__builtins__": {**vars(builtins), "__import__": of}} if modules else {}


def _writes_around(code: types.CodeType) -> bool:
    """Whether the function writes a variable of a function around it."""
    return any(step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
               for step in steps_of(code))


def _may_be_inside(code: types.CodeType) -> bool:
    """Whether a function that is traced may define this one: what message passing passes by itself
    may come to it under any name, so it may not ask whether something is None."""
    return code.co_name in COMPREHENSIONS or not (
        code.co_flags & NOT_PLAIN_CODE or catches(code)
        or any(step.opname == "IS_OP" or "NONE" in step.opname for step in steps_of(code)))


def with_globals(function: types.FunctionType, more: dict[str, Any]) -> types.FunctionType:
    """``function`` with other values of some global names."""
    copy = types.FunctionType(function.__code__, {**function.__globals__, **more},
                              function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def is_torchs(value: Any, names: frozenset[str]) -> bool:
    """Whether it is one of the functions ``names`` of torch or of `math`. What somebody wrapped
    around such a function has its name, too, but does not stand where that does."""
    name, kind = getattr(value, "__name__", ""), type(value)
    if name not in names:
        return False
    if kind is types.FunctionType:
        place = sys.modules.get(own.original(value).__module__ or "")
        return own.home(value) == "torch" and getattr(place, name, None) is value
    module = getattr(value, "__module__", None) or "torch"
    return (kind in (types.BuiltinFunctionType, types.MethodDescriptorType)
            and module.partition(".")[0] in ("torch", "math"))


def is_known(value: Any, names: frozenset[str]) -> bool:
    """Whether a global value may stand for itself."""
    return (any(value is one for one in (*MODULES, *BUILTINS)) or is_error(value)
            or is_torchs(value, names))


def is_users_module(value: Any) -> bool:
    """Whether it is a module that is not torch's or one of Python's own."""
    return isinstance(value, types.ModuleType) and (
        value.__name__.partition(".")[0] not in ("torch", "torch_geometric", "torch_scatter",
                                                 "einops", *sys.stdlib_module_names))


def is_package(value: Any) -> bool:
    """Whether it is PyG or torch_scatter, or one of their modules. What stands for such a module
    refuses to give what is not known; others are not followed."""
    return isinstance(value, types.ModuleType) and (
        value.__name__.partition(".")[0] in ("torch_geometric", "torch_scatter"))


def is_error(value: Any) -> bool:
    """Whether it is one of Python's own exceptions, which a function may raise."""
    return isinstance(value, type) and issubclass(value, Exception) and (
        value.__module__ == "builtins")


def catches(code: types.CodeType) -> bool:
    """Whether the function may catch what a stand-in raises, and go another way. Leaving a
    ``with`` is no such thing."""
    steps = steps_of(code)
    return any(step.opname in _CATCHES and next_step.opname != "WITH_EXCEPT_START"
               for step, next_step in zip(steps, [*steps[1:], steps[-1]]))


def special_as_arguments(code: types.CodeType, names: Set[str] = SPECIAL) -> bool:
    """Whether the function does no more with what message passing passes by itself, under these
    names, than hand it to functions, or take it apart. Whether ``ptr is None`` a stand-in cannot
    answer."""
    if not all(special_as_arguments(one, names) for one in codes(code)[1:]):
        return False
    steps = steps_of(code)
    cells = {*code.co_cellvars, *code.co_freevars}  # their values by LOAD_DEREF alone
    for at, step in enumerate(steps[:-1]):
        if special_read(step, names) and (step.opname == "LOAD_DEREF" or step.argval not in cells):
            following = steps[at + 1].opname
            if not following.startswith(_HANDS_ON) and not (
                following in _COLLECTS and not special_read(step, names - NEVER_NONE)):
                return False
            if any(one.opname in _COMPARES for one in steps[at + 1:at + 3]):
                return False
    return True


def class_for_super(code: types.CodeType) -> bool:
    """Whether a method reads the variable that has its class for ``super()`` alone."""
    steps = steps_of(code)
    return all(next_step.opname == "LOAD_SUPER_ATTR"
               for step, next_step in zip(steps, [*steps[2:], *steps[-1:] * 2])
               if step.argval == "__class__" and step.opname.startswith("LOAD_"))


def steps_of(code: types.CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname != "CACHE"]


def attribute(held: Any, name: str) -> Any:
    """The attribute, found without running any code of a user's: a property is given as it is.
    Unseen where there is none, and where a class finds its attributes in its own way."""
    if finds_by_code(type(held)):
        return Unseen
    value = inspect.getattr_static(held, name, Unseen)
    if value is Unseen and isinstance(held, nn.Module):
        for kind in ("_parameters", "_buffers", "_modules"):
            value = held.__dict__[kind].get(name, value)
    return value


def is_record(value: Any) -> bool:
    """Whether it is an object of a class of Python's or the user's own that has attributes as any
    object has them, such as an `argparse.Namespace` or a dataclass."""
    cls = type(value)
    return not (isinstance(value, (nn.Module, Tensor, type, types.ModuleType, enum.Enum))
                or callable(value)
                or cls.__module__ == "builtins" or finds_by_code(cls)
                or cls.__module__.partition(".")[0] in ("torch", "torch_geometric")
                or not isinstance(getattr(value, "__dict__", None), dict))


def finds_by_code(cls: type) -> bool:
    """Whether a class finds its attributes in its own way."""
    return cls.__getattribute__ not in _AS_ANY_OBJECT or (
        getattr(cls, "__getattr__", None) not in (None, nn.Module.__getattr__))
