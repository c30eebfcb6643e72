"""PyG's layer of the same kind and size, run natively beside DGL's on the same edges.

They are no copies of each other: PyG adds self loops to GAT's graph, and TransformerConv, the twin
of DotGatConv, has maps of its own for keys and values and a skip connection.
"""
from __future__ import annotations

import dataclasses
from typing import Any

from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.adapters.pyg.bench import relational
from gnnaccel.profile.bench import (accel, layer_cells, relation_native, relation_steps, steps,
                                    timing)
from gnnaccel.profile.bench.metrics import TWIN
from gnnaccel.profile.bench.relation_graph import RelationGraph
from gnnaccel.profile.bench.result import Record

_PLAIN = {"GAT 8x8": "GAT 8x8", "GATv2 4x16": "GATv2 4x16", "DotGat 1x64": "Transformer 1x64"}
_TYPED = {"RelGraphConv 64": "RGCN 64", "HGT 4x16": "HGT 4x16"}


def record(kind: str, place: dict[str, Any], source: Any, effort: timing.Effort) -> list[Record]:
    """The twin's record, none where there is no twin. ``place``: the cell, its ``layer`` DGL's;
    ``source``: the benchmark's graph."""
    make, refused = _maker(place["layer"], place["mode"], source)
    if make is None and refused is None:
        return []
    place = {**place, "impl": TWIN}
    if refused:
        return [Record(kind, **place, error=refused)]
    # seconds a step, where it fits at all
    patient = dataclasses.replace(effort, patience_s=min(effort.patience_s, 2.0))
    return [layer_cells.step_record(kind, place, accel.CONTEXTS["native"], make, patient)[0]]


def _maker(layer: str, mode: str, source: Any):
    """(what makes the twin's step, None), (None, why it is not run), or (None, None) without a
    twin."""
    if isinstance(source, RelationGraph):
        if layer not in _TYPED:
            return None, None
        twin = relational.resolve(_TYPED[layer])
        return (lambda: relation_steps.relation_step(twin, source, mode),
                relation_native.refusal(twin, source, mode))
    if layer not in _PLAIN:
        return None, None
    spec = pyg.resolve(_PLAIN[layer])
    return (lambda: steps.layer_step(spec, source, mode)), None
