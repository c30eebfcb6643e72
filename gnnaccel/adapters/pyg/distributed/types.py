"""Layers that take all types of nodes and edges at once, over a part."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gnnaccel.dispatch.distributed.building import Relation
from gnnaccel.dispatch.distributed.session import Session
from gnnaccel.errors import PartitionError


def over_part(session: Session, native: Any, layer: Any, given: Any) -> dict[str, Any]:
    """A call with ``x_dict`` and ``edge_index_dict``, by type. The layer sees own and halo rows as
    its nodes, into which the own ones' edges enter; of its results the own rows are given.

    Every type that edges begin at is extended, in an order that all processes share.
    PartitionError where the arguments are not the part's.
    """
    name, part = type(layer).__name__, session.part
    x_dict, edges = given.arguments.get("x_dict"), given.arguments.get("edge_index_dict")
    if not (part.hetero and isinstance(x_dict, Mapping) and isinstance(edges, Mapping)):
        raise PartitionError(f"{name} was called with x_dict of type {type(x_dict).__name__} and "
                             f"edge_index_dict of type {type(edges).__name__}; over a part of a "
                             "graph with types of nodes it needs both by type")
    for relation, edge_index in edges.items():
        _check(session, name, relation, edge_index)
    sources = sorted({relation[0] for relation in edges} & x_dict.keys())
    extended = {kind: session.extend(kind, x_dict[kind], f"x of {kind}", name, layer)
                for kind in sources}
    given.arguments["x_dict"] = {kind: extended.get(kind, x) for kind, x in x_dict.items()}
    found = native(*given.args, **given.kwargs)
    return {kind: rows[:len(part.rows[kind].own)] if isinstance(rows, Tensor) else rows
            for kind, rows in found.items()}


def _check(session: Session, name: str, relation: Relation, edge_index: Any) -> None:
    if relation not in session.part.edges:
        raise PartitionError(f"{name} was called with edges {relation}, which this part does not "
                             f"have; it has {sorted(session.part.edges)}")
    if not isinstance(edge_index, Tensor) or edge_index.layout is not session.part.edges[
            relation].layout:
        raise PartitionError(f"{name} was called with a {type(edge_index).__name__} for edges "
                             f"{relation}; over a part it needs a dense tensor [2, E] of integers")
    session.check_edges(edge_index, relation[0], relation[2])
