"""Plain modules that sum over edges, held against themselves."""
from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

import gnnaccel
from gnnaccel.dispatch.ops import aggregation_cost
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from tests.judge import compare
from tests.plain import layers

NODES, EDGES = 30, 170
CASES = {
    "equivariant": (lambda: layers.Equivariant(), "h edge_index coord"),
    "equivariant with all": (lambda: layers.Equivariant(of_edges=3, of_nodes=2, attention=True,
                                                        normalize=True, tanh=True),
                             "h edge_index coord edge_attr node_attr"),
    "equivariant by sums": (lambda: layers.Equivariant(of_edges=3, residual=False, mean=False,
                                                       act=nn.ReLU()),
                            "h edge_index coord edge_attr"),
    "mesh": (lambda: layers.MeshBlock(), "x latents senders receivers"),
    "weighted": (lambda: layers.WeightedSum(), "x edge_index w"),
    "attention": (lambda: layers.Attention(), "x edge_index"),
    "attention without a maximum": (lambda: layers.Attention(stable=False), "x edge_index"),
    "filter": (lambda: layers.ContinuousFilter(), "x edge_index w basis"),
}


def tensors(names, nodes=NODES, edges=EDGES, seed=0):
    torch.manual_seed(seed)
    ends = torch.randint(0, nodes - 2, (2, edges))
    widths = {"h": 8, "x": 8, "coord": 3, "node_attr": 2, "edge_attr": 3, "latents": 8, "basis": 6}
    made = {"edge_index": ends, "senders": ends[0].clone(), "receivers": ends[1].clone(),
            "w": torch.rand(edges)}
    for name, width in widths.items():
        rows = nodes if name in ("h", "x", "coord", "node_attr") else edges
        made[name] = torch.randn(rows, width)
    return [made[name] for name in names.split()]


@pytest.mark.parametrize("name", CASES)
def test_all_gradients(kernels, name):
    make, names = CASES[name]
    layer = make()
    compare(kernels, layer, *tensors(names), positions=tuple(names.split()))
    assert gnnaccel.stats()[type(layer).__name__]["routes"].get("cuda")


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_what_a_call_is_given_is_gone_with_it(kernels, name):
    """Nothing of it waits in a circle for Python to look for such."""
    make, names = CASES[name]
    layer, given = make().to(kernels.device), kernels.put(*tensors(names))

    def call():
        new = [t * 1.0 if t.is_floating_point() else t for t in given]
        layer(*new)
        return [weakref.ref(t) for t in new if t.is_floating_point()]

    with kernels.on():
        call()  # which is kept for others like it
        gc.collect()
        gc.disable()
        try:
            alive = [one() for one in call()]
        finally:
            gc.enable()
    assert alive == [None] * len(alive)


@pytest.mark.long
@pytest.mark.parametrize("name", [*CASES, "norm"])
def test_parameters_are_gone_with_the_module(kernels, name):
    """What is kept of its calls does not hold them in a circle."""
    make, names = CASES.get(name, (layers.Normed, "x edge_index"))
    layer, given = make().to(kernels.device), kernels.put(*tensors(names))
    with kernels.on():
        for _ in range(3):
            layer(*given)
        parameters = [weakref.ref(one) for one in layer.parameters()]
        gc.collect()
        gc.disable()
        try:
            del layer
            alive = [one() for one in parameters]
        finally:
            gc.enable()
    assert alive == [None] * len(alive)


@pytest.mark.parametrize("gains,route", [((-1, 3), "cuda"), ((3, -1), "cuda"), ((1, -2), "native"),
                                         ((-2, 1), "native"), ((0.6, 0.6), "cuda")])
def test_two_sums_gain_together(emulated, monkeypatch, gains, route):
    """The network that both sums are made of costs either of them more than it gains."""
    turns = itertools.cycle(gains)

    def estimate(graph, given, grad):
        gain = next(turns)
        return Estimate(gain, 1.0, 5.0, 5.0 + gain)

    monkeypatch.setattr(aggregation_cost, "estimate", estimate)
    layer = layers.Equivariant()
    given = tensors("h edge_index coord")
    with emulated.on(when="profitable", on_fallback="native"):
        for _ in range(6):  # the first few over a graph are not looked at
            layer(*given)
    assert ("cuda" in gnnaccel.stats()["Equivariant"]["routes"]) is (route == "cuda")
