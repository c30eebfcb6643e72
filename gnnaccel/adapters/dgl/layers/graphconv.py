"""GraphConv as one scaled sum over the graph, before or after its linear map as in the host."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl import graphs
from gnnaccel.adapters.dgl.layers import plain
from gnnaccel.dispatch.ops.plain import PlainInputs, PlainSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason

ARGUMENTS = ("graph", "feat"), ("weight", "edge_weight")
FIELDS = ("_norm", "_in_feats", "_out_feats", "_allow_zero_in_degree", "_activation")
_SOURCE, _DESTINATION = {"both": -0.5, "left": -1.0}, {"both": -0.5, "right": -1.0}


def state(layer: Any, graph: Any, feat: Any, weight: Any,
          edge_weight: Any) -> tuple[PlainSpec, PlainInputs] | Reason:
    if weight is not None and layer.weight is not None:  # an error in the host
        return reason("GA206", "weight was given to a layer that has its own")
    weight = layer.weight if weight is None else weight
    why = _weight_reason(weight)
    if why is not None:
        return why

    def width(channels: int) -> int:
        return (channels if weight is None
                or layer._in_feats <= layer._out_feats else weight.shape[1])

    prepared = plain.state("GraphConv", "sum", graph, feat, edge_weight, width,
                           (weight, layer.bias), (weight,))
    if type(prepared) is Reason:
        return prepared
    return graphs.zero_in_degree_reason(layer, prepared[1].operands.nodes.edges) or prepared


def _weight_reason(weight: Any) -> Reason | None:
    if (weight is None or type(weight) in (Tensor, torch.nn.Parameter) and weight.dim() == 2
        and weight.layout == torch.strided):
        return None
    return reason("GA206", f"weight is a {type(weight).__name__} that is no matrix")


def run(layer: Any, spec: PlainSpec, inputs: PlainInputs, attend: Any) -> Tensor:
    (nodes, edge_weight, (weight,)), bias = inputs.operands, layer.bias
    x, edges, dtype = nodes.x_src, nodes.edges, _exact(spec.row)
    tensors = dict(weight=edge_weight if edge_weight is None else plain.by_edge(edge_weight))
    if layer._norm in _SOURCE:
        tensors["scale_src"] = edges.scale(0, _SOURCE[layer._norm], 0, dtype)
    if layer._norm in _DESTINATION:
        tensors["scale_dst"] = edges.scale(1, _DESTINATION[layer._norm], 0, dtype)
    if weight is None or layer._in_feats > layer._out_feats:
        fused = bias is not None and bias.shape == (spec.width,)
        out = attend({**tensors, "x": x if weight is None else x @ weight,
                      "bias": bias if fused else None})
    else:
        out = attend({**tensors, "x": x})
        fused = bias is not None and bias.shape == weight.shape[1:]
        out = torch.addmm(bias, out, weight) if fused else out @ weight
    out = out if fused or bias is None else out + bias
    return out if layer._activation is None else layer._activation(out)


def _exact(row: torch.dtype) -> torch.dtype:
    return torch.float64 if row == torch.float64 else torch.float32
