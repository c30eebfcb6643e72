"""Repeated calls with features of edges, pairs, types and dictionaries: what changes between two of
them has to be seen."""
from __future__ import annotations

import copy
import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (FiLMConv, GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, HANConv,
                                HEATConv, HeteroConv, HeteroLinear, HGTConv, NNConv, PNAConv, RGATConv,
                                RGCNConv, SAGEConv, TransformerConv)

from gnnaccel.dispatch.memory.layer_memory import memories
from tests.helpers import relative
from tests.judge import place
from tests.pyg import hetero_graphs
from tests.pyg.hetero_graphs import METADATA, hetero
from tests.pyg.judge import spread
from tests.staleness import (as_native, exchanged, refused, replace_each_forward, replaced, results,
                             tensors, watch_each_module)

N, M, E, F, R = 14, 9, 60, 8, 3


def edges() -> Tensor:
    return torch.randint(M, (2, E))


def types(count: int = E) -> Tensor:
    return torch.randint(R, (count,))


def attributed() -> tuple:
    return torch.randn(N, F), edges(), torch.randn(E, 5)


def pair() -> tuple:
    return (torch.randn(N, F), torch.randn(M, F)), edges()


def typed() -> tuple:
    return torch.randn(N, F), edges(), types()


def by_type() -> tuple:
    return hetero_graphs.features(), hetero_graphs.edges()


SQUARE = [("paper", name, "paper") for name in ("cites", "likes", "copies")]


def of_one_type() -> tuple:
    return ({"paper": torch.randn(hetero_graphs.NODES["paper"], hetero_graphs.WIDTH)},
            {name: torch.randint(hetero_graphs.NODES["paper"], (2, E)) for name in SQUARE})


class Case(NamedTuple):
    layer: Any
    inputs: Any
    settings: dict = {}


CASES = {
    "GATConv edge_attr": Case(lambda: GATConv(F, 4, 2, edge_dim=5), attributed,
                              dict(negative_slope=0.9, fill_value=0.5, add_self_loops=False,
                                   lin_edge=None)),
    "GATConv pair": Case(lambda: GATConv((F, F), 4, 2, add_self_loops=False), pair,
                         dict(negative_slope=0.9, dropout=1.0)),
    "GATConv pair of one map": Case(lambda: GATConv(F, 4, 2, add_self_loops=False), pair,
                                    dict(negative_slope=0.9)),
    "GATv2Conv edge_attr": Case(lambda: GATv2Conv(F, 4, 2, edge_dim=5), attributed,
                                dict(negative_slope=0.9)),
    "GATv2Conv pair": Case(lambda: GATv2Conv((F, F), 4, 2, add_self_loops=False), pair,
                           dict(negative_slope=0.9)),
    "TransformerConv edge_attr": Case(lambda: TransformerConv(F, 4, 2, edge_dim=5), attributed,
                                      dict(root_weight=False)),
    "RGCNConv": Case(lambda: RGCNConv(F, 4, R), typed, dict(aggr_module=nn.Identity())),
    "RGATConv": Case(lambda: RGATConv(F, 4, R, edge_dim=5), lambda: (*typed(), torch.randn(E, 5)),
                     dict(negative_slope=0.9)),
    "FiLMConv": Case(lambda: FiLMConv(F, 4, R), typed, dict(act=None)),
    "HEATConv": Case(lambda: HEATConv(F, 4, 2, R, 3, 5, 4, heads=2),
                     lambda: (torch.randn(N, F), edges(), torch.randint(2, (N,)), types(),
                              torch.randn(E, 5)),
                     dict(negative_slope=0.9, concat=False, root_weight=False)),
    "PNAConv": Case(lambda: PNAConv(F, 4, ["mean", "max", "std"], ["identity", "amplification"],
                                    torch.tensor([1, 3, 5])),
                    lambda: attributed()[:2]),
    "NNConv": Case(lambda: NNConv(F, 4, nn.Sequential(nn.Linear(5, 7), nn.ReLU(),
                                                      nn.Linear(7, F * 4))), attributed,
                   dict(root_weight=False, aggr_module=nn.Identity())),
    "HGTConv": Case(lambda: HGTConv(hetero_graphs.WIDTH, 8, METADATA, 2), by_type),
    "HANConv": Case(lambda: HANConv(hetero_graphs.WIDTH, 8, METADATA, 2), by_type,
                    dict(negative_slope=0.9, dropout=1.0)),
    **{f"HeteroConv of {kind}": Case(make, by_type, settings) for kind, make, settings in (
        ("SAGEConv", lambda: hetero(SAGEConv), dict(aggr="max")),
        ("GraphConv by mean", lambda: hetero(GraphConv, "mean"), dict(aggr="sum")),
        ("SAGEConv side by side", lambda: hetero(SAGEConv, None), dict(aggr="sum")),
        ("GATConv", lambda: hetero(GATConv, add_self_loops=False), dict(aggr="mean")),
        ("GATv2Conv", lambda: hetero(GATv2Conv, add_self_loops=False), dict(aggr="min")))},
    "HeteroConv of GCNConv": Case(lambda: hetero(GCNConv, relations=SQUARE), of_one_type,
                                  dict(aggr="max")),
    "HeteroConv of GINConv": Case(
        lambda: HeteroConv({name: GINConv(nn.Linear(hetero_graphs.WIDTH, 8)) for name in SQUARE}),
        of_one_type, dict(aggr="max")),
    "HeteroLinear": Case(lambda: HeteroLinear(F, 4, R), lambda: (torch.randn(N, F), types(N))),
}
each = pytest.mark.parametrize("name", CASES)


def warmed(route, name: str) -> tuple[Any, tuple]:
    """A layer, and the arguments of calls of it that were remembered."""
    torch.manual_seed(1)
    case = CASES[name]
    layer, args = spread(case.layer().to(route.device)).eval(), place(case.inputs(), route.device)
    for _ in range(3):
        results(layer, args, {})
    assert any(memories.get(layer).exact)
    return layer, args


@each
def test_a_repeated_call_is_stated_once(route, name, stated):
    with route.on():
        layer, args = warmed(route, name)
        own = stated.count(type(layer).__name__)
        assert own == 1
        as_native(layer, args)
        others = place(args, route.device, seed=3)  # other features over the same graph
        as_native(layer, exchanged(args, others))
        assert stated.count(type(layer).__name__) == own
        with torch.no_grad():
            as_native(layer, args)
        assert stated.count(type(layer).__name__) == own + 1  # gradients are a part of the decision


def index_tensors(args: Any) -> list[Tensor]:
    return [t for t in tensors(list(args)) if not t.is_floating_point()]


@each
def test_index_tensors_that_change(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        for t in index_tensors(args):
            t.copy_(t.flip(-1))
            as_native(layer, args)
            t.data = t.flip(-1).contiguous()
            as_native(layer, args)
        for t in index_tensors(args):  # other tensors at all
            args = replaced(args, t, t.roll(1, -1).clone())
            as_native(layer, args)


@each
def test_features_that_change(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        layer.to(torch.float64)
        as_native(layer, place(args, route.device, torch.float64))
        layer.to(torch.float32)
        as_native(layer, args)
        with torch.no_grad():  # gradients in bfloat16 are a matter of chance
            as_native(layer, args)
            with torch.autocast(route.device.type, torch.bfloat16):
                as_native(layer, args, 0.1)
            as_native(layer, args)
        as_native(layer, args)
        if not isinstance(args[0], dict):
            return
        x, ei = args
        as_native(layer, (dict(reversed(x.items())), ei))
        if name != "HGTConv":  # the host takes them for sorted
            as_native(layer, (x, dict(reversed(ei.items()))))
        as_native(layer, (x, dict(list(ei.items())[:-1])))
        as_native(layer, (x, ei))


@pytest.mark.parametrize("name",
                         [name for name in CASES if CASES[name].inputs in (by_type, of_one_type)
                          and name != "HGTConv"])
def test_edges_that_change_their_names(route, name):
    with route.on(on_fallback="native"):
        layer, (x, ei) = warmed(route, name)
        for t in ei.values():
            t %= 3
        as_native(layer, (x, ei))
        as_native(layer, (x, dict(zip((*list(ei)[1:], *list(ei)[:1]), ei.values()))))


@pytest.mark.parametrize("name",
                         [name for name in CASES if name not in ("HeteroLinear", "HEATConv")])
def test_more_nodes(route, name):
    """Over the very same edges."""
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        as_native(layer, (larger(args[0]), *args[1:]))
        as_native(layer, args)


def larger(x: Any) -> Any:
    """``x`` with three more rows."""
    if isinstance(x, dict):
        return {key: larger(t) for key, t in x.items()}
    return tuple(map(larger, x)) if isinstance(x, tuple) else torch.cat([x, x[:3]]).detach()


@each
def test_what_the_host_refuses(route, name):
    """Features, or a layer, of another dtype."""
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        as_native(layer, args)
        others = place(args, route.device, torch.float64)
        refused(layer, others)
        as_native(layer, args)
        layer.to(torch.float64)
        refused(layer, args)


@pytest.mark.parametrize("name",
                         [name for name in CASES if "pair" in name
                          or name in ("RGCNConv", "FiLMConv")])
def test_pairs_of_one_tensor_and_of_two(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        x = torch.randn(N, F, device=route.device)
        for both in ((x, x), (x, x.clone()), (x, x)):
            as_native(layer, (both, *args[1:]))


@pytest.mark.parametrize("name", [name for name in CASES if "edge_attr" in name])
def test_features_of_edges_by_name_and_of_none(route, name):
    with route.on(on_fallback="native"):
        layer, (x, ei, attr) = warmed(route, name)
        as_native(layer, (x, ei), edge_attr=attr)
        if name.startswith("GAT"):
            as_native(layer, (x, ei))
        as_native(layer, (x, ei), edge_attr=attr)
        as_native(layer, (x, ei, attr))


SETTINGS = [(name, setting) for name, case in CASES.items() for setting in case.settings
            if setting != "aggr_module"]


@pytest.mark.parametrize("name,setting", SETTINGS)
def test_settings_of_the_layer(route, name, setting):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        if setting == "concat":
            layer.bias = None
        if setting == "dropout":
            layer.train()
        setattr(layer, setting, CASES[name].settings[setting])
        as_native(layer, args)


@pytest.mark.long
@each
def test_modules_that_are_watched(route, name):
    with route.on(on_fallback="native"):
        watch_each_module(*warmed(route, name))


@pytest.mark.long
@each
def test_modules_whose_functions_are_replaced(route, name, monkeypatch):
    with route.on(on_fallback="native"):
        replace_each_forward(*warmed(route, name), monkeypatch)


@each
def test_parameters_that_are_replaced(route, name):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        for part in layer.modules():
            for key, value in list(part._parameters.items()):
                if value is not None:
                    part._parameters[key] = nn.Parameter(torch.randn_like(value))
                    as_native(layer, args)
        for part in layer.modules():  # a bias that goes
            if part._parameters.get("bias") is not None:
                part._parameters["bias"] = None
                as_native(layer, args)


@each
def test_biases_that_come(route, name):
    """To linear maps that were made without."""
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        for part in list(layer.modules()):
            if ("bias" in part._parameters and part.bias is None and hasattr(part, "weight")
                and part is not layer):
                types, _, channels = (part.weight.shape
                                      if part.weight.dim() == 3 else (0, 0, part.weight.shape[0]))
                shape = (types, channels) if types else (channels,)
                part._parameters["bias"] = nn.Parameter(torch.randn(shape, device=route.device))
                as_native(layer, args)


def test_an_activation_that_changes(route):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, "FiLMConv")
        layer.act = nn.Tanh()
        as_native(layer, args)


def test_an_embedding_that_changes(route):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, "HEATConv")
        layer.edge_type_emb.max_norm = 0.1
        twin = copy.deepcopy(layer)
        got = layer(*args)
    assert relative(got, twin(*args)) < 1e-5


@pytest.mark.parametrize("name", ["PNAConv", "HGTConv", "FiLMConv"])
def test_torchs_map_is_replaced(route, name, monkeypatch):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, name)
        linear = nn.functional.linear
        monkeypatch.setattr(nn.functional, "linear", lambda *given: 2 * linear(*given))
        as_native(layer, args)


def test_an_aggregation_that_changes(route):
    with route.on(on_fallback="native"):
        layer, args = warmed(route, "PNAConv")
        layer.aggr_module.aggr.aggrs[0] = type(layer.aggr_module.aggr.aggrs[1])()
        as_native(layer, args)
        layer.aggr_module.scaler = ["identity", "attenuation"]
        as_native(layer, args)


@each
def test_nothing_of_a_call_is_kept_alive(route, name):
    with route.on():
        layer, args = warmed(route, name)
        kept = [weakref.ref(t) for t in (*tensors(list(args)), next(filter(None, memories.get(layer).exact)).graph())]
        del args
        gc.collect()
    assert all(ref() is None for ref in kept)
