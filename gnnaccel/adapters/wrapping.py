"""The function that stands in for a host layer's ``forward``."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def routed(native: Callable, adapter: Any, inside: Callable | None = None,
           compiled: Callable | None = None) -> Callable:
    """``native``, a class's own forward, behind the router: ``adapter`` (`dispatch.router.Adapter`)
    states its calls.

    ``inside(native, forward)``: the function that stands in for ``native`` on its route, of layers
    around others; ``forward``: the routed function, for layers that are made of them.
    ``compiled(native, layer, args, kwargs)``: a call in code that is compiled; None: such code gets
    ``native``.
    """
    from torch.compiler import is_compiling

    from gnnaccel.dispatch.memory.layer_memory import MISSED, fast_path, memories
    from gnnaccel.dispatch.policy.config import current
    from gnnaccel.dispatch.router import decide
    from gnnaccel.dispatch.uncompiled import kept_apart

    remembered = memories.entries

    @kept_apart
    @functools.wraps(native)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # compiled regions trace the host's own code (GA404), but for what is made for them
        if is_compiling():
            return (native(self, *args, **kwargs) if compiled is None
                    else compiled(native, self, args, kwargs))
        config = current()
        if config is None:
            return native(self, *args, **kwargs)
        if id(self) in remembered:  # `router.route`, without its call
            out = fast_path(self, adapter, instead, args, kwargs, config)
            if out is not MISSED:
                return out
        return decide(self, adapter, instead, args, kwargs, config)

    instead = native if inside is None else inside(native, forward)
    return forward


def by_layer(chosen: Callable[[Any], bool], theirs: Callable, others: Callable) -> Callable:
    """A method that is ``theirs`` for the ``chosen`` layers and for all ``others`` that one."""
    from gnnaccel.dispatch.uncompiled import kept_apart

    @kept_apart
    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (theirs if chosen(self) else others)(self, *args, **kwargs)

    return method
