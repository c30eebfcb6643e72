"""What plain modules cost in Python calls, by kernels and natively."""
from __future__ import annotations

import pytest
import torch

from tests.call_counts import by_kernels, counted, natively
from tests.plain.layers import Equivariant, WeightedSum

import gnnaccel

NODES, EDGES, WIDTH = 12, 3000, 8


def weighted(count: int = EDGES) -> tuple:
    return torch.randn(NODES, WIDTH), torch.randint(NODES, (2, count)), torch.rand(count)


def placed(count: int = EDGES) -> tuple:
    return torch.randn(NODES, WIDTH), torch.randint(NODES, (2, count)), torch.randn(NODES, 3)


LAYERS = {
    "a plain sum": (WeightedSum, weighted),
    "a plain network": (Equivariant, placed),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_a_repeated_call_by_kernels(emulated, name):
    made, inputs = LAYERS[name]
    by_kernels(name, made(), inputs(40), emulated)


@pytest.mark.long
@pytest.mark.parametrize("graph", ("known", "new"))
@pytest.mark.parametrize("name", LAYERS)
def test_native_calls(graph, name):
    made, inputs = LAYERS[name]
    natively(name, made(), inputs, graph)


def test_native_calls_with_arguments_by_name():
    layer = WeightedSum()
    x, edges, w = weighted()
    with torch.no_grad(), gnnaccel.enabled(backend="cuda"):
        layer(x, edges, w)
        by_place = counted(lambda: layer(x, edges, w))
        by_name = counted(lambda: layer(edge_index=edges, w=w, x=x))
    assert by_place[:2] == by_name[:2]
