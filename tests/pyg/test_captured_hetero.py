"""Captures of models that `to_hetero` makes, in no other module."""
from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg

import gnnaccel
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import on, replays, same  # noqa: F401

SIZES = {"a": 10, "b": 12}
RELATIONS = [("a", "to", "b"), ("b", "to", "a")]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = pyg.SAGEConv((6, 6), 8), pyg.SAGEConv((8, 8), 4)

    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).relu(), edge_index)


@pytest.fixture
def case(on, request):
    torch.manual_seed(2)
    place = "cuda" if "cuda" in request.node.name else "cpu"
    model = pyg.to_hetero(Plain(), (list(SIZES), RELATIONS)).to(place)
    x = {kind: torch.randn(count, 6, device=place) for kind, count in SIZES.items()}
    edges = {(a, "to", b): torch.stack([torch.randint(SIZES[a], (30,)),
                                        torch.randint(SIZES[b], (30,))]).to(place)
             for a, _, b in RELATIONS}
    return model, (x, edges)


def step(model, args) -> list:
    model.zero_grad()
    out = model(*args)
    sum(one.square().sum() for one in out.values()).backward()
    return [*[one.detach() for one in out.values()], *[p.grad.clone() for p in model.parameters()]]


def beside(model, args, steps: int = 8) -> None:
    """Each step beside the host's own."""
    for _ in range(steps):
        found = step(model, args)
        with gnnaccel.disabled():
            assert same(found, step(model, args))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01)


def test_training(case):
    beside(*case)
    assert replays("GraphModule") == 4


def more_of_a_layer(model):
    next(m for m in model.modules() if isinstance(m, pyg.SAGEConv)).normalize = True


def another_graph(model):
    for node in model.graph.nodes:
        if node.op == "call_method" and node.target == "relu":
            node.target = "tanh"
    model.recompile()


def another_module(model):
    at = next(name for name, m in model.named_modules() if isinstance(m, pyg.SAGEConv))
    parent, _, name = at.rpartition(".")
    setattr(operator.attrgetter(parent)(model), name,
            copy.deepcopy(model.get_submodule(at)).requires_grad_(True))


@pytest.mark.parametrize("change", [more_of_a_layer, another_graph, another_module])
def test_a_change_is_seen(case, change):
    model, args = case
    beside(model, args)
    change(model)
    beside(model, args)
    assert replays("GraphModule") >= 4
