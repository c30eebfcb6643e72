"""Tables out of a result: for the terminal by rich, for documents in Markdown. Both render the same
sections."""
from __future__ import annotations

from gnnaccel.profile.bench import columns, metrics, script_table, targets, text
from gnnaccel.profile.bench.result import Record, Result
from gnnaccel.profile.bench.text import MISSING, Section

ONCE_LIMIT = 0.95
_TYPED = {"nodes": "num_nodes", "edges": "num_edges", "relations": "num_relations",
          "median relation": "median_relation", "max in-degree": "max_in_degree",
          "pairs by source / edges": "pairs_src", "pairs by destination / edges": "pairs_dst"}


def sections(result: Result) -> list[Section]:
    """What there is to show; sections without rows are left out."""
    cells = metrics.cells(result)
    made = [columns.LAYERS.section(cells), _floors(result),
            *(one.section(cells) for one in columns.TABLES), _typed_graphs(result),
            *(one.section(cells) for one in columns.RELATIONS), once(result),
            *(one.section(cells) for one in columns.HOSTS), script_table.section(result),
            _targets(result), _left_out(result)]
    return [section for section in made if section.rows]


def markdown(result: Result) -> str:
    lines = [_headline(result), ""]
    for section in sections(result):
        lines += [f"### {section.title}", "", _line(section.columns),
                  _line(["---"] * len(section.columns))]
        lines += [_line(row) for row in section.rows]
        lines += [""] + [f"* {note}" for note in section.notes] + ([""] if section.notes else [])
    return "\n".join(lines)


def show(result: Result, style: str = "rich") -> None:
    """Print to standard output; without rich installed, Markdown."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        style = "markdown"
    if style == "markdown":
        print(markdown(result))
        return
    console = Console()
    if not console.is_terminal:
        # Into a file, rich would wrap the columns at 80 characters.
        console = Console(width=200)
    console.print(_headline(result), markup=False)
    for section in sections(result):
        table = Table(*section.columns, title=section.title, title_justify="left")
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
        for note in section.notes:
            console.print(f"  {note}", markup=False, highlight=False)


def _floors(result: Result) -> Section:
    rows = [(r.shape, r.layer, r.impl, text.number(r.ms) if r.timing else r.error or MISSING)
            for r in result.find(kind="floor")]
    return Section("Floor: every edge's row gathered once", ("shape", "width", "degrees", "ms"),
                   rows)


def _typed_graphs(result: Result) -> Section:
    rows = [(record.shape, record.device, *(text.number(record.values.get(name))
                                            for name in _TYPED.values()))
            for record in result.find(kind="shape") if "num_relations" in record.values]
    return Section("Graphs with typed edges", ("shape", "on", *_TYPED), rows)


def _targets(result: Result) -> Section:
    """Verdicts of the suites of which something was measured."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    rows = []
    for wanted in targets.SUITES:
        verdicts = targets.judge(result, wanted)
        if any(verdict.met is not None for verdict in verdicts):
            rows += [(verdict.target.text(), text.number(verdict.value), words[verdict.met])
                     for verdict in verdicts]
    return Section("Targets", ("target", "measured", ""), rows)


def _left_out(result: Result) -> Section:
    rows = [(record.shape or MISSING, record.layer, record.error or MISSING)
            for record in result.find(kind="note")]
    return Section("What was left out", ("shape", "what", "why"), list(dict.fromkeys(rows)))


def _headline(result: Result) -> str:
    known = result.provenance
    versions = ", ".join(f"{name} {known[name]}" for name in ("torch", "cuda", "cupy",
                                                              "torch_geometric", "dgl")
                         if known.get(name))
    where, commit = known.get("gpu") or "CPU", known.get("commit") or "unknown"
    return f"{where}; {versions}; {known.get('date', '')}; commit {commit}"


def _line(cells) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


# --- graphs that come once: a layer per row, a size per column ------------------------------------

def once(result: Result) -> Section:
    """Native's time over gnnaccel's, by the medians; below it the cells that are slower both by the
    median and by the least."""
    found = {(record.layer, text.shape(record), record.mode): record
             for record in result.find(kind="once")}
    layers, sizes = (list(dict.fromkeys(key[part] for key in found)) for part in (0, 1))
    notes: dict[str, str] = {}
    rows = [(layer, *(_pair([found.get((layer, size, mode)) for mode in ("forward", "training")],
                            notes) for size in sizes)) for layer in layers]
    return Section("Graphs that come once: x native, forward / training", ("layer", *sizes),
                   rows, (*text.notes_of(notes), _slow(found)))


def _pair(records: list[Record | None], notes: dict[str, str]) -> str:
    if not any(records):
        return MISSING
    return " / ".join(MISSING if record is None else text.failure(record, notes)
                      if record.error else
                      f"{record.values['ratio_median']:.2f}" for record in records)


def _slow(found: dict[tuple[str, str, str], Record]) -> str:
    """The cells below the limit by both ratios, the lowest first: one ratio alone is often the
    noise of a few calls."""
    measured = {key: (record.values["ratio_median"], record.values["ratio_least"])
                for key, record in found.items() if not record.error}
    slow = sorted((ratios, key) for key, ratios in measured.items() if max(ratios) < ONCE_LIMIT)
    said = f"below {ONCE_LIMIT} by the median and by the least: "
    if not slow:
        return f"{said}none of {len(measured)} cells"
    return f"{said}{len(slow)} of {len(measured)} cells, the lowest first: " + "; ".join(
        f"{layer}, {size}, {mode}: {median:.3f} and {least:.3f}"
        for (median, least), (layer, size, mode) in slow)
