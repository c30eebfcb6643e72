"""The table of whole scripts: a row each, and the geometric means."""
from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from gnnaccel.profile.bench import text
from gnnaccel.profile.bench.metrics import ratio
from gnnaccel.profile.bench.result import Record, Result
from gnnaccel.profile.bench.script_child import BOUND, CAPTURE, COLD, ENABLED, NATIVE, TURNS
from gnnaccel.profile.bench.script_figures import KIND

Runs = dict[str, Record]
Notes = dict[str, str]


def _time(part: str) -> Callable[[Runs, Notes], str]:
    def column(runs: Runs, notes: Notes) -> str:
        record = runs.get(part)
        return (text.MISSING if record is None else text.failure(record, notes) if record.error
                else text.number(record.ms))

    return column


#: by title, what a column shows; numbers are native's over ours, and have a mean
_COLUMNS: dict[str, Callable[[Runs, Notes], str | float | None]] = {
    "native ms": _time(NATIVE),
    "gnnaccel ms": _time(ENABLED),
    "gain": lambda runs, notes: _over(runs, ENABLED, _ms),
    "capture ms": _time(CAPTURE),
    "capture gain": lambda runs, notes: _over(runs, CAPTURE, _ms),
    "in turns": lambda runs, notes: _in_turns(runs, ENABLED),
    "capture in turns": lambda runs, notes: _in_turns(runs, CAPTURE),
    "bound": lambda runs, notes: _over_bound(runs),
    "loop gain": lambda runs, notes: _over(runs, ENABLED, _value("loop_ms")),
    "capture loop": lambda runs, notes: _over(runs, CAPTURE, _value("loop_ms")),
    "cold wall": lambda runs, notes: _over(runs, COLD, _wall),
    "wall": lambda runs, notes: _over(runs, ENABLED, _wall),
    "memory": lambda runs, notes: _over(runs, ENABLED, _value("peak_mib")),
    "loss": lambda runs, notes: _loss(runs),
    "by kernels": lambda runs, notes: _share(runs),
    "steps": lambda runs, notes: _steps(runs),
}
_MEANING = ("gains and ratios are native's over gnnaccel's: above 1, gnnaccel takes less; "
            "loss: largest relative difference in the first five steps; by kernels: layers' calls "
            "that did not run natively")


def section(result: Result) -> text.Section:
    """Columns in which no script has anything are left out."""
    notes: dict[str, str] = {}
    scripts: dict[tuple[str, str], Runs] = {}
    for record in result.find(kind=KIND):
        scripts.setdefault((record.layer, record.device), {})[record.impl] = record
    found = {key: [column(runs, notes) for column in _COLUMNS.values()]
             for key, runs in scripts.items()}
    rows = [[_name(*key), *(one if isinstance(one, str) else text.ratio(one) for one in cells)]
            for key, cells in found.items()]
    if not rows:
        return text.Section("Scripts", (), [])
    gained = sum(any(_COLUMNS[one](runs, notes) is not None for one in ("gain", "in turns"))
                 for runs in scripts.values())
    rows.append([f"geometric mean of {gained}", *map(_mean, zip(*found.values()))])
    columns = ("script", *_COLUMNS)
    shown = [place for place in range(len(columns))
             if any(row[place] != text.MISSING for row in rows)]
    return text.Section("Scripts as they are: a training step, natively and through gnnaccel",
                        tuple(columns[place] for place in shown),
                        [tuple(row[place] for place in shown) for row in rows],
                        (*text.notes_of(notes), *_failures(scripts), _MEANING))


def _mean(cells: Sequence[str | float | None]) -> str:
    ratios = [one for one in cells if one and not isinstance(one, str)]
    return text.ratio(statistics.geometric_mean(ratios) if ratios else None)


def _steps(runs: Runs) -> str:
    native = runs.get(NATIVE) or runs.get(ENABLED)
    return str(native.values["steps"]) if native and native.timing else text.MISSING


def _share(runs: Runs) -> str:
    share = runs[ENABLED].values.get("share") if ENABLED in runs else None
    return text.MISSING if share is None else f"{share:.0%}"


def _loss(runs: Runs) -> str:
    found = [float(runs[part].values["loss_difference"]) for part in (ENABLED, CAPTURE)
             if part in runs and runs[part].values.get("loss_difference") is not None]
    return f"{max(found):.0e}" if found else text.MISSING


def _failures(scripts: dict[tuple[str, str], Runs]) -> list[str]:
    """Those of runs that have no column of their own."""
    return [f"{_name(*key)}, {part}: {runs[part].error}" for key, runs in scripts.items()
            for part in (COLD, TURNS, BOUND) if part in runs and runs[part].error]


def _name(name: str, device: str) -> str:
    return f"{name} (cpu)" if device == "cpu" else name


def _over(runs: Runs, part: str, of: Callable[[Record], float | None]) -> float | None:
    if NATIVE not in runs or part not in runs:
        return None
    found = ratio(of(runs[NATIVE]), of(runs[part]))
    return found if found is None or math.isfinite(found) else None


def _in_turns(runs: Runs, way: str) -> float | None:
    """Native steps over those of a way that took turns with them in one process."""
    if TURNS not in runs or runs[TURNS].error:
        return None
    taken = runs[TURNS].values["turns"]
    return taken[NATIVE]["ms"] / taken[way]["ms"] if way in taken else None


def _over_bound(runs: Runs) -> float | None:
    """Native steps over what is left of them without layers; without a native run, of those that
    took turns."""
    if NATIVE in runs and runs[NATIVE].ms is not None:
        return _over(runs, BOUND, _ms)
    if BOUND not in runs or TURNS not in runs or runs[TURNS].error:
        return None
    return ratio(runs[TURNS].values["turns"][NATIVE]["ms"], runs[BOUND].ms)


def _ms(record: Record) -> float | None:
    return record.ms


def _value(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.values.get(name)


def _wall(record: Record) -> float | None:
    """A run that was stopped by its limit did other work."""
    return None if record.values.get("ended") == "limit" else record.values.get("wall_s")
