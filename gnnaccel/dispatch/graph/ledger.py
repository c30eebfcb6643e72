"""Ledgers of the calls over each graph, whether or not its structure was built.

Nobody can know whether a graph will come again. Its ledger says how often it came and how much time
faster calls over it would have saved; from that follows when building its structure pays, when
results derived from it are worth keeping, and whether a layer's native calls over it need another
look.

A ledger belongs to a graph's edges as they are: a write into them opens a new one. A graph of
several tensors is known by the largest. Of inference tensors, whose writes nobody counts, there are
no ledgers.
"""
from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from gnnaccel.dispatch.graph.edge_arrays import EdgeArrays
from gnnaccel.dispatch.graph.tensor_ref import TensorRef


class GraphLedger(TensorRef):
    """Counts of calls over the graph of these edges, which it refers to weakly.

    ``key``: the edges' id; ``sightings``: calls that asked about the graph; ``calls``: those of
    layers that its structure would have served; ``seconds``: saved, had calls been faster ones;
    ``functions``: names of the host's functions whose results over it were asked for; ``layers``:
    by `layer_memory.LayerMemory.number`, for a layer that had native calls over it, the ids of all
    tensors of the graph, then in each `layer_memory.mode_of` the layer the state in which the call
    was decided as one over a known graph.
    """

    __slots__ = ("key", "sightings", "calls", "seconds", "functions", "layers")

    key: int
    version: int
    sightings: int
    calls: int
    seconds: float
    functions: tuple[str, ...]
    layers: dict[int, list[Any]]

    # made by `of` without a call of Python's
    __new__ = weakref.ref.__new__  # type: ignore[assignment]  # (edges, what to call)
    __init__ = weakref.ref.__init__


#: ledgers by the id of the edges; public for lookups that cannot afford a call
ledgers: dict[int, GraphLedger] = {}
# ledgers of tensors that are gone, until the next new one; noted without a call of Python's
_gone: list[GraphLedger] = []
_note = _gone.append


def of(edges: Tensor | EdgeArrays) -> GraphLedger:
    """The ledger of these edges as they are now."""
    key = id(edges)
    entry = ledgers.get(key)
    if entry is None or entry() is not edges or entry.version != edges._version:
        # No loop ends and no call returns between the look and the taking, so that no other thread
        # takes the last one meanwhile.
        while (gone := _gone.pop() if _gone else None) is not None:
            if gone.key in ledgers and ledgers[gone.key] is gone:  # no other tensor lies there
                del ledgers[gone.key]
        entry = GraphLedger(edges, _note)
        entry.key, entry.version, entry.pointer = key, edges._version, 0  # stand-ins have no memory
        entry.sightings, entry.calls, entry.seconds = 0, 0, 0.0
        entry.functions, entry.layers = (), {}
        ledgers[key] = entry
    return entry


def keep(numbers: list[int]) -> None:
    """Forget the calls of all layers but those with these ``numbers``: the others are gone."""
    for entry in list(ledgers.values()):
        if len(entry.layers) > len(numbers):
            before = entry.layers.copy()
            entry.layers = {number: before[number] for number in numbers if number in before}


def forget() -> None:
    """Forget every graph."""
    ledgers.clear()
    _gone.clear()
