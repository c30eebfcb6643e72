"""Random classes as users write them, each with a history of calls.

    python -m tests.oracle.programs 13 emulated      a case, without what its alarm does not take

A program (`programs_classes`) is written to a file and imported, then called four to ten times.
Before each call a few things happen (`programs_calls`), each with random choices of its own. Any
statement of the program, and any event, can be left out, and all others stay.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from . import earlier, programs_calls as calls
from .backends import Backend, off
from .graphs import IN, Draw
from .judge import CONDITIONED, Results, beyond, differing, distances
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


def history(seed: int, module: ModuleType, made: Program, on, without: frozenset = frozenset(),
            **options) -> Iterator[tuple[Results, str, str | None]]:
    """After each call what it gave, what happened before it, and what it raised."""
    world = calls.World(lambda: module.Net(IN, made.width), made, seed, **options)
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
            found, problem = attempt(lambda: calls.call(world))
        words, world.cast = "; ".join(said) + " low" * world.cast, False
        yield found or {}, words, problem


def check(seed: int, backend: Backend, only: str = "",
          without: frozenset = frozenset()) -> tuple[str, str | None, int]:
    """What was run, what is wrong with it, and how many calls were compared."""
    made = program(Draw(f"program {seed}"), frozenset(w for w in without if isinstance(w, int)))
    if only not in made.text:
        return "a program", None, 0
    if random.Random(f"forget {seed}").random() < 0.5:
        earlier.forget()
    module, said, count, low = imported(made.text), [], 0, False
    patches = contextlib.ExitStack()
    try:
        patches.enter_context(backend.splitting(seed))
        host = history(seed, module, made, off, without)
        ours = history(seed, module, made, backend.on, without)
        for (theirs, words, refusal), (got, _, problem) in zip(host, ours):
            said.append(f"call {count}: {words}")
            low, count = words.endswith("low"), count + 1
            wrong = _wrong(seed, module, made, without, count - 1, (got, problem), (theirs, refusal), low)
            if wrong is not None:
                head = CONDITIONED if wrong.startswith(CONDITIONED) else ""
                return "a program", f"{head}call {count - 1}: {wrong[len(head):]} | {said}", count
            if refusal:
                break
    finally:
        backend.finish()
        patches.close()
        sys.modules.pop(module.__name__, None)
    return "a program", None if count and not refusal or count > 1 else "refused", count


def _wrong(seed: int, module: ModuleType, made: Program, without: frozenset, step: int,
           ours: tuple, host: tuple, low: bool) -> str | None:
    (got, problem), (theirs, refusal) = ours, host
    if problem or refusal:
        kinds = tuple((text or "").split(":")[0] for text in (problem, refusal))
        if kinds[0] == kinds[1] or kinds == ("GraphError", "IndexError"):
            return None
        if refusal and WRITTEN in refusal and not problem:
            return None  # what the host needs for backward, kernels do not always
        return f"raises {problem}, and not {refusal}"
    if got.keys() != theirs.keys():
        return f"gives {sorted(got.keys() - theirs.keys())}, and not {sorted(theirs.keys() - got.keys())}"
    found, floor = differing(got, theirs), LOW_FLOOR if low else FLOOR
    if found is None and all(gap <= floor for gap in distances(got, theirs).values()):
        return None
    exact = _step(history(seed, module, made, off, without, exact=True), step)
    truth = exact if exact.keys() == theirs.keys() else theirs
    if found is None and beyond([(got, theirs, truth)], floor) is None:
        return None
    near = [_step(history(seed, module, made, off, without, nudge=n), step) for n in range(NUDGES)]
    near = [one for one in near if one.keys() == theirs.keys()]
    if found is not None:
        return (CONDITIONED if any(differing(n, theirs) for n in near) else "") + found.text
    found = beyond([(got, theirs, truth, *near)], floor)
    if found is not None:
        gaps, apart = distances(got, theirs), [distances(n, theirs) for n in near]
        spread = {k: max((one.get(k, 0.0) for one in apart), default=0.0) for k in gaps}
        if all(gaps[k] <= FACTOR * spread[k] + floor for k in gaps):
            return CONDITIONED + found.text
    return found and found.text


def _step(run: Iterator, step: int) -> Results:
    found = next(itertools.islice(run, step, None), ({},))
    return found[0]


def shrunk(seed: int, backend: Backend) -> str | None:
    """The same finding of a program and a history from which all is left out that it does not take."""
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
    options = head[head.index("super().__init__(", head.index("class Layer")):].split("\n")[0]
    return f"{wrong}\n{options}\n{rest}"


if __name__ == "__main__":
    one = Backend(sys.argv[2])
    with one.session():
        print(shrunk(int(sys.argv[1]), one))
