"""The rest of ``dgl.nn``: layers without a row in `dgl_layers`, readouts, and further options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .dgl_layers import EDGE, OUT, case
from .graphs import IN, Case, Draw, features, mlp


def whole(found: Case) -> Case:
    """The case over a graph with its CSC: without it DGL's mailboxes hold other nodes' messages
    (docs/dgl.md)."""
    g, *rest = found.args
    return Case(found.module, (g.formats(["coo", "csr", "csc"]), *rest), found.kwargs, found.note)


def directional(d: Draw) -> Case:
    """Over directions at the nodes."""
    import dgl.nn as n

    aggregators = d.choice((["dir1-av", "mean"], ["dir2-dx", "max"], ["dir1-dx", "sum", "dir2-av"]))
    module = n.DGNConv(IN, IN, aggregators, ["identity", "amplification"], 2.5,
                       num_towers=d.choice((1, 2)), residual=d.chance(0.5))
    found = whole(case(d, module))
    g, x = found.args
    return Case(module, (g, x), {"eig_vec": features(d, g.num_nodes(), 3)}, found.note)


def towers(d: Draw) -> Case:
    """PNA with towers and features of edges."""
    import dgl.nn as n

    module = n.PNAConv(IN, 2 * IN, d.choice((["mean", "std"], ["max", "moment3", "sum"])),
                       ["identity", "attenuation"], 1.7, num_towers=2, edge_feat_size=EDGE,
                       residual=False)
    return whole(case(d, module, edge=EDGE))


def positions(d: Draw) -> Case:
    import dgl.nn as n

    wide = d.chance(0.5)
    module = n.EGNNConv(IN, 6, OUT, EDGE if wide else 0)
    g, x, *rest = (found := case(d, module, edge=EDGE if wide else 0)).args
    return Case(module, (g, x, features(d, g.num_nodes(), 3), *rest), note=found.note)


def initial(d: Draw) -> Case:
    """Layers that take the first features again."""
    import dgl.nn as n

    module = n.GCN2Conv(IN, 2, alpha=0.3, lambda_=0.7, allow_zero_in_degree=True,
                        project_initial_features=d.chance(0.5), bias=d.chance(0.5))
    found = case(d, module, weight="edge_weight")
    g, x = found.args
    return Case(module, (g, x, features(d, g.num_nodes(), IN)), found.kwargs, found.note)


def atomic(d: Draw) -> Case:
    import dgl.nn as n

    module = n.AtomicConv(torch.tensor([1.2, 1.5, 2.0]), torch.tensor([0.5, 1.0, 1.4]),
                          torch.tensor([1.0, 2.0, 0.5]), d.choice((None, torch.tensor([6.0, 7.0]))))
    found = whole(case(d, module))
    g = found.args[0]
    kinds = (d.integers(2, g.num_nodes(), 1) + 6).float()
    return Case(module, (g, kinds, d.uniform_(g.num_edges(), 1) * 2 + 0.1), note=found.note)


def unfolded(d: Draw) -> Case:
    import dgl.nn as n

    module = n.TWIRLSConv(IN, OUT, 6, 3, precond=d.chance(0.6), alp=0.5, lam=d.choice((0.5, 1.0)),
                          attention=d.chance(0.5), norm=d.choice(("none", "layer")))
    return case(d, module)


class NormWeights(nn.Module):
    """Weights that sum up to one, for a layer without a norm."""

    def __init__(self, norm: str, eps: float):
        super().__init__()
        import dgl.nn as n

        self.weights = n.EdgeWeightNorm(norm, eps)
        self.layer = n.GraphConv(IN, OUT, norm="none", allow_zero_in_degree=True)

    def forward(self, g: Any, x: Tensor, e: Tensor) -> Tensor:
        return self.layer(g, x, edge_weight=self.weights(g, e.abs()[:, 0] + 0.1))


class Readout(nn.Module):
    """A readout of a batch of two: the graph, and the same graph."""

    def __init__(self, readout: nn.Module):
        super().__init__()
        self.readout = readout

    def forward(self, g: Any, x: Tensor) -> Tensor:
        import dgl

        return self.readout(dgl.batch([g, g]), torch.cat([x, 1.3 * x.tanh()]))


def readout(d: Draw) -> Case:
    import dgl.nn as n

    make = d.choice((n.SumPooling, n.AvgPooling, n.MaxPooling,
                     lambda: n.GlobalAttentionPooling(nn.Linear(IN, 1)),
                     lambda: n.GlobalAttentionPooling(nn.Linear(IN, 1), mlp(IN, OUT)),
                     lambda: n.Set2Set(IN, 2, 1), lambda: n.WeightAndSum(IN)))
    return case(d, Readout(make()))


def stacked(d: Draw) -> Case:
    """Layers in DGL's ``Sequential``."""
    import dgl.nn as n

    return case(d, n.Sequential(
        n.GraphConv(IN, 8, activation=torch.tanh, allow_zero_in_degree=True), n.TAGConv(8, 6),
        n.SAGEConv(6, OUT, "pool")))


def pairs(d: Draw) -> Case:
    """Layers with features of edges, over two kinds of nodes and blocks."""
    import dgl.nn as n

    how = d.choice(("sum", "mean", "max"))
    module, edge = d.choice((
        (lambda: n.EGATConv((IN, IN), EDGE, OUT, 5, 2), EDGE),
        (lambda: n.NNConv((IN, IN), OUT, mlp(EDGE, IN * OUT), how, residual=d.chance(0.5)), EDGE),
        (lambda: n.GMMConv((IN, IN), OUT, EDGE, 2, how, residual=d.chance(0.5),
                           allow_zero_in_degree=True), EDGE),
        (lambda: n.CFConv(IN, EDGE, 6, OUT), EDGE), (lambda: n.GINEConv(mlp(IN, OUT)), IN),
        (lambda: n.EdgeConv(IN, OUT, allow_zero_in_degree=True), 0)))
    return case(d, module(), pairs=True, edge=edge)


def more() -> dict:
    """The layers by name; DGL is imported here."""
    import dgl.nn as n

    zero = {"allow_zero_in_degree": True}
    return {
        "dgl DGNConv": directional, "dgl PNAConv of towers": towers, "dgl EGNNConv": positions,
        "dgl GCN2Conv": initial, "dgl AtomicConv": atomic, "dgl TWIRLSConv": unfolded,
        "dgl readout": readout, "dgl stack": stacked, "dgl pairs": pairs,
        "dgl ChebConv": lambda d: case(d, n.ChebConv(IN, OUT, d.choice((1, 2, 3)))),
        "dgl EdgeWeightNorm": lambda d: case(
            d, NormWeights(d.choice(("both", "right", "none")), d.choice((0.0, 0.1))), edge=EDGE),
        "dgl SAGEConv lstm": lambda d: whole(case(d, n.SAGEConv(IN, OUT, "lstm"))),
        "dgl EdgeConv of norms": lambda d: case(d, n.EdgeConv(IN, OUT, batch_norm=True, **zero)),
        "dgl GraphConv of widths": lambda d: case(
            d, n.GraphConv(IN, d.choice((1, 3 * IN)), norm=d.choice(("both", "right")),
                           activation=torch.tanh, **zero), pairs=True, weight="edge_weight"),
        "dgl GATConv of widths": lambda d: case(
            d, n.GATConv((IN, IN), OUT, 2, residual=d.chance(0.5), activation=torch.tanh, **zero),
            pairs=True),
    }
