"""The suite behind the README's table: a training step of each layer, natively, compiled, by a
peer's kernel and by gnnaccel, all in one run."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from gnnaccel.adapters.pyg.bench import layers as attention
from gnnaccel.adapters.pyg.bench import plain, relational
from gnnaccel.profile.bench import (accel, aggregate_cells, compiled, layer_cells, peers, plan,
                                    relation_cells, relation_graph, relation_shapes, shapes, steps,
                                    suite_attention, timing)
from gnnaccel.profile.bench.guard import Budget
from gnnaccel.profile.bench.result import Record

MODE = "training"
LAYERS = ("GAT 8x8", "GATv2 1x64", "Transformer 1x64", "GCN 64", "SAGE 64", "SAGE max 64")
#: over relations: PyG's layer, and PyG's faster one of the same mathematics, which is its peer
RELATIONAL, RELATIONAL_PEER = "RGCN 64", "FastRGCN 64"


@dataclasses.dataclass(frozen=True)
class PeersPlan(plan.Measuring):
    """``layers``: by name, over ``shapes``; ``typed``: graphs for `RELATIONAL`. Nothing is compiled
    with a ``compile_limit`` of 0."""

    shapes: tuple[shapes.Shape, ...]
    typed: tuple[relation_shapes.RelationShape, ...]
    layers: tuple[str, ...]


def from_options(options: Any) -> PeersPlan:
    """A plan from parsed options. Raises ValueError on names that do not exist and devices that are
    not there."""
    where = plan.device(options)
    names = plan.flat(options.shapes) or (["tiny"] if options.quick else ["arxiv", "fb15k-size"])
    typed = [relation_shapes.SHAPES[name] for name in names if name in relation_shapes.SHAPES]
    names = [name for name in names if name not in relation_shapes.SHAPES]
    known = {name: name for name in LAYERS}
    layers = [plan.named(name, known) for name in plan.flat(options.layers)] or list(LAYERS)
    compiles = options.compile if options.compile is not None else where.type == "cuda"
    found = plan.measuring(options)
    if not compiles or options.quick:
        found["compile_limit"] = 0.0
    return PeersPlan(tuple(map(shapes.resolve, names)), tuple(typed), tuple(layers), **found)


def peers_suite(wanted: PeersPlan, budget: Budget) -> Iterator[Record]:
    """Every layer on every shape; what is compiled comes last, in processes of its own."""
    for shape in wanted.shapes:
        graph = shapes.make(shape, wanted.device, wanted.seed, wanted.order)
        yield suite_attention.shape_record(graph)
        for name in wanted.layers:
            if budget.spent:
                return
            yield from layer_records(name, graph, wanted)
        accel.clear_cache()
        del graph
        timing.release(wanted.device)
    for typed in wanted.typed:
        yield from typed_records(typed, wanted)
    if wanted.compile_limit:
        yield from compiled_records(wanted, budget)


def typed_records(shape: relation_shapes.RelationShape, wanted: PeersPlan) -> Iterator[Record]:
    """`RELATIONAL` and its peer over one graph; the peer natively."""
    graph = relation_graph.make(shape, wanted.device, wanted.seed, wanted.order)
    yield Record("shape", shape.name, device=graph.device.type, values=relation_graph.facts(graph))
    for name, impls in ((RELATIONAL, wanted.impls), (RELATIONAL_PEER, ("native",))):
        yield from relation_cells.layer_records(relational.LAYERS[name], graph, MODE,
                                                wanted.effort, impls)
    accel.clear_cache()
    del graph
    timing.release(wanted.device)


def layer_records(name: str, graph: shapes.Graph, wanted: PeersPlan) -> Iterator[Record]:
    """The layer's own records and its peer's, each checked against the host's."""
    place: dict[str, Any] = dict(shape=graph.shape.name, layer=name, mode=MODE,
                                 device=graph.device.type)
    kind, found = kind_of(name), {}
    for impl in wanted.impls:
        record, found[impl] = layer_cells.step_record(
            kind, {**place, "impl": impl}, accel.CONTEXTS[impl], lambda: step_of(name, graph),
            wanted.effort)
        yield record
    yield from layer_cells.comparison("check", place, found)
    peer = peers.PEERS.get(name)
    if peer is None:
        return
    if peer.missing or graph.device.type != "cuda" and peer.package:
        yield Record(kind, **place, impl=peer.name,
                     error=peer.missing or f"{peer.name} needs a GPU")
        return
    record, theirs = layer_cells.step_record(kind, {**place, "impl": peer.name}, accel.native,
                                             lambda: peer_step(peer, name, graph), wanted.effort)
    if theirs and found.get("native"):
        record.values |= steps.differences(theirs, found["native"])
    yield record


def kind_of(name: str) -> str:
    """Of which suite's layers it is, as `compiled` asks."""
    return aggregate_cells.KIND if name in plain.LAYERS else "layer"


def step_of(name: str, graph: shapes.Graph) -> steps.Step:
    if name in plain.LAYERS:
        return aggregate_cells.layer_step(plain.LAYERS[name], graph, MODE)
    return steps.layer_step(attention.resolve(name), graph, MODE)


def peer_step(peer: peers.Peer, name: str, graph: shapes.Graph) -> steps.Step:
    step = step_of(name, graph)
    step.module = peer.make(step.module, graph.edge_index, graph.num_nodes)
    return step


def compiled_records(wanted: PeersPlan, budget: Budget) -> Iterator[Record]:
    """The compiled cells, small graphs first."""
    jobs_of: dict[str, list[tuple]] = {"layer": [], aggregate_cells.KIND: [], "relation": [
        (shape, RELATIONAL_PEER) for shape in wanted.typed]}
    for shape in wanted.shapes:
        for name in wanted.layers:
            jobs_of[kind_of(name)].append((shape, name))
    for kind, jobs in jobs_of.items():
        yield from compiled.by_waves(wanted, jobs, budget, kind=kind)
