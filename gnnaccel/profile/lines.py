"""Where in the user's code the time of layers goes: by the line that called them."""
from __future__ import annotations

import linecache
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from gnnaccel.profile.tables import milliseconds, table

#: packages whose frames stand between the user's line and the layer
_BETWEEN = ("gnnaccel", "torch", "torch_geometric", "dgl", "contextlib", "functools")
_SHOWN = 20
Place = tuple[str, int]


@dataclass
class Line:
    """Milliseconds of all calls from this line, forward and backward; ``routes``: calls by route,
    ``layers``: by the layer's name."""

    file: str
    line: int
    source: str
    calls: int = 0
    ms: float = 0.0
    routes: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)


class Lines:
    """What is added up while a report measures."""

    def __init__(self) -> None:
        self._found: dict[Place, Line] = {}

    def called(self, layer: str, route: str) -> Line:
        """One call, from the line that makes it now."""
        place = _place()
        line = self._found.get(place)
        if line is None:
            source = linecache.getline(*place).strip()
            line = self._found[place] = Line(*place, source)
        line.calls += 1
        line.routes[route] = line.routes.get(route, 0) + 1
        line.layers[layer] = line.layers.get(layer, 0) + 1
        return line

    def as_dicts(self) -> list[dict[str, Any]]:
        """By the time they took, most first."""
        return [asdict(line) for line in sorted(self._found.values(), key=lambda one: -one.ms)]

    def __str__(self) -> str:
        lines = self.as_dicts()[:_SHOWN]
        total = sum(line.ms for line in self._found.values()) or 1.0
        rows = [(f"{os.path.basename(one['file'])}:{one['line']}", one["source"][:60],
                 ", ".join(one["layers"]), one["calls"], milliseconds(one["ms"]),
                 f"{one['ms'] / total:.0%}",
                 ", ".join(f"{n} {route}" for route, n in one["routes"].items())) for one in lines]
        return table("lines that call layers, forward and backward",
                     ("line", "source", "layers", "calls", "ms", "share", "ran by"), rows,
                     right=("calls", "ms", "share")) if rows else ""


def _place() -> Place:
    """File and line of the innermost frame that is the user's."""
    frame = sys._getframe(1)
    while (frame.f_back is not None
           and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
