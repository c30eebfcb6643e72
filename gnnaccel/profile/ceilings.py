"""What a device can do at most, as the cost model has it, and where a kernel stands under that."""
from __future__ import annotations

import re
from dataclasses import dataclass

from gnnaccel.dispatch.plan import cost
from gnnaccel.profile.entries import Entry


@dataclass(frozen=True)
class Ceilings:
    """``bandwidths``: (name, bytes per second) pairs, slowest first; ``flops``: operations per
    second; ``provenance``: where the numbers were measured."""

    bandwidths: tuple[tuple[str, float], ...]
    flops: float
    provenance: str


@dataclass(frozen=True)
class Point:
    """One kernel of one layer: operations per byte, operations per second, and its share of the
    slowest bandwidth."""

    name: str
    intensity: float
    flops: float
    bytes_per_s: float


def ceilings(device: str) -> Ceilings:
    """Of "cuda" or "cpu"."""
    rates = cost.constants()
    orderings = rates["relational"][device]["orderings"]
    if device == "cuda":
        gpu = rates["cuda"]
        found = gpu.get("ceilings", gpu)  # measured on their own, where they were
        lines = (("gathered rows, memory", found["gather_hbm"]),
                 ("gathered rows, L2", found["gather_l2"]))
        return Ceilings(lines, orderings["flops"], _machine(gpu["provenance"]))
    return Ceilings((("memory", orderings["bandwidth"]),), orderings["flops"],
                    _machine(rates["relational"]["cpu"]["provenance"]))


def _machine(provenance: str) -> str:
    """What was measured on, without how."""
    return re.split(r"[.;] ", provenance, maxsplit=1)[0]


def points(entries: list[Entry], device: str) -> list[Point]:
    """Of the entries whose bytes and operations are known and whose forward was timed."""
    found = []
    for entry in entries:
        each = entry.forward_each_ms
        if (entry.device == device and entry.route != "native" and each and entry.moved
            and entry.flops):
            flops, moved = entry.flops / each * 1e3, entry.moved / each * 1e3
            found.append(Point(f"{entry.name}: {entry.kernel}", flops / moved, flops, moved))
    return found
