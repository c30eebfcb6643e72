"""A report as one page: HTML, style and charts in one file that asks nobody for anything. Whatever comes from outside is
escaped."""
from __future__ import annotations

import datetime
import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from gnnaccel._version import __version__
from gnnaccel.profile import svg
from gnnaccel.profile.ceilings import ceilings, points
from gnnaccel.profile.entries import Entry
from gnnaccel.profile.style import STYLE
from gnnaccel.profile.tables import milliseconds, size, times

if TYPE_CHECKING:
    from gnnaccel.profile.report import Report

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MOST = 24  # bars, points and graphs in one chart; the tables have all
_GRAPHS = 6


def page(report: Report) -> str:
    """The page's text."""
    entries = report.entries
    sections = [_decisions(entries), _speedups(report), _time(entries), *_rooflines(entries), _degrees(entries),
                _relations(entries), _comparison(report), _fallbacks(report)]
    head = (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>gnnaccel report</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><style>{STYLE}</style></head><body>')
    return "\n".join([head, _heading(report, entries), *sections, f"<footer>gnnaccel {_e(__version__)}</footer></body></html>\n"])


def _heading(report: Report, entries: list[Entry]) -> str:
    total = sum(entry.own_ms for entry in entries)
    devices = sorted({entry.device for entry in entries})
    names = [torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device for device in devices]
    when = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    text = f"{when}, torch {torch.__version__}, {', '.join(names) or 'no calls'}: {total:.4g} ms in layers"
    compiling = report.compiling() and f"<p>{_e(report.compiling())}</p>"
    return f"<h1>gnnaccel report</h1><p>{_e(text)}{_e(f' of {report.wall_s:.3g} s' if report.wall_s else '')}</p>{compiling}"


# --- pieces ------------------------------------------------------------------------------------------------------------

def _e(value: object) -> str:
    return html.escape(str(value), quote=True)


def _section(title: str, about: str, *parts: str) -> str:
    return f"<section><h2>{_e(title)}</h2><p>{_e(about)}</p>{''.join(parts)}</section>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[str] = ()) -> str:
    """Cells are texts; (text, css class) pairs get that class."""
    heads = "".join(f'<th{_css("n" if c in numbers else "")}>{_e(c)}</th>' for c in columns)
    lines = []
    for row in rows:
        cells = []
        for column, cell in zip(columns, row):
            value, css = cell if isinstance(cell, tuple) else (cell, "")
            classes = " ".join(filter(None, ("n" if column in numbers else "", css)))
            cells.append(f"<td{_css(classes)}>{_e('–' if value is None else value)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _css(classes: str) -> str:
    return f' class="{classes}"' if classes else ""


def _chart(drawing: str) -> str:
    return f'<div class="wide">{drawing}</div>'


def _legend(*keys: tuple[str, str]) -> str:
    return "<p>" + "".join(f'<span class="key {css}"></span>{_e(words)}' for css, words in keys) + "</p>"


# --- sections ----------------------------------------------------------------------------------------------------------

def _decisions(entries: list[Entry]) -> str:
    total = sum(entry.own_ms for entry in entries) or 1.0
    columns = ("layer", "class", "ran by", "calls", "forward ms", "backward ms", "own ms", "share", "kept MiB", "cache hits",
               "deciding us", "ruled out")
    rows = []
    for e in entries:
        hits = e.cache.get("hit", 0)
        asked = hits + e.cache.get("miss", 0)
        rows.append((e.name, e.layer, (e.kernel or e.route, "soft" if e.route == "native" else "good"), e.calls,
                     milliseconds(e.forward_ms), milliseconds(e.backward_ms), milliseconds(e.own_ms),
                     f"{e.own_ms / total:.0%}", size(e.kept_bytes), f"{hits}/{asked}" if asked else None,
                     f"{e.overhead_us / max(1, e.calls):.0f}", (_ruled_out(e), "long")))
    return _section("Decisions", "What ran each layer, and what was ruled out. Own time leaves out layers inside that are listed "
                    "themselves; kept is the device memory that a call leaves in use; deciding includes what recording it costs.",
                    _table(columns, rows, numbers=columns[3:11]))


def _ruled_out(entry: Entry) -> str | None:
    by_reason: dict[str, list[str]] = {}
    for item in entry.reasons:
        by_reason.setdefault(f"{item['code']} {item['text']}", []).append(item["candidate"])
    return "; ".join(f"{', '.join(candidates)}: {why}" for why, candidates in by_reason.items()) or None


def _speedups(report: Report) -> str:
    measured = [one for one in report.comparison.layers if one.native_ms and one.ours_ms][:_MOST]
    title, about = "Native against accelerated", "Milliseconds of each layer on the inputs of its first call, side by side."
    if not measured:
        return _section(title, "Not measured: run with --compare as well, which times each layer natively too.")
    rows = []
    for one in measured:
        behind = f"{milliseconds(one.ours_ms)} ms, {times(one.native_ms, one.ours_ms)}"
        rows.append((one.who, [("host", one.native_ms, f"{milliseconds(one.native_ms)} ms"), ("ours", one.ours_ms, behind)]))
    return _section(title, about, _legend(("host", "native"), ("ours", "gnnaccel")), _chart(svg.bars(title, rows)))


def _time(entries: list[Entry]) -> str:
    rows = [(f"{e.name}, {e.route}", [("host" if e.route == "native" else "ours", e.own_ms, f"{milliseconds(e.own_ms)} ms")])
            for e in entries[:_MOST]]
    parts = [_legend(("ours", "gnnaccel"), ("host", "native")), _chart(svg.bars("Own time", rows))] if rows else []
    return _section("Where the time went", "Own time, forward and backward.", *parts)


def _rooflines(entries: list[Entry]) -> Iterator[str]:
    for device in ("cuda", "cpu"):
        shown = points(entries, device)[:_MOST]
        if not shown:
            continue
        roof = ceilings(device)
        numbered = [(str(i), p.intensity, p.flops) for i, p in enumerate(shown, 1)]
        drawing = svg.roofline("Roofline", roof.bandwidths, roof.flops, numbered)
        base = roof.bandwidths[0]
        rows = [(i, p.name, f"{p.bytes_per_s / 1e9:.3g}", f"{p.flops / 1e9:.3g}", f"{p.bytes_per_s / base[1]:.0%}")
                for i, p in enumerate(shown, 1)]
        lines = ", ".join(f"{'dashed' if at else 'solid'}: {name} at {rate / 1e9:.4g} GB/s"
                          for at, (name, rate) in enumerate(roof.bandwidths))
        columns = ("", "kernel", "GB/s", "Gop/s", f"of {base[0]}")
        yield _section(f"Roofline, {device}", "Forward passes by what they must move and compute, estimated, and the time they "
                       f"took with everything around the kernels. {lines}; {roof.flops / 1e9:.4g} Gop/s. "
                       f"Ceilings as on {roof.provenance}.",
                       _chart(drawing), _table(columns, rows, numbers=columns[2:]))


def _degrees(entries: list[Entry]) -> str:
    parts, seen = [], set()
    for entry in entries:
        graph, key = entry.graph, str((entry.graph, entry.histogram))
        if entry.histogram is None or key in seen or len(seen) >= _GRAPHS:
            continue
        seen.add(key)
        labels = ["0", "1", *(f"{1 << b - 1}–{(1 << b) - 1}" if b < 8 else f"2^{b - 1}…" for b in range(2, 64))]
        split = entry.split.bit_length() if entry.split is not None else 64
        mark = (split, f"rows beyond {entry.split} edges are split") if split < len(entry.histogram) else None
        about = f"{entry.name}: {graph['num_src']} to {graph['num_dst']} nodes, {graph['num_edges']} edges"
        about += "" if mark or entry.split is None else f"; none has more than {entry.split}"
        parts.append(f"<h3>{_e(about)}</h3>")
        parts.append(_chart(svg.columns("Destinations by degree", entry.histogram, labels[:len(entry.histogram)], mark)))
    about = ("Destinations by how many edges enter them, on a logarithmic scale. On a GPU, longer rows than the line are cut "
             "into chunks.")
    return _section("Degrees", about if parts else "No degrees were reported.", *parts)


def _relations(entries: list[Entry]) -> str:
    shown = [entry for entry in entries if entry.passes is not None and entry.graph is not None][:_GRAPHS]
    if not shown:
        return ""
    rows = []
    for e in shown:
        p, edges = e.passes, e.graph["num_edges"]
        rows.append((f"{e.name}, {p['relations']} relations", [
            ("host", edges, f"{edges} edges"), ("ours", p["pairs_src"], f"{p['pairs_src']} (source, r)"),
            ("other", p["pairs_dst"], f"{p['pairs_dst']} (dest., r)")]))
    lines = [(e.name, (o["name"], "good" if o is e.passes["orderings"][0] else ""), f"{o['bytes'] / 1e6:.3g}",
              f"{o['flops'] / 1e6:.3g}", f"{o['estimated_us']:.3g}") for e in shown for o in e.passes["orderings"]]
    return _section("Relations", "Values that depend on a node and a relation are made once for each pair of them that occurs, "
                    "not once per edge. The ordering taken is the first of each layer.",
                    _legend(("host", "edges"), ("ours", "(source, relation) pairs"), ("other", "(destination, relation) pairs")),
                    _chart(svg.bars("Edges and pairs", rows)),
                    _table(("layer", "ordering", "MB", "Mop", "estimated us"), lines, numbers=("MB", "Mop", "estimated us")))


def _comparison(report: Report) -> str:
    layers = report.comparison.layers
    if not layers:
        return ""
    rows = []
    for one in layers:
        css = {"same": "good", "mismatch": "bad"}.get(one.verdict, "soft")
        worst = one.worst
        found = (f"{worst.ours:.1e}", f"{worst.host:.1e}", f"{worst.allowed:.1e}", worst.name) if worst else (None,) * 4
        rows.append((one.who, one.kernel or one.route, (one.verdict, css), *found, size(one.native_bytes), size(one.ours_bytes),
                     ("; ".join(one.notes) or None, "long")))
    columns = ("layer", "kernel", "verdict", "error", "host's", "allowed", "worst in", "native MiB", "ours MiB", "notes")
    return _section("Compared with the host", "Relative errors against the host's own layer in fp64, the worst of output and "
                    "gradients. Allowed is twice the host's own error plus a floor.",
                    _table(columns, rows, numbers=("error", "host's", "allowed", "native MiB", "ours MiB")))


def _fallbacks(report: Report) -> str:
    found = report.fallbacks()
    if not found:
        return _section("Native calls", "Every call was taken over.")
    rows = [((f["code"], "bad"), (f["text"], "long"), f["calls"], milliseconds(f["ms"]), ", ".join(dict.fromkeys(f["layers"])),
             (f["hint"], "long")) for f in found]
    return _section("Native calls", "By the time they took; a layer with several reasons counts under its first.",
                    _table(("code", "why", "calls", "own ms", "layers", "what would change it"), rows,
                           numbers=("calls", "own ms")))
