"""NNConv without the matrices of its edges.

Sums and means are made as `edge_networks` says. Layers with other networks or aggregations pass
messages as any other layer does.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters import edge_networks
from gnnaccel.adapters.pyg import calls, edges, guards
from gnnaccel.dispatch.ops.plain import PlainInputs, PlainSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import turned

AGGREGATIONS = ("SumAggregation", "MeanAggregation")
FIELDS = ("in_channels_l", "out_channels", "root_weight")
ARGUMENTS = ("x", "edge_index"), ("edge_attr", "size")


def propagates(layer: Any) -> bool:
    nn = layer._modules.get("nn")
    return (type(layer._modules.get("aggr_module")).__name__ not in AGGREGATIONS
            or type(nn) is not torch.nn.Sequential or not nn._modules)


def state(layer: Any, x: Any, edge_index: Any, edge_attr: Any,
          size: Any) -> tuple[PlainSpec, PlainInputs] | Reason:
    pair = not isinstance(x, Tensor)
    if pair and not (isinstance(x, (tuple, list)) and len(x) == 2):
        return reason("GA206", f"x is a {type(x).__name__}")
    x_src, x_dst = x if pair else (x, x)
    why = (guards.features_reason(x_src) or guards.features_reason(x_dst, "x[1]")
           or edge_networks.unfit("nn", layer.nn, x_src, layer.in_channels_l, layer.out_channels,
                                  guards.plain_linear))
    if why is not None:
        return why
    num_src, num_dst = x_src.shape[0], x_dst.shape[0]
    if size is not None and tuple(size) != (num_src, num_dst):
        return reason("GA206",
                      f"size={tuple(size)} does not fit features of {num_src} and {num_dst} nodes")
    plain = edges.plain(edge_index, num_src, num_dst, x_src.device)
    if type(plain) is Reason:
        return plain
    why = guards.edge_reason(edge_attr, plain.shape[1], x_src)
    if why is None and edge_attr.dim() != 2:
        why = reason("GA206", f"edge_attr is {list(edge_attr.shape)}")
    if why is not None:
        return why
    reduce = edge_networks.operation(
        layer.nn, type(layer.aggr_module).__name__ == "MeanAggregation", layer.out_channels)
    spec = PlainSpec("NNConv", reduce, False, x_src.shape[1], x_src.dtype, num_src, num_dst,
                     plain.shape[1], False)
    return spec, PlainInputs(plain, x_src.device, (x_src, x_dst, edge_attr))


def again(layer: Any, args: tuple, kwargs: dict, kept: None) -> PlainInputs:
    x, edge_index, edge_attr, _ = calls.bound(args, kwargs, *ARGUMENTS)
    x_src, x_dst = x if isinstance(x, tuple) else (x, x)
    return PlainInputs(edge_index, x_src.device, (x_src, x_dst, edge_attr))


def resized(layer: Any, args: tuple, kwargs: dict, spec: PlainSpec,
            kept: None) -> tuple[PlainSpec, PlainInputs] | None:
    inputs = again(layer, args, kwargs, kept)
    (x_src, x_dst, edge_attr), edge_index = inputs.operands, inputs.edge_index
    num_src, num_dst, count = x_src.shape[0], x_dst.shape[0], edge_index.shape[1]
    if (edges.plain(edge_index, num_src, num_dst, x_src.device) is not edge_index
            or edge_attr.shape[0] != count):
        return None
    return PlainSpec(spec.native, spec.reduce, spec.weighted, spec.width, spec.row,
                     num_src, num_dst, count, spec.on_cpu), inputs


def run(layer: Any, spec: PlainSpec, inputs: PlainInputs, attend: Any) -> Tensor:
    x_src, x_dst, features = inputs.operands
    *before, last = layer.nn
    for module in before:
        features = module(features)
    sums = attend({"x": x_src, "edge": features})  # [num_dst, terms, in_channels]
    maps = turned(last.weight)  # [K, in_channels * out_channels]
    if last.bias is not None:
        maps = torch.cat([maps, last.bias.unsqueeze(0)])
    out = sums.flatten(1) @ maps.reshape(-1, layer.out_channels)
    if layer.root_weight:
        out = out + layer.lin(x_dst)
    return out if layer.bias is None else out + layer.bias
