"""Repeated calls of DGL's layers by kernels: what changes between two of them has to be seen."""
from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

import dgl
import pytest
import torch
from dgl.nn.pytorch import (AGNNConv, DotGatConv, EdgeGATConv, EGATConv, GATConv, GatedGCNConv,
                            GATv2Conv, GINConv, GraphConv, HGTConv, NNConv, RelGraphConv, SAGEConv,
                            TypedLinear)
from torch import nn

from gnnaccel.dispatch.memory.layer_memory import memories
from tests.dgl import graphs
from tests.dgl.graphs import F, M, N
from tests.judge import place, spread
from tests.staleness import (as_native, exchanged, refused, replace_each_forward, replaced, results,
                             tensors, watch_each_module)

R, K = 3, 4


def plain() -> tuple:
    return graphs.square(), graphs.features()


def pair() -> tuple:
    return graphs.bipartite(), (graphs.features(), graphs.features(M))


def attributed() -> tuple:
    g, x = plain()
    return g, x, torch.randn(g.num_edges(), K)


def typed() -> tuple:
    g, x = plain()
    return g, x, torch.randint(R, (g.num_edges(),))


def of_types() -> tuple:
    g, x = plain()
    return g, x, torch.randint(2, (N,)), torch.randint(R, (g.num_edges(),))


class Case(NamedTuple):
    """``settings``: attributes, by their path, and values that they may take later."""

    layer: Any
    inputs: Any
    settings: dict = {}


CASES = {
    "GATConv": Case(lambda: GATConv(F, 4, 2, residual=True), plain,
                    {"leaky_relu.negative_slope": 0.9, "activation": torch.tanh,
                     "attn_drop.p": 1.0}),
    "GATConv pair": Case(lambda: GATConv((F, F), 4, 2), pair,
                         {"leaky_relu.negative_slope": 0.9, "has_explicit_bias": False}),
    "GATConv pair of one map": Case(lambda: GATConv(F, 4, 2), pair),
    "GATv2Conv": Case(lambda: GATv2Conv(F, 4, 2), plain,
                      {"leaky_relu.negative_slope": 0.9, "activation": torch.tanh}),
    "GATv2Conv pair": Case(lambda: GATv2Conv((F, F), 4, 2), pair),
    "DotGatConv": Case(lambda: DotGatConv(F, 4, 2), plain),
    "AGNNConv": Case(lambda: AGNNConv(), plain),
    "EdgeGATConv": Case(lambda: EdgeGATConv(F, K, 4, 2), attributed,
                        {"leaky_relu.negative_slope": 0.9, "activation": torch.tanh}),
    "EGATConv": Case(lambda: EGATConv(F, K, 4, 5, 2), attributed),
    "RelGraphConv": Case(lambda: RelGraphConv(F, 4, R), typed,
                         {"self_loop": False, "activation": torch.tanh}),
    "RelGraphConv of bases": Case(lambda: RelGraphConv(F, 4, R, "basis", 2), typed),
    "HGTConv": Case(lambda: HGTConv(F, 4, 2, 2, R), of_types,
                    {"sqrt_d": 9.0, "use_norm": True}),
    "GraphConv": Case(lambda: GraphConv(F, 4), plain, {"_norm": "right", "_activation": torch.tanh}),
    "GraphConv of more channels": Case(lambda: GraphConv(F, 24), plain, {"_norm": "left"}),
    "SAGEConv": Case(lambda: SAGEConv(F, 4, "mean"), plain,
                     {"_aggre_type": "gcn", "activation": torch.tanh}),
    "SAGEConv pool": Case(lambda: SAGEConv(F, 4, "pool"), plain,
                          {"norm": torch.tanh, "_aggre_type": "mean"}),
    "SAGEConv pair": Case(lambda: SAGEConv(F, 24, "mean"), pair),
    "GINConv": Case(lambda: GINConv(nn.Linear(F, 4), "sum", learn_eps=True), plain,
                    {"_aggregator_type": "mean", "apply_func": None}),
    "GatedGCNConv": Case(lambda: GatedGCNConv(F, K, F), attributed, {"residual": False}),
    "NNConv": Case(lambda: NNConv(F, 4, nn.Sequential(nn.Linear(K, 5), nn.ReLU(),
                                                      nn.Linear(5, 4 * F)), "sum"), attributed,
                   {"reducer": dgl.function.mean}),
    "TypedLinear": Case(lambda: TypedLinear(F, 4, R), lambda: (graphs.features(),
                                                               torch.randint(R, (N,)))),
}
each = pytest.mark.parametrize("name", CASES)
over_graphs = pytest.mark.parametrize("name", [name for name in CASES if name != "TypedLinear"])


def warmed(route, name: str) -> tuple[Any, tuple]:
    """A layer, and the arguments of calls of it that were remembered."""
    torch.manual_seed(1)
    case = CASES[name]
    args = tuple(a.to(route.device) if isinstance(a, dgl.DGLGraph) else place(a, route.device)
                 for a in case.inputs())
    layer = spread(case.layer().to(route.device)).eval()
    for _ in range(3):
        results(layer, args, {})
    assert any(memories.get(layer).exact)
    return layer, args


def others(args: tuple) -> tuple:
    """The same over other features."""
    return tuple(exchanged(a, fresh(a)) for a in args)


def fresh(a: Any) -> Any:
    if isinstance(a, tuple):
        return tuple(map(fresh, a))
    floating = isinstance(a, torch.Tensor) and a.is_floating_point()
    return torch.randn_like(a) if floating else a


@each
def test_a_repeated_call_is_stated_once(route, name, stated):
    with route.on():
        layer, args = warmed(route, name)
        own = stated.count(type(layer).__name__)
        assert own == 1
        as_native(layer, args)
        as_native(layer, others(args))
        assert stated.count(type(layer).__name__) == own
        with torch.no_grad():
            as_native(layer, args)
        assert stated.count(type(layer).__name__) == own + 1  # gradients are a part of the decision


@over_graphs
def test_graphs_that_change(route, name):
    with route.on(on_fallback="native"):
        layer, (g, *rest) = warmed(route, name)
        as_native(layer, (g.local_var(), *rest))  # other graphs over the same edges
        as_native(layer, (g.clone(), *rest))
        other = CASES[name].inputs()[0].to(g.device)  # as large, with other edges
        as_native(layer, (other, *rest))
        as_native(layer, (g, *rest))
        as_native(layer, (g.int(), *rest))
        ids = torch.arange(2, device=g.device)
        for a, b in ((0, 1), (2, 3)):  # in place: as many edges as before
            g.remove_edges(ids)
            g.add_edges(ids + a, ids + b)
            as_native(layer, (g, *rest))


@each
def test_features_that_change(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        doubles = tuple(a if isinstance(a, dgl.DGLGraph) else place(a, route.device, torch.float64)
                        for a in args)
        refused(layer, doubles)
        layer.to(torch.float64)
        as_native(layer, doubles)
        refused(layer, args)
        layer.to(torch.float32)
        as_native(layer, args)


@each
def test_integer_tensors_that_change(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        for t in [t for t in args if isinstance(t, torch.Tensor) and not t.is_floating_point()]:
            t.copy_(t.flip(-1))
            as_native(layer, args)
            t.data = t.flip(-1).contiguous()
            as_native(layer, args)
            args = replaced(args, t, t.roll(1, -1).clone())
            as_native(layer, args)


@pytest.mark.parametrize("name", [name for name in CASES if "pair" in name])
def test_pairs_of_one_tensor_and_of_two(route, name):
    with route.on(on_fallback="native"):
        layer, _ = warmed(route, name)
        g, x = graphs.bipartite(N, N).to(route.device), torch.randn(N, F, device=route.device)
        for both in ((x, x), (x, x.clone()), (x, x), (x.clone(), x)):
            as_native(layer, (g, both))


@pytest.mark.long
def test_one_tensor_in_two_places(route):
    """Features of nodes and of edges that are the same tensor, and then are not."""
    g = dgl.graph((torch.arange(N), torch.arange(N).roll(1))).to(route.device)
    layer = spread(EdgeGATConv(F, F, 4, 2).to(route.device)).eval()
    x = torch.randn(N, F, device=route.device)
    with route.on(on_fallback="native"):
        for edges in (x, x, torch.randn_like(x), x):
            as_native(layer, (g, x, edges))
            as_native(layer, (g, edges, x))


SETTINGS = [(name, setting) for name, case in CASES.items() for setting in case.settings]


@pytest.mark.parametrize("name,setting", SETTINGS)
def test_settings_of_the_layer(route, name, setting):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        owner, _, attribute = setting.rpartition(".")
        if attribute == "p":
            layer.train()
            layer.feat_drop.p = 0.0
        if setting == "has_explicit_bias":
            nn.init.ones_(layer.bias)
        if setting == "use_norm":
            layer.norm = nn.LayerNorm(8, device=route.device)
        if CASES[name].settings[setting] == "gcn":
            layer.bias = nn.Parameter(torch.randn(4, device=route.device))
        setattr(layer.get_submodule(owner), attribute, CASES[name].settings[setting])
        as_native(layer, args)


@over_graphs
def test_nodes_without_edges_that_are_refused_later(route, name):
    with route.on(on_fallback="native"):
        layer, (g, *rest) = warmed(route, name)
        if not hasattr(layer, "_allow_zero_in_degree") or g.is_block:
            pytest.skip("it takes all graphs")
        layer._allow_zero_in_degree = True
        bare = g.clone()
        bare.remove_edges(bare.in_edges(0, form="eid"))
        rest = [t[:bare.num_edges()].detach() if len(rest) > 1 and t is rest[1] else t
                for t in rest]
        assert bare.in_degrees(0) == 0
        for _ in range(3):
            results(layer, (bare, *rest), {})
        layer._allow_zero_in_degree = False
        with pytest.raises(dgl.DGLError, match="0-in-degree"):
            layer(bare, *rest)


@each
def test_modules_that_are_watched(route, name):
    with route.on(on_fallback="native"):
        watch_each_module(*warmed(route, name))


@pytest.mark.long
@each
def test_modules_whose_functions_are_replaced(route, name, monkeypatch):
    with route.on(on_fallback="native"):
        replace_each_forward(*warmed(route, name), monkeypatch)


@over_graphs
def test_message_passing_that_is_replaced(route, name, monkeypatch):
    """A graph's own methods, by which the host's layers pass messages."""
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        for method in ("update_all", "apply_edges"):
            own = getattr(dgl.DGLGraph, method)

            def twice(self, *args, own=own, **kwargs):
                own(self, *args, **kwargs)
                for data in (self.dstdata, self.edata):
                    for key in list(data):
                        if data[key].is_floating_point() and data[key].requires_grad:
                            data[key] = data[key] * 2

            with monkeypatch.context() as patch:
                patch.setattr(dgl.DGLGraph, method, twice)
                as_native(layer, args)
            as_native(layer, args)


@pytest.mark.long
@each
def test_parameters_that_are_replaced(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        for part in layer.modules():
            for key, value in list(part._parameters.items()):
                if value is not None:
                    part._parameters[key] = nn.Parameter(torch.randn_like(value))
                    as_native(layer, args)
                    part._parameters[key].data = torch.randn_like(value)
                    as_native(layer, args)


def test_weights_of_edges_that_come_with_the_graph(route):
    """RelGraphConv takes them from the graph's own features where a call brings none."""
    with route.on(on_fallback="native"):
        layer, (g, x, types) = warmed(route, "RelGraphConv")
        for _ in range(2):
            g.edata["norm"] = torch.rand(g.num_edges(), 1, device=g.device)
            as_native(layer, (g, x, types))
        as_native(layer, (g, x, types), norm=torch.rand(g.num_edges(), 1, device=g.device))
        del g.edata["norm"]
        as_native(layer, (g, x, types))


@pytest.mark.parametrize("name", ["GATConv", "GraphConv", "SAGEConv", "GINConv"])
def test_weights_of_edges(route, name):
    with route.on(on_fallback="native"):
        layer, (g, x) = warmed(route, name)
        weight = torch.rand(g.num_edges(), device=g.device)
        for _ in range(2):
            as_native(layer, (g, x), edge_weight=weight)
            as_native(layer, (g, x), edge_weight=torch.rand_like(weight))
            as_native(layer, (g, x))


@pytest.mark.parametrize("name", ["GraphConv", "SAGEConv", "GINConv"])
def test_weights_of_edges_that_lie_otherwise(route, name, stated):
    """A column of several is read where it lies; calls with weights are remembered, too."""
    with route.on(on_fallback="native"):
        layer, (g, x) = warmed(route, name)
        columns = torch.rand(g.num_edges(), 3, device=g.device)
        for shape in (-1,), (-1, 1):
            for _ in range(3):
                as_native(layer, (g, x), edge_weight=columns[:, 0].contiguous().view(shape))
            seen = len(stated)
            as_native(layer, (g, x), edge_weight=torch.rand_like(columns[:, 0]).view(shape))
            assert len(stated) == seen
            for column in range(3):
                as_native(layer, (g, x), edge_weight=columns[:, column].unflatten(0, shape))
            as_native(layer, (g, x), edge_weight=columns[:, 1].double().view(shape).float())


def test_a_weight_that_is_given(route):
    with route.on(on_fallback="native"):
        layer = GraphConv(F, 4, weight=False, bias=False).to(route.device)
        g, x = graphs.square().to(route.device), graphs.features().to(route.device)
        for _ in range(4):
            as_native(layer, (g, x, torch.randn(F, 4, device=route.device)))
        as_native(layer, (g, x))


def test_blocks(route):
    """Destinations are the first of the sources."""
    with route.on(on_fallback="native"):
        for make in (lambda: GATConv(F, 4, 2), lambda: GraphConv(F, 4),
                     lambda: SAGEConv(F, 4, "mean")):
            layer, block = spread(make().to(route.device)).eval(), graphs.block().to(route.device)
            for _ in range(3):
                x = torch.randn(block.num_src_nodes(), F, device=route.device)
                as_native(layer, (block, x))


def test_relations_of_a_heterograph(route):
    """`g[etype]` shares its edges with the graph, of which it is only a part."""
    ends = [torch.randint(12, (2, 60)) for _ in range(2)]
    g = dgl.heterograph({("a", name, "a"): tuple(e) for name, e in zip(("x", "y"), ends)},
                        num_nodes_dict={"a": 12}).to(route.device)
    layer = spread(SAGEConv(F, 4, "mean").to(route.device)).eval()
    x = torch.randn(12, F, device=route.device)
    with route.on(on_fallback="native"):
        for _ in range(3):
            as_native(layer, (g["x"], x))
            as_native(layer, (g["y"], x))
        results(layer, (g["x"], x), {})
        refused(layer, (g, x))


@each
def test_nothing_of_a_call_is_kept_alive(route, name):
    with route.on():
        layer, args = warmed(route, name)
        held = next(filter(None, memories.get(layer).exact))
        kept = [weakref.ref(t) for t in (*tensors(list(args)), held.graph())]
        kept += [weakref.ref(g._graph) for g in args if isinstance(g, dgl.DGLGraph)]
        del args
        gc.collect()
    assert all(ref() is None for ref in kept)
