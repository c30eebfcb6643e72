"""What DGL's layers cost in Python calls, by kernels and natively."""
from __future__ import annotations

from itertools import product

import dgl
import pytest
import torch
from dgl.nn.pytorch import GATConv, GraphConv, HGTConv

from tests.call_counts import by_kernels, natively

NODES, EDGES, WIDTH = 12, 40, 16
LAYERS = {"DGL GATConv": lambda: GATConv(WIDTH, 8, 2),
          "DGL HGTConv": lambda: HGTConv(WIDTH, 8, 2, 2, 2),
          "DGL GraphConv": lambda: GraphConv(WIDTH, WIDTH)}


def inputs(name: str) -> tuple:
    ends = torch.randint(NODES, (2, EDGES))
    graph = dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=NODES))
    types = ([torch.arange(n) % 2 for n in (NODES, graph.num_edges())]
             if name == "DGL HGTConv" else [])
    return graph, torch.randn(NODES, WIDTH), *types


@pytest.mark.parametrize("name", LAYERS)
def test_a_repeated_call_by_kernels(emulated, name):
    by_kernels(name, LAYERS[name](), inputs(name), emulated)


@pytest.mark.long
@pytest.mark.parametrize("graph, name", product(("known", "new"), LAYERS))
def test_native_calls(graph, name):
    natively(name, LAYERS[name](), lambda: inputs(name), graph)
