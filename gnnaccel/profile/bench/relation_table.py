"""The relational suites' tables."""
from __future__ import annotations

from gnnaccel.profile.bench import metrics, text
from gnnaccel.profile.bench.result import Result

VARIANTS = ("none", "compaction", "reordering", "all")
WAYS = ("loop", "grouped_mm", "dense", "gnnaccel")


def sections(result: Result) -> list[text.Section]:
    """All of them; those without rows are for the caller to leave out."""
    cells = metrics.cells(result)
    return [_graphs(result), _relations(cells), _passes(cells), _segments(cells)]


def _graphs(result: Result) -> text.Section:
    facts = ("num_nodes", "num_edges", "num_relations", "median_relation", "max_in_degree",
             "pairs_src", "pairs_dst")
    rows = [(record.shape, record.device, *(text.number(record.values.get(name)) for name in facts))
            for record in result.find(kind="shape") if "num_relations" in record.values]
    columns = ("shape", "on", "nodes", "edges", "relations", "median relation", "max in-degree",
               "pairs by source / edges", "pairs by destination / edges")
    return text.Section("Graphs with typed edges", columns, rows)


def _relations(cells: list[metrics.Cell]) -> text.Section:
    """``first``: the peak of a first training step, in which structures are built too."""
    columns = ("shape", "layer", "mode", "native ms", "gnnaccel ms", "x native", "peak MiB native",
               "peak MiB gnnaccel", "kept MiB", "first MiB native", "first MiB gnnaccel",
               "difference", "route")
    firsts = {(cell.shape, cell.layer, cell.mode): cell for cell in cells if cell.kind == "memory"}

    def row(cell: metrics.Cell, notes: dict[str, str]) -> tuple[str, ...]:
        first = firsts.get((cell.shape, cell.layer, cell.mode)) if cell.device != "cpu" else None
        return (text.shape(cell), cell.layer, cell.mode, text.time(cell, "native", notes),
                text.time(cell, "gnnaccel", notes), text.ratio(cell.metric("vs_native")),
                *text.memory(cell), _first(first, "native", notes),
                _first(first, "gnnaccel", notes), text.difference(cell),
                cell.route or text.MISSING)

    return text.table("Relational layers: PyG natively and through gnnaccel", columns,
                      (cell for cell in cells if cell.kind.startswith("relation")), row)


def _first(cell: metrics.Cell | None, impl: str, notes: dict[str, str]) -> str:
    record = cell.by.get(impl) if cell else None
    if record is None:
        return text.MISSING
    return (text.failure(record, notes) if record.error
            else text.number(record.values.get("peak_mib")))


def _passes(cells: list[metrics.Cell]) -> text.Section:
    def row(cell: metrics.Cell, notes: dict[str, str]) -> tuple[str, ...]:
        gains = (metrics.ratio(cell.ms("none"), cell.ms(name)) for name in VARIANTS[1:])
        return (cell.shape, cell.layer, cell.mode,
                *(text.time(cell, name, notes) for name in VARIANTS), *map(text.ratio, gains),
                *(text.number(cell.value(name, "peak_mib")) for name in ("none", "all")),
                cell.route_of("all") or text.MISSING)

    columns = ("shape", "layer", "mode", *(f"{name} ms" for name in VARIANTS),
               *(f"x by {name}" for name in VARIANTS[1:]), "peak MiB none", "peak MiB all", "route")
    return text.table("gnnaccel with and without compaction and reordering", columns,
                      (cell for cell in cells if cell.kind == "compaction"), row)


def _segments(cells: list[metrics.Cell]) -> text.Section:
    def row(cell: metrics.Cell, notes: dict[str, str]) -> tuple[str, ...]:
        ours = cell.ms("gnnaccel")
        floor = next((record.values.get("floor_ms") for record in cell.by.values()), None)
        gains = (metrics.ratio(cell.ms(way), ours) for way in WAYS[:-1])
        return (cell.shape, cell.layer, cell.mode, *(text.time(cell, way, notes) for way in WAYS),
                text.number(floor), *map(text.ratio, gains),
                text.ratio(metrics.ratio(ours, floor)),
                text.number(cell.value("gnnaccel", "rel_l2")))

    columns = ("rows, width", "precision", "mode", *(f"{way} ms" for way in WAYS), "floor ms",
               *(f"x {way}" for way in WAYS[:-1]), "x floor", "difference")
    return text.table("One matrix per segment", columns,
                      (cell for cell in cells if cell.kind == "segment-gemm"), row)
