"""Cells of tables as text: numbers, ratios, failures. Nothing but the standard library, as for
every report."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gnnaccel.profile.bench import metrics
from gnnaccel.profile.bench.result import Record

MISSING = "-"


@dataclasses.dataclass(frozen=True)
class Section:
    """One table. ``notes`` stand below it."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def small(value: float | None) -> str:
    """Two significant digits and an exponent."""
    return MISSING if value is None else f"{value:.1e}"


def ratio(value: float | None) -> str:
    """A number with an x behind it."""
    return MISSING if value is None else f"{number(value)}x"


def time(cell: metrics.Cell, impl: str, notes: dict[str, str]) -> str:
    """Milliseconds, or why there are none. A time from one call alone says so."""
    record = cell.by.get(impl)
    if record is None:
        return MISSING
    if record.error:
        return failure(record, notes)
    return number(record.ms) + (" (1 call)" if record.timing and record.timing.get("batches") == 1
                                else "")


def failure(record: Record, notes: dict[str, str]) -> str:
    """A short error as it is, for a long one a mark whose full text goes into ``notes``."""
    error = record.error or ""
    return error if len(error) <= 16 else f"failed [{notes.setdefault(error, str(len(notes) + 1))}]"


def notes_of(notes: dict[str, str]) -> tuple[str, ...]:
    """What `failure` collected, as a section's notes."""
    return tuple(f"[{mark}] {said}" for said, mark in notes.items())


def shape(of: metrics.Cell | Record) -> str:
    """The shape's name, and that it was measured on a CPU."""
    return f"{of.shape} (cpu)" if of.device == "cpu" else of.shape


def spread(cell: metrics.Cell) -> str:
    """Where the middle of gnnaccel's times lies."""
    record = cell.by.get("gnnaccel")
    timed = record.timing if record else None
    return f"{number(timed['p10_ms'])} to {number(timed['p90_ms'])}" if timed else MISSING


def difference(cell: metrics.Cell) -> str:
    """The largest relative L2 difference between native's and gnnaccel's output and gradient."""
    if cell.check is None:
        return MISSING
    return cell.check.error or MISSING if cell.difference is None else small(cell.difference)
