"""Measuring and comparing around a script, for the command line: `start` before it, `finish` after it."""
from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gnnaccel.profile.compare import Comparer
from gnnaccel.profile.report import Report
from gnnaccel.profile.sinks import rank_path


@dataclass
class Observer:
    """``measured``: None where only comparing was asked for; ``path``: of the page; ``tables``: whether times are printed."""

    measured: Report | None
    comparer: Comparer | None
    path: str | None
    tables: bool


def start(profile: bool, compare: bool, report: str | None) -> Observer:
    """Begin to measure (``profile``, or for the page ``report``) and to compare layers at their first calls (``compare``).

    Works before and after ``enable()``. Raises OSError, naming the path, where the page could not be written later.
    """
    if report is not None:
        _check_writable(rank_path(report))
    measured = Report() if profile or report is not None else None
    comparer = Comparer() if compare else None
    if measured is not None:
        measured.start()
    if comparer is not None:  # outside of what is measured, so that comparing is not
        comparer.__enter__()
        if measured is not None:
            measured.comparison, comparer.naming = comparer.result, measured.naming
    return Observer(measured, comparer, report, profile)


def finish(observer: Observer) -> None:
    """Stop, print what was found to stderr, each rank on its own, and write the page."""
    if observer.comparer is not None:
        observer.comparer.__exit__(None, None, None)
    if observer.measured is not None:
        observer.measured.stop()
    lines = []
    if observer.tables:
        lines.append(str(observer.measured))
    elif observer.comparer is not None:
        lines.append(str(observer.comparer.result))
    if observer.path is not None:
        lines.append(f"report: {observer.measured.html(observer.path)}\n")
    for line in lines:
        print(f"{_rank()}{line}", file=sys.stderr, end="")


def _rank() -> str:
    rank = os.environ.get("RANK", "")
    return f"rank {rank}: " if rank.isdecimal() and int(os.environ.get("WORLD_SIZE", "1") or 1) > 1 else ""


def _check_writable(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OSError(f"the report cannot be written to {str(path)!r}: name a file in a folder that exists and can be written")
