"""``forward`` of classes of modules that sum over edges by themselves, replaced by one that asks
for a faster way.

A class is looked at once, when its first object is made or where there are some already: whether
the code of its ``forward``, of its methods that this calls, or of functions of the user's that
these call, names a function that sums by an index. All other classes are left alone.
"""
from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from gnnaccel.adapters import own
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.plain.signature import Signature
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.uncompiled import kept_apart, uncompiled

#: functions and methods that sum by an index
SUMS = frozenset(("index_add", "index_add_", "index_reduce", "index_reduce_", "scatter_add",
                  "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_put_", "index_put",
                  "scatter", "scatter_sum", "scatter_mean", "scatter_max", "scatter_min"))
_HOSTS = ("torch", "torch_geometric", "torch_scatter", "dgl", "gnnaccel")
#: what a function says of its arguments, or has of another's
_SAID = frozenset(("__signature__", "__text_signature__", "__wrapped__"))
_MOST = 64  # functions that are looked at for one class
_looked_at: IdentityMap[bool] = IdentityMap()  # classes
_entries = _looked_at.entries


class _Constructor:
    """What stands in for the constructor of all modules. torch.compile puts a function of its own
    around it, in which it may stay when gnnaccel is disabled, and is found when it is enabled
    again. ``patches``: through which classes are taken over; ``reached``: whether a module was made
    by it."""

    patches: PatchSet | None = None
    reached = False


_constructor = _Constructor()


def install(patches: PatchSet) -> None:
    """Take over the classes that are there and, through ``patches`` too, those to come."""
    from torch import nn

    _looked_at.clear()
    _constructor.reached, _constructor.patches = False, patches
    nn.Module()
    if not _constructor.reached:
        patches.set(nn.Module, "__init__", _looking(nn.Module.__init__),
                    "Looks once at each class of modules, when its first object is made, whether "
                    "its `forward` sums over edges by itself; of such classes `forward` is "
                    "replaced.",
                    active="While gnnaccel is enabled, when a module is made.",
                    cost="0.3 microseconds for each module that is made, 0.1 ms for the first of a "
                         "class. Calls of modules cost nothing, but of those classes. Where "
                         "torch.compile has put a function of its own around it in the meantime, "
                         "it stays in that, and does nothing.", stays=True)
    for cls in _subclasses(nn.Module):
        _look(cls, patches)


def _subclasses(cls: type) -> Iterator[type]:
    seen: set[int] = set()  # ids, as a metaclass may compare in its own way
    pending: list[type] = [cls]
    while pending:
        subclasses: list[type] = type.__subclasses__(pending.pop())
        for one in subclasses:
            if id(one) not in seen:
                seen.add(id(one))
                pending.append(one)
                yield one


def _looking(native: Callable) -> Callable:
    """``native``, the constructor of all modules. Dynamo, which inlines it, reads all variables of
    functions around it, so that it has none but functions."""
    from torch.compiler import is_compiling

    @functools.wraps(native)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_compiling():
            cls = type(self)
            if id(cls) not in _entries:
                _made(cls)
        native(self, *args, **kwargs)

    return uncompiled(__init__)


def _made(cls: type) -> None:
    """Look at a class whose first object is made."""
    _constructor.reached, patches = True, _constructor.patches
    with PatchSet.alone():
        if patches is not None and len(patches):  # none are left where gnnaccel is disabled
            _look(cls, patches)


def _look(cls: type, patches: PatchSet) -> None:
    """Take over a class that sums over edges."""
    _looked_at.set(cls, True)
    # it may be that of a class above, whose other methods are others
    forward = next((vars(one)["forward"] for one in cls.__mro__ if "forward" in vars(one)), None)
    if type(forward) is not types.FunctionType or own.home(forward) in _HOSTS or (
        getattr(forward, "sums_over_edges", False)) or _of_host(cls) or not (
        _sums(cls, forward) and _open(cls) and _SAID.isdisjoint(vars(forward))):
        return
    signature = Signature.of(forward)
    if signature is None or len(signature.names) < 2:  # features and edges
        return
    rules.register_class(rules.path_of(cls))
    patches.set(cls, "forward", routed(forward, signature,
                                       functools.partial(_let_go, weakref.ref(cls), patches)),
                "Runs what the module sums over edges by kernels that are written for it, where "
                "that is faster.",
                active="While gnnaccel is enabled, outside of code that is compiled.",
                cost="On a CPU some two microseconds per call.")


def _of_host(cls: type) -> bool:
    """Whether it is a layer that its host's adapter takes care of."""
    return any(one.__name__ == "MessagePassing" and one.__module__.startswith("torch_geometric.")
               for one in cls.__mro__)


def _open(cls: type) -> bool:
    """Whether attributes of a class are set as those of most are: its metaclass has no say."""
    return type(cls).__setattr__ is type.__setattr__ and type(cls).__delattr__ is type.__delattr__


def _sums(cls: type, forward: types.FunctionType) -> bool:
    """Whether the code of ``forward``, or of what it calls of the user's, names one of `SUMS`."""
    pending, seen = [forward], set()  # type: ignore[var-annotated]
    while pending and len(seen) < _MOST:
        function = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = dict.fromkeys(_names(function.__code__))
        if not SUMS.isdisjoint(names):
            return True
        # ``super`` finds any of the methods
        places = (*map(vars, cls.__mro__), function.__globals__,
                  *_modules(function.__globals__, names))
        for name in names:
            for found in (place.get(name) for place in places):
                if type(found) is types.FunctionType and own.home(found) not in _HOSTS:
                    pending.append(own.original(found))
    return False


def _modules(place: dict, names: dict[str, None]) -> Iterator[dict]:
    """What the user's modules have that go by one of these names."""
    for name in names:
        found = place.get(name)
        if type(found) is types.ModuleType and found.__name__.partition(".")[0] not in _HOSTS:
            yield vars(found)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)


def _let_go(held: weakref.ref, patches: PatchSet) -> None:
    """Put back the ``forward`` of a class that turned out to be no layer."""
    cls = held()
    if cls is not None:
        patches.undo(cls, "forward")


def routed(native: types.FunctionType, signature: Signature,
           let_go: Callable[[], None]) -> Callable:
    """``native``, the ``forward`` of a class, behind the router. A subclass whose own ``forward``
    calls it by ``super()`` gets ``native``. ``let_go``: as of `calls.Forward`."""
    from torch.compiler import is_compiling

    from gnnaccel.adapters.plain import calls
    from gnnaccel.dispatch.policy.config import current

    decided = calls.decided(calls.Forward(native, signature, let_go))

    # no variables but functions, as in `_looking`
    @kept_apart
    @functools.wraps(native)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = None if is_compiling() else current()
        if config is None or type(self).forward is not forward:
            return native(self, *args, **kwargs)
        return decided(self, args, kwargs, config)

    # not all who ask for it look at what is wrapped
    forward.__signature__ = inspect.signature(native)  # type: ignore[attr-defined]
    forward.sums_over_edges = True  # type: ignore[attr-defined]
    return forward
