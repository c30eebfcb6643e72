"""PyG's layers that may run over parts, each with options that reach its less usual steps, and what
it is called with."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.distributed.graphs import FEATURES as F
from tests.distributed.graphs import homogeneous

OUT = 8


def data() -> Any:
    """`homogeneous` with what some layers want besides."""
    found = homogeneous(3)
    count = found.num_nodes
    g = torch.Generator().manual_seed(8)
    found.x0, found.pos = torch.randn(count, F, generator=g), torch.randn(count, 3, generator=g)
    found.normal = nn.functional.normalize(torch.randn(count, 3, generator=g))
    found.node_type = torch.randint(0, 2, (count,), generator=g)
    found.edge_attr.requires_grad_(False)
    return found


def _mlp(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, out))


def _given(*names: str) -> Callable[[Any], tuple]:
    return lambda d: tuple(d[name] for name in names)


_plain = _given("x", "edge_index")
_weight = _given("x", "edge_index", "edge_weight")
_attr = _given("x", "edge_index", "edge_attr")
_type = _given("x", "edge_index", "edge_type")


def _pna(pyg: Any) -> Any:
    return pyg.PNAConv(F, OUT, ["mean", "std", "max", "min", "sum"],
                       ["identity", "amplification", "attenuation"],
                       torch.ones(10, dtype=torch.long), edge_dim=4)


#: name -> (the layer, of `torch_geometric.nn`; its arguments, of `data`)
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], tuple]]] = {
    "AGNNConv": (lambda pyg: pyg.AGNNConv(), _plain),
    "APPNP": (lambda pyg: pyg.APPNP(3, 0.1), _weight),
    "ARMAConv": (lambda pyg: pyg.ARMAConv(F, OUT, 2, 2), _weight),
    "CGConv": (lambda pyg: pyg.CGConv(F, 4), _attr),
    "ClusterGCNConv": (lambda pyg: pyg.ClusterGCNConv(F, OUT), _plain),
    "DNAConv": (lambda pyg: pyg.DNAConv(F, 2, 2),
                lambda d: (torch.stack([d.x, d.x0], 1), d.edge_index)),
    "EGConv": (lambda pyg: pyg.EGConv(F, OUT, ["mean", "sum", "symnorm", "std", "max"],
                                      num_heads=2), _plain),
    "EdgeConv": (lambda pyg: pyg.EdgeConv(_mlp(2 * F, OUT)), _plain),
    "FAConv": (lambda pyg: pyg.FAConv(F), _given("x", "x0", "edge_index")),
    "FastRGCNConv": (lambda pyg: pyg.FastRGCNConv(F, OUT, 3, num_bases=2), _type),
    "FeaStConv": (lambda pyg: pyg.FeaStConv(F, OUT, 2), _plain),
    "FiLMConv": (lambda pyg: pyg.FiLMConv(F, OUT, 3), _type),
    "GATConv": (lambda pyg: pyg.GATConv(F, OUT, 2, edge_dim=4), _attr),
    "GATv2Conv": (lambda pyg: pyg.GATv2Conv(F, OUT, 2, edge_dim=4), _attr),
    "GCN2Conv": (lambda pyg: pyg.GCN2Conv(F, 0.1, theta=0.5, layer=1),
                 _given("x", "x0", "edge_index", "edge_weight")),
    "GCNConv": (lambda pyg: pyg.GCNConv(F, OUT, improved=True), _weight),
    "GENConv": (lambda pyg: pyg.GENConv(F, OUT, learn_t=True, edge_dim=4, msg_norm=True,
                                        norm="layer"), _attr),
    "GINConv": (lambda pyg: pyg.GINConv(_mlp(F, OUT), train_eps=True), _plain),
    "GINEConv": (lambda pyg: pyg.GINEConv(_mlp(F, OUT), edge_dim=4), _attr),
    "GMMConv": (lambda pyg: pyg.GMMConv(F, OUT, 4, 2), _attr),
    "GatedGraphConv": (lambda pyg: pyg.GatedGraphConv(F, 2), _weight),
    "GeneralConv": (lambda pyg: pyg.GeneralConv(F, OUT, 4, attention=True, heads=2), _attr),
    "GraphConv": (lambda pyg: pyg.GraphConv(F, OUT, aggr="max"), _weight),
    "HEATConv": (lambda pyg: pyg.HEATConv(F, OUT, 2, 3, 4, 4, 4, 2),
                 _given("x", "edge_index", "node_type", "edge_type", "edge_attr")),
    "LEConv": (lambda pyg: pyg.LEConv(F, OUT), _weight),
    "LGConv": (lambda pyg: pyg.LGConv(), _weight),
    "MFConv": (lambda pyg: pyg.MFConv(F, OUT), _plain),
    "MixHopConv": (lambda pyg: pyg.MixHopConv(F, OUT), _weight),
    "NNConv": (lambda pyg: pyg.NNConv(F, OUT, _mlp(4, F * OUT), aggr="mean"), _attr),
    "PDNConv": (lambda pyg: pyg.PDNConv(F, OUT, 4, 8), _attr),
    "PNAConv": (_pna, _attr),
    "PPFConv": (lambda pyg: pyg.PPFConv(_mlp(F + 4, OUT)),
                _given("x", "pos", "normal", "edge_index")),
    "PointGNNConv": (lambda pyg: pyg.PointGNNConv(_mlp(F, 3), _mlp(F + 3, OUT), _mlp(OUT, F)),
                     _given("x", "pos", "edge_index")),
    "PointNetConv": (lambda pyg: pyg.PointNetConv(_mlp(F + 3, OUT)),
                     _given("x", "pos", "edge_index")),
    "PointTransformerConv": (lambda pyg: pyg.PointTransformerConv(F, OUT),
                             _given("x", "pos", "edge_index")),
    "RGATConv": (lambda pyg: pyg.RGATConv(F, OUT, 3, heads=2, edge_dim=4),
                 _given("x", "edge_index", "edge_type", "edge_attr")),
    "RGCNConv": (lambda pyg: pyg.RGCNConv(F, OUT, 3, num_blocks=2), _type),
    "ResGatedGraphConv": (lambda pyg: pyg.ResGatedGraphConv(F, OUT, edge_dim=4), _attr),
    "SAGEConv": (lambda pyg: pyg.SAGEConv(F, OUT, normalize=True, project=True), _plain),
    "SGConv": (lambda pyg: pyg.SGConv(F, OUT, 2), _weight),
    "SSGConv": (lambda pyg: pyg.SSGConv(F, OUT, 0.1, 2), _weight),
    "SimpleConv": (lambda pyg: pyg.SimpleConv("mean", "self_loop"), _weight),
    "SuperGATConv": (lambda pyg: pyg.SuperGATConv(F, OUT, 2), _plain),
    "TAGConv": (lambda pyg: pyg.TAGConv(F, OUT, 3), _weight),
    "TransformerConv": (lambda pyg: pyg.TransformerConv(F, OUT, 2, beta=True, edge_dim=4), _attr),
    "WLConvContinuous": (lambda pyg: pyg.WLConvContinuous(), _weight),
}


def run(name: str, d: Any, rows: Any = slice(None), device: Any = "cpu", pinned: bool = False
        ) -> tuple[torch.Tensor, dict[str, Any]]:
    """A layer's result over ``d``, and gradients of weights and features. ``rows``: the nodes'
    numbers in the whole graph, of which the loss depends; ``device``: where the layer is;
    ``pinned``: whether what it is called with is in pinned memory."""
    from torch_geometric import nn as pyg

    torch.manual_seed(0)
    make, arguments = CASES[name]
    layer, d = make(pyg).eval().to(device), d.clone()
    d = d.pin_memory() if pinned else d
    d.x.requires_grad_()
    out = layer(*arguments(d))
    share = torch.randn(homogeneous().num_nodes, *out.shape[1:],
                        generator=torch.Generator().manual_seed(5))[rows]
    (out * share).sum().backward()
    found = {key: p.grad.cpu() for key, p in layer.named_parameters() if p.grad is not None}
    return out.detach(), {**found, "x": d.x.grad}
