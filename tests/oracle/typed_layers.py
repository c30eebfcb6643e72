"""The table, second part: PyG's layers over edges and nodes of several types."""

from __future__ import annotations

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from .backends import off
from .graphs import EDGE, IN, RELATIONS, Case, Draw, edges, features, graph, lying, mlp, one_type

OUT = 4
TYPES = ["a", "b", "c"]
EDGE_TYPES = [
    ("a", "to", "b"),
    ("b", "to", "a"),
    ("a", "own", "a"),
    ("c", "x", "a"),
    ("a", "z", "c"),
]
_KINDS = ("random", "random", "random", "repeated", "from_one", "single", "one_each", "hub")


def rgcn(d: Draw) -> Case:
    options = d.choice(({}, {"num_bases": 2}, {"num_blocks": 2}, {"aggr": "add"}, {"aggr": "max"},
                        {"root_weight": False}, {"bias": False}, {"num_bases": 2, "aggr": "sum"}))
    return one_type(d, pyg.RGCNConv(IN, OUT, RELATIONS, **options), "type")


def rgcn_of_ids(d: Draw) -> Case:
    """Features that are a table of embeddings, with ids or without."""
    module = pyg.RGCNConv(20, OUT, RELATIONS, **d.choice(({}, {"num_bases": 2}, {"aggr": "add"})))
    edge_index = edges(d, 20, 20, d.choice(_KINDS), 80)
    ids = d.choice((None, torch.arange(20), d.integers(20, 20)))
    return Case(module, (ids, edge_index),
                {"edge_type": d.integers(RELATIONS, edge_index.shape[1])})


def rgat(d: Draw) -> Case:
    return one_type(
        d,
        pyg.RGATConv(IN, OUT, RELATIONS, heads=d.choice((1, 2)),
                     concat=d.chance(0.6), num_bases=d.choice((None, 2)),
                     attention_mechanism=d.choice(("within-relation", "across-relation")),
                     attention_mode="additive-self-attention",
                     mod=d.choice((None, "additive", "f-additive", "f-scaled"))),
        "type",
    )


def film(d: Draw) -> Case:
    options = d.choice(({}, {"aggr": "add"}, {"aggr": "max"}, {"act": None},
                        {"nn": nn.Linear(IN, 2 * OUT)}))
    return one_type(d, pyg.FiLMConv(IN, OUT, num_relations=RELATIONS, **options), "type")


def film_one(d: Draw) -> Case:
    """One relation: it passes messages."""
    options = d.choice(({}, {"aggr": "add"}, {"aggr": d.choice(("max", "min"))}, {"act": None},
                        {"act": d.choice((nn.Tanh(), nn.ELU(), nn.LeakyReLU(0.2), nn.PReLU()))},
                        {"nn": nn.Sequential(nn.Linear(IN, 5), nn.Tanh(), nn.Linear(5, 2 * OUT))},
                        {"flow": "target_to_source"}))
    pairs = "flow" not in options
    return one_type(d, pyg.FiLMConv((IN, IN) if pairs else IN, OUT, **options), pairs=pairs)


def heat(d: Draw) -> Case:
    n = d.choice((2, 20))
    edge_index, kind = graph(d, n, n)
    count = edge_index.shape[1]
    args = (features(d, n, IN), edge_index, d.integers(2, n), d.integers(3, count),
            features(d, count, EDGE))
    return Case(pyg.HEATConv(IN, OUT, 2, 3, 3, EDGE, 4, heads=d.choice((1, 2)),
                             concat=d.chance(0.5)), args, note=kind)


def _typed_graph(d: Draw, types: list, edge_types: list, none: bool) -> tuple[dict, dict]:
    count = {t: d.choice((1, 3, 10, 15)) for t in types}
    x = {t: features(d, count[t], IN) for t in types}
    kinds = (*_KINDS, "none") if none else _KINDS
    found = {e: edges(d, count[e[0]], count[e[2]], d.choice(kinds), d.choice((5, 40)))
             for e in edge_types}
    if d.chance(0.3):
        found = {e: lying(d, edge_index).long() for e, edge_index in found.items()}
    return x, found


def _some(d: Draw) -> tuple[list, list]:
    edge_types = EDGE_TYPES[: d.choice((2, 3, 4, 5))]
    return sorted({t for e in edge_types for t in (e[0], e[2])}), edge_types


def hgt(d: Draw) -> Case:
    metadata = _some(d)
    return Case(pyg.HGTConv(IN, 8, metadata, heads=d.choice((1, 2, 4))),
                _typed_graph(d, *metadata, none=True))


def han(d: Draw) -> Case:
    metadata = _some(d)
    return Case(pyg.HANConv(IN, 8, metadata, heads=d.choice((1, 2))),
                _typed_graph(d, *metadata, none=False))


def _inner(d: Draw, kind: int, aggr: str) -> nn.Module:
    pair = (IN, IN)
    return (
        lambda: pyg.SAGEConv(pair, OUT, aggr=aggr),
        lambda: pyg.GraphConv(pair, OUT, aggr=aggr),
        lambda: pyg.GATConv(pair, 2, heads=2, add_self_loops=False),
        lambda: pyg.GATv2Conv(pair, 2, heads=2, add_self_loops=False),
        lambda: pyg.GINConv(mlp(IN, OUT)),
        lambda: pyg.TransformerConv(pair, OUT),
    )[kind]()


def hetero(d: Draw) -> Case:
    metadata = _some(d)
    kind, mixed, aggr = d.randrange(6), d.chance(0.3), d.choice(("add", "mean", "max"))
    layers = {e: _inner(d, d.randrange(6) if mixed else kind, aggr) for e in metadata[1]}
    how = d.choice(("sum", "mean", "max", "min", "cat", None))
    return Case(pyg.HeteroConv(layers, aggr=how), _typed_graph(d, *metadata, none=True),
                note=f"kind {kind} mixed {mixed} {how}")


class Net(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def to_hetero(d: Draw) -> Case:
    make = d.choice((lambda: pyg.SAGEConv((-1, -1), IN),
                     lambda: pyg.GATConv((-1, -1), IN, add_self_loops=False),
                     lambda: pyg.GraphConv((IN, IN), IN)))
    module = pyg.to_hetero(Net(make(), make()), (TYPES, EDGE_TYPES),
                           aggr=d.choice(("sum", "mean", "max")))
    return _initialised(module, _typed_graph(d, TYPES, EDGE_TYPES, none=False))


def to_hetero_with_bases(d: Draw) -> Case:
    make = d.choice((lambda: pyg.SAGEConv(IN, IN), lambda: pyg.GraphConv(IN, IN)))
    module = pyg.to_hetero_with_bases(Net(make(), make()), (TYPES, EDGE_TYPES),
                                      num_bases=d.choice((2, 3)), in_channels={"x": IN})
    return _initialised(module, _typed_graph(d, TYPES, EDGE_TYPES, none=False))


def _initialised(module: nn.Module, args: tuple) -> Case:
    with off(), torch.no_grad():
        module(*args)
    return Case(module, args)


def hetero_linear(d: Draw) -> Case:
    types = d.integers(4, 30)
    return Case(pyg.HeteroLinear(IN, 5, 4),
                (features(d, 30, IN), types.sort().values if d.chance(0.4) else types))


def hetero_dict_linear(d: Draw) -> Case:
    types = [f"t{i}" for i in range(12)]
    return Case(pyg.HeteroDictLinear(IN, 5, types),
                ({t: features(d, d.choice((0, 1, 7)), IN) for t in types if d.chance(0.8)},))


TABLE = {
    "RGCNConv": rgcn,
    "RGCNConv of ids": rgcn_of_ids,
    "RGATConv": rgat,
    "FiLMConv": film,
    "HEATConv": heat,
    "HGTConv": hgt,
    "FastRGCNConv": lambda d: one_type(
        d,
        pyg.FastRGCNConv(IN, OUT, RELATIONS,
                         **d.choice(({}, {"num_bases": 2}, {"num_blocks": 2}, {"aggr": "add"}))),
        "type",
    ),
    "RGATConv edges": lambda d: one_type(d, pyg.RGATConv(IN, OUT, RELATIONS, edge_dim=EDGE,
                                                         heads=d.choice((1, 2))), "both"),
    "FiLMConv one": film_one,
    "HANConv": han,
    "HeteroConv": hetero,
    "to_hetero": to_hetero,
    "to_hetero_with_bases": to_hetero_with_bases,
    "HeteroLinear": hetero_linear,
    "HeteroDictLinear": hetero_dict_linear,
}
