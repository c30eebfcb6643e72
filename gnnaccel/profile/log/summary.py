"""What a log says in sum, and in what two runs differ. As data first; `text` makes it readable."""
from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gnnaccel.dispatch.observe.records import Record
from gnnaccel.profile.log.reading import sizes, took
from gnnaccel.profile.sinks import who

_WIDEST = 44  # characters of a cell


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
    """`summarise` in lines."""
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
    """`difference` in lines."""
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
