"""Measuring and comparing around a script, for the command line: `start` before it, `finish` after
it."""
from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gnnaccel import store
from gnnaccel.errors import GnnaccelError
from gnnaccel.profile.autotune import Tuner
from gnnaccel.profile.compare import Comparer
from gnnaccel.profile.report import Report
from gnnaccel.profile.sinks import rank_path


@dataclass
class Observer:
    """``measured``: None where neither ``--profile`` nor ``--report`` was given; ``path``: of the
    page; ``tables``: whether times are printed; ``tuner``: of ``--autotune``."""

    measured: Report | None
    comparer: Comparer | None
    path: str | None
    tables: bool
    tuner: Tuner | None = None


def start(profile: bool, compare: bool, report: str | None, autotune: bool = False,
          lines: bool = False) -> Observer:
    """Begin to measure (``profile``, or for the page ``report``; ``lines``: by line as well), to
    compare layers at their first calls (``compare``), to time the ways that they can go
    (``autotune``).

    Works before and after ``enable()``. Raises OSError, naming the path, where the page could not
    be written. Where what is timed could not be kept, nothing is timed, and a line on stderr says
    why.
    """
    if report is not None:
        _check_writable(rank_path(report))
    measured = Report(lines=lines) if profile or report is not None else None
    comparer = Comparer() if compare else None
    if measured is not None:
        measured.start()
    if comparer is not None:  # outside of what is measured, so that comparing is not
        comparer.__enter__()
        if measured is not None:
            measured.comparison, comparer.naming = comparer.result, measured.naming
    return Observer(measured, comparer, report, profile, _tuner() if autotune else None)


def finish(observer: Observer) -> None:
    """Stop, print what was found to stderr, each rank on its own, and write the page."""
    if observer.tuner is not None:
        observer.tuner.__exit__(None, None, None)
    if observer.comparer is not None:
        observer.comparer.__exit__(None, None, None)
    if observer.measured is not None:
        observer.measured.stop()
    lines = [] if observer.tuner is None else [f"autotune: {observer.tuner}"]
    if observer.tables:
        lines.append(str(observer.measured))
    elif observer.comparer is not None:
        lines.append(str(observer.comparer.result))
    if observer.path is not None and observer.measured is not None:
        lines.append(f"report: {observer.measured.html(observer.path)}\n")
    for line in lines:
        print(f"{_rank()}{line}", file=sys.stderr, end="")


def _tuner() -> Tuner | None:
    try:
        store.check()
    except (OSError, GnnaccelError) as problem:
        print(f"{_rank()}autotune: nothing is timed, as nothing could be kept ({problem}); "
              "set GNNACCEL_CACHE_DIR to a folder that can be written", file=sys.stderr)
        return None
    return Tuner().__enter__()


def _rank() -> str:
    rank = os.environ.get("RANK", "")
    return f"rank {rank}: " if rank.isdecimal() and int(os.environ.get("WORLD_SIZE", "1")
                                                        or 1) > 1 else ""


def _check_writable(path: Path) -> None:
    if (path.is_dir() or not path.parent.is_dir()
        or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise OSError(f"the report cannot be written to {str(path)!r}: name a file in a folder "
                      "that exists and can be written")
