"""The floor: gathering every edge's source row once along the CSC and summing, and nothing else.

Measured on the graph itself and on one with the same size and uniform degrees; the latter is the
floor that targets are stated against, as its work is balanced without effort.
"""
from __future__ import annotations

import dataclasses

import torch

from gnnaccel.profile.bench import shapes, timing
from gnnaccel.profile.bench.guard import guarded
from gnnaccel.profile.bench.result import Record


def floor_records(graph: shapes.Graph, widths: list[int], effort: timing.Effort) -> list[Record]:
    """One record per width (in features, as ``layer``) and degree law (``impl``: "actual" or
    "uniform")."""
    try:
        from gnnaccel.cuda.gather import row_gather
        from gnnaccel.dispatch.graph.view import GraphView
    except ImportError as problem:
        return [Record("note", shape=graph.shape.name, layer="floor",
                       error=f"no row gather: {problem}")]
    records = []
    for impl in ("uniform", "actual"):
        def prepared(impl=impl):
            same = (graph if impl == "actual"
                    else shapes.make(shapes.uniform(graph.shape), graph.device))
            return GraphView(same.edge_index, graph.num_nodes, graph.num_nodes).csc(places=False)

        rows, error = guarded(prepared, graph.device)
        for width in widths:
            def cell(width=width, rows=rows):
                x = torch.randn(graph.num_nodes, width, device=graph.device)
                return dataclasses.asdict(timing.measure(lambda: row_gather(rows, x), graph.device,
                                                         effort))

            timed, failed = (None, error) if error else guarded(cell, graph.device)
            records.append(Record("floor", graph.shape.name, str(width), impl=impl,
                                  device=graph.device.type, timing=timed, error=failed))
        rows = None
        timing.release(graph.device)
    return records
