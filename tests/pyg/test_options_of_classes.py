"""Users' subclasses of layers that compute an option, by a property, run as without gnnaccel."""
from __future__ import annotations

import pytest
import torch
from torch_geometric import nn as pyg

import gnnaccel
from tests.helpers import relative
from tests.pyg import graphs, hetero_graphs


def held(name: str) -> property:
    """A property whose value is kept under another name."""
    return property(lambda self: self.__dict__[f"_of_{name}"],
                    lambda self, value: self.__dict__.__setitem__(f"_of_{name}", value))


def on_edges(*more):
    return lambda: (graphs.features(), graphs.square(), *more)


BY_TYPE = lambda: (hetero_graphs.features(), hetero_graphs.edges())  # noqa: E731 - a table's
LAYERS = {
    "GATConv": ("negative_slope", lambda cls: cls(graphs.F, 4, 2), on_edges()),
    "GATv2Conv": ("dropout", lambda cls: cls(graphs.F, 4, 2), on_edges()),
    "TransformerConv": ("concat", lambda cls: cls(graphs.F, 4, 2), on_edges()),
    "SuperGATConv": ("flow", lambda cls: cls(graphs.F, 4, 2), on_edges()),
    "HANConv": ("negative_slope", lambda cls: cls(hetero_graphs.WIDTH, 8, hetero_graphs.METADATA),
                BY_TYPE),
    "HGTConv": ("heads", lambda cls: cls(hetero_graphs.WIDTH, 8, hetero_graphs.METADATA), BY_TYPE),
    "HeteroLinear": ("is_sorted", lambda cls: cls(graphs.F, 4, 3),
                     lambda: (graphs.features(), torch.randint(3, (graphs.N,)))),
}


def moved(value, device):
    """Tensors, also within tuples and dictionaries, on ``device``."""
    if isinstance(value, dict):
        return {key: moved(part, device) for key, part in value.items()}
    return (value.to(device) if isinstance(value, torch.Tensor)
            else tuple(moved(part, device) for part in value))


def one(result):
    return result if isinstance(result, torch.Tensor) else torch.cat(list(result.values()))


@pytest.mark.parametrize("name", LAYERS)
def test_an_option_that_is_a_property(route, name):
    option, make, inputs = LAYERS[name]
    base = getattr(pyg, name)
    cls = type(name, (base,), {option: held(option), "__module__": __name__})
    layer = make(cls).to(route.device)
    args = moved(inputs(), route.device)
    with gnnaccel.disabled():
        expected = one(layer(*args))
    with route.on(on_fallback="native"):
        for _ in range(3):
            assert relative(one(layer(*args)), expected) < 1e-5


def test_a_property_that_a_class_is_given_later(route):
    cls = type("GATConv", (pyg.GATConv,), {"__module__": __name__})
    layer, args = cls(graphs.F, 4, 2).to(route.device), moved(on_edges()(), route.device)
    with route.on():
        for _ in range(3):
            layer(*args)
        cls.negative_slope = property(lambda self: 0.9)
    with gnnaccel.disabled():
        expected = layer(*args)
    with route.on(on_fallback="native"):
        assert relative(layer(*args), expected) < 1e-5
