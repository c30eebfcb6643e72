"""What PyG's layers cost in Python calls, by kernels and natively."""
from __future__ import annotations

import operator
import os
import random
from itertools import product

import pytest
import torch
from torch.nn import Linear, Sequential
from torch_geometric.nn import (ARMAConv, FiLMConv, GATConv, GATv2Conv, GCNConv, GENConv, GINConv,
                                GINEConv, GraphConv, HANConv, HEATConv, HGTConv, MessagePassing,
                                NNConv, PNAConv, RGATConv, RGCNConv, SAGEConv, TransformerConv, to_hetero)
from torch_geometric.utils import scatter, softmax

import gnnaccel
from gnnaccel.adapters.pyg.propagate import calls
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.ops import aggregation_cost
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from tests.call_counts import (FILES, FRESH, by_kernels, counted, natively, over_new_graphs,
                               run_modules)
from tests.pyg import hetero_graphs
from tests.pyg.hetero_graphs import METADATA, edges, features, hetero

NODES, EDGES, WIDTH = 12, 3000, 16  # over fewer edges a call is not looked at on a CPU


class Own(MessagePassing):
    """A user's layer."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j):
        return x_j


class Gated(MessagePassing):
    """A user's layer with a message for which kernels are written."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin, self.edge = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(5, WIDTH)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.lin(x), e=self.edge(edge_attr))

    def message(self, x_i, x_j, e):
        return torch.sigmoid(x_i * e) * x_j


class Network(Gated):
    """The same with a small network over both ends and the edge."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Sequential(Linear(3 * WIDTH, WIDTH), torch.nn.ReLU(), Linear(WIDTH, WIDTH))

    def message(self, x_i, x_j, e):
        return self.mlp(torch.cat([x_i, x_j, e], dim=-1))


class Attends(MessagePassing):
    """A user's GAT."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(WIDTH, WIDTH)
        self.att = torch.nn.Parameter(torch.randn(1, 2 * WIDTH))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = (torch.cat([x_i, x_j], dim=-1) * self.att).sum(dim=-1)
        alpha = softmax(torch.nn.functional.leaky_relu(alpha, 0.2), index, ptr, size_i)
        return x_j * alpha.unsqueeze(-1)


class Twice(torch.nn.Module):
    """A model for to_hetero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), WIDTH), SAGEConv((-1, -1), WIDTH)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Averaged(Own):
    """A user's layer with an ``aggregate`` of its own."""

    def aggregate(self, inputs, index, dim_size):
        return scatter(inputs, index, 0, dim_size, reduce="mean") * 0.5


def plain(count: int = EDGES, nodes: int = NODES) -> tuple:
    return torch.randn(nodes, WIDTH), torch.randint(nodes, (2, count))


def matrix(count: int = EDGES) -> tuple:
    ids = torch.randint(count, (2, count))
    adjacency = torch.sparse_coo_tensor(ids, torch.rand(count), (count, count)).coalesce()
    return torch.randn(count, WIDTH), adjacency.to_sparse_csr()


def typed(count: int = EDGES, nodes: int = NODES) -> tuple:
    return *plain(count, nodes), torch.randint(3, (count,))


def attributed(count: int = EDGES, nodes: int = NODES) -> tuple:
    return *plain(count, nodes), torch.randn(count, 5)


def weighted(count: int = EDGES, nodes: int = NODES) -> tuple:
    return *plain(count, nodes), torch.rand(count)


def of_types(count: int = EDGES, nodes: int = NODES) -> tuple:
    x, edge_index, edge_type = typed(count, nodes)
    return x, edge_index, torch.randint(2, (nodes,)), edge_type, torch.randn(count, 5)


def by_type(count: int = EDGES, nodes: int | None = None) -> tuple:
    if nodes is None:
        return features(), edges()
    return features(author=nodes), edges(count=33 + count // 8, author=nodes)


def model() -> torch.nn.Module:
    """SAGEConv twice, by to_hetero."""
    made = to_hetero(Twice(), METADATA)
    with torch.no_grad(), gnnaccel.disabled():
        made(*by_type())
    return made


#: layer -> how it is made, and arguments of a call over a new graph
LAYERS = {
    "GATConv": (lambda: GATConv(WIDTH, 8, 2), plain),
    "GCNConv": (lambda: GCNConv(WIDTH, WIDTH), plain),
    "SAGEConv": (lambda: SAGEConv(WIDTH, WIDTH), plain),
    "SAGEConv over a matrix": (lambda: SAGEConv(WIDTH, WIDTH), matrix),
    "GINConv": (lambda: GINConv(torch.nn.Linear(WIDTH, WIDTH)), plain),
    "RGCNConv": (lambda: RGCNConv(WIDTH, WIDTH, 3), typed),
    "HGTConv": (lambda: HGTConv(hetero_graphs.WIDTH, WIDTH, METADATA, 2), by_type),
    "HeteroConv": (lambda: hetero(SAGEConv), by_type),
    "a user's": (Own, plain),
    "a user's aggregate": (Averaged, plain),
    "a user's network": (Network, attributed),
    "a user's attention": (Attends, plain),
    "GATv2Conv": (lambda: GATv2Conv(WIDTH, 8, 2, edge_dim=5), attributed),
    "TransformerConv": (lambda: TransformerConv(WIDTH, 8, 2, edge_dim=5), attributed),
    "RGATConv": (lambda: RGATConv(WIDTH, WIDTH, 3), typed),
    "FiLMConv": (lambda: FiLMConv(WIDTH, WIDTH, 3), typed),
    "HEATConv": (lambda: HEATConv(WIDTH, WIDTH, 2, 3, 3, 5, 4, heads=2), of_types),
    "PNAConv": (lambda: PNAConv(WIDTH, WIDTH, ["mean", "max"], ["identity"], torch.ones(4).long()),
                plain),
    "FiLMConv of one relation": (lambda: FiLMConv(WIDTH, WIDTH), plain),
    "PNAConv with edges": (lambda: PNAConv(WIDTH, WIDTH, ["mean", "max"], ["identity"],
                                           torch.ones(4).long(), edge_dim=5, towers=2), attributed),
    "NNConv": (lambda: NNConv(WIDTH, WIDTH, Sequential(Linear(5, WIDTH * WIDTH))), attributed),
    "SAGEConv of a list": (lambda: SAGEConv(WIDTH, WIDTH, aggr=["mean", "max"]), plain),
    "SAGEConv of a deviation": (lambda: SAGEConv(WIDTH, WIDTH, aggr="std"), plain),
    "HANConv": (lambda: HANConv(hetero_graphs.WIDTH, WIDTH, METADATA, 2), by_type),
    "ARMAConv": (lambda: ARMAConv(WIDTH, WIDTH, num_stacks=2, num_layers=2), plain),
    "HeteroConv of GATConv": (lambda: hetero(GATConv, add_self_loops=False), by_type),
}
#: the same of layers whose calls over new graphs are counted, where it is not of `LAYERS`
OVER_NEW = {
    "TransformerConv": (lambda: TransformerConv(WIDTH, 8, 2), plain),
    "GENConv": (lambda: GENConv(WIDTH, WIDTH), plain),
    "GENConv with edges": (lambda: GENConv(WIDTH, WIDTH, edge_dim=5), attributed),
    "GINEConv": (lambda: GINEConv(torch.nn.Linear(WIDTH, WIDTH), edge_dim=5), attributed),
    "GraphConv": (lambda: GraphConv(WIDTH, WIDTH), plain),
    "GraphConv with weights": (lambda: GraphConv(WIDTH, WIDTH), weighted),
    "a user's generated": (Gated, attributed),
    "to_hetero": (model, by_type),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_a_repeated_call_by_kernels(emulated, name):
    made, inputs = LAYERS[name]
    by_kernels(name, made(), inputs(40), emulated)


@pytest.mark.parametrize("graph, name", product(("known", "new"), LAYERS))
def test_native_calls(graph, name):
    made, inputs = LAYERS[name]
    natively(name, made(), inputs, graph)


@pytest.mark.long
@pytest.mark.parametrize("train, name", product((False, True), FRESH))
def test_calls_over_new_graphs(emulated, monkeypatch, train, name):
    kind, _, listed = name.partition(", ")
    made, inputs = OVER_NEW.get(kind) or LAYERS[kind]
    if inputs in (typed, of_types, by_type):  # whose kernels go by the number of pairs
        random.seed(0)
        torch.manual_seed(0)
    options = {}
    if listed:  # a structure never pays, its absence from the first edge on
        estimate = Estimate(gain=9.0, structure=1e9, ours=1.0, native=10.0, once=2.0)
        monkeypatch.setattr(aggregation_cost, "estimate", lambda *args: estimate)
        monkeypatch.setattr(calls, "_FEW_AT_FIRST", 0)
        options = {"when": "profitable"}
    with emulated.on(**options):
        over_new_graphs(name, made(),
                        lambda: inputs(random.randint(33, 60), random.randint(8, 15)), train)


@pytest.mark.parametrize("route", FILES)
def test_the_files_that_a_call_walks_through(request, route):
    """Run alone, the first call here is the process's first."""
    emulated = request.getfixturevalue("emulated") if route == "kernels" else None
    layer, edges = LAYERS["GATConv"][0](), 40 if emulated else EDGES

    def walked(x, edge_index) -> int:
        return len(counted(lambda: layer(x.requires_grad_(), edge_index).sum().backward()).files)

    with emulated.on() if emulated else gnnaccel.enabled(backend="cuda"):
        run_modules()
        first = walked(*plain(edges))
        for _ in range(2):
            layer(*plain(edges))
        cache.clear()
        args = plain(edges)
        another, *_, repeated = (walked(*args) for _ in range(5))
    found = first, another, repeated
    assert all(map(operator.le, found, FILES[route])), f"{found} files, at most {FILES[route]}"


@pytest.mark.long
def test_calls_are_counted():
    """Those of gnnaccel's functions, and from them those of built-in ones; no others."""
    assert counted(lambda: sorted([2, 1])) == (0, 0, frozenset())
    found = counted(lambda: cache.info())
    assert found.python >= 2 and found.builtin >= 1
    assert os.path.join("dispatch", "graph", "cache.py") in found.files


def in_turns(layer, args) -> tuple[dict[str, int], dict[str, int]]:
    """Python calls of one call in training, in evaluation, and in evaluation with gradients: where
    calls of its kind came before, and where all kinds take turns."""
    def train():
        layer.train()(*args)

    def evaluate():
        with torch.no_grad():
            layer.eval()(*args)

    def watch():
        layer.eval()(*args)

    kinds, alone = (train, evaluate, watch), {}
    for kind in kinds:
        for _ in range(80):
            kind()
        alone[kind.__name__] = counted(kind).python
    for _ in range(6):
        for kind in kinds:
            kind()
    return alone, {kind.__name__: counted(kind).python for kind in kinds}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_training_and_evaluation_take_turns(emulated, name):
    made, inputs = LAYERS[name]
    with emulated.on():
        alone, turns = in_turns(made(), inputs(40))
    assert turns == alone


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_a_few_graphs_take_turns(emulated, name):
    """A layer that is shared by several graphs, as by those of validation and test."""
    made, inputs = LAYERS[name]
    layer, graphs = made(), [inputs(40 + count) for count in range(3)]

    def repeated(args) -> int:
        return counted(lambda: layer(*args)).python

    with emulated.on():
        alone = []  # by graph: rows of nodes without edges take calls of their own
        for args in graphs:
            for _ in range(6):
                layer(*args)
            alone.append(repeated(args))
        for _ in range(4):
            for args in graphs:
                layer(*args)
        turns = [repeated(args) for args in graphs]
    assert all(count <= most for count, most in zip(turns, alone)), (turns, alone)


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_training_and_evaluation_take_turns_natively(name):
    made, inputs = LAYERS[name]
    with gnnaccel.enabled(backend="cuda"):
        alone, turns = in_turns(made(), inputs())
    # streaks end, and then each call is compared
    assert all(turns[kind] <= alone[kind] + 60 for kind in turns), (alone, turns)
