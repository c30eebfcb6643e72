"""What the file of a run comes to, as a record."""
from __future__ import annotations

import math
import statistics
from typing import Any

from gnnaccel.profile.bench import accel
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.script_child import BEFORE_LOOK, BLOCK, BOUND, ENABLED, NATIVE, TURNS

KIND = "script"
_WARM = 10  # steps that do not count, or a third where there are fewer than three times as many
_COMPARED = 5  # losses of the first steps
# where ways take turns:
_SKIPPED = 3  # steps of each turn that do not count
_FIRST = 1  # turns of each way that do not: kernels are compiled, structures built, calls captured
_LEAST = 5  # steps of each way, for a result
_MIB = 2**20


def record(name: str, part: str, found: dict[str, Any], native: dict[str, Any] | None,
           turns: dict[str, Any] | None = None) -> Record:
    """One run's. ``timing``: of a step, zero_grad to the end of the optimizer's step, the device
    waited for at both. ``values``: ``what`` is timed, ``steps``, ``ended`` (what ended the run:
    the "script", so many "steps" or "seconds", the "limit"), ``loop_ms`` from the end of a step to
    the end of the next (mean: evaluation may come after some steps only), ``wall_s`` from the
    process's start to the end of the script or of its last step, ``first_step_s`` to the end of its
    first, ``peak_mib``, ``losses`` of the
    first steps, ``loss_difference`` (`difference`, where there is ``native``), ``share`` of layers'
    calls that did not run natively, ``routes`` and ``reasons`` of these calls, ``compile_s`` and
    ``kernels`` (compiled or loaded), ``replays`` and ``refused`` of captured calls. The part
    `BOUND` has what is left of a native step (of the ``native`` run, or of ``turns``) without its
    layers for ``timing``, and ``layers_share``, their part of a step. The part `TURNS` has the
    steps with gnnaccel for ``timing``, and ``turns``: by way the median step, its deciles, and of
    how many steps."""
    ms, loop = (_counted(found[key]) for key in ("ms", "loop_ms"))
    place: dict[str, Any] = dict(kind=KIND, layer=name, mode="step", impl=part,
                 device="cuda" if found["gpu"] else "cpu")
    if not ms:
        return Record(**place, error=_nothing(found))
    values = {"what": found["what"], "steps": len(found["ms"]), "ended": found["ended"],
              "loop_ms": statistics.fmean(loop) if loop else None, "wall_s": found["wall_s"],
              "first_step_s": found["first_step_s"],
              "peak_mib": found["memory_bytes"] and found["memory_bytes"] / _MIB,
              "losses": [_text(loss) for loss in _losses(found)]}
    if native is not None:
        values["loss_difference"] = _text(difference(_losses(native), _losses(found)))
    if part == BOUND:
        return _bound(place, found, values, native_steps(native, turns))
    if part == TURNS:
        return _turns(place, found, values)
    values |= _calls(found["stats"])
    values["compile_s"], values["kernels"] = found["compiled"]
    if found["captured"]["replays"] or found["captured"]["refused"]:
        values |= found["captured"]
    return Record(**place, timing=_timing(ms, found["ms"]), values=values)


def _turns(place: dict[str, Any], found: dict[str, Any], values: dict[str, Any]) -> Record:
    taken = counted(found["ways"], found["ms"])
    if not {NATIVE, ENABLED} <= set(taken):
        return Record(**place, error="too few steps for the ways to take turns")
    for one in ("loss_difference", "losses"):  # each way goes on where another one was
        values.pop(one, None)
    timings = {way: _timing(steps, found["ms"]) for way, steps in taken.items()}
    values["turns"] = {way: {name: timing[name] for name in ("ms", "p10_ms", "p90_ms", "calls")}
                       for way, timing in timings.items()}
    if found["captured"]["replays"] or found["captured"]["refused"]:
        values |= found["captured"]
    return Record(**place, timing=timings[ENABLED], values=values)


def counted(ways: list[str], ms: list[float | None]) -> dict[str, list[float]]:
    """By way, the times of the steps that count, where there are enough."""
    found: dict[str, list[float]] = {}
    begun: dict[str, int] = {}
    for number, (way, one) in enumerate(zip(ways, ms)):
        begun[way] = begun.get(way, 0) + (number % BLOCK == 0)
        if begun[way] > _FIRST and number % BLOCK >= _SKIPPED and one is not None:
            found.setdefault(way, []).append(one)
    return {way: steps for way, steps in found.items() if len(steps) >= _LEAST}


def native_steps(native: dict[str, Any] | None, turns: dict[str, Any] | None) -> list[float]:
    """The times of native steps that count: of the native run, where there is none of the run in
    which ways took turns."""
    if native is not None:
        return _counted(native["ms"])
    return [] if turns is None else counted(turns["ways"], turns["ms"]).get(NATIVE, [])


def difference(native: list[float], ours: list[float]) -> float | None:
    """The largest relative difference of the losses of the first five steps; None where there are
    none. No number in both is no difference, in one of them it is infinite."""
    pairs = list(zip(native, ours))[:_COMPARED]
    return max((_apart(a, b) for a, b in pairs), default=None)


def _apart(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if a == b or a != a and b != b else math.inf
    return abs(a - b) / max(abs(a), 1e-12) if a != b else 0.0


def _losses(found: dict[str, Any]) -> list[float]:
    """Of the first ten steps; JSON has made strings of their numbers."""
    return [float(loss) for number, loss in found["losses"].items() if int(number) <= 10]


def _text(value: float | None) -> float | str | None:
    """What JSON has no number for, as text."""
    return value if value is None or math.isfinite(value) else str(value)


def _counted(ms: list[float | None]) -> list[float]:
    return [one for one in ms[min(_WARM, len(ms) // 3):] if one is not None]


def _timing(ms: list[float], all_: list[float | None]) -> dict[str, Any]:
    """`timing.Timing`'s fields."""
    deciles = statistics.quantiles(ms, n=10) if len(ms) > 1 else ms * 9
    return dict(ms=statistics.median(ms), p10_ms=deciles[0], p90_ms=deciles[-1], min_ms=min(ms),
                first_ms=next((one for one in all_ if one is not None), None), calls=len(ms),
                batches=len(ms))


def _calls(stats: dict[str, Any]) -> dict[str, Any]:
    found = accel.routes(stats)
    total = sum(found["routes"].values())
    return {"share": 1 - found["routes"].get("native", 0) / total if total else None, **found}


def _bound(place: dict[str, Any], found: dict[str, Any], values: dict[str, Any],
           native: list[float]) -> Record:
    layers = found["layers_ms"]
    if layers is None:
        return Record(**place, error="needs gradients cleared before each step"
                      if found["what"] == "training step" else "needs an optimizer")
    if not native:
        return Record(**place, error="needs native steps, of the part native or turns")
    looked = [one for one in found["ms"][BEFORE_LOOK:] if one is not None]
    share = min(1.0, layers * len(looked) / sum(looked))
    left = [(1 - share) * statistics.median(native)]
    return Record(**place, timing=_timing(left, left) | {"calls": len(looked)},
                  values={**values, "layers_share": share})


def _nothing(found: dict[str, Any]) -> str:
    if found["ended"] == "limit":
        return "too few steps within the limit"
    return ("nothing to measure: no optimizer made two steps in the script's own process, and no "
            "module was called")
