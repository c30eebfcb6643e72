"""The shared judge for layers called as ``layer(graph, feat, ...)``."""
from __future__ import annotations

import functools

from tests import judge
from tests.judge import close, on_routes, spread, took

# arguments, for the names of their gradients
POSITIONS = ("graph", "feat", "third", "fourth", "fifth")

compare = functools.partial(judge.compare, positions=POSITIONS)
native_because = functools.partial(judge.native_because, same=close)  # DGL's operations are taken over

__all__ = ["POSITIONS", "close", "compare", "native_because", "on_routes", "spread", "took"]
