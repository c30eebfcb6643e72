"""``propagate`` of every message-passing class that has no adapter of its own, replaced by one that
asks for a faster way; of a class with one too, where some of its layers just pass messages, as
those of users' subclasses do that redefine its methods.

PyG writes a ``propagate`` for each class when that is first instantiated, into the class itself;
ours is put around it then. Where PyG could not write one, the class inherits one, and gets ours
around that. A ``propagate`` that somebody else wrote is left alone; where it hands on to PyG's
general one by ``super()``, that asks. ``_orig_propagate`` and
``_jinja_propagate``, which explainers go back to, stay the host's own.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from gnnaccel.adapters import own as own_code
from gnnaccel.adapters.patching import PatchSet, by_layer
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.uncompiled import kept_apart, uncompiled

_TEMPLATES = "_set_jittable_templates"
_KEPT = ("_orig_propagate", "_jinja_propagate")


def install(patches: PatchSet) -> None:
    """Take over the classes that are there and, through ``patches`` too, those to come."""
    from torch_geometric.nn import MessagePassing

    # not in old versions, where classes instantiated later stay native
    if hasattr(MessagePassing, _TEMPLATES):
        patches.set(MessagePassing, _TEMPLATES,
                    _taking_over(getattr(MessagePassing, _TEMPLATES), patches),
                    "Replaces `propagate` of a class when PyG writes it, which is when the class "
                    "is first instantiated.")
        if own_code.is_method(MessagePassing.propagate, MessagePassing, "propagate",
                              "torch_geometric"):
            patches.set(MessagePassing, "propagate", _handed_on(MessagePassing.propagate),
                        "Runs the aggregation as one operation over the graph where the "
                        "`propagate` that a user's class has of its own hands on to this.")
    for cls in _subclasses(MessagePassing):
        if cls.__module__.startswith("torch_geometric.nn.") and not _has_adapter(cls):
            rules.register_class(rules.path_of(cls))
        if _KEPT[0] in vars(cls):
            _take_over(cls, patches)


def _subclasses(cls: type) -> Iterator[type]:
    seen = set()
    stack: list[type] = list(cls.__subclasses__())
    while stack:
        subclass = stack.pop()
        if subclass not in seen:
            seen.add(subclass)
            yield subclass
            stack.extend(subclass.__subclasses__())


def _has_adapter(cls: type) -> bool:
    from gnnaccel.adapters.pyg import known_class

    return known_class(cls) is not None


def _taking_over(native: Callable, patches: PatchSet) -> Callable:
    """``native``, which writes a class's ``propagate``, so that ours is put around."""

    from torch_geometric.nn import MessagePassing

    @functools.wraps(native)
    @uncompiled
    def set_templates(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = native(self, *args, **kwargs)
        cls = type(self)
        for name in _KEPT:
            original = vars(cls).get(name)
            if getattr(original, "routed", False):  # inherited from a class that was taken over
                setattr(cls, name, original.__wrapped__)
        with patches.alone():  # several threads may make the first layers of a class
            # not where somebody kept this from a session that is over
            if patches.holds(MessagePassing, _TEMPLATES):
                _take_over(cls, patches)
        return result

    return set_templates


def _take_over(cls: type[Any], patches: PatchSet) -> None:
    from gnnaccel.adapters.pyg import known_class, propagates, redefines

    adapter = known_class(cls)
    native, original, generated = map(_unpatched, (
        cls.propagate, *map(vars(cls).get, _KEPT)))
    chosen = None if adapter is None else propagates(adapter)
    if getattr(native, "routed", False) or (adapter is not None and chosen is None
                                            and not redefines(cls)):
        return
    written = vars(cls).get("propagate") is native is generated is not original
    # where PyG could not write one: the general one, or what was written for a class above
    inherited = "propagate" not in vars(cls) and native is original is generated
    if (written or inherited) and own_code.is_method(native, cls, "propagate", "torch_geometric"):
        replacement = routed(native)
        if chosen is not None:
            replacement = by_layer(chosen, replacement, native)
            replacement.__wrapped__ = native  # type: ignore[attr-defined]
        patches.set(cls, "propagate", replacement,
                    "Runs the aggregation as one operation over the graph, without a message per "
                    "edge, where that is faster.")


def _unpatched(propagate: Any) -> Any:
    """PyG's general ``propagate`` for ours, which hands on to it; any other as it is."""
    return propagate.__wrapped__ if getattr(propagate, "hands_on", False) else propagate


_users: IdentityMap[tuple[Any, bool]] = IdentityMap(256)  # by class: its `propagate`, and `_asks`


def _asks(cls: type[Any]) -> bool:
    """Whether a class has a ``propagate`` that its user wrote, and may be taken over besides."""
    from gnnaccel.adapters.pyg import known_class, redefines

    propagate = cls.propagate
    entry = _users.get(cls)
    if entry is None or entry[0] is not propagate:
        of_user = not own_code.is_method(propagate, cls, "propagate", "torch_geometric")
        entry = propagate, of_user and (known_class(cls) is None or redefines(cls))
        _users.set(cls, entry)
    return entry[1]


def _handed_on(native: Callable) -> Callable:
    """``native``, PyG's general ``propagate``, which a user's calls by ``super()``."""
    from torch.compiler import is_compiling

    faster = routed(native)

    @functools.wraps(native)
    def propagate(self: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        if is_compiling() or not _asks(type(self)):
            return native(self, edge_index, size, **kwargs)
        return faster(self, edge_index, size=size, **kwargs)

    propagate.hands_on = True  # type: ignore[attr-defined]
    return propagate


def routed(native: Callable) -> Callable:
    """``native``, a class's own ``propagate``, with the aggregations that we have faster ways
    for."""
    from torch import compiler
    from torch.compiler import is_dynamo_compiling

    from gnnaccel.adapters.pyg.compile.messages import inside
    from gnnaccel.adapters.pyg.propagate import calls
    from gnnaccel.adapters.pyg.propagate.calls import fast_path
    from gnnaccel.cuda.runtime.capture import capturing
    from gnnaccel.dispatch.memory.layer_memory import MISSED
    from gnnaccel.dispatch.observe import records
    from gnnaccel.dispatch.policy import config as configs

    current, held, cells = configs.current, configs.held, configs.cells

    @kept_apart
    @functools.wraps(native)
    def propagate(self: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        # `is_compiling` and `current`, without their calls
        if args or is_dynamo_compiling() or compiler._is_compiling_flag:
            return inside(native, self, edge_index, args, kwargs)
        cell = held()
        config = (cell.config if cell is not None else current() if cells
                  else configs.of_process)
        if config is None:
            return native(self, edge_index, **kwargs)
        # the short way tells nothing; the route is the same
        if not records.sinks and not capturing():
            out = fast_path(self, native, edge_index, kwargs, config)
            if out is not MISSED:
                return out
        return calls.decide(self, native, edge_index, kwargs, config)

    propagate.routed = True  # type: ignore[attr-defined]
    return propagate
