"""Layer by layer: some steps under two reports in turn, one with gnnaccel and one with every layer
native; and what the runs of a script come to."""
from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from gnnaccel import session
from gnnaccel.dispatch.policy.reasons import KINDS
from gnnaccel.profile.entries import Entry
from gnnaccel.profile.gain.verdict import Gain, Kept, Layer, Side
from gnnaccel.profile.report import Report

if TYPE_CHECKING:
    from gnnaccel.profile.gain.cli import Found

#: an include list that no layer is in
NO_LAYER = ["re:(?!)"]
_APART = 0.01  # losses that differ by more are spoken of
_WORTH = 0.95  # captured steps that take less of the time than this are spoken of


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


# --- the runs of a script -------------------------------------------------------------------------

def summary(found: Found) -> Gain:
    native, ours = _side(found.native), _side(found.enabled)
    seen = found.look and found.look["look"]
    gain = Gain(found.enabled[0]["what"], native, ours)
    if found.captured is not None and found.captured["captured"]["replays"]:
        gain.captured = _side([found.captured])
    gain.kept = kept(found.enabled[-1]["stats"], seen["fallbacks"] if seen else [])
    if seen:
        gain.layers = [Layer(**one) for one in seen["layers"]]
    else:
        gain.notes.append("layers were not looked at: the script is too short for it, or did not "
                          "run to the end")
    gain.to_try = _to_try(gain, seen["advice"] if seen else [])
    gain.notes += _notes(found, gain)
    return gain


def _side(runs: list[dict[str, Any]]) -> Side:
    loops = [one for run in runs for one in run["loop_ms"]]
    # JSON has made strings of the numbers of steps
    losses = {int(step): loss for step, loss in runs[0]["losses"].items()}
    return Side([statistics.median(run["ms"]) for run in runs], sum(len(run["ms"]) for run in runs),
                statistics.fmean(loops) if loops and runs[0]["what"] == "training step" else None,
                max((run["memory_bytes"] or 0 for run in runs), default=0) or None, losses)


def _to_try(gain: Gain, advice: list[str]) -> list[str]:
    ours = gain.ours.step_ms
    first = ["write `import gnnaccel; gnnaccel.enable()` at the top of the script, or run it by "
             "python -m gnnaccel"] if gain.verdict == "faster" else []
    if gain.verdict == "slower":
        first = ["python -m gnnaccel --autotune: times the ways that each layer can go and keeps "
                 "the fastest"]
    if gain.captured is not None and gain.captured.step_ms < _WORTH * ours:
        first.append("gnnaccel.enable(capture=True), or python -m gnnaccel --capture: calls that "
                     "repeat are replayed as CUDA graphs, which takes "
                     f"{gain.captured.step_ms / ours:.0%} of the time of a step (docs/compile.md)")
    return first + advice


def _notes(found: Found, gain: Gain) -> list[str]:
    notes = []
    seconds, kernels = found.enabled[0]["compiled"]
    if kernels:
        notes.append(f"{kernels} kernels were compiled or loaded at first use, in {seconds:.1f} s; "
                     "they are kept, and none of that is in the times above")
    if len(found.enabled) == 1:
        notes.append("the script takes long to start, so each way ran once: give it more by "
                     "--seconds")
    refused = found.captured["captured"]["refused"] if found.captured is not None else {}
    notes += [f"with capture=True calls of {name} were not replayed: {why}"
              for name, reasons in refused.items() for why in reasons]
    difference = gain.as_dict()["loss_difference"]
    if difference is not None and difference > _APART:
        notes.append("losses differ: dropout draws other masks from the same distribution, and "
                     "small differences grow with the steps; python -m gnnaccel --compare tells "
                     "whether a layer is wrong")
    return notes
