"""Where records go: human lines through a logger, a JSONL file, a ring in memory.

The session subscribes sinks to `gnnaccel.dispatch.observe.records`; a sink is a callable that takes
one record, in whatever thread made it, and has ``close()``.
"""
from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.observe.records import Record

LOGGER = "gnnaccel"
_TOLD_APART = ("direction", "host", "layer", "name", "route", "kernel", "dtype", "grad", "storage",
               "autocast", "capturing", "cache")


class RingSink:
    """The latest ``size`` records."""

    def __init__(self, size: int) -> None:
        self._ring: deque[Record] = deque(maxlen=size)

    def __call__(self, record: Record) -> None:
        self._ring.append(record)

    def records(self) -> list[Record]:
        """Oldest first."""
        return list(self._ring)

    def clear(self) -> None:
        self._ring.clear()

    def resize(self, size: int) -> None:
        """Keep ``size`` records from now on; the oldest go if there are more."""
        if size != self._ring.maxlen:
            self._ring = deque(self._ring, maxlen=size)

    def close(self) -> None:
        """Nothing to release; the records stay readable."""


class JsonlSink:
    """Appends one JSON object per line to ``path`` and flushes each.

    Each line also tells which kernels were made since the line before it, the first one all of
    them, so that ``warmup --log`` can make them ahead. In a distributed run (environment variable
    ``RANK`` above 0) ``run.jsonl`` becomes ``run.rank1.jsonl`` and so on. Raises OSError when the
    file cannot be opened, at construction.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = rank_path(path)
        self._lock = threading.Lock()
        self._file = open(self.path, "a", encoding="utf-8")
        self._told = 0  # kernels

    def __call__(self, record: Record) -> None:
        with self._lock:
            # a record of another thread may come in while the session closes the sink
            if not self._file.closed:
                self._file.write(json.dumps({**record, "kernels": self._kernels()}, default=str)
                                 + "\n")
                self._file.flush()

    def _kernels(self) -> list[dict[str, Any]]:
        made = driver.noted(self._told)
        self._told += len(made)
        return [dict(family=family, entry=entry, defines=dict(defines))
                for family, entry, defines in made]

    def close(self) -> None:
        with self._lock:
            self._file.close()


def rank_path(path: str | os.PathLike) -> Path:
    """``path``, or on a rank above 0 ``path`` with ``.rankN`` before its suffix."""
    path = Path(path)
    rank = os.environ.get("RANK", "")
    return (path.with_name(f"{path.stem}.rank{int(rank)}{path.suffix}")
            if rank.isdecimal() and int(rank) > 0 else path)


class LoggerSink:
    """One line per distinct decision at level INFO of the logger ``gnnaccel``, when it is first
    made; how often each was made follows in `close`, which also runs when the interpreter ends.

    Decisions are the same if they are of the same layer, took the same way for the same reasons, on
    the same dtype, over graphs of the same sizes up to the next power of two, whose structure was
    there or was not. With ``show`` the
    lines are made visible: the logger is set to INFO if it is stricter, and gets a handler on
    stderr if neither it nor a parent has one; `close` takes both back.
    """

    def __init__(self, show: bool = True) -> None:
        self._logger = logging.getLogger(LOGGER)
        self._level: int | None = None
        self._handler: logging.Handler | None = None
        self._counts: dict[tuple, tuple[int, Record]] = {}  # with the first of each
        self._lock = threading.Lock()
        atexit.register(self._sum_up)
        if not show:
            return
        if not self._logger.isEnabledFor(logging.INFO):
            self._level = self._logger.level
            self._logger.setLevel(logging.INFO)
        if not self._logger.hasHandlers():
            self._handler = _stderr_handler()
            self._logger.addHandler(self._handler)

    def __call__(self, record: Record) -> None:
        if not self._logger.isEnabledFor(logging.INFO):
            return
        key = _kind(record)
        with self._lock:
            count, first = self._counts.get(key, (0, record))
            self._counts[key] = count + 1, first
        if not count:
            self._logger.info("%s", line(record))

    def _sum_up(self) -> None:
        """Say how often each decision was made, most often first, of those made more than once."""
        with self._lock:
            counts, self._counts = list(self._counts.values()), {}
        for count, first in sorted(counts, key=lambda one: -one[0]):
            if count > 1:
                self._logger.info("%d times: %s", count, _short(first))

    def close(self) -> None:
        self._sum_up()
        atexit.unregister(self._sum_up)
        if self._handler is not None:
            self._logger.removeHandler(self._handler)
            self._handler = None
        if self._level is not None:
            self._logger.setLevel(self._level)
            self._level = None


def _stderr_handler() -> logging.Handler:
    """Rich on a terminal that has it; plain otherwise, because rich folds lines when it writes to a
    file."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.logging import RichHandler
        except ImportError:
            pass  # rich is optional; the plain handler says the same
        else:
            return RichHandler(console=Console(stderr=True), show_path=False)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    return handler


def line(record: Record) -> str:
    """A record in one line for a reader."""
    return "; ".join([", ".join([f"#{record['call']} {_what(record)}", *_details(record)]),
                      *ruled_out(record)])


def who(record: Record) -> str:
    return record["layer"] if record["name"] is None else f"{record['name']} ({record['layer']})"


def _what(record: Record) -> str:
    """Which layer went which way."""
    way = f"{record['direction']} {record['host']} {who(record)} -> {record['route']}"
    return way if record["kernel"] is None else f"{way}, {record['kernel']}"


def _short(record: Record) -> str:
    """A decision that was told before."""
    parts = [_what(record)]
    if record["route"] == "native" and record["rejected"]:
        parts.append(record["rejected"][0]["code"])
    if record["cache"] != "none":
        parts.append(f"structure cache {record['cache']}")
    return ", ".join(parts)


def _kind(record: Record) -> tuple:
    """What decisions are told apart by; texts hold estimates, which change with sizes."""
    graph = record["graph"]
    sizes = graph and [graph[size].bit_length() for size in ("num_src", "num_dst", "num_edges")]
    return (*(record[field] for field in _TOLD_APART), *(sizes or ()),
            *((item["candidate"], item["code"]) for item in record["rejected"]))


def ruled_out(record: Record) -> list[str]:
    """The candidates not taken, one text per reason: ``ruled out "a", "b": code text``. Of a call
    that was not understood, which has no candidates but the layer itself: ``code text``."""
    by_reason: dict[str, list[str]] = {}
    for item in record["rejected"]:
        by_reason.setdefault(f"{item['code']} {item['text']}", []).append(item["candidate"])
    return [why if candidates == [record["layer"]] else
            "ruled out " + ", ".join(f'"{name}"' for name in candidates) + f": {why}"
            for why, candidates in by_reason.items()]


def _details(record: Record) -> list[str]:
    details: list[Any] = []
    graph = record["graph"]
    if graph is not None:
        details.append(f"{graph['num_src']}->{graph['num_dst']} nodes, {graph['num_edges']} edges")
    passes = record["passes"]
    if passes is not None:
        details.append(f"{passes['relations']} relations, {passes['compaction_src']:.2f} and "
                       f"{passes['compaction_dst']:.2f} pairs per edge, {passes['ordering']}")
    if record["dtype"] is not None:
        details.append(record["dtype"])
    if record["cache"] != "none":
        details.append(f"structure cache {record['cache']}")
    if record["cost_us"] is not None:
        details.append(f"estimated {record['cost_us']:.0f} us")
    return details
