"""Modules of this folder, asked for where they are needed by what they need themselves."""
from __future__ import annotations

import importlib
from typing import Any


def other(name: str) -> Any:
    """The module of this name, such as ``rows.pieces``."""
    return importlib.import_module(f"{__package__}.{name}")
