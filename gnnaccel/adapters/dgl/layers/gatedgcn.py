"""GatedGCNConv: its gates and both sums over the graph as one operation."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from gnnaccel.adapters import guards as shared
from gnnaccel.adapters.dgl import guards, reading
from gnnaccel.adapters.dgl.layers import plain
from gnnaccel.dispatch.ops.plain import PlainInputs, PlainSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason

FIELDS: tuple[str, ...] = ()
ARGUMENTS = ("graph", "feat", "edge_feat"), ()


def state(layer: Any, graph: Any, feat: Any,
          edge_feat: Any) -> tuple[PlainSpec, PlainInputs] | Reason:
    if isinstance(feat, tuple):
        return reason("GA206", "feat is a pair", "pass features of the nodes as one tensor")
    maps = guards.weights(layer, "B", "A", "C", "D", "E")
    if type(maps) is Reason:
        return maps
    prepared = plain.state("GatedGCNConv", "gated", graph, feat, None,
                           lambda channels: maps[0].shape[0], maps, (edge_feat,))
    if type(prepared) is Reason:
        return prepared
    if not reading.one_frame(graph):  # the host then has no features of nodes to look at
        return reason("GA204", "the graph's sources and destinations are different nodes")
    why = shared.edge_reason(edge_feat, prepared[0].num_edges, feat)
    if why is not None or edge_feat.dim() != 2 or len({t.shape[0] for t in maps}) > 1:
        return (why
                or reason("GA206",
                          "edge_feat has one dimension, or the layer's maps have several widths"))
    return prepared


def run(layer: Any, spec: PlainSpec, inputs: PlainInputs, attend: Any) -> tuple[Tensor, Tensor]:
    nodes, _, (edge_feat,) = inputs.operands
    feat = nodes.x_src
    own, values, left, right = layer.A(feat), layer.B(feat), layer.D(feat), layer.E(feat)
    score, sums = attend(dict(left=left, right=right, edge=layer.C(edge_feat), values=values))
    out, edges = own + sums, score
    if layer.batch_norm:
        out, edges = layer.bn_node(out), layer.bn_edge(edges)
    if edges is score and score.requires_grad:
        edges = score.clone()  # backward reads the scores; what is made of them may be in place
    if layer.activation:
        out, edges = layer.activation(out), layer.activation(edges)
    if layer.residual:
        out, edges = feat + out, edge_feat + edges
    return layer.dropout(out), layer.dropout(edges)
