"""HeteroConv whose layers differ: groups of them as one, the others by themselves, put together as
the host does."""
from __future__ import annotations

import gc

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, GINConv, GraphConv, HeteroConv, SAGEConv

import gnnaccel
from tests import probes
from tests.pyg.hetero_graphs import (ABOUT, CITES, KNOWS, OUT, RELATIONS, WIDTH, WRITES, WRITTEN,
                                     edges, features, in_groups, near, on, same)
from tests.pyg.judge import compare

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")


def mixed(aggr="sum", **changes) -> HeteroConv:
    """Two layers of a kind, two of another, one alone; ``changes``: other layers, by the relation's
    name."""
    convs = {WRITES: SAGEConv(WIDTH, OUT), CITES: GATConv(WIDTH, 8, 2, add_self_loops=False),
             WRITTEN: SAGEConv(WIDTH, OUT), ABOUT: GATConv(WIDTH, 8, 2, add_self_loops=False),
             KNOWS: GraphConv(WIDTH, OUT)}
    return HeteroConv({name: changes.get(name[1], conv) for name, conv in convs.items()}, aggr)


@pytest.mark.parametrize("aggr", ["sum", "mean", "min", "cat", None])
def test_every_way_to_put_them_together(route, aggr):
    compare(route, mixed(aggr), features(), edges(), floor=1e-6,
            went=lambda: gnnaccel.stats()["HeteroConv"]["routes"] == {"native": 1,
                                                                      route.backend: 2})


def test_which_run_together(route):
    x, ei = features(), edges()
    in_groups(route, mixed(), x, ei, groups=2, GraphConv={route.backend: 1})
    in_groups(route, mixed(knows=SAGEConv(WIDTH, OUT)), x, ei, groups=2)
    in_groups(route, mixed(writes=type("Own", (GraphConv,), {})(WIDTH, OUT)), x, ei, groups=1,
              Own={route.backend: 1}, SAGEConv={route.backend: 1}, GraphConv={route.backend: 1})


def test_relations_without_edges_and_those_not_given(route):
    in_groups(route, mixed(), features(), edges(empty=[WRITES, ABOUT]), groups=2,
              GraphConv={route.backend: 1})
    in_groups(route, mixed(), features(), edges([WRITES, WRITTEN, CITES]), groups=1,
              GATConv={route.backend: 1})


@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_results_of_other_widths_are_the_hosts_error(route, aggr):
    """Also where one of them is a single channel, which additions stretch."""
    made = HeteroConv({WRITES: SAGEConv(WIDTH, 1), WRITTEN: SAGEConv(WIDTH, 1),
                       CITES: GraphConv(WIDTH, 4)}, aggr).to(route.device)
    x, ei = on(route.device, features(), edges([WRITES, WRITTEN, CITES]))
    for enabled in (gnnaccel.disabled(), route.on(on_fallback="native")):
        with enabled, pytest.raises(RuntimeError, match="equal size"):
            made(x, ei)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_shapes_are_found_on_the_meta_device(route, aggr):
    """There torch knows no autocast."""
    x, ei = on(torch.device("meta"), features(), edges())
    with route.on(on_fallback="native"):
        found = mixed(aggr).to("meta")(x, ei)
    assert {out.device.type for out in found.values()} == {"meta"}
    assert {out.shape[1] for out in found.values()} == {OUT}


def test_networks_of_several_widths(route):
    """Which they may have where results are put side by side. So they run together only where
    results are added up."""
    made = mixed("cat", writes=GINConv(torch.nn.Linear(WIDTH, 4)),
                 cites=GINConv(torch.nn.Linear(WIDTH, OUT)), about=SAGEConv(WIDTH, OUT),
                 knows=SAGEConv(WIDTH, OUT))
    for aggr, groups in (("cat", 1), ("sum", 2), (None, 1)):
        if aggr != "cat":
            made.convs[WRITES] = GINConv(torch.nn.Linear(WIDTH, OUT))
        made.aggr, went = aggr, {"native": 1, route.backend: groups}
        compare(route, made, features(), edges(), floor=1e-6,
                went=lambda: gnnaccel.stats()["HeteroConv"]["routes"] == went)


@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(route, dtype, aggr):
    made, (x, ei) = mixed(aggr).to(route.device), on(route.device, features(), edges())
    exact = made(x, ei)
    with torch.autocast(route.device.type, dtype):
        native = made(x, ei)
        with route.on():
            near(made(x, ei), native, exact, dtype)


def test_what_a_layer_alone_has_on_it_counts(route):
    made, (x, ei), log = mixed().to(route.device), on(route.device, features(), edges()), []
    made.convs[KNOWS].register_forward_hook(lambda *args: log.append(args[1][0] is x["author"]))
    expected = made(x, ei)
    with route.on():
        same(made(x, ei), expected)
    assert log == [True, True]
    gnnaccel.exclude(made.convs[WRITES])
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        same(made(x, ei), expected)
    assert gnnaccel.stats()["SAGEConv"]["routes"] == {"native": 1, route.backend: 1}
    gnnaccel.exclude(made)
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        same(made(x, ei), expected)
    assert gnnaccel.stats()["HeteroConv"]["routes"] == {"native": 1}


@pytest.mark.long
def test_changes_between_calls(route):
    made, (x, ei) = mixed().to(route.device), on(route.device, features(), edges())
    changes = [lambda: setattr(made, "aggr", "max"),
               lambda: made.convs[WRITES].register_forward_hook(lambda *args: args[2] * 2),
               lambda: setattr(made.convs[CITES], "negative_slope", 0.9),
               lambda: made.convs.__setitem__(ABOUT,
                                              GATConv(WIDTH, OUT, 1,
                                                      add_self_loops=False).to(route.device)),
               made.eval]
    for change in changes:
        with route.on(on_fallback="native"):
            made(x, ei)
            change()
            got = made(x, ei)
        same(got, made(x, ei))


def test_a_forward_that_a_user_puts_on_the_class_runs_once(route, monkeypatch):
    """Not for each group as well."""
    made = mixed().to(route.device)
    x, ei = on(route.device, features(), edges())
    expected = {name: t * 2 for name, t in made(x, ei).items()}
    with route.on(on_fallback="native"), monkeypatch.context() as patch:
        made(x, ei)
        routed = HeteroConv.forward
        patch.setattr(HeteroConv, "forward", lambda *args: {
            name: t * 2 for name, t in routed(*args).items()})
        same(made(x, ei), expected)


def test_what_is_remembered_goes_with_the_layer(route):
    gc.collect()
    before = probes.kept()["HeteroConv layers"]
    made, (x, ei) = mixed().to(route.device), on(route.device, features(), edges())
    with route.on():
        for _ in range(3):
            made(x, ei)
    assert probes.kept()["HeteroConv layers"] == before + 3
    assert list(made.state_dict()) == list(mixed().state_dict())
    del made
    gc.collect()
    assert probes.kept()["HeteroConv layers"] == before


# ---- GCNConv and GINConv ----

SQUARE = [CITES, KNOWS, ("paper", "follows", "paper")]


@pytest.mark.parametrize("options",
                         [{}, dict(add_self_loops=False), dict(normalize=False, bias=False)],
                         ids=str)
@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_gcn(route, aggr, options):
    ei = edges(SQUARE, empty=SQUARE[2:])
    ei[CITES][:, 5:9] = 4  # loops that are there already, more than once
    compare(route, HeteroConv({name: GCNConv(WIDTH, OUT, **options) for name in SQUARE}, aggr),
            features(), ei)


def test_gcn_loops_of_relations_count(route):
    """One for each node of each relation, also where several relations join one type."""
    made = HeteroConv({name: GCNConv(WIDTH, OUT) for name in SQUARE}).to(route.device)
    x, ei = on(route.device, features(), edges(SQUARE))
    with route.on(records=1):
        made(x, ei)
        found = gnnaccel.records()[-1]["graph"]["num_edges"]
    assert found == sum(ei[name].shape[1] + x[name[0]].shape[0] for name in SQUARE)


def test_gcn_again_and_half(route):
    made = HeteroConv({name: GCNConv(WIDTH, OUT) for name in SQUARE}).to(route.device)
    x, ei = on(route.device, features(), edges(SQUARE))
    exact = made(x, ei)
    with route.on():
        for _ in range(3):  # weights of edges are kept from the second call on
            same(made(x, ei), exact)
        ei[KNOWS][1] = 2
        got = made(x, ei)
    exact = made(x, ei)
    same(got, exact)
    half, rows = made.bfloat16(), {k: t.bfloat16() for k, t in x.items()}
    with route.on():
        got = half(rows, ei)
    near(got, half(rows, ei), exact, torch.bfloat16)
    with route.on(on_fallback="native"), torch.autocast(route.device.type, torch.bfloat16):
        half.float()(x, ei)
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA203": 1}


def test_gcn_between_types_is_the_hosts_error(route):
    made = HeteroConv({name: GCNConv(WIDTH, OUT, add_self_loops=False)
                       for name in (WRITES, CITES)}).to(route.device)
    x, ei = on(route.device, features(), edges([WRITES, CITES]))
    with route.on(on_fallback="native"), pytest.raises(ValueError, match="tuple"):
        made(x, ei)


def gin(aggr="sum", out=OUT, relations=RELATIONS) -> HeteroConv:
    def network():
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, out), torch.nn.ReLU(),
                                   torch.nn.Linear(out, out))

    return HeteroConv({name: GINConv(network(), 0.3, at % 2 == 0)
                       for at, name in enumerate(relations)}, aggr)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", None])
def test_gin(route, aggr):
    compare(route, gin(aggr), features(), edges(empty=[ABOUT]))


def test_gin_calls_its_networks(route):
    made, (x, ei), log = gin().to(route.device), on(route.device, features(), edges()), []
    for conv in made.convs.values():
        conv.nn[0].register_forward_hook(lambda *args: log.append(args[1][0].shape[0]))
    expected = made(x, ei)
    rows, log[:] = list(log), []
    with route.on():
        same(made(x, ei), expected)
    assert log == rows
    made.convs[CITES].nn = torch.nn.Linear(WIDTH, OUT).to(route.device)
    with route.on():
        got = made(x, ei)
    same(got, made(x, ei))


def test_gin_double_and_precision(route):
    made = gin(out=3, relations=[WRITES, CITES])
    x, ei = on(route.device, features(), edges([WRITES, CITES], count=9))
    made = made.to(route.device)
    exact = made(x, ei)
    with torch.autocast(route.device.type, torch.bfloat16):
        native = made(x, ei)
        with route.on():
            near(made(x, ei), native, exact, torch.bfloat16)
    if route.name == "torch":
        inputs = [x[name].double()[:, :WIDTH].requires_grad_() for name in ("paper", "author")]
        made = made.double()
        with route.on():
            assert torch.autograd.gradcheck(lambda
                                            *values: made(dict(zip(("paper", "author"), values)),
                                                          ei)["paper"], inputs,
                                            fast_mode=True)


def test_gin_of_several_widths_goes_layer_by_layer(route):
    widths = {"paper": 12, "author": 7, "field": 5}
    relations = [CITES, KNOWS]
    made = HeteroConv({name: GINConv(torch.nn.Linear(widths[name[0]], OUT))
                       for name in relations}).to(route.device)
    x, ei = on(route.device, features(widths), edges(relations))
    with route.on(on_fallback="native"):
        got = made(x, ei)
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA206": 1}
    same(got, made(x, ei))


def test_layers_of_several_widths_are_looked_through_once(route, monkeypatch):
    """Which is how they are made, so that nothing of it may pass with the next call."""
    widths = {"paper": 12, "author": 7, "field": 5}
    made = HeteroConv({name: SAGEConv((widths[name[0]], widths[name[-1]]), OUT)
                       for name in RELATIONS}).to(route.device)
    x, ei = on(route.device, features(widths), edges(count=500))
    decided = probes.decided(monkeypatch)
    with route.on(on_fallback="native"):
        for _ in range(3):
            made(x, ei)
        gnnaccel.reset_stats()
        decided.clear()
        got = made(x, ei)
    assert "HeteroConv" not in decided
    assert gnnaccel.stats()["HeteroConv"]["routes"] == {"native": 1, route.backend: 2}
    same(got, made(x, ei))
