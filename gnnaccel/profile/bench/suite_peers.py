"""The suite behind the README's table: a training step of each layer, natively, compiled, by a
peer's kernel and by gnnaccel, all in one run."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gnnaccel.adapters.pyg.bench import layers as attention
from gnnaccel.adapters.pyg.bench import plain, relational
from gnnaccel.profile.bench import (accel, cells, compiled, peers, plan, relation_graph, shapes,
                                    steps, suite_aggregate, suite_relational)
from gnnaccel.profile.bench.guard import Budget
from gnnaccel.profile.bench.plan import Plan
from gnnaccel.profile.bench.relation_graph import RelationShape
from gnnaccel.profile.bench.result import Record

MODE = "training"
LAYERS = ("GAT 8x8", "GATv2 1x64", "Transformer 1x64", "GCN 64", "SAGE 64", "SAGE max 64")
#: over relations: PyG's layer, and PyG's faster one of the same mathematics, which is its peer
RELATIONAL, RELATIONAL_PEER = "RGCN 64", "FastRGCN 64"


def from_options(options: Any) -> Plan:
    """A plan from parsed options: layers by name over graphs, `RELATIONAL` over those with typed
    edges, and nothing compiled with a ``compile_limit`` of 0. Raises ValueError on names that do
    not exist and devices that are not there."""
    where = plan.device(options)
    names = plan.flat(options.shapes) or (["tiny"] if options.quick else ["arxiv", "fb15k-size"])
    known = {name: name for name in LAYERS}
    layers = [plan.named(name, known) for name in plan.flat(options.layers)] or list(LAYERS)
    # graphs without types first
    jobs: list[plan.Job] = [(shapes.resolve(name), tuple(layers)) for name in names
            if name not in relation_graph.SHAPES]
    jobs += [(relation_graph.SHAPES[name], (RELATIONAL, RELATIONAL_PEER)) for name in names
             if name in relation_graph.SHAPES]
    compiles = options.compile if options.compile is not None else where.type == "cuda"
    found = plan.measuring(options)
    if not compiles or options.quick:
        found["compile_limit"] = 0.0
    return Plan(tuple(jobs), **found)


def peers_suite(wanted: Plan, budget: Budget) -> Iterator[Record]:
    """Every layer on every shape; what is compiled comes last, in processes of its own."""
    for shape, layers in wanted.jobs:
        typed = isinstance(shape, RelationShape)

        def records(graph: Any) -> Iterator[Record]:
            for name in layers:
                if budget.spent:
                    return
                yield from (typed_records if typed else layer_records)(name, graph, wanted)

        yield from cells.on_graph(wanted, shape, relation_graph.make if typed else shapes.make,
                                  records)
    if wanted.compile_limit:
        yield from compiled_records(wanted, budget)


def typed_records(name: str, graph: relation_graph.RelationGraph, wanted: Plan) -> list[Record]:
    """`RELATIONAL` or its peer over one graph; the peer natively."""
    impls = wanted.impls if name == RELATIONAL else ("native",)
    return suite_relational.layer_records(relational.LAYERS[name], graph, MODE, wanted.effort,
                                          impls)


def layer_records(name: str, graph: shapes.Graph, wanted: Plan) -> Iterator[Record]:
    """The layer's own records and its peer's, each checked against the host's."""
    place: dict[str, Any] = dict(shape=graph.shape.name, layer=name, mode=MODE,
                                 device=graph.device.type)
    kind, found = kind_of(name), {}
    for impl in wanted.impls:
        record, found[impl] = cells.step_record(
            kind, {**place, "impl": impl}, accel.CONTEXTS[impl], lambda: step_of(name, graph),
            wanted.effort)
        yield record
    yield from cells.comparison(place, found)
    peer = peers.PEERS.get(name)
    if peer is None:
        return
    if peer.missing or graph.device.type != "cuda" and peer.package:
        yield Record(kind, **place, impl=peer.name,
                     error=peer.missing or f"{peer.name} needs a GPU")
        return
    record, theirs = cells.step_record(kind, {**place, "impl": peer.name}, accel.native,
                                       lambda: peer_step(peer, name, graph), wanted.effort)
    if theirs and found.get("native"):
        record.values |= steps.differences(theirs, found["native"])
    yield record


def kind_of(name: str) -> str:
    """Of which suite's layers it is, as `compiled` asks."""
    return (suite_aggregate.KIND if name in plain.LAYERS else "relation"
            if name in relational.LAYERS else "layer")


def step_of(name: str, graph: shapes.Graph) -> steps.Step:
    if name in plain.LAYERS:
        return suite_aggregate.layer_step(plain.LAYERS[name], graph, MODE)
    return steps.layer_step(attention.resolve(name), graph, MODE)


def peer_step(peer: peers.Peer, name: str, graph: shapes.Graph) -> steps.Step:
    step = step_of(name, graph)
    step.module = peer.make(step.module, graph.edge_index, graph.num_nodes)
    return step


def compiled_records(wanted: Plan, budget: Budget) -> Iterator[Record]:
    """The compiled cells, by kind, small graphs first."""
    jobs_of: dict[str, list[tuple]] = {"layer": [], suite_aggregate.KIND: [], "relation": []}
    for shape, layers in wanted.jobs:
        for name in layers:
            if name != RELATIONAL:
                jobs_of[kind_of(name)].append((shape, name))
    for kind, jobs in jobs_of.items():
        yield from compiled.by_waves(wanted, budget, kind, jobs)
