"""The Python state of a tree of modules, and whether it has changed.

A replayed CUDA graph runs none of a module's code, so all that the code would have read has to be
as it was when the graph was captured: attributes, submodules, flags, hooks, classes and their
functions, and where parameters and buffers lie. Numbers in parameters and buffers are read by the
graph itself.
"""
from __future__ import annotations

import collections
import contextlib
import inspect
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from gnnaccel.adapters.captured import values
from gnnaccel.adapters.captured.values import Unknown
from gnnaccel.dispatch.graph.ordered_weights import is_of_the_graph
from gnnaccel.dispatch.graph.tensor_ref import unversioned

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
          "_propagate_forward_pre_hooks", "_propagate_forward_hooks", "_message_forward_pre_hooks",
          "_message_forward_hooks", "_aggregate_forward_pre_hooks", "_aggregate_forward_hooks",
          "_message_and_aggregate_forward_pre_hooks", "_message_and_aggregate_forward_hooks",
          "_edge_update_forward_pre_hooks", "_edge_update_forward_hooks")
#: entries of a module's ``__dict__`` besides its own attributes
ASIDE = frozenset((*_TABLES, *_HOOKS, "_non_persistent_buffers_set", "_is_full_backward_hook",
                    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
                    "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs",
                    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"))
#: classes of torch whose objects do something that a replay does not
_ACTING = (torch.Generator, torch.cuda.Event, getattr(torch, "Event", torch.cuda.Event))
INFERENCE = "a tensor made in inference mode"  # writes to it are not counted
#: packages whose objects count as unchanging where a module keeps one
LIBRARIES = ("torch", "torch_geometric", "torch_scatter", "torch_sparse", "torch_cluster", "dgl",
             "gnnaccel", "builtins", "functools", "collections", "typing", "inspect")
#: of what is known of a layer's functions, which `Reads` compares
_INSPECTORS = "torch_geometric.inspector"
#: classes of Python whose objects do not change
_UNCHANGING = (bytes, complex, frozenset, range, slice, type(Ellipsis), type(NotImplemented),
               types.BuiltinFunctionType, type)
#: containers of a module whose contents are compared
_CONTAINERS = (list, dict, set, tuple, collections.deque)


class Snapshot:
    """The state of ``roots`` and of all modules in them. Raises Unknown where something in them
    cannot be compared. The first of ``roots`` is not kept alive, and runs on ``device``."""

    def __init__(self, roots: Iterable[nn.Module], device: torch.device) -> None:
        first, *others = roots
        self._root = weakref.ref(first)
        every = list(dict.fromkeys([m for root in (first, *others) for m in root.modules()]))
        if any(isinstance(m, torch.jit.ScriptModule) for m in every):
            raise Unknown("a module of torch.jit")
        self._modules = [m for m in every if m is not first]
        self._classes = [type(m) for m in self._modules]
        self._root_class = type(first)
        self._dicts = list(map(vars, self._modules))
        self._attributes = _Attributes(first, self._modules)
        self._hooks = [vars(m)[name] for m in every for name in _HOOKS if name in vars(m)]
        if any(self._hooks):
            raise Unknown("hooks of modules")
        self.parameters = list(dict.fromkeys(
            p for m in every for p in vars(m)["_parameters"].values() if p is not None))
        self.buffers = [b for m in every for b in vars(m)["_buffers"].values() if b is not None]
        self._contents, attributes = _contents(every, first)
        if unversioned((*self.buffers, *attributes)):
            raise Unknown(INFERENCE)
        self.buffers += attributes
        self.tensors = [*self.parameters, *self.buffers]
        for t in self.tensors:
            if t.layout is not torch.strided:
                raise Unknown(f"a tensor of layout {t.layout}")
        self._places = list(map(_place, self.tensors))
        self._own = [vars(t) for t in self.tensors]
        # on integers a CUDA graph's kernels may depend in more than their results, and read weights
        # of a graph from a sorted copy; tensors on the host are read when it is captured
        self._whole = [t for t in self.buffers if t.device.type != device.type
                       or t.dim() and not t.is_floating_point() or is_of_the_graph(t)]
        self._versions = [t._version for t in self._whole]
        _check(self.parameters)
        if any(self._own):
            raise Unknown("a tensor with attributes of its own")

    def holds(self) -> bool:
        """Whether the state has not changed."""
        root = self._root()
        return (root is not None and type(root) is self._root_class
                and all(map(is_, map(vars, self._modules), self._dicts))
                and [type(m) for m in self._modules] == self._classes
                and self._attributes.hold(root) and not any(self._hooks)
                and list(map(_place, self.tensors)) == self._places
                and not any(self._own)
                and [t._version for t in self._whole] == self._versions
                and all(held.holds() for held in self._contents))

    @contextlib.contextmanager
    def replaced(self, others: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """A block in which other tensors stand in the places of these parameters, buffers and
        attributes."""
        root = self._root()
        assert root is not None
        places = [(table, name, t) for m in (root, *self._modules)
                  for table in (vars(m)["_parameters"], vars(m)["_buffers"], vars(m))
                  for name, t in table.items() if isinstance(t, Tensor) and t in others]
        try:
            for table, name, t in places:
                table[name] = others[t]
            yield
        finally:
            for table, name, t in places:
                table[name] = t

    @property
    def read(self) -> list[Tensor]:
        """Tensors in containers and objects among the attributes."""
        return [t for held in self._contents for t in held.tensors]


class _Attributes:
    """What the attributes of ``first`` and ``modules`` are, and what names their classes define.
    Raises Unknown where a library's object has something that cannot be compared."""

    def __init__(self, first: nn.Module, modules: list[nn.Module]) -> None:
        every = [first, *modules]
        # live views; but of the first's attributes, as methods of its own would keep it alive
        tables = [of[name] for of in map(vars, every) for name in _TABLES]
        self._views = [d.values() for d in (*map(vars, modules), *tables)]
        # values may change their names; a library's own attributes do not
        self._named = [d for d in tables if d]
        self._named += [vars(m) for m in modules if not _of_a_library(m)]
        self._names = [*vars(first), *chain.from_iterable(self._named)]
        self._views += [vars(cls).values() for cls in _ancestry(every)]
        self._views += [view for m in every for name, value in vars(m).items()
                        if name not in ASIDE and _is_object(value)
                        for view in _inside(f"the attribute {name}", value)]
        views = [vars(first).values(), *self._views]
        self._lengths = [len(view) for view in views]
        self._held = [_Method(value) if _is_method_of(value, first) else value
                      for view in views for value in view]

    def hold(self, first: nn.Module) -> bool:
        """Whether they have the values that they had. Numbers and texts may be equal ones."""
        views = [vars(first).values(), *self._views]
        if ([len(view) for view in views] != self._lengths
            or [*vars(first), *chain.from_iterable(self._named)] != self._names):
            return False
        if all(map(is_, chain.from_iterable(views), self._held)):
            return True
        return all(a is b or (type(a) is type(b) and type(a) in (int, float, str) and a == b
                              and (a or str(a) == str(b)))  # 0.0 is no -0.0
                   or (type(b) is _Method and _is_method_of(a, first) and a.__func__ is b.function)
                   for a, b in zip(chain.from_iterable(views), self._held))


class _Method:
    """A method of the first root, which it does not keep alive."""

    __slots__ = ("function",)

    def __init__(self, method: types.MethodType) -> None:
        self.function = method.__func__


def _is_method_of(value: Any, module: nn.Module | None) -> bool:
    return type(value) is types.MethodType and value.__self__ is module


def _place(t: Tensor) -> tuple:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad


def _ancestry(modules: list[nn.Module]) -> list[type]:
    return list(dict.fromkeys(cls for m in modules for cls in type(m).__mro__
                              if cls not in (nn.Module, object)))


class Frozen:
    """A value with its form and tensors, to compare it with later."""

    __slots__ = ("_get", "_form", "tensors", "_versions")

    def __init__(self, get: Any) -> None:
        """Take the value that ``get()`` returns. Raises Unknown."""
        self._get = get
        tensors: list[Tensor] = []
        self._form = values.apart(get(), tensors, ())
        if unversioned(tensors):
            raise Unknown(INFERENCE)
        self.tensors = tensors
        self._versions = [(_place(t), t._version) for t in tensors]

    def holds(self) -> bool:
        """Whether the value has not changed: equal numbers, these very tensors, unwritten."""
        try:
            value = self._get()
        except (LookupError, ValueError):
            return False
        return values.same(value, self._form, self.tensors) and self._versions == [
            (_place(t), t._version) for t in self.tensors]


def _contents(modules: list[nn.Module], root: nn.Module) -> tuple[list[Frozen], list[Tensor]]:
    """Attributes that can be changed in place, and those that are tensors."""
    frozen, tensors = [], []
    for m in modules:
        for name, value in vars(m).items():
            if name in ASIDE or isinstance(value, (bool, int, float, str, type(None),
                                                   types.FunctionType)):
                continue  # `Reads` has the values that a function reads
            of = value.__self__ if type(value) is types.MethodType else value
            if isinstance(of, nn.Module):  # `Reads` has it and the function of its method
                if root in of.modules() and not (  # it would be kept alive
                        m is root is of and type(value) is types.MethodType):
                    what = "" if of is value else "a method of "
                    raise Unknown(f"the attribute {name}, {what}the module around it")
                continue
            if isinstance(value, Tensor):
                tensors.append(value)
            elif (isinstance(value, (*_CONTAINERS, *values.NAMESPACES)) or values.of_data(value)
                  or not _of_a_library(value) and values.is_object(value)):
                frozen.append(Frozen(lambda value=value: value))
            elif _is_object(value):  # which tensors it holds is compared by `_Attributes`
                held = [t for view in _inside(name, value) for t in view if isinstance(t, Tensor)]
                if held:
                    frozen.append(Frozen(lambda held=held: held))
            elif not _of_a_library(value):
                raise Unknown(f"the attribute {name}, an object of class "
                              f"{type(value).__module__}.{type(value).__qualname__}")
    return frozen, tensors


def _is_object(value: Any) -> bool:
    """Whether it is an object of a library's class, with attributes of its own."""
    return (_has(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type))
            and not _has(value, "__qualname__") and not isinstance(value, types.ModuleType)
            and _of_a_library(value))


def _has(value: Any, name: str) -> bool:
    """Whether there is such an attribute. A ``__getattr__`` of the user's, which may raise anything
    (``self[name]`` in a dictionary), is not asked."""
    if any(isinstance(vars(base).get(asked), types.FunctionType)
           and base.__module__.partition(".")[0] not in LIBRARIES
           for base in type(value).__mro__ for asked in ("__getattr__", "__getattribute__")):
        return inspect.getattr_static(value, name, None) is not None
    return hasattr(value, name)


def _inside(name: str, value: Any) -> Iterator[Any]:
    """Live views of the attributes of a library's object, and of containers and such objects in it.
    Raises Unknown where there is an object that cannot be compared."""
    todo, seen = [value], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        view = one if isinstance(one, _CONTAINERS) else vars(one)
        if isinstance(one, dict):
            yield one.keys()
        view = view.values() if isinstance(view, dict) else view
        yield view
        if type(one).__module__ == _INSPECTORS:
            continue
        for inner in view:
            if isinstance(inner, _CONTAINERS) or _is_object(inner):
                todo.append(inner)
            elif not (isinstance(inner, (bool, int, float, str, Tensor, type(None), weakref.ref))
                      or _of_a_library(inner)):
                raise Unknown(f"{name}, with an object of class "
                              f"{type(inner).__module__}.{type(inner).__qualname__}")


def _of_a_library(value: Any) -> bool:
    owner = value if callable(value) and _has(value, "__qualname__") else type(value)
    if isinstance(value, _ACTING) or owner.__module__ == "builtins" and owner is type(value):
        return owner in _UNCHANGING
    return (getattr(owner, "__module__", None) or "").partition(".")[0] in LIBRARIES


def _check(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        if type(p) is not nn.Parameter or p.is_meta:
            raise Unknown(f"a parameter of class {type(p).__name__}")
        if p._backward_hooks:
            raise Unknown("a hook of a parameter")
        if p.is_inference():
            raise Unknown("a parameter made in inference mode")
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        raise Unknown("parameters on several devices")
