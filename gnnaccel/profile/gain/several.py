"""``python -m gnnaccel gain --list FILE``: many scripts, one row each, and what they come to."""
from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnnaccel.profile.gain.verdict import Gain
from gnnaccel.profile.tables import milliseconds, size, table

_COLUMNS = ("script", "native ms", "gnnaccel ms", "step", "captured", "loop", "MiB", "loss",
            "verdict")
_NUMBERS = tuple(c for c in _COLUMNS if c not in ("script", "verdict"))


def listed(path: str) -> list[list[str]]:
    """The scripts in the file, each with its arguments, split as a shell does it. Empty lines do
    not count, nor does what comes after a ``#``. Raises ValueError where there are none, or where a
    quotation is not closed; OSError."""
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as problem:
            raise ValueError(f"line {number} of {path}: {problem}") from None
        if words:
            found.append(words)
    if not found:
        raise ValueError(f"{path} names no script; write one in each line, with its arguments")
    return found


def measured(scripts: list[list[str]],
             measure: Callable[[list[str]], Gain | str]) -> dict[str, Gain | str]:
    """By the command line of each script, what ``measure`` says: a verdict, or why there is none.
    Says on the way how far it has come."""
    found: dict[str, Gain | str] = {}
    for number, words in enumerate(scripts, 1):
        name = shlex.join(words)
        print(f"{number} of {len(scripts)}: {name}", file=sys.stderr, flush=True)
        found[name] = measure(words)
    return found


def text(found: dict[str, Gain | str]) -> str:
    """The table, and the geometric means below it."""
    rows = [_row(name, one) if isinstance(one, Gain) else (name, *[None] * 7, one)
            for name, one in found.items()]
    return table("", _COLUMNS, rows, right=_NUMBERS).strip("\n") + "\n\n" + _means(found)


def _row(name: str, gain: Gain) -> tuple:
    native, ours, captured = gain.native, gain.ours, gain.captured
    loss = gain.as_dict()["loss_difference"]
    return (name, milliseconds(native.step_ms), milliseconds(ours.step_ms), _factor(gain.times),
            None if captured is None else _factor(native.step_ms / captured.step_ms),
            _factor(_loop(gain)),
            f"{size(native.memory_bytes)} -> {size(ours.memory_bytes)}"
            if native.memory_bytes and ours.memory_bytes else None,
            None if loss is None else f"{loss:.0e}", gain.verdict)


def _factor(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"


def _loop(gain: Gain) -> float | None:
    return (gain.native.loop_ms / gain.ours.loop_ms
            if gain.native.loop_ms and gain.ours.loop_ms else None)


def means(found: dict[str, Gain | str]) -> dict[str, Any]:
    """Geometric means of the factors, over the scripts that have them, and the numbers of
    scripts by verdict."""
    gains = [one for one in found.values() if isinstance(one, Gain)]
    captured = [g.native.step_ms / g.captured.step_ms for g in gains if g.captured is not None]
    loops = [f for f in map(_loop, gains) if f is not None]
    verdicts = [g.verdict for g in gains]
    return {"step": _mean([g.times for g in gains]), "captured": _mean(captured),
            "loop": _mean(loops), "slower": verdicts.count("slower"),
            "faster": verdicts.count("faster"), "no difference": verdicts.count("no difference"),
            "no verdict": len(found) - len(gains)}


def _mean(factors: list[float]) -> float | None:
    return statistics.geometric_mean(factors) if factors else None


def _means(found: dict[str, Gain | str]) -> str:
    all_ = means(found)
    names = {"step": "a step", "captured": "a step with capture=True",
             "loop": "step to step, with loading and evaluation"}
    said = [f"{names[part]} {all_[part]:.2f}x" for part in names if all_[part] is not None]
    numbers = ", ".join(f"{all_[verdict]} {verdict}"
                        for verdict in ("faster", "no difference", "slower", "no verdict"))
    return (f"geometric means: {'; '.join(said)}\n" if said else "") + f"scripts: {numbers}\n"


def as_dict(found: dict[str, Gain | str], options: argparse.Namespace) -> dict[str, Any]:
    """All of it, with the machine and the versions, as data that JSON can hold."""
    from gnnaccel.profile.bench.result import provenance

    return {"provenance": provenance(["gain", "--seconds", f"{options.seconds:g}", "--list",
                                      options.list]),
            "scripts": {name: one.as_dict() if isinstance(one, Gain) else {"why": one}
                        for name, one in found.items()}, "means": means(found)}


def written(found: dict[str, Gain | str], options: argparse.Namespace) -> None:
    """Write ``--json``, if it was asked for."""
    if options.json:
        Path(options.json).write_text(json.dumps(as_dict(found, options), indent=1) + "\n",
                                      encoding="utf-8")
