"""Which scripts ``--suite scripts`` runs, and how."""
from __future__ import annotations

import collections
import dataclasses
import glob
import os
import shlex
from typing import Any

from gnnaccel.profile.bench import plan
from gnnaccel.profile.bench.script_child import BOUND, CAPTURE, COLD, ENABLED, NATIVE, TURNS

#: in the order of a script's runs
PARTS = (NATIVE, COLD, ENABLED, CAPTURE, TURNS, BOUND)
_ON_A_GPU = (COLD, CAPTURE)  # unless they are named
_QUICK_STEPS, _QUICK_SECONDS = 20, 2.0


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
    preload = plan.flat(options.preload)
    for file in (options.before, *(name for name in preload if name.endswith(".py"))):
        if file and not file.endswith(".py"):
            raise ValueError(f"--before {file} is no .py file")
        if file and not os.path.isfile(file):
            raise ValueError(f"no file {file}")
    named = plan.parts(options, PARTS, PARTS) or None
    steps, seconds = options.steps, options.seconds
    if options.quick:
        steps, seconds = min(steps, _QUICK_STEPS), min(seconds, _QUICK_SECONDS)
    return ScriptsPlan(_scripts(options.scripts), named, options.native,
                       plan.device(options).type == "cpu", steps, seconds, options.limit,
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
