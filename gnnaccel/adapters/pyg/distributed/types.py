"""Layers that take all types of nodes and edges at once, over a part."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.distributed.building import Relation
from gnnaccel.dispatch.distributed.session import Session
from gnnaccel.dispatch.observe import watch
from gnnaccel.errors import PartitionError


def over_part(session: Session, native: Any, layer: Any, given: Any) -> dict[str, Any]:
    """A call with ``x_dict`` and ``edge_index_dict``, by type. The layer sees own and halo rows as
    its nodes, and is told how many are own (`state.own_rows`): no edge enters the others. Where it
    computes results for these all the same, they are left out.

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
    with _told(x_dict, extended):
        results = native(*given.args, **given.kwargs)
    return {kind: _own(rows, len(part.rows[kind].own)) for kind, rows in results.items()}


@contextlib.contextmanager
def _told(x_dict: Mapping[str, Any], extended: Mapping[str, Tensor]) -> Iterator[None]:
    """A block in which `state.own_rows` says how many rows ``x_dict`` has of each type, if
    ``extended`` has more of any. Not while calls run again natively, to compare."""
    before, own_rows = state.own_rows, None
    if (any([len(rows) > len(x_dict[kind]) for kind, rows in extended.items()])
        and not watch.repeating()):
        own_rows = {kind: len(x) for kind, x in x_dict.items() if isinstance(x, Tensor)}
    state.own_rows = own_rows
    try:
        yield
    finally:
        state.own_rows = before


def _own(rows: Any, count: int) -> Any:
    return rows[:count] if isinstance(rows, Tensor) and len(rows) > count else rows


def _check(session: Session, name: str, relation: Relation, edge_index: Any) -> None:
    if relation not in session.part.edges:
        raise PartitionError(f"{name} was called with edges {relation}, which this part does not "
                             f"have; it has {sorted(session.part.edges)}")
    if not isinstance(edge_index, Tensor) or edge_index.layout is not session.part.edges[
            relation].layout:
        raise PartitionError(f"{name} was called with a {type(edge_index).__name__} for edges "
                             f"{relation}; over a part it needs a dense tensor [2, E] of integers")
    session.check_edges(edge_index, relation[0], relation[2])
