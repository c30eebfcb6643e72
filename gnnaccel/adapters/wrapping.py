"""The function that stands in for a host layer's ``forward``."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def routed(native: Callable, adapter: Any) -> Callable:
    """``native``, a class's own forward, behind the router: ``adapter`` (`dispatch.router.Adapter`) states its calls."""
    from torch.compiler import is_compiling

    from gnnaccel.dispatch.config import current
    from gnnaccel.dispatch.router import route

    @functools.wraps(native)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # compiled regions trace the host's own code (GA404); nothing of ours may be traced
            return native(self, *args, **kwargs)
        config = current()
        if config is None:
            return native(self, *args, **kwargs)
        return route(self, adapter, native, args, kwargs, config)

    return forward
