"""The function that stands in for a host layer's ``forward``."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def routed(native: Callable, adapter: Any, inside: Callable | None = None) -> Callable:
    """``native``, a class's own forward, behind the router: ``adapter`` (`dispatch.router.Adapter`)
    states its calls.

    ``inside(native)``: what stands in for ``native`` on its route, of layers around others.
    """
    from torch.compiler import is_compiling

    from gnnaccel.dispatch.memory.layer_memory import MISSED, fast_path, memories
    from gnnaccel.dispatch.policy.config import current
    from gnnaccel.dispatch.router import decide

    instead, remembered = native if inside is None else inside(native), memories.entries

    @functools.wraps(native)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # compiled regions trace the host's own code (GA404); nothing of ours may be traced
        if is_compiling():
            return native(self, *args, **kwargs)
        config = current()
        if config is None:
            return native(self, *args, **kwargs)
        if id(self) in remembered:  # `router.route`, without its call
            out = fast_path(self, adapter, instead, args, kwargs, config)
            if out is not MISSED:
                return out
        return decide(self, adapter, instead, args, kwargs, config)

    return forward
