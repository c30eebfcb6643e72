"""HeteroConv of GATv2Conv, run as one attention whose relations have a vector each, against the
host's own loop."""
from __future__ import annotations

import copy

import pytest
import torch
from torch_geometric.nn import GATv2Conv, HeteroConv

import gnnaccel
from gnnaccel.dispatch.graph import cache
from tests.pyg.hetero_graphs import (ABOUT, CITES, KNOWS, RELATIONS, WIDTH, WRITES, WRITTEN, edges,
                                     features, hetero, in_groups, many, near, on, same)
from tests.pyg.judge import compare, on_routes

OPTIONS = [{}, dict(concat=False, bias=False), dict(share_weights=True, negative_slope=0.0)]

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")


def layer(group="sum", relations=RELATIONS, channels=WIDTH, out=8, heads=2, **options):
    return hetero(GATv2Conv, group, relations, out, channels, heads=heads,
                  **{"add_self_loops": False, **options})


@pytest.mark.long
@on_routes("options,group", [(OPTIONS[0], "sum"), (OPTIONS[1], "mean"), (OPTIONS[2], "max")],
           [(OPTIONS[1], "cat"), (OPTIONS[0], None), (OPTIONS[2], "mean")])
def test_options(route, options, group):
    compare(route, layer(group, **options), features(), edges(empty=[ABOUT]), floor=1e-6)


@on_routes("shape", [(5, 3)], [(16, 4), (64, 1), (1, 1)])
def test_shapes_and_other_widths(route, shape):
    out, heads = shape
    widths = {"paper": 12, "author": 7, "field": 5}
    convs = {name: GATv2Conv((widths[name[0]], widths[name[2]]), out, heads, add_self_loops=False)
             for name in RELATIONS}
    compare(route, HeteroConv(convs), features(widths), edges(), floor=1e-5 if out == 1 else 1e-6)


def test_self_loops(route):
    relations = [CITES, KNOWS, ("paper", "follows", "paper")]
    ei = edges(relations, empty=relations[2:])
    ei[CITES][:, 5:9] = 4  # loops that are there already
    compare(route, layer(relations=relations, add_self_loops=True), features(), ei, floor=1e-6)


@pytest.mark.long
def test_types_without_nodes_and_many_relations(route):
    relations = [WRITTEN, CITES, ABOUT, ("author", "in", "field")]
    compare(route, layer(relations=relations), features(field=0),
            edges(relations, empty=relations[2:]), floor=1e-6)
    x, ei = many(relations=24, count=45)
    compare(route, layer("mean", relations=list(ei)), x, ei, floor=3e-6)


def test_the_structure_is_kept_and_the_results_share_no_memory(route):
    made, (x, ei) = layer(dropout=0.5).to(route.device), on(route.device, features(), edges())
    with route.on():
        made(x, ei)
        made.eval()
        out = made({k: t.requires_grad_() for k, t in x.items()}, ei)
        assert (cache.info()["hits"], cache.info()["misses"]) == (1, 1)
        assert len({t.untyped_storage().data_ptr() for t in out.values()}) == len(out)
        sum(t.relu_().sum() for t in out.values()).backward()
        again = made(x, ei)
    same(again, made(x, ei))


@pytest.mark.parametrize("how", ["half", "autocast"])
def test_precision(route, how):
    dtype = torch.bfloat16
    made, (x, ei) = layer().to(route.device), on(route.device, features(), edges())
    exact = made(x, ei)
    if how == "half":
        made, x = copy.deepcopy(made).to(dtype), {k: t.to(dtype) for k, t in x.items()}
    with torch.autocast(route.device.type, dtype, enabled=how == "autocast"):
        native = made(x, ei)
        with route.on():
            near(made(x, ei), native, exact, dtype)


@pytest.mark.long
def test_gradients_in_double(route):
    relations = [WRITES, CITES]
    x, ei = on(route.device, features(4), edges(relations, count=9))
    made = layer(relations=relations, channels=4, out=2).to(route.device)
    inputs = [x[name].requires_grad_() for name in ("paper", "author")]

    def call(paper, author):
        return tuple(made({"paper": paper, "author": author}, ei).values())

    if route.name == "torch":
        made, inputs = made.double(), [t.detach().double().requires_grad_() for t in inputs]
        with route.on():
            assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    seconds = []  # second derivatives, which are had by plain operations
    for options in (None, route):
        with route.on() if options else gnnaccel.enabled(exclude=["HeteroConv", "GATv2Conv"]):
            first = torch.autograd.grad(call(*inputs)[0].pow(2).sum(), inputs, create_graph=True)
            second = torch.autograd.grad(sum(t.pow(2).sum() for t in first),
                                         [*inputs, made.convs[CITES].att])
        seconds.append(dict(enumerate(second)))
    same(*seconds, 1e-4)


def test_options_that_stay_with_the_layers(route):
    made = HeteroConv({name: GATv2Conv(WIDTH, 8, 2, add_self_loops=False, residual=name == CITES)
                       for name in RELATIONS})
    in_groups(route, made, features(), edges(), GATv2Conv={route.backend: 1})
