"""HeteroConv of SAGEConv and GraphConv, run as one layer: every option against the host's own
loop."""
from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, GCNConv, GraphConv, HeteroConv, HGTConv, SAGEConv

import gnnaccel
from gnnaccel.dispatch.graph import cache, joining
from gnnaccel.errors import GraphError
from tests.helpers import relative
from tests.pyg.hetero_graphs import (ABOUT, BETWEEN_TWO, CITES, KNOWS, METADATA, NODES, OUT,
                                     RELATIONS, WIDTH, WRITES, WRITTEN, edges, edited_in_place,
                                     features, hetero, in_any_order, many, near, of_other_sizes, on,
                                     same)
from tests.pyg.judge import compare, on_routes

SAGE = [{}, dict(aggr="sum"), dict(aggr="add"), dict(root_weight=False), dict(bias=False),
        dict(root_weight=False, bias=False)]
GRAPH = [{}, dict(aggr="mean"), dict(bias=False)]
CLASSES = {"SAGEConv": SAGEConv, "GraphConv": GraphConv}
CELLS = [("SAGEConv", options) for options in SAGE] + [("GraphConv", options) for options in GRAPH]

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")


# ---- options ----

@pytest.mark.parametrize("aggr", ["sum", "mean"])
@on_routes("name,options", CELLS)
def test_layers_inside(route, name, options, aggr):
    compare(route, hetero(CLASSES[name], aggr, **options), features(), edges())


@pytest.mark.parametrize("aggr", ["min", "max", "cat", None])
def test_relations_that_are_not_added_up(route, aggr):
    widths = {"paper": 12, "author": 12, "field": 5}
    convs = {name: SAGEConv((12, widths[name[2]]), OUT) for name in RELATIONS}
    compare(route, HeteroConv(convs, aggr), features(widths), edges(empty=[ABOUT]))


@on_routes("width,out", [(1, 1), (7, 5)], [(64, 64), (20, 33), (128, 16)])
def test_widths(route, width, out):
    compare(route, hetero(channels=width, out=out), features(width), edges())


def test_targets_of_other_widths(route):
    widths = {"paper": 12, "author": 12, "field": 5}
    convs = {name: SAGEConv((12, widths[name[2]]), OUT) for name in RELATIONS}
    compare(route, HeteroConv(convs), features(widths), edges())


@pytest.mark.parametrize("made",
                         [lambda: hetero(channels=(-1, -1)), lambda: HGTConv(-1, OUT, METADATA),
                          lambda: HeteroConv(
    {name: (SAGEConv if at % 2 else GraphConv)((-1, -1), OUT)
     for at, name in enumerate(RELATIONS)}), lambda: HeteroConv(
    {name: SAGEConv(WIDTH, OUT) if at else SAGEConv((-1, -1), OUT)
     for at, name in enumerate(RELATIONS)})],
    ids=["alike", "hgt", "groups", "one"])
def test_lazy_layers_in_a_checkpoint(route, made):
    """The call that makes the weights goes natively, and so does its repetition in backward, though
    they are there by then."""
    made, (x, ei) = made().to(route.device), on(route.device, features(), edges())
    x = {name: t.requires_grad_() for name, t in x.items()}
    with route.on(on_fallback="native"):
        for _ in range(3):
            sum(t.sum() for t in checkpoint(made, x, ei, use_reentrant=False).values()).backward()
    routes = gnnaccel.stats()[type(made).__name__]["routes"]
    assert routes["native"] >= 2 and routes[route.backend] >= 4, routes


def test_lazy_layers(route):
    lazy, (x,
           ei) = hetero(channels=(-1, -1)).to(route.device), on(route.device, features(), edges())
    with route.on(on_fallback="native"):
        lazy(x, ei)
    assert gnnaccel.stats()["HeteroConv"]["reasons"] == {"GA209": 1}
    compare(route, lazy, features(), edges())


@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_eval_mode_without_gradients(route, aggr):
    compare(route, hetero(group=aggr).requires_grad_(False), features(), edges(), train=False,
            require=False)


# ---- the dictionaries ----

def test_by_keyword(route):
    compare(route, hetero(), x_dict=features(), edge_index_dict=edges())


def test_any_order_of_the_dictionaries(route):
    in_any_order(route, hetero())


def test_edge_types_that_are_not_given(route):
    got = compare(route, hetero(), features(), edges([WRITTEN, CITES]))
    assert "out[field]" not in got and got["convs.<author___writes___paper>.lin_l.weight"] is None


def test_edge_types_that_the_layer_does_not_know(route):
    x, ei = on(route.device, features(),
               {**edges(), ("field", "of", "author"): torch.zeros(2, 4, dtype=torch.long)})
    made = hetero().to(route.device)
    with route.on():
        got = made(x, ei)
    same(got, made(x, ei))


@pytest.mark.parametrize("empty", [[WRITES], [WRITES, CITES], [ABOUT], RELATIONS[:4]], ids=len)
def test_edge_types_without_edges(route, empty):
    got = compare(route, hetero(), features(), edges(empty=empty))
    name = f"convs.<{'___'.join(empty[0])}>"
    assert not got[f"{name}.lin_l.weight"].any() and got[f"{name}.lin_l.bias"].any() and got[
        f"{name}.lin_r.weight"].any()


def test_one_relation_for_a_target(route):
    compare(route, hetero(group="mean", relations=[WRITES]), features(), edges([WRITES]))


def test_a_type_without_nodes(route):
    relations = [WRITTEN, CITES, ABOUT]
    compare(route, hetero(relations=relations), features(field=0), edges(relations, empty=[ABOUT]))
    sources = [("field", "of", "paper"), CITES]
    compare(route, hetero(relations=sources), features(field=0), edges(sources, empty=sources[:1]))


def test_a_type_that_nothing_uses_gets_no_gradient(route):
    got = compare(route, hetero(relations=[CITES, KNOWS]), features(), edges([CITES, KNOWS]))
    assert got["x[field]"] is None


def test_targets_that_only_give_the_number_of_rows_get_no_gradient(route):
    got = compare(route, hetero(relations=[ABOUT], root_weight=False), features(), edges([ABOUT]))
    assert got["x[field]"] is None and got["x[paper]"].any()


@pytest.mark.long
@pytest.mark.parametrize("count", [64])
@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_many_relations(route, count, aggr):
    x, ei = many(relations=count)
    compare(route, hetero(group=aggr, relations=list(ei)), x, ei)


def test_int32_edges_strided_edges_and_the_edge_index_class(route):
    made = hetero(relations=[WRITES, CITES, ABOUT]).to(route.device)
    x, ei = on(route.device, features(), edges([WRITES, CITES, ABOUT]))
    expected = made(x, ei)
    other = {WRITES: ei[WRITES].int(), CITES: ei[CITES].t().contiguous().t(),
             ABOUT: EdgeIndex(ei[ABOUT], sparse_size=(NODES["paper"], NODES["field"]))}
    with route.on():
        same(made(x, other), expected)


# ---- numbers ----

@pytest.mark.long
def test_gradients_in_double(route):
    if route.name != "torch":
        pytest.skip("the kernels compute in fp32")
    made, (x, ei) = hetero(relations=RELATIONS[:3], out=3,
                           channels=4).double(), (features(4), edges(RELATIONS[:3], count=9))
    inputs = [t.double().requires_grad_() for t in x.values()]

    def call(*values):
        return tuple(made(dict(zip(x, values)), ei).values())

    with route.on():
        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)
    weight = made.convs[WRITES].lin_l.weight
    with route.on():
        got = torch.autograd.grad(sum(t.pow(2).sum() for t in call(*inputs)), weight)[0]
    expected = torch.autograd.grad(sum(t.pow(2).sum() for t in call(*inputs)), weight)[0]
    assert relative(got, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_half_precision(route, dtype, aggr):
    made, (x, ei) = hetero(group=aggr).to(route.device), on(route.device, features(), edges())
    exact = made(x, ei)
    half, rows = copy.deepcopy(made).to(dtype), {k: t.to(dtype) for k, t in x.items()}
    native = half(rows, ei)
    with route.on():
        got = half(rows, ei)
    near(got, native, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_autocast(route, dtype, aggr):
    made, (x, ei) = hetero(group=aggr).to(route.device), on(route.device, features(), edges())
    exact = made(x, ei)
    with torch.autocast(route.device.type, dtype):
        native = made(x, ei)
        with route.on():
            got = made(x, ei)
    near(got, native, exact, dtype)


@pytest.mark.long
def test_results_may_be_changed_in_place(route):
    """Each for itself: that an operation has kept one of them for its backward does not hinder
    changing another."""
    for options in SAGE:
        made, (x, ei) = hetero(**options).to(route.device), on(route.device, features(), edges())
        with route.on():
            out = made({k: t.requires_grad_() for k, t in x.items()}, ei)
        assert not any(t._is_view() for t in out.values())
        before, (first, *rest) = {k: t.detach().clone() for k, t in out.items()}, out
        kept = out[first].pow(2).sum()
        (kept + sum(out[name].relu_().sum() for name in rest)).backward()
        assert torch.equal(out[first], before[first])
        assert all(torch.equal(out[name], before[name].relu()) for name in rest)


# ---- the structure ----

def test_the_second_call_finds_the_structure(route):
    made, (x, ei) = hetero().to(route.device), on(route.device, features(), edges())
    with route.on():
        made(x, ei)
        hetero().to(route.device)({k: t + 1 for k, t in x.items()}, ei)
        hetero(GraphConv).to(route.device)(x, ei)
        assert (cache.info()["hits"], cache.info()["misses"]) == (2, 1)


def test_edges_edited_in_place(route):
    edited_in_place(route, hetero())


def test_the_structure_goes_with_any_of_its_tensors(route):
    made, (x, ei) = hetero().to(route.device), on(route.device, features(), edges())
    with route.on():
        made(x, ei)
    assert cache.info()["entries"] == 1
    del ei[CITES]
    gc.collect()
    assert cache.info()["entries"] == 0


def test_the_same_edges_between_types_of_other_sizes(route):
    of_other_sizes(route, hetero(relations=BETWEEN_TWO))


NEW = {"SAGEConv": (SAGEConv, {}), "GCNConv": (GCNConv, {}),
       "GATConv": (GATConv, dict(heads=2, concat=False, add_self_loops=False))}


@pytest.mark.long
@pytest.mark.parametrize("inside", NEW)
def test_graphs_that_are_new_in_each_call(route, monkeypatch, inside):
    """Where kernels run, one of them puts the edges of all types together."""
    cls, options = NEW[inside]
    relations, by_kernel, joined = ([CITES, KNOWS] if cls is GCNConv else RELATIONS,
                                    joining.by_kernel, [])
    monkeypatch.setattr(joining, "by_kernel",
                        lambda *given: joined.append(len(given[0])) or by_kernel(*given))
    made = hetero(cls, relations=relations, **options)
    for count, empty in ((40, []), (1, []), (300, relations[:1])):
        ei = edges(relations, count=count, empty=empty)
        ei[CITES] = ei[CITES].t().contiguous().t()
        compare(route, made, features(), ei)
    assert set(joined) == ({len(relations), len(relations) - 1}
                           if route.backend == "cuda" else set())


def test_ids_of_the_next_type(route):
    made, (x, ei) = hetero().to(route.device), on(route.device, features(), edges())
    ei[WRITES][0, 3] = NODES["author"]
    with route.on(), pytest.raises(GraphError, match="author"):
        for t in made(x, ei).values():
            t.sum().item()


@pytest.mark.parametrize("route", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)],
                         indirect=True)
@pytest.mark.parametrize("wrong", [-1, NODES["author"]])
def test_ids_of_other_types_under_a_normalisation(route, wrong):
    """Which reads them before the graph is built."""
    made = hetero(GCNConv, relations=[CITES, KNOWS]).to(route.device)
    x, ei = on(route.device, features(), edges([CITES, KNOWS]))
    ei[KNOWS][1, 3] = wrong
    with route.on(), pytest.raises(GraphError,
                                   match=f"destination ids from .*{wrong}.*there are "
                                   f"{NODES['author']} nodes"):
        made(x, ei)


@pytest.mark.parametrize("end, what", [(0, "source"), (1, "destination")])
def test_ids_of_no_node_in_weighted_sums(route, end, what):
    """Before anything is indexed with them, which on a GPU would end the process's work there."""
    made = hetero(GCNConv, relations=[CITES, KNOWS]).to(route.device)
    x, ei = on(route.device, features(), edges([CITES, KNOWS]))
    ei[KNOWS][end, 3] = 1000
    with route.on(), pytest.raises(GraphError,
                                   match=rf"{what} ids from \d to 1000; there are 13 nodes of type "
                                   r"'author'"):
        made(x, ei)
