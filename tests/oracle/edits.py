"""What happens to a model between two calls: each edit is a function of a `History`.

An edit returns a few words on what it did. What it raises itself (a tensor that cannot be edited
so, a module without that option) is part of the history.
"""

from __future__ import annotations

from collections.abc import Callable

from .table import fatal

EDITS: list[Callable] = []


def edit(often: int):
    """Registers an edit, drawn ``often`` times as often as the rarest."""

    def register(function: Callable) -> Callable:
        EDITS.extend([function] * often)
        return function

    return register


def apply(history) -> str:
    """Make a random edit; what was done, in words."""
    function = history.choose.choice(EDITS)
    try:
        what = function(history)
    except (RuntimeError, ValueError, AttributeError, KeyError, TypeError, IndexError) as problem:
        if fatal(problem):
            raise
        what = f"({type(problem).__name__})"
    return f"{function.__name__} {what or ''}".strip()
