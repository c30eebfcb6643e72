"""``--suite attention-kernel``: raw attention by graph and head layout, Python and allocation
included."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gnnaccel.profile.bench import floor, kernel_cells, layer_cells, timing
from gnnaccel.profile.bench.guard import guarded
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.shapes import Graph

SIZES = ((1, 64), (8, 8), (1, 128))


def graph_records(graph: Graph, effort: timing.Effort) -> Iterator[Record]:
    """All kernel cells of one graph, and the floor for their widths."""
    if graph.device.type == "cuda":
        yield from floor.floor_records(graph, sorted({heads * width for heads, width in SIZES}),
                                       effort)
    for scores, make in kernel_cells.SCORES.items():
        for heads, width in SIZES:
            yield from _pair_records(graph, scores, make, heads, width, effort)


def _pair_records(graph: Graph, scores: str, make, heads: int, width: int,
                  effort: timing.Effort) -> list[Record]:
    pair, error = guarded(lambda: make(graph, heads, width), graph.device)
    records = []
    for index, mode in enumerate(("forward", "training")):
        def cell(index=index):
            timed = dataclasses.asdict(timing.measure(pair[index], graph.device, effort))
            return timed, timing.peak_extra_bytes(pair[index], graph.device)

        value, failed = (None, error) if error else guarded(cell, graph.device)
        timed, peak = value or (None, None)
        memory = {} if peak is None else {"peak_mib": peak / layer_cells.MIB}
        records.append(Record("kernel", graph.shape.name, f"{scores} {heads}x{width}", mode,
                              "gnnaccel", graph.device.type, timed,
                              {"width": heads * width, **memory}, failed))
    pair = None
    timing.release(graph.device)
    return records
