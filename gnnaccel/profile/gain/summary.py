"""What the runs of a script come to."""
from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from gnnaccel.profile.gain.looking import kept
from gnnaccel.profile.gain.verdict import Gain, Layer, Side

if TYPE_CHECKING:
    from gnnaccel.profile.gain.cli import Found

_APART = 0.01  # losses that differ by more are spoken of
_WORTH = 0.95  # captured steps that take less of the time than this are spoken of


def summary(found: Found) -> Gain:
    """The verdict on ``found``."""
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
