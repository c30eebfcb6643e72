"""Time to build the structures kernels walk: the CSC alone (forward) and with the CSR
(backward)."""
from __future__ import annotations

import dataclasses

from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.profile.bench import timing
from gnnaccel.profile.bench.guard import guarded
from gnnaccel.profile.bench.result import Record
from gnnaccel.profile.bench.shapes import Graph


def structure_records(graph: Graph, effort: timing.Effort) -> list[Record]:
    """Two records for the graph, layers "csc" and "csc+csr"; ``peak_mib`` is in MiB."""
    records = []
    for name, csr in (("csc", False), ("csc+csr", True)):
        def build(csr=csr):
            pyg.build_structure(graph.edge_index, graph.num_nodes, csr)

        def cell(build=build):
            timed = timing.measure(build, graph.device, effort)
            return dataclasses.asdict(timed), timing.peak_extra_bytes(build, graph.device)

        value, error = guarded(cell, graph.device)
        timed, peak = value or (None, None)
        records.append(Record("structure", graph.shape.name, name, impl="gnnaccel",
                              device=graph.device.type, timing=timed, error=error,
                              values={} if peak is None else {"peak_mib": peak / 2**20}))
        timing.release(graph.device)
    return records
