"""What is known of the calls over a graph, whether or not its structure was built.

Nobody can know whether a graph will come again. Its ledger says how often it came and what faster
calls over it would have saved; from that follows when building its structure pays, when results
derived from it are worth keeping, and whether a layer's native calls over it need another look.

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
    """Of the graph of these edges, which it refers to weakly.

    ``key``: the edges' id; ``sightings``: calls that asked about the graph; ``calls``: those of
    layers that its structure would have served; ``seconds``: what faster calls would have saved;
    ``functions``: those of the host's, by name, whose results over it were asked for; ``layers``:
    by `layer_memory.LayerMemory.number`, of a layer that had native calls over it, the ids of all
    its tensors, and the state in which the call was decided as one over a known graph, in each
    `layer_memory.mode_of` the layer.
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


#: by the id of the edges; for lookups that cannot afford a call
ledgers: dict[int, GraphLedger] = {}
# those of tensors that are gone, until the next new one; noted without a call of Python's
_gone: list[GraphLedger] = []
_note = _gone.append


def of(edges: Tensor | EdgeArrays) -> GraphLedger:
    """The ledger of these edges as they are now."""
    key = id(edges)
    found = ledgers.get(key)
    if found is None or found() is not edges or found.version != edges._version:
        while _gone:
            gone = _gone.pop()
            if gone.key in ledgers and ledgers[gone.key] is gone:  # no other tensor lies there
                del ledgers[gone.key]
        found = GraphLedger(edges, _note)
        found.key, found.version, found.pointer = key, edges._version, 0  # stand-ins have no memory
        found.sightings, found.calls, found.seconds = 0, 0, 0.0
        found.functions, found.layers = (), {}
        ledgers[key] = found
    return found


def forget() -> None:
    """Forget every graph."""
    ledgers.clear()
    _gone.clear()
