"""One process of the oracle: runs case after case, and says line by line which."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

AGAIN = (
    3  # exit status: what was left of this process cannot be used; the next case wants a new one
)


def part(name: str, backend) -> Callable | None:
    """A part's ``check(seed, name, mode)``; None where it cannot run.

    It gives what ran, what is wrong, and the number of checks.
    """
    if name == "table":
        from . import table

        return lambda seed, only, mode: (*table.check(seed, backend, only, mode), 1)
    if name == "dgl":
        from . import dgl_layers

        return dgl_layers.check_with(backend) if dgl_layers.applicable(backend) else None
    if name == "histories":
        from . import histories

        return lambda seed, only, mode: histories.check(seed, backend, only)
    if name in ("scripts", "programs"):
        from . import programs, scripts

        check = programs.check if name == "programs" else scripts.check
        return lambda seed, only, mode: check(seed, backend, only)
    if name == "captures":
        from . import captures

        return ((lambda seed, only, mode: captures.check(seed, backend, only))
                if captures.applicable(backend) else None)
    if name == "messages":
        from . import messages

        return lambda seed, only, mode: (*messages.check(seed, backend, mode), 1)
    return _metagraphs(backend)


def _metagraphs(backend) -> Callable | None:
    try:
        from . import metagraphs
    except ImportError:
        return None
    metagraphs.DEVICE = backend.device
    if not metagraphs.applicable():
        return None
    return lambda seed, only, mode: ("metagraph", metagraphs.check(seed, backend.on), 1)


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def work(options) -> int:
    """Run the cases ``first``, ``first + step``, ... while time lasts. The status to exit with."""
    from .backends import Backend

    warnings.filterwarnings("ignore")
    backend = Backend(options.backend)
    # Whatever libraries print must not come between the lines.
    out, sys.stdout = sys.stdout, sys.stderr
    with contextlib.redirect_stderr(sys.stderr), backend.session():
        check = part(options.part, backend)
        sys.stdout = out
        if check is None:
            say(skipped=options.part)
            return 0
        end, seed = time.monotonic() + options.seconds, options.first
        for _ in range(options.cases):
            if time.monotonic() > end:
                break
            say(begin=seed)
            again = one(check, seed, options)
            seed += options.step
            if again:
                return AGAIN
    return 0


def one(check: Callable, seed: int, options) -> bool:
    """Run one case and say how it went. Whether this process can go no further."""
    start = time.monotonic()
    dead = False
    try:
        what, wrong, checks = check(seed, options.only, options.mode)
    except Exception as problem:
        what, checks = options.only or options.part, 1
        dead = "CUDA error" in str(problem)
        wrong = "the oracle itself: " + traceback.format_exc()[-700:]
    if wrong == "start again":
        wrong, dead = "refused", True
    say(end=seed, what=what, wrong=wrong, checks=checks, seconds=round(time.monotonic() - start, 3))
    return dead
