"""The table, first part: PyG's layers over nodes of one type."""

from __future__ import annotations

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from .graphs import EDGE, IN, Case, Draw, channels, mlp, one_type

OUT = 4
DEGREES = torch.tensor([3, 5, 4, 2, 1, 1])

_SINGLE = [{"aggr": name} for name in ("add", "mean", "max", "min")]
_RARE = [{"aggr": name} for name in ("softmax", "powermean", "median", "var", "std", "mul")]
_SEVERAL = [
    {"aggr": ["mean", "max", "std"]},
    {"aggr": ["add", "min", "var"]},
    {"aggr": ["mean", "softmax"]},
    {"aggr": "softmax", "aggr_kwargs": {"learn": True}},
    {"aggr": "powermean", "aggr_kwargs": {"learn": True, "p": 2.0}},
    {"aggr": "softmax", "aggr_kwargs": {"t": 0.5, "semi_grad": True}},
]
_FLOW = [{}, {"flow": "target_to_source"}]


def aggr(d: Draw, rare: bool = True) -> dict:
    """How messages are put together. ``rare``: also in ways that few people ask for."""
    if rare and d.chance(0.4):
        return d.choice(_RARE + _SEVERAL)
    return d.choice([*_SINGLE, *_FLOW])


def gat(d: Draw) -> Case:
    heads, width = d.choice((1, 2, 2, 3, 8)), channels(d, OUT)
    if width != OUT:
        heads = d.choice((1, 3))
    return one_type(d, pyg.GATConv(IN, width, heads=heads, concat=d.chance(0.6),
                                   negative_slope=d.choice((0.2, 0.2, 0.0, 1.0, 0.9)),
                                   add_self_loops=d.chance(0.6), bias=d.chance(0.7),
                                   residual=d.chance(0.3)))


def gat_edges(d: Draw) -> Case:
    fill = d.choice(("mean", "mean", "add", "max", 1.5, torch.tensor([1.0, 2.0, 3.0])))
    return one_type(d, pyg.GATConv(IN, channels(d, OUT), heads=d.choice((1, 2)),
                                   edge_dim=EDGE, fill_value=fill, concat=d.chance(0.7),
                                   add_self_loops=d.chance(0.7)), "attr")


def gatv2(d: Draw) -> Case:
    return one_type(d, pyg.GATv2Conv(IN, channels(d, OUT), heads=d.choice((1, 2, 3)),
                                     concat=d.chance(0.6), share_weights=d.chance(0.4),
                                     add_self_loops=d.chance(0.6), bias=d.chance(0.7),
                                     residual=d.chance(0.3)))


def transformer(d: Draw) -> Case:
    return one_type(d, pyg.TransformerConv(IN, channels(d, OUT), heads=d.choice((1, 2, 4)),
                                           concat=d.chance(0.6), beta=d.chance(0.4),
                                           root_weight=d.chance(0.7), bias=d.chance(0.6)))


def pna(d: Draw, edge: bool = False) -> Case:
    aggregators = d.choice((["mean", "max"], ["sum", "min", "std", "var"], ["std"],
                            ["mean", "min", "max", "std"]))
    scalers = d.choice((["identity"],
                        ["identity", "amplification", "attenuation", "linear", "inverse_linear"]))
    return one_type(d, pyg.PNAConv(IN, OUT, aggregators, scalers, DEGREES, towers=d.choice((1, 2)),
                                   divide_input=d.chance(0.4), pre_layers=d.choice((1, 1, 2)),
                                   post_layers=d.choice((1, 2)), train_norm=d.chance(0.2),
                                   edge_dim=EDGE if edge else None), "attr" if edge else None)


def gen(d: Draw, edge: bool = False) -> Case:
    options = d.choice(({"learn_t": True}, {"aggr": "powermean", "learn_p": True}, {"aggr": "add"},
                        {"aggr": "max"}, {"t": 0.1}, {"msg_norm": True, "learn_msg_scale": True},
                        {"aggr": ["softmax", "max"]}))
    return one_type(d, pyg.GENConv(IN, OUT, edge_dim=EDGE if edge else None, **options), "attr"
                    if edge else None)


def egc(d: Draw) -> Case:
    aggregators = d.choice((["symnorm"], ["sum", "mean", "max", "min", "std", "var", "symnorm"],
                            ["max", "std"]))
    return one_type(d, pyg.EGConv(IN, 8, num_heads=d.choice((2, 4)), num_bases=2,
                                  aggregators=aggregators, add_self_loops=d.chance(0.6)))


def gcn(d: Draw) -> Case:
    return one_type(d, pyg.GCNConv(IN, channels(d, OUT), improved=d.chance(0.3),
                                   add_self_loops=d.chance(0.7), bias=d.chance(0.7),
                                   cached=d.chance(0.1), **d.choice(_FLOW)), "weight")


class WithFirst(nn.Module):
    """A layer that takes the first features too."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return self.layer(x, x.detach() * 0.5, edge_index, edge_weight)


class Signed(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(x, edge_index, edge_index.flip(0))


TABLE = {
    "GATConv": gat,
    "GATConv edges": gat_edges,
    "GATv2Conv": gatv2,
    "TransformerConv": transformer,
    "GATConv pair": lambda d: one_type(d,
                                       pyg.GATConv((IN, IN) if d.chance(0.6) else IN, OUT,
                                                   heads=d.choice((1, 2, 5)), concat=d.chance(0.6),
                                                   add_self_loops=d.chance(0.5)), pairs=True,
                                       lone=True),
    "GATv2Conv pair": lambda d: one_type(d, pyg.GATv2Conv((IN, IN), OUT, heads=d.choice((1, 2)),
                                                          add_self_loops=d.chance(0.5)),
                                         pairs=True),
    "GATv2Conv edges": lambda d: one_type(d,
                                          pyg.GATv2Conv(IN, channels(d, OUT),
                                                        heads=d.choice((1, 2)), edge_dim=EDGE,
                                                        fill_value=d.choice(("mean", 0.0, "max"))),
                                          "attr"),
    "TransformerConv pair": lambda d: one_type(
        d, pyg.TransformerConv((IN, IN), OUT, heads=2, beta=d.chance(0.4)), pairs=True
    ),
    "TransformerConv edges": lambda d: one_type(
        d,
        pyg.TransformerConv(IN, channels(d, OUT), heads=d.choice((1, 2)), edge_dim=EDGE),
        "attr",
    ),
    "SuperGATConv": lambda d: one_type(d, pyg.SuperGATConv(IN, OUT, heads=d.choice((1, 2)),
                                                           attention_type=d.choice(("MX", "SD")),
                                                           concat=d.chance(0.5),
                                                           add_self_loops=d.chance(0.6))),
    "AGNNConv": lambda d: one_type(d, pyg.AGNNConv(requires_grad=d.chance(0.7),
                                                   add_self_loops=d.chance(0.6))),
    "GCNConv": gcn,
    "GCNConv unnormalised": lambda d: one_type(
        d, pyg.GCNConv(IN, OUT, normalize=False, add_self_loops=False, **aggr(d)), "weight"
    ),
    "ChebConv": lambda d: one_type(d, pyg.ChebConv(IN, OUT, K=d.choice((1, 2, 3))), "weight",
                                   loops=False),
    "SAGEConv": lambda d: one_type(d, pyg.SAGEConv(IN, OUT, normalize=d.chance(0.3),
                                                   root_weight=d.chance(0.7),
                                                   project=d.chance(0.2), **aggr(d))),
    "SAGEConv pair": lambda d: one_type(d, pyg.SAGEConv((IN, IN), OUT, **aggr(d)), pairs=True,
                                        lone=True),
    "GraphConv": lambda d: one_type(d, pyg.GraphConv(IN, OUT, **aggr(d)), "weight", pairs=True),
    "GatedGraphConv": lambda d: one_type(d, pyg.GatedGraphConv(IN, 2, **aggr(d, rare=False)),
                                         "weight"),
    "ResGatedGraphConv": lambda d: one_type(
        d,
        pyg.ResGatedGraphConv(IN, OUT, root_weight=d.chance(0.6), **aggr(d, rare=False)),
        pairs=True,
    ),
    "ResGatedGraphConv edges": lambda d: one_type(d, pyg.ResGatedGraphConv(IN, OUT, edge_dim=EDGE),
                                                  "attr"),
    "TAGConv": lambda d: one_type(
        d, pyg.TAGConv(IN, OUT, **d.choice(({"K": 1}, {"K": 3}, {"normalize": False}))), "weight"
    ),
    "GINConv": lambda d: one_type(d, pyg.GINConv(mlp(IN, OUT), train_eps=d.chance(0.5), **aggr(d)),
                                  pairs=True, lone=True),
    "GINEConv": lambda d: one_type(d, pyg.GINEConv(mlp(IN, OUT), edge_dim=EDGE,
                                                   train_eps=d.chance(0.5), **aggr(d, rare=False)),
                                   "attr"),
    "GINEConv same width": lambda d: one_type(d, pyg.GINEConv(mlp(IN, OUT), **aggr(d, rare=False)),
                                              "attr", edge_channels=IN),
    "ARMAConv": lambda d: one_type(d, pyg.ARMAConv(IN, OUT,
                                                   **d.choice(({"num_stacks": 2, "num_layers": 2},
                                                               {}, {"shared_weights": True}))),
                                   "weight"),
    "SGConv": lambda d: one_type(d, pyg.SGConv(IN, OUT, K=d.choice((1, 2)),
                                               add_self_loops=d.chance(0.6)), "weight"),
    "SSGConv": lambda d: one_type(d, pyg.SSGConv(IN, OUT, alpha=0.3, K=2), "weight"),
    "APPNP": lambda d: one_type(d, pyg.APPNP(K=2, alpha=0.2), "weight"),
    "MFConv": lambda d: one_type(d, pyg.MFConv(IN, OUT)),
    "LGConv": lambda d: one_type(d, pyg.LGConv(normalize=d.chance(0.6)), "weight"),
    "LEConv": lambda d: one_type(d, pyg.LEConv(IN, OUT, **aggr(d, rare=False)), "weight"),
    "ClusterGCNConv": lambda d: one_type(d, pyg.ClusterGCNConv(IN, OUT,
                                                               diag_lambda=d.choice((0.0, 1.0)),
                                                               add_self_loops=d.chance(0.7))),
    "GENConv": gen,
    "GENConv edges": lambda d: gen(d, True),
    "GCN2Conv": lambda d: one_type(
        d, WithFirst(pyg.GCN2Conv(IN, 0.1, 0.5, 1, shared_weights=d.chance(0.5))), "weight"
    ),
    "FAConv": lambda d: one_type(d, WithFirst(pyg.FAConv(IN)), "weight"),
    "PANConv": lambda d: one_type(d, pyg.PANConv(IN, OUT, filter_size=2)),
    "WLConvContinuous": lambda d: one_type(d, pyg.WLConvContinuous(), "weight"),
    "SimpleConv": lambda d: one_type(
        d,
        pyg.SimpleConv(**d.choice(_SINGLE),
                       combine_root=d.choice((None, "sum", "cat", "self_loop"))),
        "weight",
    ),
    "MixHopConv": lambda d: one_type(d, pyg.MixHopConv(IN, OUT, powers=[0, 1, 2]), "weight"),
    "PDNConv": lambda d: one_type(d, pyg.PDNConv(IN, OUT, edge_dim=EDGE, hidden_channels=4),
                                  "attr"),
    "EGConv": egc,
    "PNAConv": pna,
    "PNAConv edges": lambda d: pna(d, True),
    "FeaStConv": lambda d: one_type(d, pyg.FeaStConv(IN, OUT, heads=2)),
    "CGConv": lambda d: one_type(d, pyg.CGConv(IN, EDGE), "attr"),
    "NNConv": lambda d: one_type(d, pyg.NNConv(IN, OUT, mlp(EDGE, IN * OUT),
                                               aggr=d.choice(("add", "mean", "max"))), "attr"),
    "EdgeConv": lambda d: one_type(d, pyg.EdgeConv(mlp(2 * IN, OUT),
                                                   aggr=d.choice(("max", "add", "mean")))),
    "GMMConv": lambda d: one_type(d, pyg.GMMConv(IN, OUT, EDGE, 2), "attr"),
    "GeneralConv": lambda d: one_type(d, pyg.GeneralConv(IN, OUT, in_edge_channels=EDGE,
                                                         attention=d.chance(0.5), heads=2), "attr"),
    "SignedConv": lambda d: one_type(d, Signed(pyg.SignedConv(IN, OUT, True))),
    "HypergraphConv": lambda d: one_type(d, pyg.HypergraphConv(IN, OUT)),
    "AntiSymmetricConv": lambda d: one_type(d, pyg.AntiSymmetricConv(IN)),
    "DirGNNConv": lambda d: one_type(
        d,
        pyg.DirGNNConv(d.choice((pyg.SAGEConv(IN, OUT),
                                 pyg.GATConv(IN, OUT, add_self_loops=False)))),
    ),
}
