"""Modules of this package, asked for where they are needed by what they need themselves."""
from __future__ import annotations

import importlib
from typing import Any


def other(name: str) -> Any:
    """The module of this package."""
    return importlib.import_module(f"{__package__}.{name}")
