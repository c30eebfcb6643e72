"""What ``python -m gnnaccel calibrate`` measured of a GPU, and the cost model's rates with it.

The rates of ``constants.json`` were found on one GPU, whose ceilings are next to them. Another
one's rates are taken to stand to its own ceilings as those do: a kernel that reaches 90 % of the
one's bandwidth is expected to reach 90 % of the other's.
"""
from __future__ import annotations

import copy
import math
from typing import Any

from gnnaccel import store

NAME = "calibration.json"
SCHEMA = 1
#: of a device. launch: seconds; gather_l2, gather_hbm (rows gathered), copy: bytes per second; l2:
#: bytes
CEILINGS = ("launch", "gather_l2", "gather_hbm", "copy", "l2")
_FACTOR = 100.0  # beyond which a ratio to the reference is no GPU's


def of(device: str) -> dict[str, Any] | None:
    """What was measured of the device of this name: ``ceilings``, ``date``, ``versions``. None
    where nothing (sensible) was."""
    held = store.read(NAME)
    if held is None or held.get("schema") != SCHEMA:
        return None
    found = held.get("devices", {}).get(device)
    return found if isinstance(found, dict) and not problem(found.get("ceilings")) else None


def problem(ceilings: Any) -> str | None:
    """What is wrong with measured ceilings; None where nothing is."""
    if not isinstance(ceilings, dict) or set(ceilings) != set(CEILINGS):
        return f"ceilings are {', '.join(CEILINGS)}"
    for name, value in ceilings.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            return f"{name}={value!r} is no positive number"
    return None


def implausible(ceilings: dict[str, float], reference: dict[str, float]) -> str | None:
    """Which ceiling is too far from the reference to be believed; None where none is."""
    for name in CEILINGS:
        ratio = ceilings[name] / reference[name]
        if not 1 / _FACTOR < ratio < _FACTOR:
            return f"{name}={ceilings[name]:.3g} is {ratio:.3g} times that of the reference"
    return None


def scaled(constants: dict[str, Any], device: str, found: dict[str, Any]) -> dict[str, Any]:
    """``constants`` with the rates of GPUs as they are to be expected of ``device``."""
    made = copy.deepcopy(constants)
    gpu, relational = made["cuda"], made["relational"]["cuda"]
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
    return made
