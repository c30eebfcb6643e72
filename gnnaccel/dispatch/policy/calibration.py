"""Measurements of a GPU by ``python -m gnnaccel calibrate``, and the cost model's rates with them.

The rates of ``constants.json`` were measured on one GPU, whose ceilings are next to them. On
another one they are taken to be in proportion to its ceilings: a kernel that reaches 90 % of the
first one's bandwidth is expected to reach 90 % of the other's.
"""
from __future__ import annotations

import copy
import math
from typing import Any

from gnnaccel import store

NAME = "calibration.json"
SCHEMA = 1
#: ceilings of a device. launch: seconds; gather_l2, gather_hbm (rows gathered), copy: bytes per
#: second; l2: bytes
CEILINGS = ("launch", "gather_l2", "gather_hbm", "copy", "l2")
_FACTOR = 100.0  # limit of a ratio to the reference: no GPU is beyond


def of(device: str) -> dict[str, Any] | None:
    """Measurements of the device of this name: ``ceilings``, ``date``, ``versions``. None where
    there are none, or no sensible ones."""
    held = store.read(NAME)
    if held is None or held.get("schema") != SCHEMA:
        return None
    entry = held.get("devices", {}).get(device)
    return entry if isinstance(entry, dict) and not problem(entry.get("ceilings")) else None


def problem(ceilings: Any) -> str | None:
    """Why measured ceilings are wrong, as a text; None where they are not."""
    if not isinstance(ceilings, dict) or set(ceilings) != set(CEILINGS):
        return f"ceilings are {', '.join(CEILINGS)}"
    for name, value in ceilings.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            return f"{name}={value!r} is no positive number"
    return None


def implausible(ceilings: dict[str, float], reference: dict[str, float]) -> str | None:
    """The ceiling that is too far from the reference to be believed, as a text; None if none is."""
    for name in CEILINGS:
        ratio = ceilings[name] / reference[name]
        if not 1 / _FACTOR < ratio < _FACTOR:
            return f"{name}={ceilings[name]:.3g} is {ratio:.3g} times that of the reference"
    return None


def scaled(constants: dict[str, Any], device: str, found: dict[str, Any]) -> dict[str, Any]:
    """``constants`` with the rates of GPUs as expected of ``device``."""
    result = copy.deepcopy(constants)
    gpu, relational = result["cuda"], result["relational"]["cuda"]
    ratio = {name: found["ceilings"][name] / gpu["ceilings"][name] for name in CEILINGS}
    gpu["launch"] *= ratio["launch"]
    gpu["gather_l2"] *= ratio["gather_l2"]
    gpu["gather_hbm"] *= ratio["gather_hbm"]
    gpu["l2_bytes"] *= ratio["l2"]
    gpu["native_bandwidth"] *= ratio["copy"]
    gpu["structure_per_edge"] /= ratio["copy"]
    relational["orderings"]["bandwidth"] *= ratio["gather_hbm"]
    relational["orderings"]["launch"] *= ratio["launch"]
    for rates in relational["structure"].values():
        rates[:] = [rates[0] * ratio["launch"], rates[1] / ratio["copy"]]
    gpu["ceilings"] = dict(found["ceilings"])
    gpu["provenance"] = (
        f"calibrated on {device}, {found.get('date', 'at an unknown date')}; scaled from: "
        f"{gpu['provenance']}")
    return result
