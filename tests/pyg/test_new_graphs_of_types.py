"""Calls of layers with relations that differ from a kept one in their graph and in numbers of rows
are stated as that was; all else is seen."""
from __future__ import annotations

import copy
import random

import pytest
import torch
from torch_geometric.nn import (FastRGCNConv, FiLMConv, GATConv, GATv2Conv, GCNConv, GINConv,
                                GraphConv, HANConv, HEATConv, HGTConv, MaxAggregation, RGATConv,
                                RGCNConv, SAGEConv, to_hetero)

import gnnaccel
from gnnaccel.adapters import pyg
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.distributed import state as distributed
from tests.judge import SECOND_LOOK, judge, place, run, spread
from tests.pyg.hetero_graphs import METADATA, NODES, RELATIONS, WIDTH, hetero

R, F, EDGE = 3, 6, 5
FLOOR = 1e-6


def typed(width: int = 0) -> list:
    nodes, edges = random.randint(12, 40), random.randint(40, 150)
    args = [torch.randn(nodes, F), torch.randint(nodes, (2, edges)), torch.randint(R, (edges,))]
    return [*args, torch.randn(edges, width)] if width else args


def with_nodes() -> list:
    x, edge_index, edge_type, edge_attr = typed(EDGE)
    return [x, edge_index, torch.randint(2, x.shape[:1]), edge_type, edge_attr]


def pairs() -> list:
    x, edge_index, edge_type = typed()
    more = x.shape[0] + random.randint(1, 9)
    return [(x, torch.randn(more, F)), edge_index, edge_type]


def by_type(relations=RELATIONS, names=tuple(NODES), empty=()) -> list:
    counts = {name: random.randint(8, 24) for name in names}
    return [{name: torch.randn(n, WIDTH) for name, n in counts.items()},
            {name: torch.stack([torch.randint(counts[end], (count,)) for end in (name[0], name[-1])])
             for name in relations for count in [0 if name in empty else random.randint(20, 50)]}]


class TwoSage(torch.nn.Module):
    """A model for to_hetero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), 8)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def model() -> torch.nn.Module:
    made = to_hetero(TwoSage(), METADATA)
    with torch.no_grad(), gnnaccel.disabled():
        made(*by_type())
    return made


def gin(channels: int, out: int) -> GINConv:
    return GINConv(torch.nn.Linear(channels, out))


CITES = [name for name in RELATIONS if name[0] == name[-1]]
#: layer -> how it is made, and arguments of a call over a new graph
LAYERS = {
    "RGCNConv": (lambda: RGCNConv(F, 8, R), typed),
    "RGCNConv of pairs": (lambda: RGCNConv(F, 8, R, num_bases=2, aggr="add"), pairs),
    "RGCNConv blocks": (lambda: RGCNConv(F, 8, R, num_blocks=2), typed),
    "FastRGCNConv": (lambda: FastRGCNConv(F, 8, R), typed),
    "RGATConv": (lambda: RGATConv(F, 4, R, heads=2), typed),
    "RGATConv edges": (lambda: RGATConv(F, 4, R, heads=2, edge_dim=EDGE), lambda: typed(EDGE)),
    "FiLMConv": (lambda: FiLMConv(F, 8, R), typed),
    "HEATConv": (lambda: HEATConv(F, 8, 2, R, 3, EDGE, 4, heads=2), with_nodes),
    "HGTConv": (lambda: HGTConv(WIDTH, 8, METADATA, 2), by_type),
    "HANConv": (lambda: HANConv(WIDTH, 8, METADATA, 2), by_type),
    "SAGEConv": (lambda: hetero(SAGEConv, out=8), by_type),
    "SAGEConv apart": (lambda: hetero(SAGEConv, "cat", out=8), by_type),
    "GraphConv": (lambda: hetero(GraphConv, "mean", out=8), by_type),
    "GATConv": (lambda: hetero(GATConv, out=8, add_self_loops=False), by_type),
    "GATConv loops": (lambda: hetero(GATConv, relations=CITES, out=8), lambda: by_type(CITES)),
    "GATv2Conv": (lambda: hetero(GATv2Conv, out=8, add_self_loops=False), by_type),
    "GCNConv": (lambda: hetero(GCNConv, relations=CITES, out=8), lambda: by_type(CITES)),
    "GINConv": (lambda: hetero(gin, out=8), by_type),
    "to_hetero": (model, by_type),
}
OF_TYPES = [name for name, (_, inputs) in LAYERS.items() if inputs is by_type]
AS_ONE = [name for name in OF_TYPES if name[:3] not in ("HGT", "HAN", "to_")]
POSITIONS = tuple("abcde")


def right(layer, args: list, grad: bool = True) -> list[str]:
    """What is wrong with a call, by the host's own code in double precision. Errors beyond their
    limits are averaged over more draws of the order of the inputs, as in `tests.judge.compare`."""
    dtype = next(layer.parameters()).dtype

    def once(layer, dtype, seed):
        given = [place(a, "cpu", dtype, seed) for a in args]
        for t in given[0].values() if type(given[0]) is dict else given[:1]:
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                t.requires_grad_(grad)
        return run(layer, given, {}, seed=seed, positions=POSITIONS)

    def draw(seed: int) -> tuple:
        with gnnaccel.disabled():
            exact = once(copy.deepcopy(layer).double(), torch.float64, seed)
            host = once(layer, dtype, seed)
        return once(layer, dtype, seed), host, exact

    return judge([draw(0)], FLOOR, 1e-4) and judge([draw(seed) for seed in range(1, SECOND_LOOK)],
                                                   FLOOR, 1e-4)


@pytest.fixture
def stated(emulated, monkeypatch):
    """One entry for each call that was stated from the start."""
    seen, native = [], pyg._Guarded.state
    monkeypatch.setattr(pyg._Guarded, "state",
                        lambda *args: (seen.append(type(args[1]).__name__), native(*args))[1])
    with emulated.on(on_fallback="native"):
        yield seen


def made(name: str):
    make, inputs = LAYERS[name]
    torch.manual_seed(0)
    layer = spread(make())
    for _ in range(6):  # so that not every call is kept
        layer(*inputs())
    assert not right(layer, inputs())
    return layer, inputs


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_calls_over_new_graphs_are_stated_once(stated, name):
    layer, inputs = made(name)
    for _ in range(4):
        assert not right(layer, inputs())
    assert len(stated) <= 2  # a model has two layers, and HEATConv's map by type is one, too
    layers = len(stated)
    stated.clear()
    with torch.no_grad():  # one call in seven is kept
        for _ in range(14):
            layer(*inputs())
    assert len(stated) <= 7 * layers
    assert {one for s in gnnaccel.stats().values() for one in s["routes"]} == {"cuda"}


@pytest.mark.long
@pytest.mark.parametrize("name", OF_TYPES)
def test_relations_and_types_that_come_and_go(stated, name):
    """Without edges, absent, in another order; types that no relation needs."""
    layer, inputs = made(name)
    knows, fields, back = [r for r in RELATIONS if r[0] != r[-1]], RELATIONS[1:], RELATIONS[::-1]
    for given in (dict(empty=RELATIONS[:1]), dict(empty=RELATIONS[1:]), {}, dict(empty=knows),
                  dict(relations=back), dict(names=tuple(NODES)[::-1]), {},
                  dict(relations=fields), dict(empty=RELATIONS[2:3], relations=fields), {},
                  dict(empty=RELATIONS)):
        if name == "to_hetero" and given.get("relations") is fields:
            continue  # an error of the host's
        args = inputs(**given)
        assert not right(layer, args), given
    if name != "to_hetero":
        only = [r for r in RELATIONS if "field" not in (r[0], r[-1])]
        assert not right(layer, inputs(only, ("paper", "author")))
        assert not right(layer, inputs(only))


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_ids_and_numbers_of_other_dtypes(stated, name):
    layer, inputs = made(name)
    for dtype in (torch.int32, torch.int64):
        x, edges, *more = inputs()
        edges = ({key: t.to(dtype) for key, t in edges.items()}
                 if type(edges) is dict else edges.to(dtype))
        with gnnaccel.disabled():  # whose sums may take no int32
            expected = layer(x, place(edges, "cpu", None) if dtype is torch.int64 else (
                {key: t.long() for key, t in edges.items()}
                if type(edges) is dict else edges.long()), *more)
        assert same(layer(x, edges, *more), expected)
    layer.double()
    args = [place(a, "cpu", torch.float64) for a in inputs()]
    with gnnaccel.disabled():
        expected = layer(*args)
    assert same(layer(*args), expected)
    layer.float()
    assert not right(layer, inputs()) and not right(layer, inputs(), False)


def same(found, expected, tolerance: float = 1e-4) -> bool:
    if type(found) is not dict:
        return torch.allclose(found, expected, tolerance, tolerance)
    return found.keys() == expected.keys() and all(
        t is expected[name] or same(t, expected[name]) for name, t in found.items())


@pytest.mark.parametrize("name", LAYERS)
def test_arguments_that_do_not_fit(stated, name):
    """Errors of the host's stay what they are, whatever came before."""
    layer, inputs = made(name)

    def wrong(change) -> None:
        args = inputs()
        args = change(*args)
        with gnnaccel.disabled(), pytest.raises(Exception) as theirs:
            layer(*args)
        with pytest.raises(type(theirs.value)):
            layer(*args)

    if name in OF_TYPES or type(inputs()[1]) is dict:
        wrong(lambda x, edges: ({k: t[:, 1:] for k, t in x.items()}, edges))
        wrong(lambda x, edges: (x, {k: t.float() for k, t in edges.items()}))
        wrong(lambda x, edges: (x, {k: t[:1] for k, t in edges.items()}))
    else:
        wrong(lambda x, edges, *more: (x, edges.float(), *more))
        wrong(lambda x, edges, *more: (x, edges, *[t[:-1] for t in more]))
    assert not right(layer, inputs())


CHANGES = {
    "weights": lambda layer: [p.data.mul_(1.5) for p in layer.parameters()],
    "other weights": lambda layer: [m._parameters.update({name: torch.nn.Parameter(2 * p.detach())})
                                    for m in layer.modules()
                                    for name, p in [*m._parameters.items()] if p is not None],
    "frozen": lambda layer: [p.requires_grad_(False) for p in layer.parameters()],
    "some frozen": lambda layer: [p.requires_grad_(False) for p in [*layer.parameters()][::2]],
    "hooks of all inside": lambda layer: [m.register_forward_hook(lambda m, a, out: 2 * out)
                                          for m in layer.modules()
                                          if type(m).__name__ in ("Linear", "HeteroLinear")],
    "message hooks": lambda layer: [m.register_message_forward_hook(lambda m, a, out: 2 * out)
                                    for m in layer.modules() if hasattr(m, "message")],
    "aggregations": lambda layer: [setattr(m, "aggr_module", MaxAggregation())
                                   for m in layer.modules() if type(m).__name__ in (
                                       "SAGEConv", "GraphConv", "GINConv")],
    "evaluation": lambda layer: layer.eval(),
    "slope": lambda layer: [setattr(m, "negative_slope", 0.7) for m in layer.modules()
                            if hasattr(m, "negative_slope")],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_what_changes_is_seen(stated, name, change):
    layer, inputs = made(name)
    CHANGES[change](layer)
    assert not right(layer, inputs()) and not right(layer, inputs())


@pytest.mark.parametrize("name", AS_ONE)
def test_layers_inside_that_change(stated, name):
    """One of another class or replaced, one layer twice, and another way to put them together."""
    layer, inputs = made(name)
    inside, keys = layer.convs._modules, [*layer.convs._modules]
    inside[keys[0]] = copy.deepcopy(inside[keys[1]])
    assert not right(layer, inputs())
    inside[keys[2]] = inside[keys[1]]
    assert not right(layer, inputs())
    for aggr in ("mean", "max", "sum"):
        layer.aggr = aggr
        assert not right(layer, inputs()), aggr
    inside[keys[0]] = spread(SAGEConv(WIDTH, 8, aggr="max"))
    assert not right(layer, inputs())


@pytest.mark.parametrize("name", AS_ONE)
def test_within_a_part_layers_run_one_by_one(stated, monkeypatch, name):
    layer, inputs = made(name)
    gnnaccel.reset_stats()
    monkeypatch.setattr(distributed, "each_layer", lambda: True)
    layer(*inputs())
    assert gnnaccel.stats()["HeteroConv"]["routes"] == {"native": 1}


@pytest.mark.long
def test_gradients_of_features_that_come_and_go(stated):
    """Whether rows want gradients is said of each call anew."""
    for name in ("RGCNConv", "HGTConv", "SAGEConv"):
        layer, inputs = made(name)
        for grad in (False, True, False, True):
            assert not right(layer, inputs(), grad), name


def test_ids(stated):
    """Keys say nothing of ids, so that calls with these are stated each time."""
    for made in RGCNConv, FastRGCNConv:
        layer = spread(made(20, 8, R))
        for count in (20, 12, 20, 9, 12, 25):
            _, edge_index, edge_type = typed()
            # beyond its table the host's fast layer reads rows of the next relation
            args = torch.randint(20, (count,)), edge_index % count, edge_type.clamp(max=1)
            with gnnaccel.disabled():
                expected = layer(*args)
            assert same(layer(*args), expected, 1e-5), (made, count)


def test_on_one_stream_nobody_waits_for_arrays_of_relations(emulated, monkeypatch):
    waits, layer = [], RGCNConv(F, F, R)
    monkeypatch.setattr(capture, "finish", waits.append)
    with emulated.on():
        for _ in range(2):
            layer(*typed()).sum().backward()
    assert not waits
