"""The table, third part: models, edges in other forms, readouts and norms of PyG."""

from __future__ import annotations

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from .graphs import IN, Case, Draw, features, one_type
from .layers import DEGREES, OUT
from .layers import TABLE as LAYERS


def model(d: Draw) -> Case:
    kind = d.choice((pyg.models.GCN, pyg.models.GAT, pyg.models.GraphSAGE, pyg.models.GIN,
                     pyg.models.EdgeCNN, pyg.models.PNA))
    options: dict = {"v2": d.chance(0.5), "heads": 2} if kind is pyg.models.GAT else {}
    if kind is pyg.models.PNA:
        options = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": DEGREES}
    return one_type(d, kind(IN, 8, num_layers=2, out_channels=d.choice((None, 4)),
                            jk=d.choice((None, "cat", "max", "last")),
                            norm=d.choice((None, "LayerNorm", "GraphNorm")), **options))


def sequential(d: Draw) -> Case:
    steps = [
        (pyg.GCNConv(IN, 8), "x, edge_index -> a"),
        nn.ReLU(),
        (pyg.GATConv(8, 4, heads=2), "a, edge_index -> b"),
        (lambda a, b: a + b, "a, b -> x"),
        (pyg.SAGEConv(8, OUT), "x, edge_index -> x"),
    ]
    return one_type(d, pyg.Sequential("x, edge_index", steps))


def deep_gcn(d: Draw) -> Case:
    return one_type(d,
                    pyg.DeepGCNLayer(pyg.GENConv(IN, IN, learn_t=True), nn.LayerNorm(IN), nn.ReLU(),
                                     block=d.choice(("res+", "res", "dense", "plain"))))


class As(nn.Module):
    """A layer whose edges come as something else than a plain tensor."""

    def __init__(self, layer: nn.Module, form: str):
        super().__init__()
        self.layer, self.form = layer, form

    def forward(self, x: Tensor, edge_index: Tensor, **kwargs) -> Tensor:
        return self.layer(x, self.other(x, edge_index), **kwargs)

    def other(self, x: Tensor, edge_index: Tensor):
        n = x.shape[0]
        if self.form in ("edge_index", "sorted"):
            from torch_geometric import EdgeIndex

            found = EdgeIndex(edge_index.long(), sparse_size=(n, n))
            return found.sort_by("col").values if self.form == "sorted" else found
        ones = torch.ones(edge_index.shape[1], device=x.device, dtype=x.dtype)
        matrix = torch.sparse_coo_tensor(edge_index.flip(0).long(), ones, (n, n)).coalesce()
        return {"coo": matrix, "csr": matrix.to_sparse_csr(),
                "csc": matrix.to_sparse_csc()}[self.form]


def other_edges(d: Draw) -> Case:
    case = LAYERS[d.choice(("GATConv", "GCNConv", "SAGEConv", "TransformerConv", "GINConv",
                            "GraphConv", "GATv2Conv"))](d)
    (x, edge_index), form = case.args, d.choice(("edge_index", "sorted", "coo", "csr", "csc"))
    x = x[0] if isinstance(x, tuple) else x
    return Case(As(case.module, form), (x, edge_index % x.shape[0]), {}, f"{form}, {case.note}")


class Readout(nn.Module):
    """A pooling function, or an aggregation, of nodes into graphs."""

    def __init__(self, function, *rest):
        super().__init__()
        self.function, self.rest = function, rest

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return self.function(x, batch, *self.rest)


def readout(d: Draw) -> Case:
    n = d.choice((1, 30))
    batch = d.integers(6, n)
    batch = batch.sort().values if d.chance(0.7) else batch
    if d.chance(0.5):
        pool = d.choice((pyg.global_add_pool, pyg.global_mean_pool, pyg.global_max_pool))
        return Case(Readout(pool, d.choice((None, 6, 9))), (features(d, n, IN), batch))
    made = d.choice((pyg.MeanAggregation, pyg.MaxAggregation, pyg.SumAggregation,
                     pyg.MedianAggregation, pyg.StdAggregation,
                     lambda: pyg.SoftmaxAggregation(learn=True),
                     lambda: pyg.PowerMeanAggregation(learn=True),
                     lambda: pyg.MultiAggregation(["mean", "std", "max"]),
                     lambda: pyg.AttentionalAggregation(nn.Linear(IN, 1))))()
    return Case(Readout(made), (features(d, n, IN), batch.sort().values))


def norm_layer(d: Draw) -> Case:
    n = d.choice((1, 30))
    return Case(d.choice((pyg.GraphNorm, pyg.InstanceNorm, pyg.LayerNorm))(IN),
                (features(d, n, IN), d.integers(4, n).sort().values))


TABLE = {
    "models": model,
    "Sequential": sequential,
    "DeepGCNLayer": deep_gcn,
    "other edges": other_edges,
    "readouts": readout,
    "norms": norm_layer,
}
