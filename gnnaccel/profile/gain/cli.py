"""``python -m gnnaccel gain script.py``: the script natively and enabled, each in processes of its
own, and one verdict."""
from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnaccel import env
from gnnaccel.profile.gain.child import CAPTURE, ENABLED, LOOK, NATIVE, limited

DONE, FAILED, USAGE, NOTHING, TIMEOUT, BROKEN, STOPPED = 0, 1, 2, 3, 4, 5, 130
_FEWEST = 5  # steps that are timed, in a run
_SKIPPED = 3  # first steps, in which kernels are compiled and structures built
_TAIL = 25  # lines of the script's output that are shown when it fails
_EPILOG = """\
Exit status:
  0    there is a verdict, whatever it says
  1    the script fails natively
  2    wrong usage, or no such script
  3    nothing to measure: no optimizer and no call of a module, or too few steps
  4    no verdict within the time limit
  5    the script fails with gnnaccel enabled, and not natively
  130  interrupted
"""


class GainError(Exception):
    """No verdict; ``status``: the exit status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "gain", help="run a script natively and enabled, and say what it gains", epilog=_EPILOG,
        usage="python -m gnnaccel gain [options] (script.py | -m module | -c code) [arguments]\n"
              "       python -m gnnaccel gain [options] --list FILE",
        description="Runs the script several times for a few seconds each, natively and enabled in "
                    "turn, with the same seeds, and compares.", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=run)
    parser.add_argument("--seconds", type=_positive, default=60.0, metavar="S",
                        help="how long, in all, about (default 60); each run also has to start")
    parser.add_argument("--limit", type=_positive, default=300.0, metavar="S",
                        help="end a run that takes longer than this (default 300)")
    parser.add_argument("--seed", type=int, default=0,
                        help="of torch, numpy and random (default 0)")
    parser.add_argument("--show-output", action="store_true",
                        help="let the script's output through")
    parser.add_argument("--json", metavar="FILE.json", help="write the result as data, too")
    parser.add_argument("--list", metavar="FILE",
                        help="measure many scripts, each line of FILE being one with its arguments,"
                             " and print a table; --seconds is for each")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module",
                        help="run a module")
    parser.add_argument("-c", dest="code", nargs=argparse.REMAINDER, metavar="code",
                        help="run code")
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Measure and print the verdict; the exit status."""
    from gnnaccel.profile.gain.looking import summary

    kind, target = (("-m", options.module) if options.module else
                    ("-c", options.code) if options.code else ("", options.script))
    if options.list:
        return (_complain("name scripts either in the list or after the options", USAGE) if target
                else _several(options))
    if not target:
        return _complain("name a script, -m module or -c code", USAGE)
    try:
        runs = Runs(kind, target, options).all()
        found = summary(runs)
        if options.json:
            Path(options.json).write_text(json.dumps(found.as_dict(), indent=1) + "\n",
                                          encoding="utf-8")
    except GainError as problem:
        return _complain(str(problem), problem.status)
    except OSError as problem:
        return _complain(str(problem), USAGE)
    except KeyboardInterrupt:
        return _complain("interrupted", STOPPED)
    print(found, end="")
    return DONE


def _several(options: argparse.Namespace) -> int:
    from gnnaccel.profile.gain import several
    from gnnaccel.profile.gain.looking import summary

    worst = [DONE]

    def measure(words: list[str]) -> Any:
        try:
            return summary(Runs("", words, options).all())
        except GainError as problem:
            print(f"gain: {problem}", file=sys.stderr)
            worst.append(problem.status)
            return str(problem).splitlines()[-1]

    try:
        found = several.measured(several.listed(options.list), measure)
        several.written(found, options)
    except (OSError, ValueError) as problem:
        return _complain(str(problem), USAGE)
    except KeyboardInterrupt:
        return _complain("interrupted", STOPPED)
    print(several.text(found), end="")
    return max(worst)


@dataclass
class Found:
    """What the runs wrote, by mode, in the order they were made."""

    native: list[dict[str, Any]] = field(default_factory=list)
    enabled: list[dict[str, Any]] = field(default_factory=list)
    captured: dict[str, Any] | None = None
    look: dict[str, Any] | None = None


class Runs:
    """Makes the runs, one after the other."""

    def __init__(self, kind: str, target: list[str], options: argparse.Namespace):
        self._kind, self._target, self._options = kind, target, options

    def all(self) -> Found:
        """Native, enabled, enabled, native, and a look at the layers; one of each where the script
        takes long to start. On a GPU also one run with ``capture=True``. GainError where there can
        be no verdict."""
        total, began, found = self._options.seconds, time.monotonic(), Found()
        found.native.append(self._one(NATIVE, total / 6))
        startup = found.native[0]["startup"]
        left = total - (time.monotonic() - began)
        modes = [ENABLED, ENABLED, NATIVE] if 4 * startup < 0.6 * left else [ENABLED]
        seconds = max(total / 20, (left - (len(modes) + 1) * startup) / (len(modes) + 1))
        for mode in modes:
            (found.native if mode == NATIVE else found.enabled).append(self._one(mode, seconds))
        # parts of the verdict that it can do without
        if found.enabled[0].get("gpu"):
            with contextlib.suppress(GainError):
                found.captured = self._one(CAPTURE, seconds)
        with contextlib.suppress(GainError):
            found.look = self._one(LOOK, seconds)
        return found

    def _one(self, mode: str, seconds: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="gnnaccel-gain-") as folder:
            out, said = Path(folder, "out.json"), Path(folder, "said.txt")
            spec = dict(mode=mode, seconds=seconds, seed=self._options.seed, out=str(out),
                        kind=self._kind, target=self._target, start=time.time())
            with said.open("wb") as file:
                status = limited([sys.executable, "-m", "gnnaccel.profile.gain.child",
                                  json.dumps(spec)],
                                 env.of_child(mode != NATIVE,
                                              PYTHONHASHSEED=str(self._options.seed)),
                                 None if self._options.show_output else file,
                                 self._options.limit)
            tail = "\n".join(said.read_text(errors="replace").splitlines()[-_TAIL:])
            written = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
        return self._checked(mode, status, written, tail)

    def _checked(self, mode: str, status: int | None, written: dict[str, Any] | None,
                 tail: str) -> dict[str, Any]:
        how = "natively" if mode == NATIVE else "with gnnaccel enabled"
        if status is None:
            raise GainError(f"run {how}, the script made too few steps within "
                            f"{self._options.limit:g} s and was ended; give it more by --limit, or "
                            "make it smaller", TIMEOUT)
        if written is None:
            wrong = (f"{tail}\n" if tail else "") + f"the script fails {how} (exit status {status})"
            if mode != NATIVE:
                raise GainError(f"{wrong}, and not natively; please report this, and run it by "
                                "python -m gnnaccel --compare", BROKEN)
            if status == 2 and tail.startswith("can't open"):  # what python says of no script
                raise GainError(tail, USAGE)
            raise GainError(f"{wrong}; gain needs a script that runs", FAILED)
        if not written["ms"]:
            raise GainError("no optimizer made a step in the script's own process and no module "
                            "was called, so there is nothing to measure; steps in processes that "
                            "the script starts are not seen, and neither are replays of a CUDA "
                            "graph", NOTHING)
        written["ms"] = _counted(written["ms"])
        written["loop_ms"] = _counted(written["loop_ms"])
        if len(written["ms"]) < _FEWEST:
            raise GainError(f"the script ended after {len(written['ms'])} steps (a "
                            f"{written['what']} each) that count; at least {_FEWEST} are needed "
                            f"after the first {_SKIPPED}: let it run longer, by more epochs or "
                            "smaller batches", NOTHING)
        return written


def _counted(ms: list[float | None]) -> list[float]:
    return [one for one in ms[_SKIPPED:] if one is not None]


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _complain(text: str, status: int) -> int:
    print(f"gain: {text}", file=sys.stderr)
    return status
