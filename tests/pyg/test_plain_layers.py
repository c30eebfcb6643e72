"""PyG's plain aggregation layers against themselves: outputs and all gradients, over their
options."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import (APPNP, GCN, ARMAConv, ChebConv, ClusterGCNConv, EGConv, GATConv,
                                GatedGraphConv, GCN2Conv, GCNConv, GENConv, GINConv, GINEConv,
                                GraphConv, GraphSAGE, HypergraphConv, LEConv, LGConv, MFConv,
                                MixHopConv, PNAConv, ResGatedGraphConv, SAGEConv, SGConv,
                                SignedConv, SimpleConv, SSGConv, TAGConv, to_hetero)

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import E, F, N
from tests.pyg.judge import close, compare, on_routes

POSITIONS = ("x", "edge_index", "weight")


def linear(width=F):
    return torch.nn.Linear(width, 6)


class Initial(torch.nn.Module):
    """GCN2Conv, whose call takes the features of the first layer too."""

    def __init__(self, **options):
        super().__init__()
        self.conv = GCN2Conv(F, alpha=0.2, **options)

    def forward(self, x, edge_index, weight=None):
        return self.conv(x, x.relu(), edge_index, weight)


class Signed(torch.nn.Module):
    def __init__(self, first):
        super().__init__()
        self.conv = SignedConv(F if first else F // 2, 4, first_aggr=first)

    def forward(self, x, edge_index):
        half = edge_index.shape[1] // 2
        return self.conv(x, edge_index[:, :half], edge_index[:, half:])


#: name: (layer, propagations of a call, whether it takes weights of edges)
LAYERS = {
    "GCN": (lambda: GCNConv(F, 6), 1, True),
    "GCN improved": (lambda: GCNConv(F, 6, improved=True, bias=False), 1, True),
    "GCN not normalised": (lambda: GCNConv(F, 6, normalize=False), 1, True),
    "GCN without loops": (lambda: GCNConv(F, 6, add_self_loops=False), 1, True),
    "GCN cached": (lambda: GCNConv(F, 6, cached=True), 1, False),
    "GCN mean": (lambda: GCNConv(F, 6, aggr="mean"), 1, True),
    "SAGE": (lambda: SAGEConv(F, 6), 1, False),
    "SAGE sum, projected": (lambda: SAGEConv(F, 6, aggr="sum", project=True, normalize=True), 1,
                            False),
    "SAGE without root": (lambda: SAGEConv(F, 6, root_weight=False, bias=False), 1, False),
    "SAGE max": (lambda: SAGEConv(F, 6, aggr="max"), 1, False),
    "GIN eps": (lambda: GINConv(linear(), eps=0.3, aggr="mean"), 1, False),
    "TAG not normalised": (lambda: TAGConv(F, 6, K=1, bias=False, normalize=False), 1, True),
    "SG no loops": (lambda: SGConv(F, 6, K=2, add_self_loops=False), 2, True),
    "GatedGraph mean": (lambda: GatedGraphConv(F + 1, num_layers=1, aggr="mean"), 1, True),
    "MixHop no loops": (lambda: MixHopConv(F, 6, powers=[1], add_self_loops=False), 1, True),
    "Simple max": (lambda: SimpleConv("max"), 1, False),
    "GraphConv": (lambda: GraphConv(F, 6), 1, True),
    "GraphConv mean": (lambda: GraphConv(F, 6, aggr="mean"), 1, True),
    "GIN": (lambda: GINConv(linear(), train_eps=True), 1, False),
    "SG": (lambda: SGConv(F, 6, K=3), 3, True),
    "TAG": (lambda: TAGConv(F, 6, K=2), 2, True),
    "SSG": (lambda: SSGConv(F, 6, alpha=0.1, K=2), 2, True),
    "APPNP": (lambda: APPNP(3, 0.1), 3, True),
    "LG": (lambda: LGConv(), 1, True),
    "LG not normalised": (lambda: LGConv(normalize=False), 1, True),
    "MixHop": (lambda: MixHopConv(F, 6, powers=[0, 1, 2]), 2, True),
    "GCN2": (lambda: Initial(), 1, True),
    "GCN2 two weights": (lambda: Initial(shared_weights=False, theta=0.5, layer=2), 1, True),
    "ARMA": (lambda: ARMAConv(F, 6, num_stacks=2, num_layers=2), 2, True),
    "ARMA shared": (lambda: ARMAConv(F, 6, num_stacks=3, num_layers=2, shared_weights=True), 2,
                    True),
    "Cheb": (lambda: ChebConv(F, 6, K=3), 2, True),
    "Cheb rw": (lambda: ChebConv(F, 6, K=2, normalization="rw"), 1, True),
    "ClusterGCN": (lambda: ClusterGCNConv(F, 6, diag_lambda=0.3), 1, False),
    "GatedGraph": (lambda: GatedGraphConv(F, num_layers=2), 2, True),
    "Signed": (lambda: Signed(True), 2, False),
    "Signed deeper": (lambda: Signed(False), 4, False),
    "MF": (lambda: MFConv(F, 6, max_degree=4), 1, False),
    "Simple": (lambda: SimpleConv("mean", combine_root="sum"), 1, True),
    "Simple with loops": (lambda: SimpleConv("sum", combine_root="self_loop"), 1, True),
}


EMULATED = ["GCN", "SAGE", "SG", "ARMA", "Cheb", "ClusterGCN", "Simple with loops", "Signed deeper"]


@on_routes("name", EMULATED, [name for name in LAYERS if name not in EMULATED])
def test_layer(route, name):
    make, calls, weights = LAYERS[name]
    ei = graphs.square()
    if name.startswith("Cheb"):  # the Laplacian wants a graph in both directions
        ei = torch.cat([ei, ei.flip(0)], 1)
    compare(route, make(), graphs.features(), ei, calls=calls, positions=POSITIONS, floor=1e-6)
    if weights:
        weight = torch.rand(ei.shape[1]) + 0.1
        compare(route, make(), graphs.features(), ei, weight, calls=calls, positions=POSITIONS,
                floor=2e-6)


@pytest.mark.parametrize("cls", [SAGEConv, GraphConv, GINConv])
def test_two_kinds_of_nodes(route, cls):
    layer = GINConv(linear()) if cls is GINConv else cls((F, 5), 6)
    x = (graphs.features(), graphs.features(graphs.M, F if cls is GINConv else 5))
    compare(route, layer, x, graphs.bipartite(), positions=POSITIONS)


EG_REDUCES = ["sum", "mean", "symnorm", "min", "max", "var", "std"]

#: name: (layer, calls, what its call takes besides features and edges, by keyword): messages that
#: are more than neighbours' rows
MORE = {
    "LE": (lambda: LEConv(F, 6), 1, dict(edge_weight=None)),
    "LE mean": (lambda: LEConv(F, 6, aggr="mean", bias=False), 1, {}),
    "GINE": (lambda: GINEConv(linear(), train_eps=True, edge_dim=4), 1, dict(edge_attr=4)),
    "GINE mean": (lambda: GINEConv(linear(), aggr="mean"), 1, dict(edge_attr=F)),
    "GINE max": (lambda: GINEConv(linear(), eps=0.5, aggr="max"), 1, dict(edge_attr=F)),
    "GEN sum": (lambda: GENConv(F, 6, aggr="add", norm="layer", edge_dim=4), 1, dict(edge_attr=4)),
    "GEN mean": (lambda: GENConv(F, 6, aggr="mean", msg_norm=True, learn_msg_scale=True,
                                 norm="layer"), 1, {}),
    "GEN several": (lambda: GENConv(F, 6, aggr=["max", "mean"], norm="layer", eps=0.1), 1,
                    dict(edge_attr=6)),
    "ResGated": (lambda: ResGatedGraphConv(F, 6), 1, {}),
    "ResGated mean": (lambda: ResGatedGraphConv(F, 6, aggr="mean", root_weight=False, bias=False),
                      1, {}),
    "ResGated edges": (lambda: ResGatedGraphConv(F, 6, edge_dim=4), 1, dict(edge_attr=4)),
    "EG": (lambda: EGConv(F, 8), 1, {}),
    "EG all": (lambda: EGConv(F, 8, aggregators=EG_REDUCES, num_heads=2, num_bases=3, bias=False),
               1, {}),
    "EG no loops": (lambda: EGConv(F, 8, aggregators=["std"], add_self_loops=False), 1, {}),
}


@on_routes("name", [*MORE])
def test_layers_whose_messages_are_more(route, name):
    make, calls, given = MORE[name]
    given = {k: torch.rand(E) + 0.1 if width is None else torch.randn(E, width)
             for k, width in given.items()}
    compare(route, make(), graphs.features(), graphs.square(), calls=calls, positions=POSITIONS,
            floor=2e-6, **given)


def test_deviations_of_messages_that_differ_little(route):
    """Of which variances are above what PyG takes for none, 1e-5, and most of them below 1e-3."""
    layer, x, edges = EGConv(F, 8, aggregators=["std"],
                             add_self_loops=False), 0.02 * graphs.features(), graphs.square()
    compare(route, layer, x, edges, positions=POSITIONS, floor=2e-6)
    with torch.no_grad():
        found = layer.to("cpu").aggregate(layer.bases_lin(x)[edges[0]], edges[1], graphs.N).square()
    assert (found > 1.1e-5).float().mean() > 0.5 and (found < 1e-3).float().mean() > 0.5


@pytest.mark.parametrize("make",
                         [lambda: LEConv((F, 5), 6),
                          lambda: ResGatedGraphConv((F, 5), 6, edge_dim=4)])
def test_both_ends_of_two_kinds_of_nodes(route, make):
    x, layer = (graphs.features(), graphs.features(graphs.M, 5)), make()
    more = {} if isinstance(layer, LEConv) else dict(edge_attr=torch.randn(E, 4))
    compare(route, layer, x, graphs.bipartite(), positions=POSITIONS, floor=2e-6, **more)


def parametrized(layer):
    torch.nn.utils.parametrizations.weight_norm(layer.lin_query)
    return layer


NATIVE = {
    "Hypergraph": (lambda: HypergraphConv(F, 6), False, "GA208"),
    "ResGated parametrized": (lambda: parametrized(ResGatedGraphConv(F, 6, edge_dim=4)), True,
                              "GA208"),
    "ResGated tanh": (lambda: ResGatedGraphConv(F, 6, act=torch.nn.Tanh()), False, "GA208"),
    "PNA": (lambda: PNAConv(F, 6, ["mean", "max"], ["identity"], torch.tensor([1, 3, 5]),
                            edge_dim=4, pre_layers=2), True, "GA208"),
}


@pytest.mark.parametrize("name", NATIVE)
def test_layers_that_stay_native(name):
    make, edges, code = NATIVE[name]
    layer, args = make(), (graphs.features(), graphs.square())
    args = (*args, graphs.edge_features()) if edges else args
    expected = layer(*args)
    with gnnaccel.enabled(when="supported"):
        got = layer(*args)
    assert close(got, expected, 1e-6)
    (entry,) = gnnaccel.stats().values()
    assert entry["routes"].keys() == {"native"} and entry["reasons"].keys() == {code}


@pytest.mark.parametrize("dtype", [torch.long, torch.float16, torch.float64], ids=str)
def test_gates_of_edges_in_another_dtype(route, dtype):
    """PyG puts them beside the nodes' features, which makes one dtype of both."""
    layer, attr = ResGatedGraphConv(F, 6, edge_dim=4), (3 * torch.randn(E, 4)).to(dtype)
    layer, x, edges, attr = [t.to(route.device)
                             for t in (layer, graphs.features(), graphs.square(), attr)]
    if dtype == torch.float64:
        with pytest.raises(RuntimeError), route.on(on_fallback="native"):
            layer(x, edges, attr)
        return
    expected = layer(x, edges, attr)
    with route.on(on_fallback="native"):
        assert close(layer(x, edges, attr), expected)
    (entry,) = gnnaccel.stats().values()
    assert entry["reasons"].keys() == {"GA203"}


# ---- whole models ----

@pytest.mark.parametrize("cls", [GCN, GraphSAGE])
def test_models(route, cls):
    compare(route, cls(F, 8, 2, 3), graphs.features(), graphs.square(), calls=2,
            positions=POSITIONS, floor=1e-6)


def test_layers_of_a_heterogeneous_model_one_by_one(route):
    """What `to_hetero` makes of a user's own layers calls them relation by relation."""
    class Own(SAGEConv):
        pass

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = Own((-1, -1), 5)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    names = [("a", "to", "b"), ("b", "back", "a")]
    x = {"a": graphs.features().to(route.device), "b": graphs.features(graphs.M).to(route.device)}
    ei = {names[0]: graphs.bipartite().to(route.device),
          names[1]: graphs.bipartite().flip(0).contiguous().to(route.device)}
    model = to_hetero(Net(), (["a", "b"], names)).to(route.device)
    with torch.no_grad():
        model(x, ei)
    expected = model(x, ei)
    gnnaccel.reset_stats()
    with route.on():
        got = model(x, ei)
    assert all(close(got[k], expected[k]) for k in expected)
    assert gnnaccel.stats() == {"Own": dict(calls=2, routes={route.backend: 2}, reasons={})}


def test_layers_with_an_adapter_count_once():
    """Native or not, a layer that is taken over as a whole is one call."""
    x, ei = graphs.features(), graphs.square()
    for layer in (GATConv(F, 4), GATConv(F, 4, aggr="mean")):
        gnnaccel.reset_stats()
        with gnnaccel.enabled(when="supported"):
            layer(x, ei)
        assert gnnaccel.stats()["GATConv"]["calls"] == 1


@pytest.mark.long
def test_training_is_the_same(route):
    """A few steps of a GCN over one graph, kept normalisation and all."""
    def trained(block):
        torch.manual_seed(3)
        model, x, ei = route.put(GCN(F, 8, 2, 3), graphs.features(), graphs.square())
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            with block():
                loss = torch.nn.functional.cross_entropy(model(x, ei),
                                                         torch.arange(N, device=x.device) % 3)
                optimiser.zero_grad()
                loss.backward()
            optimiser.step()
        return loss.detach()

    import contextlib
    assert close(trained(route.on), trained(contextlib.nullcontext), 1e-4)
    assert E
