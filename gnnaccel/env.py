"""Every ``GNNACCEL_*`` environment variable, read here and nowhere else, but that ``import
gnnaccel`` looks whether ``GNNACCEL_STANDINS`` is set.

- ``GNNACCEL``: 0 makes ``enable()`` leave everything native. 1 or unset: it works. After ``python
  -m gnnaccel autostart install``, 1 switches gnnaccel on in every process.
- ``GNNACCEL_BACKEND``: auto, cuda or torch
- ``GNNACCEL_WHEN``: profitable or supported
- ``GNNACCEL_ON_FALLBACK``: native, warn or raise
- ``GNNACCEL_BACKWARD``: caller or workers, the thread in which backward runs on a single GPU
- ``GNNACCEL_FIRST_USE``: wait or background, what calls do while kernels are compiled
- ``GNNACCEL_COMPILE``: 1 for ``enable(compile=True)``
- ``GNNACCEL_CAPTURE``: 1 for ``enable(capture=True)``
- ``GNNACCEL_LOG``: 1 for lines through the logger ``gnnaccel``, otherwise the path of a JSONL file
- ``GNNACCEL_RECORDS``: how many records ``gnnaccel.records()`` keeps, 0 for none
- ``GNNACCEL_INCLUDE``, ``GNNACCEL_EXCLUDE``: comma-separated class names, layer names or ``re:``
  patterns
- ``GNNACCEL_DECISIONS``: a file of decisions to keep to (``python -m gnnaccel log --export``); 1
  for those of ``autotune``
- ``GNNACCEL_PRECISION``: int8 or bf16, the format of the rows that layers gather; fp32 for none,
  whatever ``gnnaccel.quantize`` says
- ``GNNACCEL_CACHE_BYTES``: limit of the structure cache, in bytes or with a suffix, as 512MiB, 2GiB
- ``GNNACCEL_CACHE_DIR``: folder of what ``calibrate`` and ``autotune`` measure; unset: ``gnnaccel``
  in the user's cache folder
- ``GNNACCEL_STANDINS``: comma-separated packages that gnnaccel stands in for where they are
  missing: torch_scatter, torch_sparse, torch_cluster, dgl.sparse; "pyg" lets PyG see them

An argument given to ``enable()`` beats its variable. An empty variable counts as unset.
"""
from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

from gnnaccel.dispatch.policy.config import CHOICES, PRECISIONS
from gnnaccel.suggest import did_you_mean

VARIABLES = ("GNNACCEL", "GNNACCEL_BACKEND", "GNNACCEL_WHEN", "GNNACCEL_ON_FALLBACK",
             "GNNACCEL_BACKWARD", "GNNACCEL_FIRST_USE", "GNNACCEL_COMPILE", "GNNACCEL_CAPTURE",
             "GNNACCEL_LOG", "GNNACCEL_RECORDS", "GNNACCEL_INCLUDE", "GNNACCEL_EXCLUDE",
             "GNNACCEL_DECISIONS", "GNNACCEL_PRECISION", "GNNACCEL_CACHE_BYTES",
             "GNNACCEL_CACHE_DIR", "GNNACCEL_STANDINS")
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_warned: set[str] = set()


def _text(name: str, environ: Mapping[str, str] | None) -> str | None:
    text = (os.environ if environ is None else environ).get(name, "").strip()
    return text or None


def _bool(name: str, text: str) -> bool:
    word = text.casefold()
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise ValueError(f"environment variable {name}={text!r} is not a switch; use one of "
                     f"{', '.join(_YES + _NO)}")


def switch(environ: Mapping[str, str] | None = None) -> bool | None:
    """``GNNACCEL``: True, False, or None when unset. ValueError when it is neither."""
    text = _text("GNNACCEL", environ)
    return None if text is None else _bool("GNNACCEL", text)


def given(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every variable of ours that is set, known or not, by name."""
    found = os.environ if environ is None else environ
    return {name: found[name] for name in sorted(found) if name == "GNNACCEL"
            or name.startswith("GNNACCEL_")}


def safe_switch() -> bool:
    """Whether ``GNNACCEL`` says on; what is neither on nor off counts as off."""
    return (_text("GNNACCEL", None) or "").casefold() in _YES


def of_child(enabled: bool, **more: str) -> dict[str, str]:
    """The environment for a process that is to run with gnnaccel, or natively even where its script
    enables it; ``more``: further variables."""
    found = {**os.environ, **more}
    found.pop("GNNACCEL", None)
    return found if enabled else {**found, "GNNACCEL": "0"}


def cache_dir(environ: Mapping[str, str] | None = None) -> str | None:
    """``GNNACCEL_CACHE_DIR``, or None when unset."""
    return _text("GNNACCEL_CACHE_DIR", environ)


def standins(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """``GNNACCEL_STANDINS``, at its commas; without words when unset."""
    text = _text("GNNACCEL_STANDINS", environ) or ""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def cache_bytes(environ: Mapping[str, str] | None = None) -> int | None:
    """``GNNACCEL_CACHE_BYTES`` in bytes, or None when unset. ValueError when it is not a size."""
    text = _text("GNNACCEL_CACHE_BYTES", environ)
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.casefold())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"environment variable GNNACCEL_CACHE_BYTES={text!r} is not a size; "
                         "use bytes or a suffix, such as 1073741824, 512MiB or 2GiB")
    return (int(float(match[1]) * _UNITS[match[2]]) if "." in match[1]
            else int(match[1]) * _UNITS[match[2]])


def options(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The options of ``enable()`` that the environment sets. ValueError, naming the variable, for a
    wrong value."""
    found: dict[str, Any] = {}
    for option, allowed in CHOICES.items():
        name = f"GNNACCEL_{option.upper()}"
        text = _text(name, environ)
        if text is not None:
            found[option] = _choice(name, text, allowed)
    text = _text("GNNACCEL_PRECISION", environ)
    if text is not None:
        found["precision"] = _choice("GNNACCEL_PRECISION", text, PRECISIONS)
    for option in ("include", "exclude"):
        text = _text(f"GNNACCEL_{option.upper()}", environ)
        if text is not None:
            found[option] = tuple(part.strip() for part in text.split(",") if part.strip())
    text = _text("GNNACCEL_LOG", environ)
    if text is not None:
        found["log"] = _switch_or_path("GNNACCEL_LOG", text)
    text = _text("GNNACCEL_RECORDS", environ)
    if text is not None:
        found["records"] = _count("GNNACCEL_RECORDS", text)
    for option in ("compile", "capture"):
        text = _text(f"GNNACCEL_{option.upper()}", environ)
        if text is not None:
            found[option] = _bool(f"GNNACCEL_{option.upper()}", text)
    text = _text("GNNACCEL_DECISIONS", environ)
    if text is not None:
        found["decisions"] = _switch_or_path("GNNACCEL_DECISIONS", text)
    return found


def _choice(name: str, text: str, allowed: tuple[str, ...]) -> str:
    word = text.casefold()
    if word in allowed:
        return word
    raise ValueError(f"environment variable {name}={text!r} is not known; use one of "
                     f"{', '.join(allowed)}.{did_you_mean(text, allowed)}")


def _switch_or_path(name: str, text: str) -> bool | str:
    """A switch word means on or off; anything else is a path (``./1`` for a file named 1)."""
    return _bool(name, text) if text.casefold() in _YES + _NO else text


def _count(name: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"environment variable {name}={text!r} is not a count; use 0 for none, or "
                         "a whole number")
    return int(text)


def warn_unknown(environ: Mapping[str, str] | None = None) -> None:
    """Warn, once per name and process, about ``GNNACCEL_*`` variables that mean nothing."""
    for name in sorted(os.environ if environ is None else environ):
        if name.startswith("GNNACCEL_") and name not in VARIABLES and name not in _warned:
            _warned.add(name)
            warnings.warn(f"environment variable {name} is not known and has no effect."
                          f"{did_you_mean(name, VARIABLES)}", RuntimeWarning, stacklevel=3)
