"""Checks that the code of a layer is the host's own.

An adapter does in one step what the host does in several functions: the layer's methods, those of
its aggregation, and functions of their modules, such as ``softmax``. That is right only as long as
each of them is the host's. Users may replace them, on a class or in a module, before gnnaccel is
enabled or after. A `Path` lists all functions that a class runs and says which are not the host's;
`Path.same` checks at each call, by identity, that they are still the same.

A function belongs to the package of the module in which its code runs, which its globals tell:
`functools.wraps` changes a function's name, module and documentation, but not its globals. Where
gnnaccel has put a function of its own around one of the host's, the host's is judged.
"""
from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.policy.reasons import Reason, reason

#: the methods by which PyG's message passing gathers what a ``message`` gets
GATHERS = ("_check_input", "_set_size", "_index_select", "_lift", "_collect")
#: all methods of a layer that PyG's message passing calls
MESSAGE_PASSING = ("message", "edge_update", "aggregate", "update", "message_and_aggregate",
                   "propagate", "edge_updater", *GATHERS)
#: attributes in which a function may change
FUNCTION = ("__code__", "__defaults__", "__kwdefaults__")
_OURS = __name__.partition(".")[0]
# packages whose objects do not count as replacements of a host's functions
_SILENT = frozenset(("builtins", "typing", "torch", *sys.stdlib_module_names))


def original(function: Any) -> Any:
    """The function that one of gnnaccel's wraps; the function itself where it is none of these."""
    function = getattr(function, "__func__", function)
    while _top(_module(function)) == _OURS and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def home(function: Any) -> str:
    """The package of a function, or of the one that ours wraps; "" for no Python function."""
    return _top(_module(original(function)))


def is_function(function: Any, host: str, name: str) -> bool:
    """Whether this is the function ``name`` of the package ``host``, or ours around it.

    A module may have it by a longer name, such as ``add_self_loops_fn``.
    """
    return (home(function) == host
            and name.strip("_").startswith(original(function).__name__.strip("_")))


def is_torchs(function: Any, name: str, host: str) -> bool:
    """Whether this is the function ``name`` of one of torch's modules, ours around it, or the
    replacement by the package ``host``: PyG replaces ``torch.index_select``."""
    unwrapped = original(function)
    if type(unwrapped) is FunctionType:
        return home(unwrapped) in ("torch", host)
    if type(unwrapped) is BuiltinFunctionType:
        # torch.linalg.norm is torch._C._linalg's linalg_norm
        place = (unwrapped.__module__ or "").rpartition("._")[2]
        own_name = unwrapped.__name__.removeprefix(f"{place}_")
        return own_name.replace("_", "") == name.replace("_", "")
    return _top(type(unwrapped).__module__) == "torch"


def is_method(function: Any, cls: type, name: str, host: str) -> bool:
    """Whether this is the method ``name`` of the package ``host``, or ours around it.

    It may be a method of the class or of its bases, or one that the host generated for them.
    """
    unwrapped = original(function)
    module = _module(unwrapped)
    for base in cls.__mro__:
        if module.startswith(f"{base.__module__}_{base.__name__}_{name}"):
            # PyG's `propagate` and `edge_updater`
            return True
        if (_top(module) == host == _top(base.__module__)
            and unwrapped.__qualname__ == f"{base.__qualname__}.{name}"):
            return True
    return False


def _module(function: Any) -> str:
    """The module in which a function's code runs; "" of what is no Python function, or is in
    none."""
    name = function.__globals__.get("__name__") if type(function) is FunctionType else None
    return name if type(name) is str else ""


def _top(module: str) -> str:
    return module.partition(".")[0]


class Path:
    """All functions that run when methods or functions of a host's are called.

    ``host``: the package; ``names``: the methods of the class, which no object of it may replace
    either; ``parts``: of PyG, attributes that these read and no caller of ``__init__`` gives, such
    as modules; ``parameters``: attributes that the host's ``__init__`` makes parameters of;
    ``functions``: the host's, by dotted name; ``why``: the reason that names what is not the
    host's, None where everything is.
    """

    __slots__ = ("host", "names", "parts", "parameters", "functions", "why", "_watched", "_globals",
                 "_torch")

    def __init__(self, host: str) -> None:
        self.host = host
        self.names: frozenset[str] = frozenset()
        self.parts: frozenset[str] = frozenset()
        self.parameters: frozenset[str] = frozenset()
        self.functions: dict[str, Any] = {}
        self.why: Reason | None = None
        self._watched: list[tuple[Callable, Any, Any]] = []
        self._globals: dict[int, tuple[dict, dict[str, None]]] = {}  # of modules: which are named
        self._torch: dict[str, tuple[ModuleType, dict[str, None]]] = {}  # the same of torch's

    def same(self, *others: Path) -> bool:
        """Whether every function, and every one of ``others``, is still the one that was looked
        at."""
        try:
            for path in (self, *others):
                for get, place, before in path._watched:
                    if get(place) != before:
                        return False
        except (AttributeError, KeyError, ValueError, RuntimeError):
            # a function was deleted, or replaced by an array, which cannot be compared
            return False
        return True

    def methods(self, cls: type, host_class: type, start: tuple[str, ...],
                follow: bool = True) -> list[str]:
        """Add the methods ``start`` of ``cls``, which derives from ``host_class``.

        If ``follow``, also add the host's own methods that they call. A subclass may have a
        ``forward`` around the host's, so ``forward`` is taken from ``host_class``.
        """
        todo = [name for name in start if hasattr(cls, name)]
        for name in todo:  # which grows
            method = getattr(host_class if name == "forward" else cls, name)
            if (not is_method(method, cls, name, self.host)
                and (name in start or home(method) != "torch")):
                self._refuse(cls, host_class, name)
                continue
            method = self._add(method)
            if follow and not _of_message_passing(method):
                called = _names_in(method.__code__, "LOAD_ATTR", "LOAD_METHOD")
                self.parts |= frozenset(called)
                todo += [name for name in called
                         if name not in todo and _is_hosts(host_class, name)]
                self.function(method)
        self.watch(attrgetter, cls,
                   tuple(name for name in todo if name != "forward" or cls is host_class))
        if "forward" in todo and cls is not host_class:
            self.watch(attrgetter, host_class, ("forward",))
        return todo

    def function(self, function: Any) -> None:
        """Add the functions that this one names in its module, and those of torch's modules."""
        module = function.__globals__
        for name in _names_in(function.__code__, "LOAD_GLOBAL"):
            if _may_replace(module.get(name)):
                self._globals.setdefault(id(module), (module, {}))[1][name] = None
        self.torch_functions(function)

    def torch_functions(self, function: Any) -> None:
        """Add the functions that this one names in modules of torch's, as in ``F.dropout``, and in
        `math`."""
        for first, *names in _dotted(function.__code__):
            value = function.__globals__.get(first)
            if type(value) is not ModuleType or _top(value.__name__) not in ("torch", "math"):
                continue
            for name in names:
                module, value = value, getattr(value, name, None)
                if type(value) is not ModuleType:
                    if callable(value) and not isinstance(value, type):
                        self._torch.setdefault(module.__name__, (module, {}))[1][name] = None
                    break

    def complete(self) -> Path:
        """Judge the functions in modules, when everything is added."""
        for module, names in self._globals.values():
            self.watch(itemgetter, module, tuple(names))
            for name in names:
                if is_function(module[name], self.host, name):
                    self._add(module[name])
                else:
                    self.why = self.why or reason(
                        "GA504", f"{name} in {module['__name__']} was replaced")
        for of_torch, names in self._torch.values():
            self.watch(attrgetter, of_torch, tuple(names))
            for name in names:
                if not is_torchs(getattr(of_torch, name), name, self.host):
                    self.why = self.why or reason(
                        "GA504", f"{of_torch.__name__}.{name} was replaced")
        return self

    def _add(self, function: Any) -> Any:
        unwrapped = original(function)
        self.functions[f"{unwrapped.__module__}.{unwrapped.__qualname__}"] = unwrapped
        return getattr(unwrapped, "__wrapped__", unwrapped)  # the host's own decorators

    def attributes(self, cls: type, names: tuple[str, ...]) -> None:
        """Refuse a class with attributes by these names: of its objects only their own count."""
        for owner in cls.__mro__[:-1]:
            if _top(owner.__module__) not in ("torch", self.host):
                self._watched.append((len, vars(owner), len(vars(owner))))
            for name in filter(vars(owner).__contains__, names):
                self.why = self.why or reason("GA208", f"{name} is an attribute of its class")

    def watch(self, getter: Any, place: Any, names: tuple[str, ...]) -> None:
        """Have `same` compare the values by these names in ``place``, a class or a module's
        dictionary. Their owners are not judged.
        """
        if names:
            get = getter(*names)
            self._watched.append((get, place, get(place)))

    def _refuse(self, cls: type, host_class: type, name: str) -> None:
        users = cls.__mro__[:cls.__mro__.index(host_class)] if name != "forward" else ()
        self.why = self.why or (reason("GA205", f"{cls.__name__} overrides {name}")
                                if any(name in vars(user) for user in users)
                                else reason("GA504", f"{name} of {host_class.__name__} "
                                                     "was replaced"))


@functools.lru_cache(maxsize=1024)
def _names_in(code: CodeType, *kinds: str) -> tuple[str, ...]:
    """The names in instructions of these kinds, also of the functions inside, each once."""
    names = [step.argval for step in dis.get_instructions(code) if step.opname in kinds]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _names_in(constant, *kinds)
    return tuple(dict.fromkeys(names))


@functools.lru_cache(maxsize=1024)
def _dotted(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Global names with the chain of attributes that is read of them, each once."""
    chains: dict[tuple[str, ...], None] = {}
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain += (step.argval,)
            continue
        if len(chain) > 1:
            chains[chain] = None
        chain = (step.argval,) if step.opname == "LOAD_GLOBAL" else ()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            chains.update(dict.fromkeys(_dotted(constant)))
    return tuple(chains)


@functools.lru_cache(maxsize=1024)
def _parameters(code: CodeType) -> list[str]:
    """The attributes to which an ``__init__`` assigns a ``Parameter``."""
    names, made = [], False
    for step in dis.get_instructions(code):
        made |= step.argval == "Parameter" and step.opname.startswith("LOAD")
        if step.opname.startswith("STORE"):
            if made and step.opname == "STORE_ATTR":
                names.append(step.argval)
            made = False
    return names


def _of_message_passing(function: Any) -> bool:
    """Whether a function is part of message passing itself, or was generated for a class.

    The methods that it calls are looked at anyway.
    """
    return function.__qualname__.startswith("MessagePassing.") or "." not in function.__qualname__


def _is_hosts(host_class: type, name: str) -> bool:
    """Whether the host's class has, or had, a method of its own by this name."""
    return any(type(vars(base).get(name)) in (FunctionType, staticmethod, classmethod)
               for base in host_class.__mro__
               if _top(base.__module__) == _top(host_class.__module__))


def _may_replace(value: Any) -> bool:
    """Whether a module's value is a function of the host's, or may have replaced one."""
    if type(value) is FunctionType:
        from torch.compiler import is_compiling  # here: the doctor runs without torch too

        return value is not is_compiling  # which stands where PyG asks the same in a longer way
    return (callable(value) and not isinstance(value, (type, ModuleType))
            and _top(type(value).__module__) not in _SILENT)


class Paths:
    """The `Path` of each class that derives from ``host_class``.

    ``start``: the methods that are called; ``parts``: the classes that it aggregates with;
    ``options``: attributes that its objects have themselves."""

    def __init__(self, host_class: type, start: tuple[str, ...], parts: tuple[type, ...] = (),
                 follow: bool = True, options: tuple[str, ...] = ()):
        self._host_class, self._start, self._parts, self._follow = host_class, start, parts, follow
        self._options = options
        self._known: IdentityMap[Path] = IdentityMap(256)  # which know their class

    def of(self, cls: type) -> Path:
        """The path of a class: the same object for as long as it holds."""
        entry = self._known.entries.get(id(cls))  # IdentityMap.get, inlined
        if entry is not None and entry[0]() is cls and entry[1].same():
            return entry[1]
        path = Path(_top(self._host_class.__module__))
        path.names = frozenset(
            path.methods(cls, self._host_class, self._start, self._follow)) - {"forward"}
        given = inspect.signature(self._host_class).parameters  # of __init__, without self
        # DGL's layers keep functions of their own beside modules, such as agg_fn
        path.parts = frozenset(name for name in path.parts - path.names
                               if name.strip("_") not in given and path.host != "dgl")
        inits = [original(vars(base).get("__init__")) for base in self._host_class.__mro__]
        path.parameters = frozenset(name for init in inits if home(init) == path.host
                                    for name in _parameters(init.__code__))
        for part in self._parts:
            path.methods(part, part, AGGREGATION)
        if self._options:
            path.attributes(cls, self._options)
        self._known.set(cls, path.complete())
        return path


AGGREGATION = ("__call__", "forward")
_paths: dict[tuple[type, tuple[str, ...]], Paths] = {}


def path_of(host_class: type, start: tuple[str, ...]) -> Path:
    """The path of ``host_class`` itself."""
    paths = _paths.get((host_class, start))
    if paths is None:
        paths = _paths[host_class, start] = Paths(host_class, start)
    return paths.of(host_class)


class Named:
    """The `Path` of the functions that one of a host's names in its module."""

    def __init__(self, function: Any):
        self._function = function
        self._path: Path | None = None  # looked at when first asked

    def why(self) -> Reason | None:
        """The reason that names what is not the host's now."""
        if self._path is None or not self._path.same():
            self._path = self._look(self._function)
        return self._path.why

    @staticmethod
    def _look(function: Any) -> Path:
        path = Path(home(function))
        path.function(function)
        return path.complete()


#: class -> its ``forward``, and the functions of torch's modules that it calls
_forwards: dict[type, tuple[Any, list[tuple[ModuleType, str, Any]]]] = {}
#: the functions that these call, as a getter for each of torch's modules: in signatures of calls
called: list[tuple[Callable[[ModuleType], Any], ModuleType]] = []


def forward_is_own(cls: Any) -> bool:
    """Whether ``forward`` of a class, a host's or torch's, is the one that it was written with, and
    calls torch's own functions."""
    forward = cls.forward
    entry = _forwards.get(cls)
    if entry is not None and entry[0] is forward:
        for module, name, before in entry[1]:
            if getattr(module, name) is not before:
                break
        else:
            return True
    if not is_method(forward, cls, "forward", _top(cls.__module__)):
        return False
    path, function = Path(_top(cls.__module__)), original(forward)
    path.torch_functions(getattr(function, "__wrapped__", function))
    if path.complete().why is not None:
        return False
    _forwards[cls] = forward, [(module, name, getattr(module, name))
                               for module, names in path._torch.values() for name in names]
    names_in: dict[str, tuple[ModuleType, dict[str, None]]] = {}
    for _, functions in list(_forwards.values()):
        for module, name, _ in functions:
            names_in.setdefault(module.__name__, (module, {}))[1][name] = None
    called[:] = [(attrgetter(*names), module) for module, names in names_in.values()]
    return True
