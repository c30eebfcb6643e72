"""One run of a script, in a process of its own: ``python -m gnnaccel.profile.bench.script_child
SPEC``, where SPEC is JSON (`Spec`'s fields, or ``{"preload": [...]}``: then `script_forks.serve`
reads specs and forks a process for each). What was seen goes into the file that the spec names."""
from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

NATIVE, COLD, ENABLED, CAPTURE = "native", "cold", "gnnaccel", "capture"
TURNS, BOUND = "turns", "bound"
BLOCK = 10  # steps of one way, where ways take turns; then the next has its turn
_LOOKED = 10  # steps in which a run for the bound times the layers
BEFORE_LOOK = 3  # steps before these


@dataclasses.dataclass
class Spec:
    """``steps``: after so many the script is stopped, as it is ``seconds`` after its first one, or
    at the end of the first step past ``until`` (unix time). ``before``: a file that is run first.
    ``start``: unix time at which the process began. ``out``: a file. ``trains``: whether an
    optimizer will make steps; None where that is to be seen."""

    mode: str
    script: str
    arguments: list[str]
    out: str
    steps: int
    until: float
    start: float
    seconds: float = math.inf
    seed: int = 0
    exact: bool = False
    before: str | None = None
    trains: bool | None = None


class Run:
    """Watches the script's steps and stops it, by raising SystemExit out of a step."""

    def __init__(self, spec: Spec):
        from gnnaccel.profile.gain.steps import Steps, waited

        self.spec = spec
        self.steps = Steps(self._stepped, waited, self._begun)
        self._first: float | None = None
        self._report: Any = None
        self._turns: Any = None
        self._looked, self._looking = 0, False
        self._written = False

    def begin(self) -> None:
        """Seed, switch dropout off and enable where asked, and watch."""
        from gnnaccel.profile.gain import child

        child.seed(self.spec.seed)
        if self.spec.exact:
            from gnnaccel.profile.bench import script_ways

            script_ways.switch_dropout_off()
        if self.spec.mode != NATIVE:
            self._enable()
        self.steps.install()

    def _enable(self) -> None:
        from gnnaccel import session

        if self.spec.mode == BOUND:
            from gnnaccel.profile.gain.looking import NO_LAYER
            from gnnaccel.profile.report import Report

            session.enable(include=NO_LAYER, capture=False)
            self._report = Report()
        elif self.spec.mode == TURNS:
            from gnnaccel.profile.bench.script_ways import Turns

            self._turns = Turns()
        else:
            # a first run as it is; the steps of the others are not to begin natively
            session.enable(capture=self.spec.mode == CAPTURE,
                           first_use=None if self.spec.mode == COLD else "wait")

    # --- while it runs ---

    def _begun(self) -> None:
        if self._report is not None and self.steps.trains and self.steps.count >= BEFORE_LOOK:
            self._report.start()
            self._looking = True

    def _stepped(self) -> None:
        now = time.time()
        if self._first is None or self.steps.trains and self.steps.count == 1:
            self._first = now
        if self._looking:
            self._report.stop()
            self._looking, self._looked = False, self._looked + 1
        if self._turns is not None and (self.steps.trains or self.spec.trains is False):
            self._turns.stepped()
        why = self._over(now - self._first, now)
        if why:
            self.write(why)
            raise SystemExit(0)

    def _over(self, taken: float, now: float) -> str | None:
        """Why the script is to be stopped after this step. Calls of modules may come before the
        first step, so of a script that may yet train both have to be reached, the number and the
        time."""
        spec, enough = self.spec, self.steps.count >= self.spec.steps
        if now > spec.until:
            return "limit"
        if self._looked >= _LOOKED:
            return "steps"
        if not self.steps.trains and spec.trains is not False:
            return "steps" if enough and taken > spec.seconds and not spec.trains else None
        return "steps" if enough else "seconds" if taken > spec.seconds else None

    # --- what was seen ---

    def write(self, ended: str) -> None:
        """``ended``: what made the run end: the "script" itself, its "steps", "seconds", or the
        "limit"."""
        if self._written:
            return
        wall = time.time() - self.spec.start
        self._written = True
        from gnnaccel.profile.gain import child

        first = None if self._first is None else self._first - self.spec.start
        found = {**child.seen(self.steps), "count": self.steps.count, "ended": ended,
                 "trains": self.steps.trains, "wall_s": wall, "first_step_s": first,
                 "layers_ms": self._layers_ms(),
                 "ways": None if self._turns is None else self._turns.ways}
        partial = Path(self.spec.out + ".partial")
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(self.spec.out)

    def _layers_ms(self) -> float | None:
        """What layers take of a step, forward and backward."""
        if not self._looked:
            return None
        return sum(entry.own_ms for entry in self._report.entries) / self._looked


def run(spec: Spec) -> int:
    """Run the script as ``python`` would; its exit status."""
    from gnnaccel import launch

    launch.hide(__file__)
    if spec.before is not None:
        sys.argv[:] = [spec.script, *spec.arguments]
        load_file(spec.before)
    watched = Run(spec)
    watched.begin()
    status = launch.finished(launch.script, spec.script, spec.arguments)
    if not status:
        watched.write("script")
    return status


def load_file(path: str) -> None:
    """Run a file of Python as a module that nobody asked for by name; ``sys.argv`` stays."""
    name = f"__{Path(path).stem}__"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None  # of a .py file there always are
    sys.modules[name] = module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)


def main() -> int:
    given = json.loads(sys.argv[1])
    if "preload" in given:
        from gnnaccel.profile.bench import script_forks

        given = script_forks.serve(given["preload"])
        if given is None:
            return 0
    return run(Spec(**given))


if __name__ == "__main__":
    sys.exit(main())
