"""What to do next, from what a report found: what native calls would need, edges that are new at
each call, layers that the host's own code would run faster, kernels compiled at first use, and a
script that spends its time elsewhere."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gnnaccel.profile.entries import Entry
from gnnaccel.profile.pieces import duration, some

if TYPE_CHECKING:
    from gnnaccel.profile.report import Report

#: how many are shown first
FIRST = 3
#: reasons whose hints ask for another model, or for another precision of it
CHANGING = frozenset({"GA201", "GA202", "GA203", "GA207", "GA208"})
#: reasons after which there is nothing to do: a faster way was taken, or none is known
_SETTLED = frozenset({"GA209", "GA210", "GA301", "GA302", "GA303"})
_FEW = 4  # calls that show nothing yet


@dataclass(frozen=True)
class Advice:
    """``do``: what to do; ``seen``: why; ``changes``: whether the model or its training would be
    another one; ``ms``: the time in question, by which advice is ranked."""

    do: str
    seen: str
    changes: bool = False
    ms: float = 0.0

    def __str__(self) -> str:
        return f"{self.do}{' (changes the model)' if self.changes else ''}: {self.seen}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def changes_model(code: str, hint: str) -> bool:
    """Whether following the hint of this reason makes it another model."""
    return code in CHANGING and not hint.startswith("see ")


def marked(code: str, hint: str) -> str:
    """The hint, with a remark where it changes the model."""
    return f"{hint} (changes the model)" if changes_model(code, hint) else hint


def advise(report: Report) -> list[Advice]:
    """What to do, what concerns most of the time first."""
    entries = report.entries
    found = [*_native(report.fallbacks()), *_edges(report, entries), *_slower(entries),
             *_measured_slower(report), *_compiling(report)]
    return sorted(found, key=lambda one: -one.ms) + list(_elsewhere(report, entries))


def _native(fallbacks: Iterable[dict[str, Any]]) -> Iterator[Advice]:
    for one in fallbacks:
        if one["code"] not in _SETTLED and one["hint"]:
            yield Advice(one["hint"],
                         f"{some(one['layers'], 3)} ran natively, {duration(one['ms'])} in "
                         f"{_times(one['calls'])}: {one['code']} {one['text']}",
                         changes_model(one["code"], one["hint"]), one["ms"])


def _edges(report: Report, entries: list[Entry]) -> Iterator[Advice]:
    """Layers whose edges are new at nearly each call: of one size, or of many."""
    same: list[str] = []
    once: list[str] = []
    for name, seen in report.edges_seen.items():
        if seen.calls >= _FEW and seen.new > 0.7 * seen.calls:
            (same if len(seen.sizes) <= 2 else once).append(name)
    if same:
        new, calls = _new(report, same)
        yield Advice("make edge_index once, outside of the loop, and pass the same tensor each "
                     "time",
                     f"edge_index is new each step in {some(same, 3)} ({new} of {calls} calls, all "
                     "of the same size), so nothing that is made of it is used again; look for "
                     ".to(device), to_undirected or add_self_loops inside the loop",
                     ms=_taken(entries, same))
    if once:
        new, calls = _new(report, once)
        yield Advice("let batches come again, such as clusters or batches made once before the "
                     "first epoch, or make them larger",
                     f"graphs come once in {some(once, 3)} ({new} of {calls} calls), as sampled "
                     "batches do, and building a structure for one call rarely pays",
                     changes=True, ms=_taken(entries, once))


def _new(report: Report, names: list[str]) -> tuple[int, int]:
    seen = [report.edges_seen[name] for name in names]
    return sum(one.new for one in seen), sum(one.calls for one in seen)


def _taken(entries: list[Entry], names: list[str]) -> float:
    return sum(entry.own_ms for entry in entries if entry.name in names)


def _slower(entries: list[Entry]) -> Iterator[Advice]:
    """Layers that were taken over though the host's own code is estimated to be faster."""
    for entry in entries:
        ours, native = entry.cost_us, entry.native_us
        if entry.route != "native" and ours and native and native < ours:
            yield Advice(f"leave {entry.name} native: leave out when='supported', or "
                         f"gnnaccel.exclude({entry.layer})",
                         f"{entry.kernel} is estimated at {duration(ours / 1e3)} a call, the "
                         f"host's own code at {duration(native / 1e3)}",
                         ms=(ours - native) / 1e3 * entry.calls)


def _measured_slower(report: Report) -> Iterator[Advice]:
    """The same where --compare timed both."""
    for one in report.comparison.layers:
        if one.native_ms and one.ours_ms and one.ours_ms > 1.1 * one.native_ms:
            yield Advice(f"gnnaccel.exclude({one.layer}), or run with --autotune",
                         f"{one.who} took {duration(one.ours_ms)} by {one.kernel}, by the host's "
                         f"own code {duration(one.native_ms)}",
                         ms=one.ours_ms - one.native_ms)


def _compiling(report: Report) -> Iterator[Advice]:
    seconds, kernels = report.compiled
    if kernels and seconds > 0.1 * report.seconds:
        yield Advice("run it again, or compile ahead: python -m gnnaccel warmup --log run.jsonl",
                     f"{kernels} kernels were compiled or loaded at first use, which took "
                     f"{seconds:.1f} of {report.seconds:.1f} s; compiled kernels are kept",
                     ms=seconds * 1e3)


def _elsewhere(report: Report, entries: list[Entry]) -> Iterator[Advice]:
    """Where most of the time is not in layers, nothing done to layers will show."""
    total = sum(entry.own_ms for entry in entries)
    if entries and report.seconds > 0.5 and total < 300 * report.seconds:
        yield Advice("look at data loading, sampling, the optimizer and evaluation, for example "
                     "with torch.profiler",
                     f"layers take {total / report.seconds / 1e3:.0%} of the time, which is all "
                     "that gnnaccel can make shorter")


def _times(calls: int) -> str:
    return f"{calls} call{'' if calls == 1 else 's'}"
