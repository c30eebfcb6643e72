"""The check of DGL's layers for nodes that no edge enters, made once per graph. Many layers refuse
such nodes, and wait for the device in every forward to see whether there are any. Here layers that
run DGL's own code are told the first answer.

Such a layer asks ``self._allow_zero_in_degree`` first. While its forward runs over a graph without
such nodes, that is true.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from gnnaccel.adapters.dgl import graphs
from gnnaccel.adapters.dgl.bridge.tags import device_of
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.dispatch.policy.reasons import Reason

_NAME, _TOLD = "_allow_zero_in_degree", "_gnnaccel_told"
_ALLOWED = "Added: tells DGL's layer that a graph was searched for nodes without incoming edges."
_running = threading.local()


def install(patches: PatchSet) -> None:
    """Patch all layers with this check but those whose forward is replaced already: their adapters
    keep the answer. The ones that are told where they stay native (`telling`) only need the
    attribute."""
    from dgl.nn import pytorch as nn

    for cls in dict.fromkeys(value for value in vars(nn).values() if isinstance(value, type)):
        forward = vars(cls).get("forward")
        if forward is not None and _asks(forward):
            patches.set(cls, "forward", telling(forward),
                        "Looks for nodes without incoming edges once per graph, where DGL waits "
                        "for the GPU in every call.")
            patches.add(cls, _NAME, _Allowed(), _ALLOWED)
        elif getattr(forward, _TOLD, False):
            patches.add(cls, _NAME, _Allowed(), _ALLOWED)


def _asks(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    return code is not None and _NAME in code.co_names


class _Allowed:
    """The attribute as the layer has it, or true while its forward runs over a graph that has been
    looked at."""

    def __get__(self, layer: Any, cls: type | None = None) -> Any:
        if layer is None:
            return self
        return layer.__dict__[_NAME] or getattr(_running, "layer", None) is layer

    def __set__(self, layer: Any, value: Any) -> None:
        layer.__dict__[_NAME] = value

    def __delete__(self, layer: Any) -> None:
        del layer.__dict__[_NAME]


def telling(native: Callable) -> Callable:
    """``native``, a layer's forward, told the answer for a graph on the device. A forward without
    the check is left as it is."""
    if not _asks(native):
        return native

    @functools.wraps(native)
    def forward(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__[_NAME] or not _is_covered(graph):
            return native(self, graph, *args, **kwargs)
        before, _running.layer = getattr(_running, "layer", None), self
        try:
            return native(self, graph, *args, **kwargs)
        finally:
            _running.layer = before

    setattr(forward, _TOLD, True)  # `functools.wraps` hands it on to what is put around this
    return forward


def _is_covered(graph: Any) -> bool:
    """Whether ``graph`` is on the device, has one relation, and an edge enters every node. Waits
    for the device, the first time."""
    if graphs.form_reason(graph) is not None or device_of(graph._graph) is None:
        return False
    edges = graphs.homogeneous(graph)
    return not isinstance(edges, Reason) and not edges.has_bare()
