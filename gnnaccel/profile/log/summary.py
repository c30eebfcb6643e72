"""Records out of JSONL files; what a log says in sum, and in what two runs differ. As data first;
`text` makes it readable."""
from __future__ import annotations

import json
import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnaccel.dispatch.observe import records
from gnnaccel.dispatch.observe.records import Record
from gnnaccel.profile.sinks import who

_WIDEST = 44  # characters of a cell


@dataclass
class Log:
    """``records`` in the order of the file; ``problems``: lines that are no records, each with its
    number."""

    path: str
    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(path: str | os.PathLike) -> Log:
    """The records of a file that ``log="file.jsonl"`` wrote.

    A line that is no record is noted and left out: a killed process may leave half of its last one.
    OSError when there is no such file; ValueError, naming the first problem, when not one line is a
    record though there are some.
    """
    log = Log(str(path))
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    record = json.loads(line)
                    record = {**records.ADDED, **record} if isinstance(record, dict) else {}
                    records.validate(record)
                except ValueError as problem:
                    log.problems.append(f"line {number}: {problem}")
                else:
                    log.records.append(record)
    if log.problems and not log.records:
        raise ValueError(f"{Path(path).name} holds no records; {log.problems[0]}")
    return log


def chosen(found: Iterable[Record], layers: list[str] | None = None, route: str | None = None,
           code: str | None = None) -> Iterator[Record]:
    """Records of these layers (class names, qualified names or ``re:`` patterns), on this route,
    with this reason code."""
    for record in found:
        if layers and not any(_is(record, layer) for layer in layers):
            continue
        if route and record["route"] != route:
            continue
        if code and not any(item["code"] == code for item in record["rejected"]):
            continue
        yield record


def _is(record: Record, layer: str) -> bool:
    names = [name for name in (record["layer"], record["name"]) if name is not None]
    if layer.startswith("re:"):
        return any(re.fullmatch(layer[3:], name) for name in names)
    return layer in names


def sizes(record: Record) -> str:
    """The graph in short."""
    graph = record["graph"]
    if graph is None:
        return "-"
    return f"{graph['num_src']}->{graph['num_dst']}, {graph['num_edges']} edges"


def took(record: Record) -> str:
    """Route and kernel, or the reason of a native call."""
    if record["route"] == "native":
        return f"native {record['rejected'][0]['code']}" if record["rejected"] else "native"
    return f"{record['route']}: {record['kernel']}"


# --- in sum ---------------------------------------------------------------------------------------

def summarise(found: Sequence[Record]) -> dict[str, Any]:
    """``records``, ``seconds`` (from first to last), ``routes`` of the forward calls, ``layers``
    and ``reasons``, most calls first."""
    forward = [record for record in found if record["direction"] == "forward"]
    times = [record["time"] for record in found]
    return {"records": len(found), "forward": len(forward),
            "seconds": max(times) - min(times) if times else 0.0,
            "routes": dict(Counter(record["route"] for record in forward).most_common()),
            "layers": _layers(found), "reasons": _reasons(forward)}


def _layers(found: Iterable[Record]) -> list[dict[str, Any]]:
    """One entry per layer, route and kernel."""
    groups: dict[tuple, list[Record]] = defaultdict(list)
    for record in found:
        groups[record["host"], who(record), took(record)].append(record)
    merged = []
    for (host, layer, way), group in groups.items():
        forward = [record for record in group if record["direction"] == "forward"]
        hits = Counter(record["cache"] for record in forward)
        merged.append({"host": host, "layer": layer, "took": way, "forward": len(forward),
                       "backward": len(group) - len(forward),
                       "graphs": len({sizes(record) for record in forward}),
                       "cache_hits": hits["hit"], "cache_misses": hits["miss"],
                       "overhead_us": _median(forward, "overhead_us"),
                       "cost_us": _median(forward, "cost_us")})
    return sorted(merged, key=lambda entry: -(entry["forward"] + entry["backward"]))


def _median(group: list[Record], name: str) -> float | None:
    values = [record[name] for record in group if record[name] is not None]
    return statistics.median(values) if values else None


def _reasons(forward: Iterable[Record]) -> list[dict[str, Any]]:
    """Why calls ran natively: the first reason of each, as counters do."""
    counts: Counter = Counter()
    latest: dict[tuple, dict[str, str]] = {}
    for record in forward:
        if record["route"] == "native" and record["rejected"]:
            key = record["rejected"][0]["code"], who(record)
            counts[key] += 1
            latest[key] = record["rejected"][0]
    return [{"code": code, "layer": layer, "calls": n, "text": latest[code, layer]["text"],
             "hint": latest[code, layer]["hint"]}
            for (code, layer), n in counts.most_common()]


def difference(before: Iterable[Record], after: Iterable[Record]) -> list[dict[str, Any]]:
    """Forward calls that were decided otherwise, by layer, graph, dtype and mode: the ways taken
    with their calls, on both sides.

    How often a call was made does not count, only which ways it took.
    """
    sides = [_ways(before), _ways(after)]
    found = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        one, other = (dict(side.get(key, Counter())) for side in sides)
        if set(one) != set(other):
            host, layer, graph, dtype, grad = key
            found.append({"host": host, "layer": layer, "graph": graph, "dtype": dtype,
                          "grad": grad, "before": one, "after": other})
    return found


def _ways(found: Iterable[Record]) -> dict[tuple, Counter]:
    ways: dict[tuple, Counter] = defaultdict(Counter)
    for record in found:
        if record["direction"] == "forward":
            ways[record["host"], who(record), sizes(record), record["dtype"],
                 record["grad"]][took(record)] += 1
    return ways


# --- for a reader ---------------------------------------------------------------------------------

def text(summary: dict[str, Any]) -> str:
    routes = ", ".join(f"{route} {n}" for route, n in summary["routes"].items()) or "none"
    lines = [f"{summary['records']} records over {summary['seconds']:.1f} s; forward calls: "
             f"{routes}", ""]
    heads = ("host", "layer", "took", "forward", "backward", "graphs", "cache hit/miss",
             "deciding us", "estimated us")
    lines += _columns(heads, [
        (e["host"], e["layer"], e["took"], e["forward"], e["backward"], e["graphs"],
         f"{e['cache_hits']}/{e['cache_misses']}", _number(e["overhead_us"]),
         _number(e["cost_us"])) for e in summary["layers"]])
    if summary["reasons"]:
        lines += ["", "Why calls ran natively:"]
        lines += [f"  {r['calls']:6} x {r['layer']}: {r['code']} {r['text']}"
                  + (f" -> {r['hint']}" if r["hint"] else "")
                  for r in summary["reasons"]]
    return "\n".join(lines)


def difference_text(found: list[dict[str, Any]]) -> str:
    if not found:
        return "no call was decided otherwise"
    lines = [f"{len(found)} kinds of calls were decided otherwise:"]
    for entry in found:
        mode = "training" if entry["grad"] else "inference"
        lines.append(f"{entry['host']} {entry['layer']}, {entry['graph']}, "
                     f"{entry['dtype'] or '-'}, {mode}")
        for sign, side in (("-", entry["before"]), ("+", entry["after"])):
            lines += [f"  {sign} {way} (x{n})"
                      for way, n in side.items()] or [f"  {sign} not called"]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else text[:_WIDEST - 1] + "…"


def _columns(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [heads, *([_cut(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in cells]
