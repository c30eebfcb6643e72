"""A report as one page: HTML, style and charts in one file that asks nobody for anything. Whatever
comes from outside is escaped."""
from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from gnnaccel import adapters
from gnnaccel._version import __version__
from gnnaccel.profile import svg
from gnnaccel.profile.advice import FIRST, marked
from gnnaccel.profile.entries import Entry, ceilings, points
from gnnaccel.profile.pieces import (bars, chart, duration, escape, legend, metric, number, percent,
                                     section, some, table, tiles)
from gnnaccel.profile.style import STYLE
from gnnaccel.profile.tables import size

if TYPE_CHECKING:
    from gnnaccel.profile.report import Report
    from gnnaccel.profile.shadow import Shadow

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MOST = 24  # bars, points and graphs in one chart; the tables have all
_GRAPHS = 6


def page(report: Report) -> str:
    entries = report.entries
    sections = [_unmeasured()]
    if entries:
        sections = [_next(report), _summary(report, entries), _time(entries), _speedups(report),
                    _decisions(entries), _fallbacks(report), _comparison(report),
                    *_rooflines(entries), _degrees(entries), _relations(entries)]
    head = ('<!DOCTYPE html>\n<html lang="en"><head><meta '
            'charset="utf-8"><title>gnnaccel report</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta http-equiv="Content-Security-Policy" '
            f'content="{_POLICY}"><style>{STYLE}</style></head><body>')
    return "\n".join([head, _heading(report, entries), *sections,
                      f"<footer>gnnaccel {escape(__version__)}</footer></body></html>\n"])


def _heading(report: Report, entries: list[Entry]) -> str:
    devices = sorted({entry.device for entry in entries})
    names = [torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available()
             else device for device in devices]
    when = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    parts = (when, f"torch {torch.__version__}", *names)
    said = "".join(f"<p>{escape(text)}</p>" for text in (report.compiling(), *adapters.drifts())
                   if text)
    return f"<header><h1>gnnaccel report</h1><p>{escape(' · '.join(parts))}</p>{said}</header>"


def _unmeasured() -> str:
    return section("Nothing was measured",
                   "No layer that gnnaccel knows was called. Call the model inside "
                   "`with gnnaccel.report() as found:` while gnnaccel is enabled, or run the "
                   "script by `python -m gnnaccel --report out.html script.py`.")


def _summary(report: Report, entries: list[Entry]) -> str:
    total = sum(e.own_ms for e in entries)
    ours = [e for e in entries if e.route != "native"]
    calls, taken = sum(e.calls for e in entries), sum(e.calls for e in ours)
    share = sum(e.own_ms for e in ours) / total if total else 0.0
    found = [("Time in layers", duration(total),
              f"of {duration(report.wall_s * 1e3)}" if report.wall_s else "", ""),
             ("Calls taken over", f"{taken / max(1, calls):.0%}",
              f"{number(taken)} of {number(calls)}, {share:.0%} of the time", "")]
    timed = _both_ways(report)
    if timed:
        faster = sum(native for _, native, _ in timed) / sum(ours for _, _, ours in timed)
        found.append(("Faster than native", f"{number(faster)}x",
                      f"forward and backward of {_several(len(timed), 'layer')}", ""))
    verdicts = [one.verdict for one in report.comparison.layers]
    wrong, same = verdicts.count("mismatch"), verdicts.count("same")
    if wrong or same:
        found.append(("Same numbers", f"{same} of {same + wrong}",
                      "layers held against the host in fp64", "bad" if wrong else "good"))
    return tiles(found)


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _next(report: Report) -> str:
    advice = report.advice()[:FIRST]
    if not advice:
        return ""
    mark = '<span class="bad"> changes the model</span>'
    items = "".join(f"<li><b>{escape(one.do)}</b>{mark if one.changes else ''}"
                    f'<div class="soft">{escape(one.seen)}</div></li>' for one in advice)
    return f'<section class="next"><h2>What to do next</h2><ol>{items}</ol></section>'


# --- sections -------------------------------------------------------------------------------------

def _time(entries: list[Entry]) -> str:
    total = sum(entry.own_ms for entry in entries) or 1.0
    rows = [(e.name, e.kernel or e.route, [("host" if e.route == "native" else "ours", e.own_ms,
                                            f"{duration(e.own_ms)}, {percent(e.own_ms / total)}")])
            for e in entries[:_MOST]]
    more = f" The first {_MOST} of {len(entries)}." if len(entries) > _MOST else ""
    return section("Where the time went", "Forward and backward of all calls, without layers "
                                          "inside that are listed themselves."
                   + more, _sides(entries), bars(rows))


def _sides(entries: list[Entry]) -> str:
    native = {entry.route == "native" for entry in entries[:_MOST]}
    return legend(*([("ours", "gnnaccel")] if False in native else []),
                  *([("host", "native")] if True in native else []))


def _both_ways(report: Report) -> list[tuple[Shadow, float, float]]:
    """Layers that were timed natively and as they ran, with the milliseconds of either."""
    return [(one, one.native_ms, one.ours_ms) for one in report.comparison.layers
            if one.native_ms and one.ours_ms]


def _speedups(report: Report) -> str:
    measured = _both_ways(report)[:_MOST]
    title = "Native against accelerated"
    if not measured:
        return section(title,
                       "Not measured. With --compare as well, each layer is timed natively too.")
    rows = []
    for one, native, ours in measured:
        times, way = max(native, ours) / min(native, ours), "slower" if ours > native else "faster"
        rows.append((one.who, one.kernel or one.route,
                     [("host", native, duration(native)),
                      ("ours", ours, f"{duration(ours)}, {number(times)}x {way}")]))
    return section(title,
                   "Forward and backward of one call, on the inputs of each layer's first call.",
                   legend(("host", "native"), ("ours", "gnnaccel")), bars(rows))


def _decisions(entries: list[Entry]) -> str:
    total = sum(entry.own_ms for entry in entries) or 1.0
    columns = ("layer", "ran by", "class", "calls", "forward ms", "backward ms", "own ms", "share",
               "kept MiB", "cache hits", "deciding µs")
    rows = []
    for e in entries:
        hits = e.cache.get("hit", 0)
        asked = hits + e.cache.get("miss", 0)
        ran_by = (e.kernel or e.route, "by soft" if e.route == "native" else "by good")
        rows.append(((e.name, "name"), ran_by, None if e.name.startswith(e.layer) else e.layer,
                     number(e.calls), number(e.forward_ms), number(e.backward_ms),
                     number(e.own_ms), percent(e.own_ms / total), size(e.kept_bytes),
                     f"{hits}/{asked}" if asked else None, number(e.overhead_us / max(1, e.calls))))
    return section("Decisions", "Milliseconds are of all calls together. Own: without layers "
                                "inside that are listed themselves. "
                   "Kept: device memory that a call leaves in use. Cache hits: look-ups of the "
                   "graph's structure that found it. Deciding: per call, with what recording it "
                   "costs.",
                   table(columns, rows, numbers=columns[3:]), _ruled_out(entries))


def _ruled_out(entries: list[Entry]) -> str:
    found: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for e in entries:
        for item in e.reasons:
            candidates, layers = found.setdefault((item["code"], item["text"]), ([], []))
            candidates.append(item["candidate"])
            layers.append(e.name)
    if not found:
        return ""
    rows = [((code, "code"), (why, "long"), (some(candidates), "long"), (some(layers), "list"))
            for (code, why), (candidates, layers) in found.items()]
    return "<h3>What was ruled out</h3>" + table(("code", "why", "candidates", "layers"), rows)


def _fallbacks(report: Report) -> str:
    found = report.fallbacks()
    if not found:
        return section("Native calls", "None: every call was taken over.")
    rows = [((f["code"], "code"), (f["text"], "long"), (marked(f["code"], f["hint"]), "long"),
             number(f["calls"]), number(f["ms"]), (some(f["layers"]), "list")) for f in found]
    return section("Native calls", "What keeps layers native, by the time those calls took: what "
                                   "to change first. A call with "
                   "several reasons counts under its first.",
                   table(("code", "why", "what would change it", "calls", "own ms", "layers"),
                         rows, numbers=("calls", "own ms")))


def _comparison(report: Report) -> str:
    layers = [one for one in report.comparison.layers if one.verdict != "native"]
    if not layers:
        return ""
    rows = []
    for one in layers:
        kind = {"same": "good", "mismatch": "bad"}.get(one.verdict, "soft")
        worst = one.worst
        found = ((f"{worst.ours:.1e}", f"{worst.host:.1e}", f"{worst.allowed:.1e}", worst.name)
                 if worst else (None,) * 4)
        rows.append(((one.who, "name"), (one.kernel or one.route, "by"), (one.verdict, kind),
                     *found, size(one.native_bytes), size(one.ours_bytes),
                     ("; ".join(one.notes) or None, "long")))
    columns = ("layer", "kernel", "verdict", "our error", "host's", "allowed", "worst in",
               "native MiB", "our MiB", "notes")
    return section("Compared with the host",
                   "Relative errors against the host's own layer in fp64, the worst of output and "
                   "gradients. Allowed is twice the host's own error plus a floor. Layers that ran "
                   "natively are left out.",
                   table(columns, rows, numbers=("our error", "host's", "allowed", "native MiB",
                                                 "our MiB")))


def _rooflines(entries: list[Entry]) -> Iterator[str]:
    for device in ("cuda", "cpu"):
        shown = points(entries, device)[:_MOST]
        if not shown:
            continue
        roof = ceilings(device)
        numbered = [(str(i), p.intensity, p.flops) for i, p in enumerate(shown, 1)]
        base = roof.bandwidths[0]
        rows = [(i, (p.name, "long"), number(p.bytes_per_s / 1e9), number(p.flops / 1e9),
                 f"{p.bytes_per_s / base[1]:.0%}")
                for i, p in enumerate(shown, 1)]
        lines = [(f"roof{at}", f"{name}, {metric(rate)}B/s")
                 for at, (name, rate) in enumerate(roof.bandwidths)]
        lines[0] = ("roof0", f"{lines[0][1]}, then {metric(roof.flops)}op/s of arithmetic")
        columns = ("no.", "kernel", "GB/s", "Gop/s", f"of {base[0]}")
        yield section(f"Roofline, {device}", "Forward passes: what they have to move and compute, "
                                             "estimated, over the time they "
                      "took with everything around the kernels. On the line is as fast as the "
                      "device goes; above it, caches helped. Ceilings as measured on "
                      f"{roof.provenance}.", legend(*lines),
                      chart(functools.partial(svg.roofline, "Roofline", roof.bandwidths,
                                              roof.flops, numbered)),
                      table(columns, rows, numbers=columns[2:]))


def _degrees(entries: list[Entry]) -> str:
    parts: list[str] = []
    seen: set[str] = set()
    for entry in entries:
        graph, key = entry.graph, str((entry.graph, entry.histogram))
        if (graph is None or entry.histogram is None or key in seen
            or len(seen) >= _GRAPHS):
            continue
        seen.add(key)
        title = escape(_graph(entry, graph, entry.histogram))
        parts.append(f"<h3>{title}</h3>" + chart(_histogram(entry.split, entry.histogram)))
    about = ("How many nodes have how many edges entering them. A column spans the numbers of "
             "edges between the two figures under it; its height is logarithmic. On a GPU, the "
             "rows of nodes beyond the dashed line are cut into chunks.")
    return section("Degrees", about, *parts) if parts else ""


def _graph(entry: Entry, graph: dict, histogram: list[int]) -> str:
    nodes = [graph["num_src"], graph["num_dst"]]
    text = f"{nodes[0]:,} nodes" if nodes[0] == nodes[1] else f"{nodes[0]:,} to {nodes[1]:,} nodes"
    text = f"{entry.name}: {text}, {graph['num_edges']:,} edges"
    beyond = entry.split is not None and entry.split.bit_length() >= len(histogram)
    return f"{text}; no row has more than {entry.split}" if beyond else text


def _histogram(cut: int | None, histogram: list[int]) -> Callable[[float], str]:
    split = cut.bit_length() if cut is not None else 64
    mark = (split, f"split beyond {cut} edges") if split < len(histogram) else None
    return lambda width: svg.columns("Destinations by degree", histogram, width, mark)


def _whole(ordering: dict, what: str) -> int:
    """Of forward, and of backward where that was weighed."""
    return ordering[what] + (ordering.get("backward") or {}).get(what, 0)


def _relations(entries: list[Entry]) -> str:
    alike: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.passes is not None and entry.graph is not None:
            alike.setdefault(str((entry.layer, entry.graph["num_edges"], entry.passes)),
                             []).append(entry)
    if not alike:
        return ""
    rows, lines = [], []
    for group in list(alike.values())[:_GRAPHS]:
        name, p, graph = some([e.name for e in group], 2), group[0].passes, group[0].graph
        assert p is not None and graph is not None  # of these alone
        edges = graph["num_edges"]
        rows.append((name, f"{p['relations']} relations", [
            ("host", edges, f"{edges:,}"), ("ours", p["pairs_src"], f"{p['pairs_src']:,}"),
            ("other", p["pairs_dst"], f"{p['pairs_dst']:,}")]))
        lines += [((name, "name"), (o["name"], "" if i else "good"),
                   number(_whole(o, "bytes") / 1e6), number(_whole(o, "flops") / 1e6),
                   number(o["estimated_us"] / 1e3)) for i, o in enumerate(p["orderings"])]
    columns = ("layer", "ordering", "MB moved", "million operations", "estimated ms")
    return section("Relations", "Values that depend on a node and a relation are made once for "
                                "each pair of them that occurs, "
                   "not once per edge. Of the orderings of each layer the first is taken. Layers "
                   "that are alike are listed once.",
                   legend(("host", "edges"), ("ours", "(source, relation) pairs"),
                          ("other", "(destination, relation) pairs")),
                   bars(rows), table(columns, lines, numbers=columns[2:]))
