"""The floor: gathering every edge's source row once along the CSC and summing, and nothing else.

Measured on the graph itself and on one with the same size and uniform degrees; the latter is the
floor that targets are stated against, as its work is balanced without effort.
"""
from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from gnnaccel.cuda.gather import row_gather
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.profile.bench import cells, shapes, timing
from gnnaccel.profile.bench.guard import guarded
from gnnaccel.profile.bench.result import Record


def floor_records(graph: shapes.Graph, widths: Collection[int],
                  effort: timing.Effort) -> list[Record]:
    """One record per width (in features, as ``layer``) and degree law (``impl``: "actual" or
    "uniform")."""
    records = []
    for impl in ("uniform", "actual"):
        def prepared(impl=impl):
            same = (graph if impl == "actual"
                    else shapes.make(shapes.uniform(graph.shape), graph.device))
            return GraphView(same.edge_index, graph.num_nodes, graph.num_nodes).csc(places=False)

        rows, error = guarded(prepared, graph.device)
        for width in sorted(widths):
            call, failed = (None, error) if error else guarded(
                lambda: _gathering(rows, graph, width), graph.device)
            place = Record("floor", graph.shape.name, str(width), impl=impl,
                           device=graph.device.type)
            records.append(cells.call_record(place, call, failed, graph.device, effort))
        rows = call = None
        timing.release(graph.device)
    return records


def _gathering(rows: Any, graph: shapes.Graph, width: int) -> Callable[[], object]:
    x = torch.randn(graph.num_nodes, width, device=graph.device)
    return lambda: row_gather(rows, x)
