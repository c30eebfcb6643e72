"""One run of the script, in a process of its own: ``python -m gnnaccel.profile.gain.child SPEC``,
where SPEC is JSON. Writes what it saw to the file that SPEC names, and ends the script when its
time is over. And how such processes are ended in time, with everything that they started."""
from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NATIVE, ENABLED, CAPTURE, LOOK = "native", "enabled", "capture", "look"
#: steps after which the layers are looked at, with the number of steps of a look with gnnaccel, and
#: of as many native ones after these; the last look that came to its end counts
_LOOKS = {5: 3, 30: 10, 120: 20}


class Run:
    """``spec``: ``mode``, ``seconds`` of steps, ``seed``, ``out`` (a file), ``kind`` and ``target``
    as `runner.split` has them, ``start`` (unix time at which the process was started)."""

    def __init__(self, spec: dict[str, Any]):
        from gnnaccel.profile.gain.steps import Steps

        self.spec = spec
        self.steps = Steps(self._stepped)
        self.look: Any = None  # the one that came to its end
        self._looking: Any = None
        self._first: float | None = None

    def begin(self) -> None:
        """Seed, enable where asked, and watch."""
        seed(self.spec["seed"])
        if self.spec["mode"] != NATIVE:
            from gnnaccel import session

            session.enable(capture=self.spec["mode"] == CAPTURE or None, first_use="wait")
        self.steps.install()

    def _stepped(self) -> None:
        if self._first is None:
            self._first = time.time()
        looked = self.spec["mode"] == LOOK and self._look(self.steps.count)
        if looked or time.time() - self._first > self.spec["seconds"] and self._enough():
            self.write(ended=False)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # what the script would do on its way out is not run

    def _look(self, count: int) -> bool:
        """Begin and end looks; whether the last one is over."""
        from gnnaccel.profile.gain.looking import Look

        for first, steps in _LOOKS.items():
            if count == first:
                self._looking = Look()
                self._looking.begin(native=False)
            elif count == first + steps:
                self._looking.end()
                self._looking.begin(native=True)
            elif count == first + 2 * steps:
                self._looking.end()
                self.look, self._looking = self._looking, None
        return count == first + 2 * steps

    def _enough(self) -> bool:
        return (self.look is not None and self._looking is None if self.spec["mode"] == LOOK
                else self.steps.count >= 8)

    def write(self, ended: bool) -> None:
        """``ended``: by itself."""
        memory = peak_memory()
        if self._looking is not None:
            self._looking.end()
        found = {**seen(self.steps), "ended": ended, "memory_bytes": memory,
                 "startup": None if self._first is None else self._first - self.spec["start"],
                 "look": None if self.look is None else self.look.as_dict()}
        Path(self.spec["out"]).write_text(json.dumps(found), encoding="utf-8")


def main() -> int:
    """Run the script as ``python`` would; its exit status."""
    from gnnaccel import launch

    spec = json.loads(sys.argv[1])
    launch.hide(__file__)
    run = Run(spec)
    run.begin()
    name, *arguments = spec["target"]
    ways = {"-m": launch.module, "-c": launch.command}
    status = launch.finished(ways.get(spec["kind"], launch.script), name, arguments)
    if not status:
        run.write(ended=True)
    return status


def seen(steps: Any) -> dict[str, Any]:
    """What a run comes to, as plain data: of its `Steps`, and of this process."""
    import torch

    from gnnaccel import session
    from gnnaccel.cuda.runtime import driver
    from gnnaccel.dispatch.observe import counters

    return {**steps.as_dict(), "memory_bytes": peak_memory(), "gpu": torch.cuda.is_initialized(),
            "stats": counters.stats(), "compiled": driver.compile_seconds(),
            "captured": session.status()["captured"]}


def seed(number: int) -> None:
    """Of random, torch and numpy."""
    import torch

    random.seed(number)
    torch.manual_seed(number)
    try:
        import numpy
    except ImportError:
        return  # nothing to seed
    numpy.random.seed(number)


def peak_memory() -> int | None:
    """The peak, in bytes: of the GPU's memory in use, without one of this process."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None  # no Linux
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


# --- from outside ---------------------------------------------------------------------------------

def limited(command: list[str], environment: dict[str, str], output: Any, limit: float,
            errors: Any = subprocess.STDOUT) -> int | None:
    """The exit status; None where it was ended after ``limit`` seconds. What it started goes with
    it. ``output``: a file, or None to let all through; ``errors``: a file for what goes to standard
    error, with ``output`` by default."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                               stderr=None if output is None else errors, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_group(process.pid)
        process.wait()


def kill_group(leader: int) -> None:
    """End the processes of the group that ``leader`` leads, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
