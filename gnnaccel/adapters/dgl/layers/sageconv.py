"""SAGEConv as one mean, sum or maximum over the graph; aggregators "mean", "gcn" and "pool"."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl import graphs, guards, reading
from gnnaccel.adapters.dgl.layers import plain
from gnnaccel.adapters.guards import declared
from gnnaccel.dispatch.ops.plain import PlainInputs, PlainSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason

ARGUMENTS = ("graph", "feat"), ("edge_weight",)
FIELDS = ("_aggre_type", "_in_src_feats", "_out_feats")


def state(layer: Any, graph: Any, feat: Any,
          edge_weight: Any) -> tuple[PlainSpec, PlainInputs] | Reason:
    kind = layer._aggre_type
    if kind not in ("mean", "gcn", "pool"):
        return reason("GA208", f"aggregator_type={kind!r}", "use mean, gcn or pool")
    why = _pair_reason(graph, feat) if kind == "gcn" and isinstance(feat, tuple) else None
    if why is not None:
        return why

    def width(channels: int) -> int:
        return layer._out_feats if kind != "pool" and _maps_first(layer) else channels

    maps = guards.weights(layer, "fc_neigh", *(("fc_self",) if kind != "gcn" else ()))
    if type(maps) is Reason:
        return maps
    bias = declared(layer, "bias") if kind == "gcn" else None
    return plain.state("SAGEConv", "max" if kind == "pool" else "sum", graph, feat, edge_weight,
                       width, (*maps, bias))


def _pair_reason(graph: Any, feat: tuple) -> Reason | None:
    if len({getattr(t, "shape", ())[1:] for t in feat}) > 1:  # an error in the host
        return reason("GA206", "feat is a pair of different widths")
    # the host then adds destinations' rows
    if type(graphs.homogeneous(graph)) is not Reason and reading.one_frame(graph):
        return reason("GA206", "feat is a pair, the graph has one set of nodes",
                      "pass features of the nodes as one tensor")
    return None


def _maps_first(layer: Any) -> bool:
    return layer._in_src_feats > layer._out_feats


def run(layer: Any, spec: PlainSpec, inputs: PlainInputs, attend: Any) -> Tensor:
    nodes, kind, exact = (inputs.operands.nodes, layer._aggre_type,
                          torch.float64 if spec.row == torch.float64 else torch.float32)
    x_src, x_dst = plain.dropped(layer, nodes)
    weight = inputs.operands.edge_weight
    tensors = dict(weight=weight if weight is None else plain.by_edge(weight))
    if kind == "pool":
        neighbours = layer.fc_neigh(attend({**tensors, "x": torch.relu(layer.fc_pool(x_src))}))
    else:
        first, scale = _maps_first(layer), nodes.edges.scale(1, -1.0, int(kind == "gcn"), exact)
        rows = layer.fc_neigh(x_src) if first else x_src
        neighbours = attend({**tensors, "x": rows, "scale_dst": scale})
        if kind == "gcn":
            paired = nodes.x_dst is not None and not nodes.same
            own = rows[:spec.num_dst] if not paired else layer.fc_neigh(x_dst) if first else x_dst
            neighbours = torch.addcmul(neighbours, own, scale.to(own.dtype).unsqueeze(1))
        neighbours = neighbours if first else layer.fc_neigh(neighbours)
    if kind == "gcn":
        out = neighbours if layer.bias is None else neighbours + layer.bias
    else:
        out = layer.fc_self(x_dst) + neighbours
    out = out if layer.activation is None else layer.activation(out)
    return out if layer.norm is None else layer.norm(out)
