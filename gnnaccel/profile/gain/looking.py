"""Layer by layer: some steps under two reports in turn, one with gnnaccel and one with every layer
native."""
from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any

from gnnaccel import session
from gnnaccel.dispatch.policy.reasons import KINDS
from gnnaccel.profile.entries import Entry
from gnnaccel.profile.gain.verdict import Kept, Layer
from gnnaccel.profile.report import Report

#: an include list that no layer is in
NO_LAYER = ["re:(?!)"]


class Look:
    """``begin(native)`` starts to measure, ``end()`` stops; `as_dict` has what was found."""

    def __init__(self) -> None:
        self._reports = {False: Report(), True: Report()}
        self._open: contextlib.ExitStack | None = None

    def begin(self, native: bool) -> None:
        """Measure from here on; with ``native`` every layer runs the host's own code."""
        self._open = contextlib.ExitStack()
        self._open.enter_context(session.enabled(include=NO_LAYER) if native
                                 else session.enabled(first_use="wait"))
        self._open.enter_context(self._reports[native])

    def end(self) -> None:
        """Stop measuring, if it was begun."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def as_dict(self) -> dict[str, Any]:
        """Layers, native calls and advice as plain data."""
        ours, native = self._reports[False], self._reports[True]
        return {"layers": [one.__dict__ for one in layers(ours.entries, native.entries)],
                "fallbacks": ours.fallbacks(), "advice": [str(one) for one in ours.advice()]}


def layers(ours: list[Entry], native: list[Entry]) -> list[Layer]:
    """Each layer that was called with gnnaccel, with what a call of it took either way."""
    alone = _each(native)
    found = []
    for name, ms in _each(ours).items():
        way = max((entry for entry in ours if entry.name == name),
                  key=lambda entry: (entry.calls, entry.route != "native"))
        found.append(Layer(name, way.layer, way.kernel, alone.get(name), ms))
    return found


def _each(entries: list[Entry]) -> dict[str, float]:
    """Milliseconds of one call by the layer's name."""
    total: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for entry in entries:
        total[entry.name] += entry.total_ms
        calls[entry.name] += entry.timed
    return {name: ms / calls[name] for name, ms in total.items() if calls[name]}


def kept(stats: dict[str, dict[str, Any]], fallbacks: list[dict[str, Any]]) -> list[Kept]:
    """Native calls by their reason, most first. ``stats``: counts of a run, by class; where the
    run was looked at, ``fallbacks`` has the layers' names and what was seen."""
    calls: dict[str, int] = defaultdict(int)
    classes: dict[str, list[str]] = defaultdict(list)
    for layer, entry in stats.items():
        for code, count in entry["reasons"].items():
            calls[code] += count
            classes[code].append(layer)
    seen = {one["code"]: one for one in fallbacks}
    return [Kept(code, seen[code]["text"] if code in seen else KINDS[code].title, count,
                 seen[code]["layers"] if code in seen else classes[code])
            for code, count in sorted(calls.items(), key=lambda item: -item[1])]
