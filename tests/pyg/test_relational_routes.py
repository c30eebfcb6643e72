"""Which way relational calls go by default, and that a graph seen twice counts as known."""
from __future__ import annotations

import dataclasses

import pytest
import torch
from torch_geometric.nn import (FastRGCNConv, GATConv, GATv2Conv, GINConv, HeteroConv, RGATConv,
                                RGCNConv, SAGEConv)

import gnnaccel
from gnnaccel.dispatch.plan import cost
from gnnaccel.dispatch.relational import costs, statements
from gnnaccel.dispatch.relational.request import RelationalRequest, RelationalSpec

R, N, E, F = 40, 400, 3000, 16


def inputs(relations: int = R, nodes: int = N, edges: int = E) -> tuple:
    torch.manual_seed(0)
    return torch.randn(nodes, F), torch.randint(0, nodes,
                                                (2, edges)), torch.randint(0, relations, (edges,))


def routes(layer, *args, calls: int = 1) -> list[str]:
    with gnnaccel.enabled(records=calls), torch.no_grad():
        for _ in range(calls):
            layer(*args)
        return [r["route"] for r in gnnaccel.records()[-calls:]]


@pytest.mark.parametrize("cls", [RGCNConv, FastRGCNConv, RGATConv])
def test_many_relations_are_taken_over(cls):
    assert routes(cls(F, F, R), *inputs(nodes=4000, edges=30000), calls=2)[-1] == "torch"


def test_a_tiny_new_graph_is_left_to_the_host():
    assert routes(RGCNConv(F, F, 1), *inputs(1, 20, 40)) == ["native"]


def test_a_graph_that_comes_again_counts_as_known(monkeypatch):
    """Its structure alone spoke against it."""
    constants = cost.constants()
    cpu = {**constants["relational"]["cpu"],
           "structure": {"forward": [10.0, 0.0], "training": [10.0, 0.0]}}
    dear = {**constants, "relational": {**constants["relational"], "cpu": cpu}}
    monkeypatch.setattr(cost, "constants", lambda: dear)
    layer, (x, edge_index, edge_type) = RGCNConv(F, F, R), inputs()
    with gnnaccel.enabled(backend="torch", records=9), torch.no_grad():
        for _ in range(2):
            layer(x, edge_index, edge_type)
        layer(x, edge_index, edge_type.clone())  # another graph, for all that is known
        edge_index[0, 0] += 1
        layer(x, edge_index, edge_type)
        found = [r["route"] for r in gnnaccel.records()[-4:]]
    assert found == ["native", "torch", "native", "native"]


@pytest.mark.gpu
@pytest.mark.parametrize("cls,relations,first",
                         [(RGCNConv, 3, "native"), (RGCNConv, 60, "cuda"),
                          (RGATConv, 60, "native")])
def test_a_new_graph_on_a_gpu_has_to_pay_for_its_structure(cls, relations, first):
    layer, args = cls(F, F, relations).cuda(), [t.cuda() for t in inputs(relations)]
    assert routes(layer, *args, calls=2) == [first, "cuda"]
    again = [t.clone() for t in args]
    assert routes(layer, *again, calls=2) == [first, "cuda"]


@pytest.mark.gpu
def test_new_graphs_on_a_gpu_are_not_read_where_the_last_one_did_not_pay(monkeypatch):
    from gnnaccel.dispatch.plan import planner

    asked, plan = [], planner.plan
    def spy(request, config):
        if type(request) is RelationalRequest:
            asked.append(request)
        return plan(request, config)

    monkeypatch.setattr(planner, "plan", spy)
    layer, (x, *graph) = RGCNConv(F, F, 3).cuda(), [t.cuda() for t in inputs(3)]

    def decided(*graph) -> bool:
        asked.clear()
        assert torch.allclose(layer(x, *graph), RGCNConv.forward.__wrapped__(layer, x, *graph),
                              atol=1e-4)
        return bool(asked)

    gnnaccel.reset_stats()
    with gnnaccel.enabled(), torch.no_grad():
        assert [decided(*(t.clone() for t in graph)) for _ in range(3)] == [True, False, False]
        assert gnnaccel.stats()["RGCNConv"]["routes"] == {"native": 3}
        assert decided(*(t.repeat_interleave(2, -1) for t in graph)), "more edges"


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [(GATConv,), (GATConv, SAGEConv), (GATv2Conv, GINConv)], ids=str)
def test_parts_over_new_graphs_on_a_gpu_stay_native_where_the_whole_does(kinds):
    """A structure for each relation would cost more than the one for all, which does not pay."""
    made = [HeteroConv({("a", str(at), "b"): _part(kinds[at % len(kinds)])
                        for at in range(3)}).cuda() for _ in range(2)]
    x = {name: torch.randn(30, F).cuda() for name in "ab"}
    ei = {("a", str(at), "b"): torch.randint(0, 30, (2, 50)).cuda() for at in range(3)}
    gnnaccel.reset_stats()
    with gnnaccel.enabled(), torch.no_grad():
        for _ in range(4):
            given = {name: t.clone() for name, t in ei.items()}
            for layer in made:
                layer(x, given)
        assert {name: list(one["routes"]) for name, one in gnnaccel.stats().items()} == {
            name: ["native"] for name in ("HeteroConv", *[k.__name__ for k in kinds])}
        before = gnnaccel.stats()["HeteroConv"]["calls"]
        for layer in made:
            for _ in range(3):
                layer(x, ei)
        assert gnnaccel.stats()["HeteroConv"]["calls"] > before and "cuda" in {
            route for one in gnnaccel.stats().values()
            for route in one["routes"]}, "a graph that comes again"


def _part(kind):
    if kind is GINConv:
        return kind(torch.nn.Linear(F, F))
    return kind(F, F, **({} if kind is SAGEConv else dict(add_self_loops=False)))


@pytest.mark.parametrize("name", cost.constants()["relational"]["cuda"]["once"])
@pytest.mark.parametrize("grad", [False, True])
def test_structures_of_new_graphs_on_a_gpu_are_paid_for_and_those_of_known_ones_are_there(name,
                                                                                          grad):
    x, edge_index, _ = inputs()
    program = statements.rgcn(False, False)
    sizes = dict(x=(F,), weight=(R, F, F))
    shapes = tuple((operand, sizes[operand]) for operand, _ in program.inputs)
    stated = RelationalSpec(program, name, shapes, x.dtype, x.dtype, N, N, E, R, lambda own,
                            compact: None)
    new, known = (stated.request("cuda", grad, fresh) for fresh in (True, False))
    assert costs.native(known) is None and costs.cuda(known) + 5e-4 < costs.cuda(new)
    assert costs.native(new) >= costs.native(dataclasses.replace(stated, num_edges=1,
                                                                 num_relations=1).request("cuda",
                                                                                          grad,
                                                                                          True))
    assert not grad or costs.native(new) > costs.native(stated.request("cuda", False, True))
    assert costs.native(dataclasses.replace(stated,
                                            native="another").request("cuda", grad, True)) is None


def test_native_calls_are_remembered_until_something_changes(monkeypatch):
    from gnnaccel.dispatch.plan import planner

    asked = []
    plan = planner.plan
    monkeypatch.setattr(planner, "plan", lambda request,
                        config: asked.append(request) or plan(request, config))
    layer, (x, edge_index, edge_type) = RGCNConv(F, F, 1), inputs(1, 20, 40)

    def decided(*args, **kwargs) -> bool:
        asked.clear()
        expected = layer.__class__.forward.__wrapped__(layer, *args, **kwargs)
        got = layer(*args, **kwargs)
        assert torch.equal(got, expected)
        return bool(asked)

    with gnnaccel.enabled(), torch.no_grad():
        assert decided(x, edge_index, edge_type), "a new graph"
        assert decided(x, edge_index, edge_type), "the same as one of many"
        assert not decided(x, edge_index,
                           edge_type) and not decided(x.clone(), edge_index, edge_type)
        gnnaccel.reset_stats()
        layer(x, edge_index, edge_type)
        assert gnnaccel.stats()["RGCNConv"]["reasons"] == {"GA401": 1}
        other = edge_index.clone()
        assert not decided(x[:, :F].double().float()[:20], other,
                           edge_type), "other edges, no more of them"
        assert decided(x, other, edge_type), "which come again"
        assert decided(*inputs(1, 20, 80)), "more edges"
        for _ in range(2):
            decided(x, edge_index, edge_type)
        assert not decided(x, edge_index,
                           edge_type) and decided(x, edge_index, edge_type=edge_type), "keywords"
        for _ in range(2):
            decided(x, edge_index, edge_type)
        with torch.enable_grad():
            assert decided(x, edge_index, edge_type), "with gradients"
        for _ in range(2):
            decided(x, edge_index, edge_type)
        assert not decided(x, edge_index, edge_type)
        gnnaccel.reset_stats()
        with gnnaccel.enabled(when="supported"):
            layer(x, edge_index, edge_type)
        assert gnnaccel.stats()["RGCNConv"]["routes"] == {"torch": 1}, "other options"
    with gnnaccel.enabled(on_fallback="raise"), torch.no_grad(), pytest.raises(
        gnnaccel.errors.FallbackError):
        layer(x, edge_index, edge_type)
