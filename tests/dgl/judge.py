"""The shared judge for layers called as ``layer(graph, feat, ...)``."""
from __future__ import annotations

import functools

from tests import judge
from tests.judge import close, on_routes, spread, took

POSITIONS = ("graph", "feat", "third", "fourth", "fifth")  # arguments, for the names of their gradients

compare = functools.partial(judge.compare, positions=POSITIONS)

__all__ = ["POSITIONS", "close", "compare", "on_routes", "spread", "took"]
