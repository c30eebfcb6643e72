"""Random classes as users write them, each with a history of calls.

    python -m tests.oracle.programs 13 emulated      a case, without what its alarm does not take

A program (`programs_classes`) is written to a file and imported, then called four to ten times.
Before each call a few things happen (`programs_calls`), each with random choices of its own. Any
statement of the program, and any event, can be left out, and all others stay.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from . import earlier
from . import programs_calls as calls
from . import programs_results as results
from .backends import Backend, off
from .graphs import IN, Draw
from .judge import CONDITIONED, Results, beyond, differing, distances, near
from .programs_classes import Program, program
from .table import WRITTEN, attempt

FLOOR = 1e-5
LOW_FLOOR = 5e-2  # where autocast was on
NUDGES = 5  # runs of the host over numbers that are one rounding away
FACTOR = 4  # times what these differ by
_number = itertools.count()


def imported(text: str) -> ModuleType:
    """A module of this text, from a file of its own."""
    name = f"oracle_program_{next(_number)}"
    path = Path(_folder().name) / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="oracle-programs-")


@dataclass(frozen=True)
class Case:
    """A program with its history. ``without``: what is left out."""

    seed: int
    module: ModuleType
    made: Program
    device: torch.device
    without: frozenset = frozenset()


def history(case: Case, on: Callable, **options) -> Iterator[tuple[Results, str, str | None]]:
    """After each call what it gave, what happened before it, and what it raised."""
    seed, without = case.seed, case.without
    world = calls.World(
        lambda: case.module.Net(IN, case.made.width), case.made, seed, case.device, **options
    )
    r = random.Random(f"history {seed}")
    for step in range(r.randint(4, 10)):
        drawn = [(r.choice(calls.EVENTS), r.random()) for _ in range(r.choice((0, 1, 1, 2, 3)))]
        torch.manual_seed(seed * 100 + step)
        said: list[str] = []
        for place, (event, number) in enumerate(drawn if step else ()):
            if (step, place) not in without:
                words, problem = attempt(lambda e=event, n=number: e(world, random.Random(n)))
                said.append(f"{(step, place)} {event.__name__} {problem or words or ''}".strip())
        world.moved()
        if (step, -1) in without:
            continue
        torch.manual_seed(seed * 100 + step)
        with on():
            found, problem = attempt(lambda: results.call(world))
        words, world.cast = "; ".join(said) + " low" * world.cast, False
        yield found or {}, words, problem


def check(
    seed: int, backend: Backend, only: str = "", without: frozenset = frozenset()
) -> tuple[str, str | None, int]:
    """What was run, what is wrong with it, and how many calls were compared."""
    made = program(Draw(f"program {seed}"), frozenset(w for w in without if isinstance(w, int)))
    if only not in made.text:
        return "a program", None, 0
    if random.Random(f"forget {seed}").random() < 0.5:
        earlier.forget()
    module = imported(made.text)
    case = Case(seed, module, made, backend.device, without)
    if backend.device.type != "cpu" and any(
        (refusal or "").startswith("IndexError")
        for _, _, refusal in history(Case(seed, module, made, torch.device("cpu"), without), off)
    ):
        sys.modules.pop(module.__name__, None)
        return "a program", "refused", 0  # a device fails for good where a CPU raises
    try:
        with backend.splitting(seed), backend.by_reference(seed):
            wrong, said = _compared(case, backend)
    finally:
        sys.modules.pop(case.module.__name__, None)
    if wrong not in (None, "refused"):
        head = CONDITIONED if wrong.startswith(CONDITIONED) else ""
        wrong = f"{head}call {len(said) - 1}: {wrong[len(head) :]} | {'; '.join(said)}"
    return "a program", wrong, len(said)


def _compared(case: Case, backend: Backend) -> tuple[str | None, list[str]]:
    """What is wrong, and what happened before each call up to that."""
    said: list[str] = []
    runs = zip(history(case, off), history(case, backend.on))
    for (theirs, words, refusal), (got, _, problem) in runs:
        backend.finish()
        said.append(words)
        wrong = _wrong(case, len(said) - 1, (got, problem), (theirs, refusal), "low" in words)
        if wrong is not None or refusal:
            return wrong or ("refused" if len(said) == 1 else None), said
    return None, said


def _wrong(case: Case, step: int, ours: tuple, host: tuple, low: bool) -> str | None:
    """What is wrong with a call. ``low``: it is under autocast."""
    (got, problem), (theirs, refusal) = ours, host
    if problem or refusal:
        kinds = tuple((text or "").split(":")[0] for text in (problem, refusal))
        if kinds[0] == kinds[1] or kinds == ("GraphError", "IndexError"):
            return None
        if refusal and WRITTEN in refusal and not problem:
            return None  # what the host needs for backward, kernels do not always
        return f"raises {problem}, and not {refusal}"
    # a result may be a view here and none there, which has no hook
    alone_hooks = {k for k in got.keys() ^ theirs.keys() if k.startswith("hook ")}
    got, theirs = ({k: v for k, v in one.items() if k not in alone_hooks} for one in (got, theirs))
    if got.keys() != theirs.keys():
        alone = [sorted(a.keys() - b.keys()) for a, b in ((got, theirs), (theirs, got))]
        return f"gives {alone[0]}, and not {alone[1]}"
    found, floor = differing(got, theirs), LOW_FLOOR if low else FLOOR
    if found is None and near(got, theirs, floor):
        return None
    exact = _step(history(case, off, exact=True), step)
    truth = exact if exact.keys() == theirs.keys() else theirs
    if found is None and beyond([(got, theirs, truth)], floor) is None:
        return None
    beside = [_step(history(case, off, nudge=n), step) for n in range(NUDGES)]
    beside = [one for one in beside if one.keys() == theirs.keys()]
    if found is not None:
        return (CONDITIONED if any(differing(n, theirs) for n in beside) else "") + found.text
    return _beyond((got, theirs, truth), beside, floor)


def _beyond(draw: tuple[Results, ...], beside: list[Results], floor: float) -> str | None:
    """The result that is off by more than the rule allows, and whether rounding explains that."""
    found = beyond([(*draw, *beside)], floor)
    if found is None:
        return None
    gaps, apart = distances(draw[0], draw[1]), [distances(n, draw[1]) for n in beside]
    spread = {k: max((one.get(k, 0.0) for one in apart), default=0.0) for k in gaps}
    rounding = all(gaps[k] <= FACTOR * spread[k] + floor for k in gaps)
    return (CONDITIONED if rounding else "") + found.text


def _step(run: Iterator, step: int) -> Results:
    found = next(itertools.islice(run, step, None), ({},))
    return found[0]


def shrunk(seed: int, backend: Backend) -> str | None:
    """The same finding, of a program and a history without what it does not take."""
    _, wrong, _ = check(seed, backend)
    if wrong is None:
        return None
    without: frozenset = frozenset()
    places = [(s, p) for s in range(10) for p in (-1, 0, 1, 2)] + [*range(40), 100, 101, 200]
    for at in places:
        _, again, _ = check(seed, backend, "", without | {at})
        if again not in (None, "refused") and not again.startswith(CONDITIONED):
            without, wrong = without | {at}, again
    made = program(Draw(f"program {seed}"), frozenset(w for w in without if isinstance(w, int)))
    head, _, rest = made.text.partition("        self.kept = self.kept_too = None\n")
    options = head[head.index("super().__init__(", head.index("class Layer")) :].split("\n")[0]
    return f"{wrong}\n{options}\n{rest}"


if __name__ == "__main__":
    one = Backend(sys.argv[2])
    with one.session():
        print(shrunk(int(sys.argv[1]), one))
