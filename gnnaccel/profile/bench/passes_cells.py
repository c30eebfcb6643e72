"""gnnaccel's passes on and off: what compaction and reordering are worth by themselves and
together."""
from __future__ import annotations

import dataclasses

from torch import Tensor

from gnnaccel.adapters.pyg.bench.relational import RelationLayer
from gnnaccel.profile.bench import layer_cells, relation_cells, steps, timing
from gnnaccel.profile.bench.guard import guarded
from gnnaccel.profile.bench.relation_graph import RelationGraph
from gnnaccel.profile.bench.relation_steps import relation_step
from gnnaccel.profile.bench.result import Record

OPTION = "passes"
"""The option of ``gnnaccel.enabled`` that chooses among passes."""

VARIANTS: dict[str, tuple[str, ...] | None] = {
    "none": (), "compaction": ("compaction",), "reordering": ("reordering",), "all": None}
"""What ``gnnaccel.enabled(passes=...)`` is given; None: the option is left out, so that every pass
may run."""


def passes_records(layer: RelationLayer, graph: RelationGraph, mode: str,
                   effort: timing.Effort) -> list[Record]:
    """One record per variant, as ``impl``, with its difference from the results without passes."""
    effort = dataclasses.replace(effort, batches=min(effort.batches, 10),
                                 seconds=min(effort.seconds, 0.5))
    place = layer_cells.place_of(layer, graph, mode)
    records: list[Record] = []
    plain: dict[str, Tensor] = {}
    for name, passes in VARIANTS.items():
        options = {} if passes is None else {OPTION: passes}
        context, refused = relation_cells.context_for("gnnaccel", layer, graph, mode, **options)
        if refused:
            records.append(Record("compaction", **place, impl=name, error=refused))
            continue
        record, tensors = layer_cells.step_record("compaction", {**place, "impl": name}, context,
                                                  lambda: relation_step(layer, graph, mode), effort)
        plain = tensors if name == "none" else plain
        if plain and tensors and name != "none":
            differences, error = guarded(lambda: steps.differences(tensors, plain), graph.device)
            record.values.update(differences or {})
            record.error = record.error or error
        records.append(record)
    return records
