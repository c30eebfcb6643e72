"""GINConv as one sum, mean or maximum over the graph."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl.layers import plain
from gnnaccel.dispatch.ops.plain import PlainInputs, PlainSpec
from gnnaccel.dispatch.policy.reasons import Reason

ARGUMENTS = ("graph", "feat"), ("edge_weight",)
FIELDS = ("_aggregator_type",)


def state(layer: Any, graph: Any, feat: Any,
          edge_weight: Any) -> tuple[PlainSpec, PlainInputs] | Reason:
    reduce = "max" if layer._aggregator_type == "max" else "sum"
    return plain.state("GINConv", reduce, graph, feat, edge_weight, lambda channels: channels,
                       (layer.eps,))


def run(layer: Any, spec: PlainSpec, inputs: PlainInputs, attend: Any) -> Tensor:
    nodes, weight, _ = inputs.operands
    tensors = dict(x=nodes.x_src, weight=weight if weight is None else plain.by_edge(weight))
    if layer._aggregator_type == "mean":
        tensors["scale_dst"] = nodes.edges.scale(1, -1.0, 0,
                                                 torch.float64
                                                 if spec.row == torch.float64 else torch.float32)
    out = (1 + layer.eps) * plain.destinations(nodes, nodes.x_src, nodes.x_dst) + attend(tensors)
    if layer.apply_func is not None:
        out = layer.apply_func(out)
    return out if layer.activation is None else layer.activation(out)
