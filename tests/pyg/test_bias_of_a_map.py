"""Biases of a layer's linear maps that are no parameters: a user keeps them fixed, or prunes."""
from __future__ import annotations

import pytest
import torch
from torch.nn.utils import prune

from tests.pyg import graphs
from tests.pyg.judge import close
from tests.pyg.layers import build

MAPS = [("GATv2Conv", "lin_l"), ("GATv2Conv", "lin_r"), ("TransformerConv", "lin_key"),
        ("TransformerConv", "lin_query"), ("TransformerConv", "lin_value"),
        ("TransformerConv", "lin_skip")]


def as_buffer(module, bias):
    del module.bias
    module.register_buffer("bias", bias)


def as_attribute(module, bias):
    del module.bias
    module.bias = bias


def pruned(module, bias):
    prune.identity(module, "bias")


@pytest.mark.long
@pytest.mark.parametrize("change", [as_buffer, as_attribute, pruned])
@pytest.mark.parametrize("name, of", MAPS)
def test_a_bias_that_is_no_parameter(route, name, of, change):
    layer, (x, ei) = (build(name, device=route.device).eval(),
                      route.put(graphs.features(), graphs.square()))
    with route.on(on_fallback="native"):
        layer(x, ei)
    change(getattr(layer, of), torch.linspace(-1, 2, 16, device=route.device))
    expected = layer(x, ei)
    with route.on(on_fallback="native"):
        for _ in range(2):
            assert close(layer(x, ei), expected, 1e-5)
