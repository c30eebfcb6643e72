"""Models made by `to_hetero`: each layer as one, against the model's own code; and that the model
stays what it is."""
from __future__ import annotations

import copy
import gc
import io
import operator
import pickle
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.nn import (GAT, GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, GraphSAGE,
                                JumpingKnowledge, Linear, SAGEConv, to_hetero)

import gnnaccel
from gnnaccel.adapters.pyg.fx import trim
from tests import probes
from tests.pyg.hetero_graphs import (CITES, KNOWS, METADATA, NODES, OUT, WIDTH, WRITES, WRITTEN,
                                     edges, features, on, results_of_types, same, trained_on_types)
from tests.pyg.judge import compare, on_routes, took

pytestmark = [pytest.mark.filterwarnings("ignore:There exist node types"),
              pytest.mark.filterwarnings("ignore:Found function")]

AGGRS = ["sum", "mean", "max", "min", "mul"]
KINDS = {
    "sage": lambda i, o: SAGEConv((i, i), o), "sums": lambda i,
    o: SAGEConv((i, i), o, aggr="sum", bias=False),
    "graph": lambda i, o: GraphConv((i, i), o), "gin": lambda i, o: GINConv(torch.nn.Linear(i, o)),
    "gat": lambda i, o: GATConv((i, i), o // 2, 2, add_self_loops=False),
    "gatv2": lambda i, o: GATv2Conv((i, i), o // 2, 2, add_self_loops=False),
}
SQUARE = (["paper", "author"],
          [CITES, ("paper", "with", "paper"), ("author", "near", "author"), KNOWS])


class Net(torch.nn.Module):
    """Two layers, or one twice, and what models have besides."""

    def __init__(self, make=KINDS["sage"], out: int = OUT):
        super().__init__()
        self.first, self.second = make(WIDTH, out), make(out, out)
        self.norm, self.skip, self.last = torch.nn.BatchNorm1d(out), Linear(-1,
                                                                            out), torch.nn.Linear(
                                                                                out, 5)

    def forward(self, x, edge_index):
        h = self.norm(self.first(x, edge_index)).relu() + self.skip(x)
        h = torch.nn.functional.dropout(self.second(h, edge_index), 0.0).relu_()
        return self.last(h)


def model_of(make=KINDS["sage"], aggr: str = "sum", metadata=METADATA, net=Net) -> torch.nn.Module:
    """Initialised, with biases that are no zeros."""
    torch.manual_seed(5)
    made, x = to_hetero(net(make), metadata, aggr), features()
    with torch.no_grad(), gnnaccel.disabled():
        made.eval()({name: x[name] for name in metadata[0]}, edges(metadata[1]))
    return made.train()


def as_one(route, made: torch.nn.Module, calls: int = 2, metadata=METADATA,
           **options) -> None:
    x = features()
    compare(route, made, {name: x[name] for name in metadata[0]}, edges(metadata[1], **options),
            calls=calls, floor=2e-6)


@on_routes("kind,aggr",
           [("sage", "sum"), ("graph", "mul"), ("gat", "mean"), ("gatv2", "sum"), ("gin", "min")],
           [(kind, aggr) for kind in KINDS for aggr in AGGRS])
def test_layers_and_ways_to_put_them_together(route, kind, aggr):
    as_one(route, model_of(KINDS[kind], aggr))


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_gcn(route, aggr):
    as_one(route, model_of(lambda i, o: GCNConv(i, o, add_self_loops=False), aggr, SQUARE),
           metadata=SQUARE)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_autocast(route, aggr):
    """Results of the dtypes that pairs of them have, which those of a HeteroConv are not
    everywhere."""
    made, (x,
           ei) = model_of(aggr=aggr).to(route.device).eval(), on(route.device, features(), edges())
    with torch.autocast(route.device.type, torch.bfloat16), torch.no_grad():
        expected = made(x, ei)
        with route.on(on_fallback="native"):
            same(made(x, ei), expected, 3e-2)
    assert gnnaccel.stats()["HeteroConv"]["routes"] == {route.backend: 2}


def test_relations_without_edges(route):
    as_one(route, model_of(), empty=[CITES, KNOWS])


def test_equal_numbers_share_gradients_as_in_the_model(route):
    """Where no edge enters, layers give their bias: of equal ones a maximum shares the gradient as
    the host does."""
    made = model_of(lambda i, o: SAGEConv((i, i), o, root_weight=i != WIDTH), "max")
    with torch.no_grad():
        for name, t in made.named_parameters():
            if name.endswith("lin_l.bias"):
                t.fill_(0.25)
    as_one(route, made)


class Keywords(Net):
    def forward(self, x, edge_index, edge_weight=None):
        h = self.first(x=x, edge_index=edge_index, edge_weight=edge_weight)
        return self.second(h.relu(), edge_index, edge_weight)


def test_weights_of_edges(route):
    """Without them as one; with them the model's own calls, each decided by itself."""
    made, (x, ei) = model_of(KINDS["graph"],
                             net=Keywords).to(route.device), on(route.device, features(), edges())
    weights = {name: torch.rand(t.shape[1], device=route.device) for name, t in ei.items()}
    expected, weighted = made(x, ei), made(x, ei, weights)
    gnnaccel.reset_stats()
    with route.on():
        same(made(x, ei), expected)
    took(route, 2)
    gnnaccel.reset_stats()
    with route.on():
        same(made(x, ei, weights), weighted)
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA210": 2} and gnnaccel.stats()[
        "GraphConv"]["calls"] == 2 * len(ei)


class Jumping(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.convs = torch.nn.ModuleList([make(WIDTH, WIDTH) for _ in range(2)])
        self.jump = JumpingKnowledge("cat")

    def forward(self, x, edge_index):
        found = []
        for conv in self.convs:
            x = conv(x, edge_index).relu()
            found.append(x)
        return self.jump(found)


def test_lists_of_layers_and_jumping_knowledge(route):
    as_one(route, model_of(net=Jumping))


class Chained(torch.nn.Module):
    """Layers with nothing between them."""

    def __init__(self, make):
        super().__init__()
        self.convs = torch.nn.ModuleList([make(WIDTH, OUT), make(OUT, OUT), make(OUT, OUT)])

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index)
        return x


@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_layers_with_nothing_between_them(route, aggr):
    as_one(route, model_of(net=Chained, aggr=aggr), calls=3)


class Twice(Jumping):
    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index)
        return self.convs[0](x / 2, edge_index)


@pytest.mark.parametrize("metadata", [METADATA, (["paper", "author"], [WRITES, WRITTEN])],
                         ids=["several relations", "one of each type"])
def test_a_layer_that_is_called_twice(route, metadata):
    as_one(route, model_of(net=Twice, metadata=metadata), metadata=metadata)


@pytest.mark.parametrize("make",
                         [lambda: GraphSAGE((-1, -1), 8, 2, 8),
                          lambda: GAT((-1, -1), 8, 2, 8, add_self_loops=False)],
                         ids=["GraphSAGE", "GAT"])
def test_models_of_the_host(route, make):
    as_one(route, model_of(net=lambda _: make()))


def test_trimmed_models_of_the_host(route):
    """With numbers of sampled nodes the model's own code runs, as it cuts each relation's inputs by
    itself."""
    made = model_of(net=lambda _: GraphSAGE((-1, -1), 8, 2, 8),
                    metadata=SQUARE).to(route.device).eval()
    x, ei = on(route.device, {t: features()[t] for t in SQUARE[0]}, edges(SQUARE[1]))
    kwargs = dict(num_sampled_nodes_per_hop={t: [n - 1, 1, 0] for t, n in NODES.items() if t in x},
                  num_sampled_edges_per_hop={name: [20, 20] for name in ei})
    ei = {name: t * 0 for name, t in ei.items()}
    expected = made(x, ei, **kwargs)
    with route.on():
        same(made(x, ei, **kwargs), expected)
        assert "HeteroConv" not in gnnaccel.stats()
        made(x, ei)
    took(route)


@pytest.mark.parametrize("function, args, kwargs",
                         [(operator.add, (1, "a"), {}), (torch.neg, (), {"input": "a"})])
def test_the_argument_behind_a_function_wherever_it_stands(function, args, kwargs):
    graph = torch.fx.Graph()
    node = torch.fx.node.map_aggregate((args, kwargs),
                                       {"a": graph.placeholder("a"), 1: 1}.__getitem__)
    node = graph.call_function(function, *node)
    assert trim._argument(graph.call_function(torch.abs, (node,))) == "a"


def test_features_of_several_widths_in_groups(route):
    widths = {"paper": 12, "author": 7, "field": 5}
    made = to_hetero(Net(lambda i, o: SAGEConv((-1, -1), o)), METADATA, "max").to(route.device)
    x, ei = on(route.device, features(widths), edges())
    with route.on():
        made(x, ei)  # of lazy layers: one by one
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA210": 2}
    expected = made(x, ei)
    gnnaccel.reset_stats()
    with route.on():
        same(made(x, ei), expected)
    assert gnnaccel.stats()["HeteroConv"]["routes"] == {"native": 1, route.backend: 3}


@st.composite
def cases(draw):
    """(kind, metadata, nodes by type, edges by edge type, aggregation); every type is a
    destination."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    types = [f"t{i}" for i in range(draw(st.integers(1, 4)))]
    nodes = {t: draw(st.sampled_from([1, 2, 9])) for t in types}
    names = [(draw(st.sampled_from(types)), f"r{at}",
              types[at] if at < len(types) else draw(st.sampled_from(types)))
             for at in range(len(types) + draw(st.integers(0, 5)))]
    names = draw(st.permutations(names))
    found = {}
    for name in names:
        count = draw(st.sampled_from([0, 1, 7, 70]))
        found[name] = torch.stack([torch.randint(0, nodes[name[end]], (count,)) for end in (0, 2)])
    return kind, (types, names), nodes, found, draw(st.sampled_from(AGGRS))


@pytest.mark.long
@settings(max_examples=12, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_any_types(route, case):
    kind, metadata, nodes, ei, aggr = case
    made = to_hetero(Net(KINDS[kind]), metadata, aggr).double().to(route.device).eval()
    x = {t: torch.randn(n, WIDTH, device=route.device, dtype=torch.float64, requires_grad=True)
         for t, n in nodes.items()}
    ei = {name: t.to(route.device) for name, t in ei.items()}
    with torch.no_grad():
        made(x, ei)
    leaves = {**{f"x {t}": v for t, v in x.items()}, **dict(made.named_parameters())}

    native = results_of_types(made, x, ei, leaves)
    with route.on(on_fallback="native"):
        got = results_of_types(made, x, ei, leaves)
    assert list(got) == list(native) and gnnaccel.stats()["HeteroConv"]["calls"] == 2
    gnnaccel.reset_stats()
    for k, t in native.items():
        assert (got[k] is None) == (t is None), k
        assert t is None or torch.allclose(got[k], t, rtol=1e-9,
                                           atol=1e-9 * max(1.0, t.abs().max().item())), k


# ---- the model stays what it is ----

def test_model_made_before_and_after(route):
    before, (x, ei) = model_of().to(route.device).eval(), on(route.device, features(), edges())
    expected, code, keys = before(x, ei), before.code, list(before.state_dict())
    forward, own = type(before).forward, set(vars(before))
    with route.on():
        same(before(x, ei), expected)
        after = model_of().to(route.device).eval()
        after.load_state_dict(before.state_dict())
        for made in (after, copy.deepcopy(before), pickle.loads(pickle.dumps(before)),
                     copy.copy(before)):
            gnnaccel.reset_stats()
            same(made(x, ei), expected)
            took(route, 2)
        stored = io.BytesIO()
        torch.save(before, stored)
        assert before.code == code and list(before.state_dict()) == keys and set(
            vars(before)) == own
        assert before.code == after.code
    assert b"gnnaccel" not in stored.getvalue()
    assert type(before).forward.__code__.co_code == forward.__code__.co_code
    gnnaccel.reset_stats()
    same(before(x, ei), expected)
    assert not gnnaccel.stats()


def test_disabling_restores_torch(route):
    from torch.fx.graph_module import _WrappedCall

    native = _WrappedCall.__call__
    with route.on():
        assert _WrappedCall.__call__ is not native
    assert _WrappedCall.__call__ is native


def test_code_that_the_user_changes(route):
    made, (x, ei) = model_of().to(route.device).eval(), on(route.device, features(), edges())
    with route.on():
        before = made(x, ei)
        made.recompile()  # as storing does, too
        same(made(x, ei), before)
        for node in made.graph.nodes:
            if node.op == "call_method" and node.target == "relu":
                node.target = "sigmoid"
        same(made(x, ei), before)  # nothing was made of the graph yet
        made.recompile()
        gnnaccel.reset_stats()
        got = made(x, ei)
        took(route, 2)
    same(got, made(x, ei))
    assert not torch.allclose(got["paper"], before["paper"])


def test_nothing_keeps_a_model_alive(route):
    gc.collect()
    before = probes.kept()["fx models"]
    made, (x, ei) = model_of().to(route.device), on(route.device, features(), edges())
    with route.on():
        made(x, ei)
    alive = [*map(weakref.ref, (*made.modules(), *made.parameters()))]
    assert probes.kept()["fx models"] == before + 1
    del made
    gc.collect()
    assert not any(ref() is not None for ref in alive) and probes.kept()["fx models"] == before


def test_training_brings_the_hosts_weights(route):
    made, (x, ei) = model_of(aggr="mean").to(route.device), on(route.device, features(), edges())
    target = {k: torch.randn(n, 5).to(route.device) for k, n in NODES.items()}

    native = trained_on_types(copy.deepcopy(made), x, ei, target, 4)
    with route.on():
        got = trained_on_types(made, x, ei, target, 4)
    assert all(torch.allclose(got[k], t, rtol=1e-4, atol=1e-5) for k, t in native.items())
