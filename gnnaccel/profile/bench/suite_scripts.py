"""``--suite scripts``: whole scripts as they are, natively and enabled, a process for each run."""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import glob
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gnnaccel import env
from gnnaccel.profile.bench import plan as plans
from gnnaccel.profile.bench import script_figures
from gnnaccel.profile.bench.guard import OUT_OF_MEMORY, Budget
from gnnaccel.profile.bench.result import Record, progress
from gnnaccel.profile.bench.script_child import (BOUND, CAPTURE, COLD, ENABLED, NATIVE, TURNS,
                                                 Spec)
from gnnaccel.profile.bench.script_forks import CannotFork, Forks
from gnnaccel.profile.gain.child import limited

#: in the order of a script's runs
PARTS = (NATIVE, COLD, ENABLED, CAPTURE, TURNS, BOUND)
_ON_A_GPU = (COLD, CAPTURE)  # unless they are named
_QUICK_STEPS, _QUICK_SECONDS = 20, 2.0
_LEAST_S = 5.0  # with less of the budget left no run begins
_TEXT = 300  # letters of an error
_OF_TURNS = 4  # times as many steps: three ways, and what does not count
_OWN_END = 0.9  # of the limit; past it a run stops itself after a step, and keeps what it measured


@dataclasses.dataclass(frozen=True)
class Script:
    """``name``: the file's name, with its folder where two have the same, and the arguments without
    their folders."""

    path: str
    arguments: tuple[str, ...]
    name: str


@dataclasses.dataclass(frozen=True)
class ScriptsPlan:
    """``parts``: those named, None for what the device makes sense of; ``seconds``, ``limit``: as
    the options of these names; ``cpu``: scripts are to see no GPU; ``repeat``: runs of each
    part."""

    scripts: tuple[Script, ...]
    parts: tuple[str, ...] | None
    native: bool
    cpu: bool
    steps: int
    seconds: float
    limit: float
    exact: bool
    before: str | None
    preload: tuple[str, ...]
    seed: int
    repeat: int = 1

    def wanted(self, gpu: bool) -> list[str]:
        """The parts, in the order of PARTS. ``gpu``: whether the script uses one."""
        return [part for part in PARTS if (self.native or part != NATIVE) and (
            part in self.parts if self.parts is not None else
            part not in (TURNS, BOUND) and (gpu or part not in _ON_A_GPU))]


def from_options(options: Any) -> ScriptsPlan:
    """A plan from parsed options. Raises ValueError where there is no script, file or device of
    that name, or a number is not above 0."""
    if not options.scripts:
        raise ValueError("--suite scripts needs --scripts: paths, patterns, or a script with its "
                         'arguments as "train.py --epochs 5"')
    for name in ("steps", "seconds", "limit", "repeat"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            raise ValueError(f"--{name} {getattr(options, name):g} is not above 0")
    preload = plans.flat(options.preload)
    for file in (options.before, *(name for name in preload if name.endswith(".py"))):
        if file and not file.endswith(".py"):
            raise ValueError(f"--before {file} is no .py file")
        if file and not os.path.isfile(file):
            raise ValueError(f"no file {file}")
    named = plans.parts(options, PARTS, PARTS) or None
    steps, seconds = options.steps, options.seconds
    if options.quick:
        steps, seconds = min(steps, _QUICK_STEPS), min(seconds, _QUICK_SECONDS)
    return ScriptsPlan(_scripts(options.scripts), named, options.native,
                       plans.device(options).type == "cpu", steps, seconds, options.limit,
                       options.exact, options.before, tuple(preload), options.seed,
                       options.repeat or 1)


def _scripts(given: list[str]) -> tuple[Script, ...]:
    found = []
    for text in given:
        path, *arguments = shlex.split(text) or [""]
        # a path with spaces is no script with arguments
        if os.path.isfile(text):
            path, arguments = text, []
        paths = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path)))
        if not paths:
            raise ValueError(f"no script {path!r}; --scripts takes paths, patterns as "
                             "'examples/*.py', or a script with its arguments in quotes")
        found += [(one, tuple(arguments)) for one in paths]
    places: dict[str, set[str]] = collections.defaultdict(set)
    for path, _ in found:
        places[os.path.basename(path)].add(os.path.realpath(path))
    return tuple(Script(path, arguments, _name(path, arguments,
                                               len(places[os.path.basename(path)]) > 1))
                 for path, arguments in dict.fromkeys(found))


def _name(path: str, arguments: tuple[str, ...], ambiguous: bool) -> str:
    folder, file = os.path.split(os.path.realpath(path))
    words = [os.path.join(os.path.basename(folder), file) if ambiguous else file,
             *(word.rpartition("/")[2] for word in arguments)]
    return shlex.join(words)


def scripts(plan: ScriptsPlan, budget: Budget) -> Iterator[Record]:
    """The records of each script, and a note of those that the budget did not suffice for."""
    with contextlib.ExitStack() as stack:
        forks = _forks(plan, stack)
        for number, script in enumerate(plan.scripts):
            if budget.left < _LEAST_S:
                yield _left_out(", ".join(one.name for one in plan.scripts[number:]))
                return
            yield from _Runs(script, plan, budget, forks).records()


def _forks(plan: ScriptsPlan, stack: contextlib.ExitStack) -> Forks | None:
    if not plan.preload:
        return None
    try:
        forks = Forks(list(plan.preload), _environment(plan), plan.limit)
    except CannotFork as problem:
        progress(f"bench: {problem}; a new process for each run instead")
        return None
    stack.callback(forks.close)
    return forks


class _Runs:
    """Of one script."""

    def __init__(self, script: Script, plan: ScriptsPlan, budget: Budget, forks: Forks | None):
        self._script, self._plan, self._budget, self._forks = script, plan, budget, forks
        self._native: dict[str, Any] | None = None
        self._turns: dict[str, Any] | None = None
        self._cold = False

    def records(self) -> Iterator[Record]:
        """In the order of the plan's parts; of each the run with the fastest step, where there are
        several, as a process may land on a slow core."""
        kept: dict[str, Record] = {}
        for number in range(self._plan.repeat):
            for record in self._once():
                if record.kind == script_figures.KIND:
                    kept[record.impl] = _faster(kept.get(record.impl), record)
                elif number == 0:
                    kept["note"] = record
            if NATIVE in kept and self._native is None:
                break
        yield from kept.values()

    def _once(self) -> Iterator[Record]:
        """One run of each part. A script that fails natively is not run otherwise, unless the
        memory did not suffice."""
        with tempfile.TemporaryDirectory(prefix="gnnaccel-scripts-") as folder:
            gpu = not self._plan.cpu
            if NATIVE in self._plan.wanted(gpu):
                record = self._one(NATIVE, Path(folder))
                yield record
                if record.error and OUT_OF_MEMORY not in record.error.lower():
                    return
                if self._native is not None:
                    gpu = self._native["gpu"]
            wanted = self._plan.wanted(gpu)
            self._cold = COLD in wanted
            others = [part for part in wanted if part != NATIVE]
            for number, part in enumerate(others):
                if self._budget.left < _LEAST_S:
                    yield _left_out(f"{self._script.name}: {', '.join(others[number:])}")
                    return
                yield self._one(part, Path(folder))

    def _one(self, part: str, folder: Path) -> Record:
        limit = min(self._plan.limit, self._budget.left)
        out = folder / f"{part}.json"
        status, errors = self._run(part, out, folder, limit)
        if out.exists():
            found = json.loads(out.read_text(encoding="utf-8"))
            if part == NATIVE:
                self._native = found
            elif part == TURNS:
                self._turns = found
            return script_figures.record(self._script.name, part, found,
                                         None if part == NATIVE else self._native, self._turns)
        given = "--limit" if limit == self._plan.limit else "what was left of the budget"
        error = f"no end within {limit:.0f} s ({given})" if status is None else _why(status, errors)
        cpu = self._plan.cpu if self._native is None else not self._native["gpu"]
        device = "cpu" if cpu else "cuda"
        return Record(script_figures.KIND, layer=self._script.name, mode="step", impl=part,
                      device=device, error=error)

    def _run(self, part: str, out: Path, folder: Path, limit: float) -> tuple[int | None, str]:
        """The exit status, and what was said on standard error."""
        errors, output, now = folder / f"{part}.err", folder / f"{part}.out", time.time()
        plan, steps, seconds = self._plan, *self._until(part)
        trains = None if self._native is None else self._native["trains"]
        spec = dataclasses.asdict(Spec(part, self._script.path, list(self._script.arguments),
                                       str(out), steps, now + _OWN_END * limit, now, seconds,
                                       plan.seed, plan.exact, plan.before, trains))
        environment = _environment(plan, part, folder / "kernels" if self._cold else None)
        if self._forks is not None:
            said = {"output": str(output), "errors": str(errors)}
            status = self._forks.run(spec, environment, said, limit)
        else:
            with output.open("wb") as first, errors.open("wb") as second:
                status = limited([sys.executable, "-m", "gnnaccel.profile.bench.script_child",
                                  json.dumps(spec)], environment, first, limit, second)
        return status, errors.read_text(errors="replace") if errors.exists() else ""

    def _until(self, part: str) -> tuple[int, float]:
        """Steps and seconds. Runs with gnnaccel make as many steps as the native one made, so that
        wall times and memory are of the same work."""
        if part == TURNS:
            return _OF_TURNS * self._plan.steps, _OF_TURNS * self._plan.seconds
        if self._native is None:
            return self._plan.steps, self._plan.seconds
        if part == BOUND or self._native["ended"] == "script":
            return self._plan.steps, float("inf")
        return self._native["count"], float("inf")


def _faster(one: Record | None, two: Record) -> Record:
    """The record with the shorter step; its ``values`` have the steps of all runs, in order."""
    runs = [] if one is None else one.values.get("runs_ms", [])
    if two.ms is not None:
        runs = [*runs, two.ms]
    if one is None or one.ms is None or two.ms is not None and two.ms < one.ms:
        one = two
    return one if one.ms is None else dataclasses.replace(
        one, values={**one.values, "runs_ms": runs})


def _left_out(what: str) -> Record:
    return Record("note", layer=what, error="not run: the budget was spent")


def _environment(plan: ScriptsPlan, part: str = NATIVE,
                 kernels: Path | None = None) -> dict[str, str]:
    """``kernels``: a kernel cache of the script's own, empty at first, in place of the user's."""
    more = {"PYTHONHASHSEED": str(plan.seed)}
    if plan.cpu:
        more["CUDA_VISIBLE_DEVICES"] = ""
    if kernels is not None:
        more["CUPY_CACHE_DIR"] = str(kernels)
    return env.of_child(part != NATIVE, **more)


def _why(status: int, said: str) -> str:
    """The exception's text, which is what no longer is indented at the end of standard error; where
    nothing was said, the exit status."""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    frames = [place for place, line in enumerate(lines) if line.startswith("  File ")]
    last = lines[-1:]
    if frames:
        last = [line for line in lines[frames[-1]:] if not line.startswith(" ")] or last
    text = " ".join(last)[:_TEXT]
    if status < 0:
        return f"ended by {signal.Signals(-status).name}" + (f": {text}" if text else "")
    return text or f"exit status {status}"
