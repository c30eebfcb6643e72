"""Which way relational calls go on a CPU by default, and that a graph seen twice counts as known."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import FastRGCNConv, RGATConv, RGCNConv

import gnnaccel
from gnnaccel.dispatch import cost

R, N, E, F = 40, 400, 3000, 16


def inputs(relations: int = R, nodes: int = N, edges: int = E) -> tuple:
    torch.manual_seed(0)
    return torch.randn(nodes, F), torch.randint(0, nodes, (2, edges)), torch.randint(0, relations, (edges,))


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
    cpu = {**constants["relational"]["cpu"], "structure": {"forward": [10.0, 0.0], "training": [10.0, 0.0]}}
    dear = {**constants, "relational": {**constants["relational"], "cpu": cpu}}
    monkeypatch.setattr(cost, "constants", lambda: dear)
    layer, (x, edge_index, edge_type) = RGCNConv(F, F, R), inputs()
    with gnnaccel.enabled(backend="torch", records=9), torch.no_grad():
        for call in range(2):
            layer(x, edge_index, edge_type)
        layer(x, edge_index, edge_type.clone())  # another graph, for all that is known
        edge_index[0, 0] += 1
        layer(x, edge_index, edge_type)
        found = [r["route"] for r in gnnaccel.records()[-4:]]
    assert found == ["native", "torch", "native", "native"]
