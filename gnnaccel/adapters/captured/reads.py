"""Values that the functions of a user's modules read besides their arguments and attributes:
globals, closures, defaults, attributes of classes and functions, and imports; of functions that are
attributes, too. Code of libraries is not looked at."""
from __future__ import annotations

import dis
import enum
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

from torch import nn

from gnnaccel.adapters.captured.state import ASIDE, LIBRARIES, Frozen
from gnnaccel.adapters.captured.values import Unknown

#: functions that act on the world, or read it, which a replay would not
_ACTING = frozenset(("print", "input", "open", "exec", "eval", "breakpoint", "globals", "setattr",
                     "delattr", "__import__"))
_CHANGING_MODULES = frozenset(("time", "datetime", "logging", "warnings", "io", "socket", "secrets",
                               "subprocess", "threading", "uuid", "wandb", "tqdm"))


#: methods that a host calls
_CALLED = ("forward", "message", "aggregate", "update", "edge_update", "message_and_aggregate",
           "propagate", "reduce", "__call__", "__getattr__", "__getattribute__", "backward",
           "setup_context")


class Reads:
    """Values read. ``frozen``: those that must not change; ``modules``: those read as globals."""

    def __init__(self, modules: list[nn.Module]) -> None:
        """Collect the values. Raises Unknown where one cannot be compared."""
        self.frozen: list[Any] = []
        self.modules: list[nn.Module] = []
        self._seen: set[Any] = set()
        self._names = set(_CALLED)
        self._members: dict[str, list[type]] = {}
        self._library: list[tuple[dict, str, Any]] = []
        self.frozen.append(_Names(self._library))
        self._tree(modules)
        self._reach()

    def holds(self) -> bool:
        """Whether all is as it was."""
        return all(one.holds() for one in self.frozen)

    def _tree(self, modules: Iterable[nn.Module]) -> None:
        every = [m for m in modules if id(m) not in self._seen]
        self._seen.update(map(id, every))
        for m in every:
            self._class(type(m))
            for name, value in vars(m).items():
                if name not in ASIDE:
                    self._held(f"the attribute {name}", value)

    def _held(self, name: str, value: Any) -> None:
        """Look at a value that the code may reach and call."""
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, nn.Module):  # one that its owner does not know as a submodule
            if id(value) not in self._seen:
                self.modules.append(value)
                self._tree(value.modules())
        elif isinstance(value, functools.partial):
            self._held(name, value.func)
            self._frozen(name, lambda: (value.args, value.keywords))
            self._held(name, [*value.args, *value.keywords.values()])
        elif isinstance(value, (list, tuple, set, dict)) and id(value) not in self._seen:
            self._seen.add(id(value))
            for one in value.values() if isinstance(value, dict) else value:
                self._held(name, one)
        elif isinstance(value, types.MethodType) and not _is_library(value.__func__.__module__):
            raise Unknown(f"{name}, a method of an object")

    def _frozen(self, name: str, get: Any) -> None:
        try:
            self.frozen.append(Frozen(get))
        except Unknown as problem:
            raise Unknown(f"{name}, {problem}") from None

    def _class(self, cls: type) -> None:
        """Note a class; its methods and values are read once their names occur somewhere."""
        for base in cls.__mro__:
            if id(base) in self._seen or _is_library(base.__module__):
                continue
            self._seen.add(id(base))
            for name in vars(base):
                self._members.setdefault(name, []).append(base)

    def _reach(self) -> None:
        while True:
            # a name that is put together at run time may be any
            some = "getattr" in self._names
            name = next((name for name in self._members
                         if name in self._names or some and not name.startswith("__")), None)
            if name is None:
                return
            for cls in self._members.pop(name):
                self._member(cls, name, vars(cls)[name])

    def _member(self, cls: type, name: str, value: Any) -> None:
        function: Any = getattr(value, "__func__", value)
        if isinstance(value, (property, functools.cached_property)):
            function = value.fget if isinstance(value, property) else value.func
        if isinstance(function, types.FunctionType):
            self._function(function)
            self.frozen.append(_Identity(lambda: vars(cls).get(name)))
        elif not (issubclass(cls, enum.Enum) or name.startswith("__")
                  or hasattr(type(value), "__get__")):
            self._value(f"{cls.__qualname__}.{name}", value, lambda: vars(cls)[name], self._names)

    def _function(self, function: types.FunctionType) -> None:
        inner = getattr(function, "__wrapped__", None)
        if isinstance(inner, types.FunctionType):
            self._function(inner)
        if id(function) in self._seen or _is_library(function.__globals__.get("__name__")):
            return
        self._seen.add(id(function))
        self.frozen.append(_Code(function))
        if function.__dict__.keys() - {"__wrapped__"}:
            self._frozen(f"the attributes of {function.__qualname__}", lambda: {
                name: value for name, value in vars(function).items() if name != "__wrapped__"})
        code, scope = function.__code__, function.__globals__
        attributes = {name for inner in _codes(code) for name in inner.co_names}
        self._names |= attributes
        for name in dict.fromkeys(_globals(code)):
            if name in scope:
                self._value(name, scope[name], lambda name=name: scope[name], attributes)
            elif name in _ACTING:
                raise Unknown(f"{function.__qualname__} calls {name}")
        for module in _imported(code, scope):
            self._module(module, attributes)
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            if name != "__class__":
                self._value(name, _content(cell), lambda cell=cell: cell.cell_contents, attributes)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value("a default", value, lambda value=value: value, attributes)

    def _value(self, name: str, value: Any, get: Any, attributes: set[str]) -> None:
        owner = (getattr(value, "__module__", None) or "").lstrip("_").partition(".")[0]
        if callable(value) and (owner in _CHANGING_MODULES or owner == "builtins"
                                and getattr(value, "__name__", None) in _ACTING):
            raise Unknown(f"the name {name}, which is {value!r}")
        if isinstance(value, types.ModuleType):
            self._module(value, attributes)
            self.frozen.append(_Identity(get))
        elif isinstance(value, nn.Module):
            self._held(name, value)
            self.frozen.append(_Identity(get))
        elif isinstance(value, type):
            self._class(value)
            self.frozen.append(_Identity(get))
        elif isinstance(value, types.FunctionType):
            self._function(value)
            self.frozen.append(Frozen(get))
        elif callable(value) and _is_library(getattr(value, "__module__", None)):
            self.frozen.append(_Identity(get))
        else:
            self._frozen(f"the name {name}", get)
            self._held(f"the name {name}", value)

    def _module(self, module: types.ModuleType, attributes: set[str]) -> None:
        top = module.__name__.partition(".")[0]
        if top in _CHANGING_MODULES:
            raise Unknown(f"the module {module.__name__}")
        if module is os and not attributes.isdisjoint(("environ", "getenv")):
            self.frozen.append(Frozen(lambda: dict(os.environ)))
        library = _is_library(module.__name__)
        for name in attributes & vars(module).keys():
            if (id(module), name) in self._seen:
                continue
            self._seen.add((id(module), name))
            value = vars(module)[name]
            if library and isinstance(value, types.ModuleType):
                if _is_library(value.__name__) and value.__name__.startswith(f"{top}."):
                    self._module(value, attributes)
                continue
            if library:
                if callable(value):  # a user may replace it
                    self._library.append((vars(module), name, value))
                continue
            self._value(f"{module.__name__}.{name}", value,
                        lambda name=name: vars(module)[name], attributes)


class _Identity:
    """An object that is read by name and compared by identity alone."""

    __slots__ = ("_get", "_value")

    def __init__(self, get: Any) -> None:
        self._get, self._value = get, get()

    def holds(self) -> bool:
        try:
            return self._get() is self._value
        except LookupError:
            return False


class _Names:
    """Functions and classes of libraries, as their modules name them."""

    __slots__ = ("_names",)

    def __init__(self, names: list[tuple[dict, str, Any]]) -> None:
        self._names = names

    def holds(self) -> bool:
        return all([members.get(name) is value for members, name, value in self._names])


class _Code:
    """Code and defaults of a function, which tools that load changed files replace in place."""

    __slots__ = ("_function", "_parts")

    def __init__(self, function: types.FunctionType) -> None:
        self._function, self._parts = function, self._now(function)

    @staticmethod
    def _now(function: types.FunctionType) -> tuple:
        return (function.__code__, function.__defaults__, function.__kwdefaults__,
                len(function.__dict__))  # a small number is one object

    def holds(self) -> bool:
        """Whether it is as it was."""
        return all(map(is_, self._now(self._function), self._parts))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise Unknown("a variable that is not set yet") from None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code and that of the functions and classes defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _globals(code: types.CodeType) -> Iterator[str]:
    for inner in _codes(code):
        for step in dis.get_instructions(inner):
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise Unknown(f"{inner.co_name} sets the global {step.argval}")
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield step.argval


def _imported(code: types.CodeType, given: dict[str, Any]) -> Iterator[types.ModuleType]:
    """The modules that are imported in the code, of those that are there."""
    for inner in _codes(code):
        steps = list(dis.get_instructions(inner))
        for number, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                level = steps[number - 2].argval
                name = importlib.util.resolve_name("." * level + step.argval,
                                                   given.get("__package__"))
                for one in dict.fromkeys((name.partition(".")[0], name)):
                    if one in sys.modules:
                        yield sys.modules[one]


def _is_library(name: str | None) -> bool:
    """Whether a module of that name belongs to Python or to an installed package."""
    top = (name or "").partition(".")[0]
    if top in LIBRARIES or top in sys.stdlib_module_names and top != "__main__":
        return True
    file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    return f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file
