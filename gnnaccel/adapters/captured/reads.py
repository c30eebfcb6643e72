"""Values that the functions of a user's modules read besides their arguments and attributes:
globals, closures, defaults, attributes of classes and functions, and imports; of functions and
classes that are attributes or arguments, too. Code of libraries is not looked at."""
from __future__ import annotations

import builtins
import enum
import functools
import operator
import os
import sys
import types
import weakref
from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import Tensor, nn

from gnnaccel.adapters.captured import instructions, values, world
from gnnaccel.adapters.captured.state import ASIDE, LIBRARIES, Frozen
from gnnaccel.adapters.captured.values import Unknown

#: methods that a host calls
_CALLED = ("forward", "message", "aggregate", "update", "edge_update", "message_and_aggregate",
           "propagate", "reduce", "backward", "setup_context")
#: methods that Python calls when a module is made, printed, copied or let go of: not in its calls
_ASIDE = frozenset(("__init__", "__new__", "__post_init__", "__init_subclass__", "__repr__",
                    "__str__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__",
                    "__copy__", "__deepcopy__", "__del__", "__dir__"))
#: functions by which code gets attributes whose names it does not name itself
_BY_TEXT = frozenset(("getattr", "vars", "__dict__", "attrgetter", "methodcaller", "getattr_static",
                      "getmembers", "__getattribute__"))
_PYTHON = os.path.dirname(os.__file__) + os.sep


class Reads:
    """Values read. ``frozen``: those that must not change; ``modules``: those read as globals;
    ``compares``: whether code may tell one tensor from another."""

    def __init__(self, modules: list[nn.Module], arguments: tuple = ()) -> None:
        """Collect the values, for a call with these arguments. Raises Unknown where one cannot be
        compared."""
        self.frozen: list[Any] = []
        self.modules: list[nn.Module] = []
        self.compares = False
        self._seen: set[Any] = set()
        self._names = set(_CALLED)
        self._members: dict[str, list[type]] = {}
        self._library: list[tuple[dict, str, Any]] = []
        self._first = weakref.ref(modules[0])
        self.frozen.append(_Names(self._library))
        self._tree(modules)
        self._held("an argument", arguments)
        self._reach()

    def holds(self) -> bool:
        """Whether all is as it was."""
        return all(one.holds() for one in self.frozen)

    @property
    def read(self) -> list[Tensor]:
        """Tensors among the values."""
        return [t for one in self.frozen if isinstance(one, Frozen) for t in one.tensors]

    def _tree(self, modules: Iterable[nn.Module]) -> None:
        every = [m for m in modules if id(m) not in self._seen]
        self._seen.update(map(id, every))
        for m in every:
            self._class(type(m))
            for name, value in vars(m).items():
                if _is_method_of_a_module(value):
                    self._function(value.__func__)
                    value = value.__self__
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
            for one in (*value.args, *value.keywords.values()):
                self._held(name, one)
        elif isinstance(value, types.MethodType):
            if not is_library(value.__func__.__module__):
                raise Unknown(f"{name}, a method of an object")
            self._held(name, value.__self__)
        elif isinstance(value, types.ModuleType):
            if not is_library(value.__name__):
                raise Unknown(f"{name}, the module {value.__name__}")
        elif isinstance(value, type):
            self._class(value)
        else:
            self._class(type(value))  # its methods, properties and operators
            if id(value) not in self._seen:
                for one in _members(value):
                    self._seen.add(id(value))
                    self._held(name, one)

    def _frozen(self, name: str, get: Any) -> None:
        try:
            self.frozen.append(Frozen(get))
        except Unknown as problem:
            raise Unknown(f"{name}, {problem}") from None

    def _class(self, cls: type) -> None:
        """Note a class; its methods and values are read once their names occur somewhere."""
        for base in (*cls.__mro__, *type.mro(type(cls))):
            if id(base) in self._seen or is_library(base.__module__):
                continue
            self._seen.add(id(base))
            self.frozen.append(_Length(vars(base)))
            for one in base if issubclass(base, enum.Enum) else ():
                self._frozen(str(one), functools.partial(vars, one))
            for name in vars(base):
                if not (name in _ASIDE and issubclass(base, nn.Module)):
                    self._members.setdefault(name, []).append(base)

    def _reach(self) -> None:
        while True:
            # a name that is put together at run time may be any
            some = not self._names.isdisjoint(_BY_TEXT)
            name = next((name for name in self._members
                         if some or name in self._names or name.startswith("__")), None)
            if name is None:
                return
            for cls in self._members.pop(name):
                self._member(cls, name, vars(cls)[name])

    def _member(self, cls: type, name: str, value: Any) -> None:
        whole = f"{cls.__qualname__}.{name}"
        if isinstance(value, property):
            functions: tuple = (value.fget, value.fset, value.fdel)
        elif isinstance(value, (functools.cached_property, functools.partialmethod)):
            functions = value.func,
        else:
            functions = getattr(value, "__func__", value),
        if isinstance(functions[0], (types.FunctionType, functools.partial)):
            for function in functions:
                self._held(whole, function)
            self.frozen.append(_Identity(lambda: vars(cls).get(name)))
        elif issubclass(cls, enum.Enum) or name.startswith("__"):
            return
        elif not hasattr(type(value), "__get__"):
            self._value(whole, value, lambda: vars(cls)[name], self._names)
        elif isinstance(value, types.MemberDescriptorType):
            if issubclass(cls, nn.Module):
                raise Unknown(f"{whole}, a slot of a module")
        elif type(value).__module__ == "functools" or not is_library(type(value).__module__):
            raise Unknown(f"{whole}, a descriptor of class {type(value).__qualname__}")

    def _function(self, function: types.FunctionType) -> None:
        inner = getattr(function, "__wrapped__", None)
        if isinstance(inner, types.FunctionType):
            self._function(inner)
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if is_library(function.__globals__.get("__name__")):
            for cell in function.__closure__ or ():  # a user's functions may be in it
                if (content := _content(cell)) is not None:
                    self._held(f"the name {function.__name__}", content)
            return
        self.frozen.append(_Code(function))
        if function.__dict__.keys() - {"__wrapped__"}:
            self._frozen(f"the attributes of {function.__qualname__}", lambda: {
                name: value for name, value in vars(function).items() if name != "__wrapped__"})
        code, scope = function.__code__, function.__globals__
        if (name := instructions.read_of_tensors(code)) is not None:
            raise Unknown(f"{function.__qualname__} reads the attribute {name} of tensors")
        if instructions.moves_without_waiting(code):
            raise Unknown(f"{function.__qualname__} may copy from the host without waiting")
        if instructions.writes_to_data(code):
            raise Unknown(f"{function.__qualname__} writes to the data of an argument")
        self.compares = self.compares or instructions.compares_identities(code)
        for name in instructions.handed_on(code):
            if isinstance(scope.get(name), types.ModuleType):
                self._held(f"the name {name}", scope[name])
        attributes = {name for inner in instructions.codes(code) for name in inner.co_names}
        if not attributes.isdisjoint(("register_hook", "retain_grad")):
            raise Unknown(f"{function.__qualname__} registers a hook, which no replay calls")
        if "zero_grad" in attributes:
            raise Unknown(f"{function.__qualname__} lets go of gradients, which no replay does")
        if not attributes.isdisjoint(world.SEEDING):
            raise Unknown(f"{function.__qualname__} seeds random numbers, which no replay does")
        self._names |= attributes
        self._named(function, attributes)

    def _named(self, function: types.FunctionType, attributes: set[str]) -> None:
        """What the function's code reads by name: globals, imported modules, variables of functions
        around it, and defaults."""
        code, scope = function.__code__, function.__globals__
        for name in dict.fromkeys(instructions.globals_of(code)):
            if name in scope:
                self._value(name, scope[name], lambda name=name: scope[name], attributes)
            elif name in world.ACTING or name in ("id", "hash"):  # of a copy these are others
                raise Unknown(f"{function.__qualname__} calls {name}")
            else:
                self._library += [(scope, name, None),
                                  (vars(builtins), name, vars(builtins).get(name))]
        for module in instructions.imported(code, scope):
            self._module(module, attributes)
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            if name != "__class__":
                self._value(name, _content(cell), lambda cell=cell: cell.cell_contents, attributes)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value("a default", value, lambda value=value: value, attributes)

    def _value(self, name: str, value: Any, get: Any, attributes: set[str]) -> None:
        if callable(value) and world.acts(value):
            raise Unknown(f"the name {name}, which is {value!r}")
        if value is os.getenv:
            self.frozen.append(Frozen(lambda: dict(os.environ)))
        if isinstance(value, (operator.attrgetter, operator.methodcaller)):
            raise Unknown(f"the name {name}, which is {value!r}")
        if isinstance(value, types.ModuleType):
            self._module(value, attributes)
            self.frozen.append(_Identity(get))
        elif isinstance(value, (nn.Module, type, functools.partial)):
            if isinstance(value, nn.Module) and any(m is self._first() for m in value.modules()):
                raise Unknown(f"the name {name}, the module around it")  # it would be kept alive
            self._held(name, value)
            self.frozen.append(_Identity(get))
        elif isinstance(value, types.FunctionType):
            self._function(value)
            self.frozen.append(Frozen(get))
        elif callable(value) and is_library(getattr(value, "__module__", None)):
            self.frozen.append(_Identity(get))
            for one in getattr(value, "__dict__", {}).values():  # a custom operator has functions
                for inner in (one, *_members(one)):
                    if isinstance(inner, types.FunctionType):
                        self._held(f"the name {name}", inner)
        else:
            self._frozen(f"the name {name}", get)
            self._held(f"the name {name}", value)

    def _module(self, module: types.ModuleType, attributes: set[str]) -> None:
        top = module.__name__.partition(".")[0]
        if (top in world.CHANGING_MODULES
            or not attributes.isdisjoint(world.OF_THE_WORLD.get(top, ()))):
            raise Unknown(f"the module {module.__name__}")
        if top == "torch" and "ops" in attributes:
            for one in world.operators(attributes):
                self._value("an operator", one, lambda one=one: one, attributes)
        if module is os and not attributes.isdisjoint(world.ENVIRONMENT):
            self.frozen.append(Frozen(lambda: dict(os.environ)))
        library = is_library(module.__name__)
        for name in {*attributes, "__getattr__"} & vars(module).keys():
            if (id(module), name) in self._seen:
                continue
            self._seen.add((id(module), name))
            value = vars(module)[name]
            if library and isinstance(value, types.ModuleType):
                if is_library(value.__name__) and value.__name__.startswith(f"{top}."):
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
    """Functions and classes of libraries, as their modules name them, and builtins; None stands for
    a name that a module does not have."""

    __slots__ = ("_names",)

    def __init__(self, names: list[tuple[dict, str, Any]]) -> None:
        self._names = names

    def holds(self) -> bool:
        return all([members.get(name) is value for members, name, value in self._names])


class _Length:
    """How many names a class has: a new one may hide another class's that was read."""

    __slots__ = ("_names", "_number")

    def __init__(self, names: Any) -> None:
        self._names, self._number = names, len(names)

    def holds(self) -> bool:
        return len(self._names) == self._number


class _Code:
    """Code and defaults of a function, which tools that load changed files replace in place."""

    __slots__ = ("_function", "_parts")

    def __init__(self, function: types.FunctionType) -> None:
        self._function, self._parts = function, self._now(function)

    @staticmethod
    def _now(function: types.FunctionType) -> tuple:
        named = function.__kwdefaults__
        return (function.__code__, function.__defaults__, named, *(named or {}).values(),
                len(function.__dict__))  # a small number is one object

    def holds(self) -> bool:
        """Whether it is as it was."""
        now = self._now(self._function)
        return len(now) == len(self._parts) and all(map(is_, now, self._parts))


def _members(value: Any) -> Iterable[Any]:
    """What is in a container, if it is one."""
    if values.of_data(value) and hasattr(value, "to_dict"):
        value = value.to_dict()
    elif isinstance(value, values.NAMESPACES) or (
            not is_library(type(value).__module__) and values.is_object(value)):
        value = vars(value)
    if isinstance(value, dict):
        return [*value.values()]
    return value if isinstance(value, (list, tuple, set, frozenset)) else ()


def _is_method_of_a_module(value: Any) -> bool:
    return (type(value) is types.MethodType and isinstance(value.__self__, nn.Module)
            and isinstance(value.__func__, types.FunctionType))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise Unknown("a variable that is not set yet") from None


def is_library(name: str | None) -> bool:
    """Whether a module of that name belongs to Python or to an installed package."""
    top = (name or "").partition(".")[0]
    file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    if top in sys.stdlib_module_names and top != "__main__":  # a user's file may have such a name
        return not file.endswith(".py") or file.startswith(_PYTHON)
    return top in LIBRARIES or any(
        f"{os.sep}{folder}{os.sep}" in file for folder in ("site-packages", "dist-packages"))
