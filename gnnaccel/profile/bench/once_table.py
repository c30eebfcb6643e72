"""The table of graphs that come once: a layer per row, a size per column."""
from __future__ import annotations

from gnnaccel.profile.bench import text
from gnnaccel.profile.bench.result import Record, Result

LIMIT = 0.95
_MODES = ("forward", "training")


def section(result: Result) -> text.Section:
    """Native's time over gnnaccel's, by the medians; below it the cells that are slower both by the
    median and by the least."""
    found = {(record.layer, text.shape(record), record.mode): record
             for record in result.find(kind="once")}
    layers, sizes = (list(dict.fromkeys(key[part] for key in found)) for part in (0, 1))
    notes: dict[str, str] = {}
    rows = [(layer, *(_pair([found.get((layer, size, mode)) for mode in _MODES], notes)
                      for size in sizes)) for layer in layers]
    return text.Section("Graphs that come once: x native, forward / training", ("layer", *sizes),
                        rows, (*text.notes_of(notes), _slow(found)))


def _pair(records: list[Record | None], notes: dict[str, str]) -> str:
    if not any(records):
        return text.MISSING
    return " / ".join(text.MISSING if record is None else text.failure(record, notes)
                      if record.error else
                      f"{record.values['ratio_median']:.2f}" for record in records)


def _slow(found: dict[tuple[str, str, str], Record]) -> str:
    """The cells below LIMIT by both ratios, the lowest first: one ratio alone is often the noise of
    a few calls."""
    measured = {key: (record.values["ratio_median"], record.values["ratio_least"])
                for key, record in found.items() if not record.error}
    slow = sorted((ratios, key) for key, ratios in measured.items() if max(ratios) < LIMIT)
    if not slow:
        return f"below {LIMIT} by the median and by the least: none of {len(measured)} cells"
    named = (f"{layer}, {size}, {mode}: {median:.3f} and {least:.3f}"
             for (median, least), (layer, size, mode) in slow)
    return (f"below {LIMIT} by the median and by the least: {len(slow)} of {len(measured)} cells, "
            "the lowest first: "
            + "; ".join(named))
