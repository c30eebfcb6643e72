"""HGTConv under torch.compile with ``enable(compile=True)``: one operator over dictionaries."""
from __future__ import annotations

import copy

import pytest
import torch

import gnnaccel
from tests.pyg import hgt_graphs
from tests.pyg.compiling import compiles, on, reset, route  # noqa: F401
from tests.pyg.hgt_graphs import RELATIONS

INDUCTOR = ["aot_eager", *(pytest.param(name, marks=pytest.mark.long)
                           for name in ("inductor", "eager"))]


class Net(torch.nn.Module):
    """A layer after one of torch's operations, and its results by type in one tuple."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, edges):
        found = self.layer({name: t.sin() for name, t in x.items()}, edges)
        return tuple(t * 2 for t in found.values())


def step(model, x, edges):
    """Results, and the gradients of features and parameters; in fp32."""
    x = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
    out = model(x, edges)
    loss = sum(t.square().sum() for t in out)
    grads = torch.autograd.grad(loss, [*x.values(), *model.parameters()], allow_unused=True)
    return [t if t is None else t.detach().float() for t in (*out, *grads)]


def truth(model, x, edges):
    """`step` of the host's layer in fp64."""
    with gnnaccel.disabled():
        return step(copy.deepcopy(model).double(), {k: t.double() for k, t in x.items()}, edges)


def same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-5)


def inputs(route, types=None, relations=RELATIONS):
    x, edges = hgt_graphs.features(), hgt_graphs.edges(relations)
    return hgt_graphs.on(route.device, {k: t for k, t in x.items() if k in (types or x)}, edges)


@pytest.mark.long
@pytest.mark.parametrize("backend", INDUCTOR)
@pytest.mark.parametrize("width", [16, 12])
def test_a_layer_is_one_operator(route, backend, width):
    """``width``: also as wide as features are, which are added then."""
    model, (x, edges) = Net(hgt_graphs.layer(out=width)).to(route.device), inputs(route)
    on(route)
    expected = truth(model, x, edges)
    step(model, x, edges)
    eager = gnnaccel.stats()["HGTConv"]
    reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    same(step(compiled, x, edges), expected)
    found = gnnaccel.stats()["HGTConv"]
    assert found.pop("compiled") == 1 and found == eager and set(found["routes"]) == {route.backend}
    same(step(compiled, x, edges), expected)
    assert compiles() == 1


PARTS = {"an edge type": (None, RELATIONS[1:]),
         "node types": (["paper", "author"], [RELATIONS[0], RELATIONS[4]]),
         "destinations": (None, [RELATIONS[0]])}


@pytest.mark.long
@pytest.mark.parametrize("label", PARTS)
def test_what_a_call_leaves_out(route, label):
    types, relations = PARTS[label]
    model, (x, edges) = Net(hgt_graphs.layer()).to(route.device), inputs(route, types, relations)
    on(route)
    expected = truth(model, x, edges)
    same(step(torch.compile(model, backend="aot_eager", fullgraph=True), x, edges), expected)
    assert gnnaccel.stats()["HGTConv"]["compiled"] == 1


@pytest.mark.long
def test_names_that_are_no_python_names(route):
    """Some of which PyG keeps by other names."""
    relations = [("a b", "is.in", "*c"), ("*c", "items", "a b")]
    x = {name: torch.randn(9, 12, device=route.device) for name in ("a b", "*c")}
    edges = {name: torch.randint(0, 9, (2, 30), device=route.device) for name in relations}
    layer = hgt_graphs.layer(channels=12, metadata=(list(x), relations))
    model = Net(layer).to(route.device)
    on(route)
    same(step(torch.compile(model, backend="aot_eager", fullgraph=True), x, edges),
         truth(model, x, edges))
    assert gnnaccel.stats()["HGTConv"]["compiled"] == 1


@pytest.mark.long
def test_graphs_change_without_recompiling(route):
    model = Net(hgt_graphs.layer()).to(route.device)
    on(route)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for papers, count in ((20, 40), (31, 52), (25, 37)):
        x, edges = hgt_graphs.on(route.device, hgt_graphs.features(paper=papers),
                                 hgt_graphs.edges(count=count, paper=papers))
        same(step(compiled, x, edges), truth(model, x, edges))
    assert compiles() == 1 and gnnaccel.stats()["HGTConv"]["compiled"] == 3


@pytest.mark.long
def test_other_edge_types_are_compiled_anew(route):
    model, (x, edges) = Net(hgt_graphs.layer()).to(route.device), inputs(route)
    on(route)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    same(step(compiled, x, edges), truth(model, x, edges))
    del edges[RELATIONS[2]]
    same(step(compiled, x, edges), truth(model, x, edges))
    assert compiles() == 2


NATIVE = {"a hook": lambda layer: layer.kqv_lin.lins["paper"].register_forward_hook(
              lambda module, given, out: out * 2),
          "another map": lambda layer: layer.out_lin.lins.update(
              {"paper": torch.nn.Sequential(torch.nn.Linear(16, 16))})}


@pytest.mark.long
@pytest.mark.parametrize("label", ["a hook", pytest.param("another map", marks=pytest.mark.long)])
def test_what_is_not_described_is_traced_natively(route, label):
    model, (x, edges) = Net(hgt_graphs.layer()).to(route.device), inputs(route)
    NATIVE[label](model.layer)
    model.to(route.device)
    expected = step(model, x, edges)  # a copy may lack hooks
    on(route)
    same(step(torch.compile(model, backend="eager"), x, edges), expected)
    assert "GA404" in gnnaccel.stats()["HGTConv"]["reasons"]
    assert "compiled" not in gnnaccel.stats()["HGTConv"]
