"""`report`: where the time went, by layer and kernel, and what native calls cost."""
from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Any

import torch

from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.observe import counters, exchanges, watch
from gnnaccel.dispatch.observe.records import Record
from gnnaccel.dispatch.observe.watch import Run, Visit
from gnnaccel.profile.advice import FIRST, Advice, advise, marked
from gnnaccel.profile.compare import Comparison
from gnnaccel.profile.entries import EdgesSeen, Entry, Line, Lines, describe
from gnnaccel.profile.exchanged import Exchanges
from gnnaccel.profile.frames import Frame, Frames, Naming, who
from gnnaccel.profile.sides import device_of, named_tensors
from gnnaccel.profile.sinks import rank_path
from gnnaccel.profile.tables import milliseconds, size, table
from gnnaccel.profile.timeline import Backward, Interval, Timeline, sequence

# first calls of an entry whose memory is looked at; asking takes as long as a short kernel's launch
_MEMORY_CALLS = 4
_active: list[Report] = []


def report(nvtx: bool = False, lines: bool = False) -> Report:
    """Where time goes. ``with gnnaccel.report() as found: train()`` measures a block;
    ``print(found)``, ``found.as_dicts()`` and ``found.html("report.html")`` show it. Inside such a
    block, or in a script run with ``--profile``, ``report()`` is what is being measured, as it
    stands.

    ``nvtx``: each call and each exchange is an NVTX range as well, named after its layer, for
    Nsight. ``lines``: time
    is added up by the lines that call layers, too. Raises ValueError where torch has no NVTX.
    """
    return _active[-1] if _active else Report(nvtx, lines)


class Report:
    """A measurement: a context manager. ``entries`` by layer and way of running; ``comparison``:
    what `compare` found, if it ran along; ``lines``: by the line that called, where asked for;
    ``exchanged``: what layers over a part exchanged with other processes.
    Times on a GPU lie between CUDA events on the call's stream, so they hold what the GPU waited
    for the host meanwhile; reading them waits for the GPU, measuring does not."""

    def __init__(self, nvtx: bool = False, lines: bool = False):
        if nvtx and not torch.version.cuda:
            raise ValueError(f"nvtx=True needs a torch with CUDA, this is {torch.__version__}; "
                             "leave nvtx out")
        self.comparison = Comparison()
        self.wall_s = 0.0
        self._nvtx = nvtx
        self.lines = Lines() if lines else None
        self._began: float | None = None
        self._compiled, self._compiled_before = (0.0, 0), (0.0, 0)
        self._entries: dict[tuple, Entry] = {}
        self.naming = Naming()
        self.edges_seen: dict[str, EdgesSeen] = {}  # by the layer's name
        self._frames, self._timeline, self._lock = Frames(), Timeline(), threading.RLock()
        self.exchanged = Exchanges(self.naming, self._timeline, nvtx)
        self._sink = self._recorded

    # --- measuring ---

    def start(self) -> Report:
        """Begin, or go on. Raises RuntimeError while it measures."""
        if self in _active:
            raise RuntimeError("this report is being measured already; leave its block first, or "
                               "make another one")
        self._began, self._compiled_before = time.perf_counter(), driver.compile_seconds()
        _active.append(self)
        watch.add(self._watch, self._sink)
        exchanges.add(self.exchanged)
        return self

    def stop(self) -> None:
        """Stop, waiting for the device."""
        watch.remove(self._watch, self._sink)
        exchanges.remove(self.exchanged)
        _active.remove(self)
        self._timeline.finish()
        assert self._began is not None
        self.wall_s += time.perf_counter() - self._began
        self._compiled, self._began = self.compiled, None

    def __enter__(self) -> Report:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _watch(self, visit: Visit, run: Run) -> Any:
        device = _device(visit)
        # events in it would be part of the graph
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return run(visit)
        with self._lock:
            self._timeline.drain()
        clock, since = self._timeline.clock, sequence()
        with self._frames.inside(visit) as frame:
            if self._nvtx:
                torch.cuda.nvtx.range_push(f"gnnaccel {_class(visit)}")
            live = self._memory(device)
            start = clock.mark(device)
            try:
                out = run(visit)
            finally:
                if self._nvtx:
                    torch.cuda.nvtx.range_pop()
            end = clock.mark(device)
        if frame.record is not None:
            self._called(frame, device, out, since, (start, end), live)
        return out

    def _recorded(self, record: dict) -> None:
        """A sink. A decision on a call around which nobody stands is counted without a time."""
        if self._frames.takes(record):
            return
        with self._lock:
            key = (record["name"] or record["layer"], record["route"], record["kernel"],
                   _code(record))
            entry = self._entries.get(key)
            if entry is None:
                device = "cuda" if torch.cuda.is_initialized() else "cpu"
                entry = self._entries[key] = Entry(record["layer"], key[0], record["route"],
                                                   record["kernel"], device,
                                                   reasons=tuple(record["rejected"]),
                                                   dtype=record["dtype"])
            entry.calls += 1
            entry.add(record)

    def _called(self, frame: Frame, device: torch.device, out: Any, since: int, marks: tuple,
                live: int | None) -> None:
        with self._lock:
            entry = self._entry(frame, device)
            outer = self._entry(frame.outer, device) if frame.outer and frame.outer.record else None
            entry.calls += 1
            entry.add(_record(frame))
            if frame.visit.adapter is not None:
                self.edges_seen.setdefault(entry.name, EdgesSeen()).note(frame.visit)
            if live is not None and entry.calls <= _MEMORY_CALLS:
                entry.kept_bytes = max(entry.kept_bytes or 0,
                                       torch.cuda.memory_allocated(device) - live)
            line = (self.lines.called(entry.name, entry.route)
                    if self.lines is not None and frame.outer is None else None)
            interval = Interval(marks[0], -1, functools.partial(_took, entry, outer, line, False))
            interval.end = marks[1]
            self._timeline.add(interval)
        if torch.is_grad_enabled():
            follower = Backward(self._timeline, device,
                                functools.partial(_took, entry, outer, line, True))
            follower.follow(list(named_tensors(out, "").values()), since)

    def _memory(self, device: torch.device) -> int | None:
        entries = list(self._entries.values())
        if device.type != "cuda" or entries and all(one.calls > _MEMORY_CALLS for one in entries):
            return None
        return torch.cuda.memory_allocated(device)

    def _entry(self, frame: Frame, device: torch.device) -> Entry:
        record, visit = _record(frame), frame.visit
        key = self.naming.of(visit.layer), record["route"], record["kernel"], _code(record)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(record["layer"], key[0], record["route"],
                                               record["kernel"], device.type)
            describe(entry, visit, record)
        return entry

    # --- reading ---

    @property
    def compiled(self) -> tuple[float, int]:
        """Seconds spent compiling kernels or loading them from CuPy's cache meanwhile, which calls
        waited for, and how many."""
        if self._began is None:
            return self._compiled
        seconds, count = driver.compile_seconds()
        seconds_before, count_before = self._compiled_before
        return (self._compiled[0] + seconds - seconds_before,
                self._compiled[1] + count - count_before)

    @property
    def seconds(self) -> float:
        """By the clock, of all that was measured until now."""
        return self.wall_s + (0.0 if self._began is None else time.perf_counter() - self._began)

    def advice(self) -> list[Advice]:
        """What to do next, what concerns most of the time first."""
        return advise(self)

    def compiling(self) -> str:
        """`compiled` in words; empty where nothing was."""
        seconds, kernels = self.compiled
        return (f"{kernels} kernels compiled, or loaded from the cache, in {seconds:.2f} s"
                if kernels else "")

    @property
    def entries(self) -> list[Entry]:
        """By the time they took themselves, most first."""
        with self._lock:
            self._timeline.finish()
            return sorted(self._entries.values(), key=lambda entry: -entry.own_ms)

    def fallbacks(self) -> list[dict[str, Any]]:
        """Why calls ran natively, by what that took: each {code, text, hint, calls, ms, layers}."""
        found: dict[str, dict[str, Any]] = {}
        for entry in self.entries:
            if entry.route == "native" and entry.reasons:
                first = entry.reasons[0]
                start = dict(code=first["code"], text=first["text"], hint=first["hint"], calls=0,
                             ms=0.0, layers=[])
                item = found.setdefault(first["code"], start)
                item["calls"] += entry.calls
                item["ms"] += entry.own_ms
                item["layers"].append(entry.name)
        return sorted(found.values(), key=lambda item: -item["ms"])

    def as_dicts(self) -> list[dict[str, Any]]:
        return [entry.as_dict() for entry in self.entries]

    def __str__(self) -> str:
        entries = self.entries
        if not entries:
            return _unmeasured()
        total = sum(entry.own_ms for entry in entries) or 1.0
        columns = ("layer", "kernel", "calls", "forward ms", "backward ms", "own ms", "share",
                   "kept MiB", "cache hits", "deciding us")
        rows = [(who(e.name, e.layer), e.kernel or e.route, e.calls,
                 milliseconds(e.forward_ms), milliseconds(e.backward_ms), milliseconds(e.own_ms),
                 f"{e.own_ms / total:.0%}", size(e.kept_bytes), _hits(e),
                 f"{e.overhead_us / e.calls:.0f}") for e in entries]
        kinds = "CUDA events" if any(e.device == "cuda" for e in entries) else "the clock"
        text = self.compiling() and self.compiling() + "\n"
        text += table(f"{total:.4g} ms in layers, by {kinds}, of {self.seconds:.3g} s", columns,
                      rows, right=columns[2:])
        text += str(self.exchanged)
        fallbacks = self.fallbacks()
        if fallbacks:
            text += table("native, by what it took", ("reason", "calls", "own ms", "layers",
                                                      "what would change it"),
                          [(f"{f['code']} {f['text']}", f["calls"], milliseconds(f["ms"]),
                            ", ".join(f["layers"][:4]), marked(f["code"], f["hint"]))
                           for f in fallbacks], right=("calls", "own ms"))
        if self.lines is not None:
            text += str(self.lines)
        advice = self.advice()[:FIRST]
        if advice:
            text += "what to do next\n\n" + "".join(f" {number}. {one}\n" for number, one
                                                   in enumerate(advice, 1))
        return text + (str(self.comparison) if self.comparison.layers else "")

    def html(self, path: str | Path) -> Path:
        """Write one page that needs nothing else; on a rank above 0 of a distributed run ``path``
        with ``.rankN`` before its suffix. Returns the path written. Raises OSError where it cannot
        be written."""
        from gnnaccel.profile.page import page

        target = rank_path(path)
        target.write_text(page(self), encoding="utf-8")
        return target


def _took(entry: Entry, outer: Entry | None, line: Line | None, backward: bool,
          taken: float) -> None:
    if backward:
        entry.backward_ms += taken
        entry.backwards += 1
    else:
        entry.forward_ms += taken
        entry.timed += 1
    if outer is not None:
        outer.inside_ms += taken
    if line is not None:
        line.ms += taken


def _code(record: dict) -> str | None:
    """Why it is native, if it is."""
    return (record["rejected"][0]["code"] if record["route"] == "native" and record["rejected"]
            else None)


def _class(visit: Visit) -> str:
    return visit.layer if isinstance(visit.layer, str) else type(visit.layer).__name__


def _device(visit: Visit) -> torch.device:
    found = device_of(visit)
    if found is not None:
        return found
    return (torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized()
            else torch.device("cpu"))


def _hits(entry: Entry) -> str | None:
    asked = entry.cache.get("hit", 0) + entry.cache.get("miss", 0)
    return f"{entry.cache.get('hit', 0)}/{asked}" if asked else None


def _unmeasured() -> str:
    """What counts alone say."""
    rows = [(layer, entry["calls"], ", ".join(f"{route} {n}"
                                              for route, n in entry["routes"].items()),
             ", ".join(f"{code} {n}" for code, n in entry["reasons"].items()))
            for layer, entry in counters.stats().items()]
    text = ("nothing was measured: use `with gnnaccel.report() as found:`, or python -m gnnaccel "
            "--profile\n")
    return text + (table("calls so far", ("layer", "calls", "routes", "reasons"), rows,
                         right=("calls",)) if rows else "")


def _record(frame: Frame) -> Record:
    """The record of a call which was decided."""
    assert frame.record is not None
    return frame.record
