"""HeteroConv of alike layers: what has to stay with the host's own loop, and that every change is
noticed."""
from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch_geometric.nn import GATv2Conv, GCNConv, GraphConv, HeteroConv, LEConv, SAGEConv

import gnnaccel
from gnnaccel.dispatch.observe import records
from gnnaccel.errors import FallbackError
from tests import probes
from tests.helpers import relative
from tests.pyg.hetero_graphs import (ABOUT, CITES, KNOWS, NODES, OUT, RELATIONS, WIDTH, WRITES,
                                     edges, features, hetero, in_groups, on, same, trained_on_types)
from tests.pyg.judge import took

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")


def native_because(route, made, x: dict, ei: dict, code: str, args: tuple = (), **kwargs) -> None:
    """The call gives the host's own result, for this reason; to rounding, as the layers inside may
    still aggregate our way."""
    x, ei = on(route.device, x, ei)
    made = made.to(route.device)
    torch.manual_seed(1)
    expected = made(x, ei, *args, **kwargs)
    gnnaccel.reset_stats()
    torch.manual_seed(1)
    with route.on(on_fallback="native"):
        got = made(x, ei, *args, **kwargs)
    stats = gnnaccel.stats()
    assert stats["HeteroConv"]["reasons"] == {code: 1}, stats
    same(got, expected, 1e-5 if route.device.type == "cuda" else 1e-6)
    if ei and any(t.shape[1] for t in ei.values()):
        with route.on(), pytest.raises(FallbackError, match=code):
            made(x, ei, *args, **kwargs)


def test_no_edges_at_all_and_no_edge_types_at_all(route):
    made = hetero().to(route.device)
    for ei in (edges(empty=RELATIONS), {}):
        native_because(route, made, features(), ei, "GA303")


@pytest.mark.parametrize("options,code", [
    (dict(aggr="max"), "GA201"), (dict(normalize=True), "GA208"), (dict(project=True), "GA208"),
    (dict(flow="target_to_source"), "GA202"), (dict(node_dim=0), "GA202")], ids=str)
def test_options_of_the_layers(route, options, code):
    relations = [CITES, KNOWS]
    native_because(route, hetero(relations=relations, **options), features(), edges(relations),
                   code)


def test_another_way_to_group(route):
    native_because(route, hetero(group="prod"), features(), edges(), "GA208")


def test_layers_that_differ(route):
    def mixed(**changes):
        return HeteroConv({name: changes.get(name[1], SAGEConv(WIDTH, OUT)) for name in RELATIONS})

    own = type("Own", (SAGEConv,), {})(WIDTH, OUT)
    for other in (SAGEConv(WIDTH, OUT, aggr="sum"), SAGEConv(WIDTH, OUT, root_weight=False), own):
        in_groups(route, mixed(cites=other), features(), edges(),
                  **{type(other).__name__: {route.backend: 1}})


def test_types_of_other_widths(route):
    widths = {"paper": 12, "author": 7, "field": 5}
    made = HeteroConv({name: SAGEConv((widths[name[0]], widths[name[2]]), OUT)
                       for name in RELATIONS})
    in_groups(route, made, features(widths), edges(), groups=2)


def test_layers_of_another_kind(route):
    relations = [CITES, KNOWS]
    native_because(route, hetero(LEConv, relations=relations), features(), edges(relations),
                   "GA208")
    native_because(route, hetero(GCNConv, relations=relations, improved=True), features(),
                   edges(relations), "GA208")


def test_further_arguments(route):
    weights = {name: torch.rand(40, device=route.device) for name in RELATIONS}
    native_because(route, hetero(GraphConv), features(), edges(), "GA208", args=(weights,))
    native_because(route, hetero(GraphConv), features(), edges(), "GA208", edge_weight_dict=weights)


def test_features_that_are_missing(route):
    x = features()
    del x["field"]
    made, ei = hetero(relations=[ABOUT]), edges([ABOUT])
    made, (x, ei) = made.to(route.device), on(route.device, x, ei)
    with route.on(on_fallback="native"):
        got = made(x, ei)
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA206": 1}
    same(got, made(x, ei), 1e-5 if route.device.type == "cuda" else 1e-6)


@pytest.mark.parametrize("where", ["conv", "message", "lin", "aggregation"])
def test_hooks(route, where):
    made, (x, ei), log = hetero().to(route.device), on(route.device, features(), edges()), []
    with route.on():
        made(x, ei)
    conv = made.convs[CITES]
    target = {"conv": conv, "message": conv, "lin": conv.lin_l,
              "aggregation": conv.aggr_module}[where]
    register = (target.register_message_forward_hook
                if where == "message" else target.register_forward_hook)
    handle = register(lambda *args: log.append(1))
    in_groups(route, made, x, ei,
              SAGEConv={"native" if where in ("message", "aggregation") else route.backend: 1})
    assert len(log) == 2
    handle.remove()
    gnnaccel.reset_stats()
    with route.on():
        made(x, ei)
    took(route, 1)


def test_hooks_in_a_new_dictionary(route):
    """Some scripts drop hooks by putting an empty dictionary in their place."""
    made, (x, ei), log = hetero().to(route.device), on(route.device, features(), edges()), []
    with route.on(on_fallback="native"):
        made(x, ei)
        made.convs[CITES]._forward_hooks = type(made._forward_hooks)()
        made(x, ei)
        made.convs[CITES].register_forward_hook(lambda *args: log.append(1))
        made(x, ei)
    assert len(log) == 1


@pytest.mark.long
def test_replaced_methods_explaining_and_other_maps(route):
    def explained(conv):
        conv.explain, conv._edge_mask = True, torch.ones(40, device=route.device)

    x, ei = on(route.device, features(), edges())
    changes = [lambda conv: setattr(conv, "message", conv.message),
               lambda conv: setattr(conv, "forward", conv.forward),
               lambda conv: setattr(conv, "propagate", conv.propagate), explained,
               lambda conv: setattr(conv, "normalize", True),
               lambda conv: setattr(conv, "lin_l", torch.nn.Linear(WIDTH, OUT).to(route.device)),
               lambda conv: torch.nn.utils.parametrizations.weight_norm(conv.lin_l)]
    for change in changes:
        made = hetero().to(route.device)
        with route.on():
            made(x, ei)  # so that it is known by the time it changes
        change(made.convs[CITES])
        expected = made(x, ei)
        gnnaccel.reset_stats()
        with route.on(on_fallback="native"):
            same(made(x, ei), expected)
        assert gnnaccel.stats()["HeteroConv"]["routes"] == {"native": 1, route.backend: 1}


def test_a_layer_that_is_replaced(route):
    made, (x, ei) = hetero().to(route.device), on(route.device, features(), edges())
    with route.on():
        made(x, ei)
    made.convs[CITES] = SAGEConv(WIDTH, OUT).to(route.device)
    made.convs[WRITES].lin_l.weight = torch.nn.Parameter(torch.randn(OUT, WIDTH,
                                                                     device=route.device))
    made.convs[ABOUT].lin_l.bias = None
    with route.on(on_fallback="native"):
        got = made(x, ei)
    same(got, made(x, ei))


def test_rules(route):
    made, (x, ei) = hetero().to(route.device), on(route.device, features(), edges())
    with route.on():
        made(x, ei)
    gnnaccel.exclude(made.convs[CITES])
    with route.on(on_fallback="native"):
        made(x, ei)
    assert gnnaccel.stats()["SAGEConv"]["reasons"] == {"GA101": 1}
    gnnaccel.include(made.convs[CITES])
    with route.on(include=["HeteroConv"]):
        made(x, ei)
    assert gnnaccel.stats()["HeteroConv"]["routes"] == {route.backend: 3, "native": 1}


def test_dtypes_that_differ(route):
    x, ei = features(), edges()
    x["field"] = x["field"].double()
    made, (x, ei) = hetero().to(route.device), on(route.device, x, ei)
    with route.on(on_fallback="native"), pytest.raises(RuntimeError):
        made(x, ei)
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA203": 1}


@pytest.mark.parametrize("shape", [(1,), (1, OUT)], ids=str)
@pytest.mark.parametrize("cls,part", [(SAGEConv, "lin_l"), (GraphConv, "lin_rel"),
                                      (GATv2Conv, "lin_l"), (GATv2Conv, "lin_r")])
def test_biases_that_are_broadcast(route, cls, part, shape):
    options = dict(add_self_loops=False) if cls is GATv2Conv else {}
    made = hetero(cls, **options).to(route.device)
    x, ei = on(route.device, features(), edges())
    with route.on():
        made(x, ei)
    own = getattr(made.convs[CITES], part)
    own.bias = torch.nn.Parameter(torch.randn(shape, device=route.device))
    gnnaccel.reset_stats()
    expected = made(x, ei)
    with route.on(on_fallback="native"):
        same(made(x, ei), expected)
    assert "native" in gnnaccel.stats()["HeteroConv"]["routes"]


def test_copies_and_what_is_remembered(route):
    gc.collect()
    before = probes.kept()["HeteroConv layers"]
    made, (x, ei) = hetero().to(route.device), on(route.device, features(), edges())
    with route.on():
        expected = made(x, ei)
        twin = copy.deepcopy(made)
        same(twin(x, ei), expected)
        for at in range(12):  # sets of edge types
            made(x, {name: ei[name] for name in RELATIONS if at % 4 != RELATIONS.index(name)})
    assert probes.kept()["HeteroConv layers"] == before + 2
    del made, twin
    gc.collect()
    assert probes.kept()["HeteroConv layers"] == before


def test_training_brings_the_hosts_weights(route):
    torch.manual_seed(3)
    made = hetero().to(route.device)
    x, ei = on(route.device, features(), edges())
    target = {k: torch.randn(n, OUT).to(route.device) for k, n in NODES.items()}

    native = trained_on_types(copy.deepcopy(made), x, ei, target, 5)
    with route.on():
        got = trained_on_types(made, x, ei, target, 5)
    assert all(relative(got[k], native[k]) < 1e-5 for k in native)


def test_replicas_whose_weights_are_no_parameters(route):
    """As `torch.nn.DataParallel` makes them."""
    made, (x, ei) = hetero().to(route.device), on(route.device, features(), edges())
    expected = made(x, ei)
    for conv in made.convs.values():
        weight = conv.lin_l.weight
        conv.lin_l._parameters = {}
        conv.lin_l.weight, conv.lin_l.bias = weight.detach().clone(), None
    native_because(route, made, x, ei, "GA208")
    assert list(made(x, ei)) == list(expected)


def test_another_container(route):
    made, (x, ei) = hetero().to(route.device), on(route.device, features(), edges())
    own = type("Own", (type(made.convs),), {})()
    own._modules = made.convs._modules
    made.convs = own
    native_because(route, made, x, ei, "GA205")


def test_records(route):
    made, (x, ei) = hetero().to(route.device), on(route.device, features(), edges())
    with route.on(records=4):
        made({k: t.requires_grad_() for k, t in x.items()}, ei)["paper"].sum().backward()
        forward, backward = gnnaccel.records()
    records.validate(forward)
    assert forward["layer"] == "HeteroConv" and forward["graph"]["num_relations"] == len(RELATIONS)
    assert forward["passes"]["orderings"] and backward["forward_call"] == forward["call"]


def test_explaining_a_call():
    assert "aggregate_first" in str(gnnaccel.explain_program(hetero(), features(), edges()))
    assert "GA208" in str(gnnaccel.explain_program(hetero(group="prod"), features(), edges()))


def test_no_warning_of_ours(route):
    made, (x, ei) = hetero().to(route.device), on(route.device, features(), edges())
    with route.on(), warnings.catch_warnings():
        warnings.simplefilter("error")
        made(x, ei)
