"""GINConv: every constructor and call option against DGL's own layer."""
from __future__ import annotations

import pytest
import torch
from dgl.nn import GINConv

from tests.dgl import graphs
from tests.dgl.graphs import E, F, M
from tests.dgl.judge import compare, on_routes
from tests.dgl.test_options_graphconv import bare

KINDS = ["sum", "mean", "max"]


@on_routes("kind,width", [(kind, width) for kind in KINDS for width in (1, F)],
           [(kind, 130) for kind in KINDS])
def test_aggregators(route, kind, width):
    compare(route, GINConv(None, kind), graphs.square(), graphs.features(width=width))


@on_routes("kind", KINDS)
def test_layer_options(route, kind):
    compare(route,
            GINConv(torch.nn.Linear(F, 5), kind, init_eps=0.3, learn_eps=True,
                    activation=torch.relu), graphs.square(), graphs.features())


@pytest.mark.long
@on_routes("kind", KINDS)
def test_weights_of_edges(route, kind):
    for shape in ((E,), (E, 1)):
        compare(route, GINConv(torch.nn.Linear(F, 5), kind), graphs.square(), graphs.features(),
                torch.randn(shape))


@on_routes("kind", KINDS)
def test_pairs_and_blocks(route, kind):
    compare(route, GINConv(None, kind, learn_eps=True), graphs.bipartite(),
            (graphs.features(), graphs.features(M)))
    block = graphs.block()
    compare(route, GINConv(None, kind), block, graphs.features(block.num_src_nodes()))


@on_routes("kind", KINDS)
def test_nodes_without_edges(route, kind):
    compare(route, GINConv(None, kind), bare(), graphs.features())


def test_equal_messages(route):
    """The first edge among equals gets the gradient of a maximum, as in the host."""
    compare(route, GINConv(None, "max"), graphs.square(), graphs.features().round())
