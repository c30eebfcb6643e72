"""Deciding how a call runs, and running it; no host is imported here."""
from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # the former place of a module that tools outside of this repository import
    if name == "planner":
        from gnnaccel.dispatch.plan import planner

        return planner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
