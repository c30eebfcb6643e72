"""HeteroConv of GATConv, run as one attention: every option against the host's own loop, and what
is routed layer by layer."""
from __future__ import annotations

import copy

import pytest
import torch
from torch_geometric.nn import GATConv, HeteroConv

import gnnaccel
from gnnaccel.dispatch.graph import cache
from tests.helpers import relative
from tests.pyg.hetero_graphs import (ABOUT, CITES, KNOWS, NODES, RELATIONS, WIDTH, WRITES, WRITTEN,
                                     edges, features, hetero, in_any_order, in_groups, many, near,
                                     on, same)
from tests.pyg.judge import compare, on_routes, took

OPTIONS = [{}, dict(concat=False), dict(bias=False), dict(concat=False, bias=False),
           dict(negative_slope=0.0), dict(negative_slope=1.3)]
SHAPES = [(8, 2), (1, 1), (5, 3)]
MORE_SHAPES = [(16, 4), (8, 8), (64, 1), (20, 12)]

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")


def layer(group="sum", relations=RELATIONS, channels=WIDTH, out=8, heads=2, **options):
    return hetero(GATConv, group, relations, out, channels, heads=heads,
                  **{"add_self_loops": False, **options})


# ---- options ----

@pytest.mark.parametrize("group", ["sum", "mean", "max", None])
@on_routes("options", OPTIONS[:4], OPTIONS[4:])
def test_options(route, options, group):
    compare(route, layer(group, **options), features(), edges(), floor=1e-6)


@on_routes("shape", SHAPES, MORE_SHAPES)
def test_shapes(route, shape):
    out, heads = shape
    floor = 1e-5 if out == 1 else 1e-6  # a gradient that is one number, a sum that cancels
    compare(route, layer(out=out, heads=heads), features(), edges(), floor=floor)


def test_two_maps_and_other_widths(route):
    widths = {"paper": 12, "author": 7, "field": 5}
    convs = {name: GATConv((widths[name[0]], widths[name[2]]), 8, 2, add_self_loops=False)
             for name in RELATIONS}
    compare(route, HeteroConv(convs), features(widths), edges(), floor=1e-6)


@pytest.mark.parametrize("channels", [WIDTH, (WIDTH, WIDTH)], ids=str)
def test_self_loops(route, channels):
    relations = [CITES, KNOWS, ("paper", "follows", "paper")]
    ei = edges(relations, empty=relations[2:])
    ei[CITES][:, 5:9] = 4  # loops that are there already
    compare(route, layer(relations=relations, channels=channels, add_self_loops=True), features(),
            ei, floor=1e-6)


def test_eval_mode_without_gradients(route):
    compare(route, layer(dropout=0.5).requires_grad_(False), features(), edges(), train=False,
            require=False)


@pytest.mark.long
def test_dropout(route):
    made = layer(dropout=0.3, relations=[CITES, WRITES]).to(route.device)
    x, ei = on(route.device, features(), edges([CITES, WRITES]))

    def mean(draws: int = 300):
        return sum(made(x, ei)["paper"].detach() for _ in range(draws)) / draws

    with route.on():
        ours = mean()
    assert relative(ours, mean()) < 0.1


def test_lazy_layers(route):
    lazy, (x, ei) = layer(channels=(-1, -1)).to(route.device), on(route.device, features(), edges())
    with route.on(on_fallback="native"):
        lazy(x, ei)
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA210": 1}
    compare(route, lazy, features(), edges(), floor=1e-6)


# ---- the dictionaries ----

def test_any_order_of_the_dictionaries(route):
    in_any_order(route, layer())


def test_edge_types_that_are_not_given(route):
    got = compare(route, layer(), features(), edges([WRITTEN, CITES]), floor=1e-6)
    assert "out[field]" not in got and got["convs.<author___writes___paper>.lin.weight"] is None


@pytest.mark.parametrize("empty", [[WRITES], [WRITES, CITES], [ABOUT], RELATIONS[:4]], ids=len)
def test_edge_types_without_edges(route, empty):
    got = compare(route, layer(), features(), edges(empty=empty), floor=1e-6)
    name = f"convs.<{'___'.join(empty[0])}>"
    assert not got[f"{name}.lin.weight"].any() and not got[f"{name}.att_dst"].any() and got[
        f"{name}.bias"].any()


def test_a_type_without_nodes(route):
    relations = [WRITTEN, CITES, ABOUT, ("author", "in", "field")]
    compare(route, layer(relations=relations), features(field=0),
            edges(relations, empty=relations[2:]), floor=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("group", ["sum", "mean"])
def test_many_relations(route, group):
    x, ei = many(relations=64, count=45)
    # 256 small gradients, sums that cancel: among so many the rounding of some is unlucky
    compare(route, layer(group, relations=list(ei)), x, ei, floor=3e-6)


# ---- numbers ----

def test_gradients_in_double(route):
    if route.name != "torch":
        pytest.skip("the kernels compute in fp32")
    relations = [WRITES, CITES]
    made, (x, ei) = layer(relations=relations, channels=4,
                          out=2).double(), (features(4), edges(relations, count=9))
    inputs = [t.double().requires_grad_() for t in (x["paper"], x["author"])]

    def call(paper, author):
        return tuple(made({"paper": paper, "author": author}, ei).values())

    with route.on():
        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["half", "autocast"])
def test_precision(route, dtype, how):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    exact = made(x, ei)
    if how == "half":
        made, x = copy.deepcopy(made).to(dtype), {k: t.to(dtype) for k, t in x.items()}
    with torch.autocast(route.device.type, dtype, enabled=how == "autocast"):
        native = made(x, ei)
        with route.on():
            got = made(x, ei)
    near(got, native, exact, dtype)


@pytest.mark.long
def test_results_share_no_memory(route):
    for options in OPTIONS[:4]:
        made, (x, ei) = layer(**options).to(route.device), on(route.device, features(), edges())
        with route.on():
            out = made({k: t.requires_grad_() for k, t in x.items()}, ei)
        assert len({t.untyped_storage().data_ptr() for t in out.values()}) == len(out)
        sum(t.relu_().sum() for t in out.values()).backward()


# ---- the structure ----

def test_the_second_call_finds_the_structure(route):
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    with route.on():
        made(x, ei)
        layer().to(route.device)({k: t + 1 for k, t in x.items()}, ei)
        assert (cache.info()["hits"], cache.info()["misses"]) == (1, 1)
        ei[CITES][0] = 3
        got = made(x, ei)
    assert cache.info()["misses"] == 2
    same(got, made(x, ei))


def test_loops_are_another_structure(route):
    x, ei = on(route.device, features(), edges([CITES, KNOWS]))
    for loops in (False, True):
        made = layer(relations=[CITES, KNOWS], add_self_loops=loops).to(route.device)
        with route.on():
            got = made(x, ei)
        same(got, made(x, ei))
    assert cache.info()["misses"] == 2


# ---- routed layer by layer ----

def alone(route, made, x: dict, ei: dict, inside: str = "GATConv", count: int | None = None,
          **options) -> None:
    """The layers inside are taken over one by one, which is no fallback."""
    made, (x, ei) = made.to(route.device), on(route.device, x, ei)
    expected = made(x, ei)
    gnnaccel.reset_stats()
    with route.on(**options):
        same(made(x, ei), expected)
    stats = gnnaccel.stats()
    assert stats["HeteroConv"]["routes"] == {"native": 1}
    assert stats[inside]["routes"] == {route.backend: len(made.convs)
                                       if count is None else count}, stats


@pytest.mark.parametrize("options", [dict(residual=True), dict(edge_dim=4)], ids=str)
def test_options_that_stay_with_the_layers(route, options):
    alone(route, layer(**options), features(), edges())


@pytest.mark.long
def test_layers_that_differ(route):
    for other in (GATConv(WIDTH, 16, 1, add_self_loops=False),
                  GATConv(WIDTH, 8, 2, add_self_loops=False, dropout=0.5),
                  GATConv((WIDTH, WIDTH), 8, 2, add_self_loops=False),
                  GATConv(WIDTH, 8, 2, bias=False, add_self_loops=False)):
        made = HeteroConv({name: other
                           if name == CITES else GATConv(WIDTH, 8, 2, add_self_loops=False)
                           for name in RELATIONS})
        in_groups(route, made.eval(), features(), edges(), GATConv={route.backend: 1})


def test_rules(route):
    made = layer().to(route.device)
    alone(route, made, features(), edges(), include=["GATConv"])
    gnnaccel.exclude(made.convs[CITES])
    x, ei = on(route.device, features(), edges())
    gnnaccel.reset_stats()
    with route.on():
        made(x, ei)
    assert gnnaccel.stats()["GATConv"]["routes"] == {"native": 1}
    assert gnnaccel.stats()["HeteroConv"]["routes"] == {route.backend: 1, "native": 1}


def test_where_no_gain_is_known_the_layers_are_routed(route):
    """The whole is not estimated on a CPU, each layer is."""
    if route.name != "torch":
        pytest.skip("on a GPU the whole pays")
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    with gnnaccel.enabled(backend="torch", when="profitable", on_fallback="warn"):
        # by the layers inside, whose graphs are tiny
        with pytest.warns(RuntimeWarning, match="GATConv") as seen:
            made(x, ei)
    assert not any("HeteroConv" in str(w.message) for w in seen)
    assert gnnaccel.stats()["HeteroConv"]["routes"] == {"native": 1} and gnnaccel.stats()[
        "GATConv"]["calls"] == len(RELATIONS)


def test_hooks_of_a_layer_inside(route):
    made, (x, ei), log = layer().to(route.device), on(route.device, features(), edges()), []
    with route.on():
        made(x, ei)
    made.convs[CITES].register_forward_hook(lambda *args: log.append(1))
    gnnaccel.reset_stats()
    with route.on():
        made(x, ei)
    assert log == [1] and gnnaccel.stats()["GATConv"]["routes"] == {route.backend: 1}


def test_dropout_that_is_changed_between_calls(route):
    made, (x, ei) = layer(dropout=0.5).to(route.device), on(route.device, features(), edges())
    with route.on():
        made(x, ei)
        made.eval()
        got = made(x, ei)
        took(route, 2)
    same(got, made(x, ei))
    assert got["paper"].shape[0] == NODES["paper"]
