"""TransformerConv as a Program."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import calls, edges, guards
from gnnaccel.dispatch import attention_programs as programs
from gnnaccel.dispatch.reasons import Reason, reason
from gnnaccel.dispatch.request import Stated

host = "pyg"
METHODS = ()


def state(layer: Any, args: tuple, kwargs: dict) -> Stated | Reason:
    bound = calls.bind(args, kwargs, ("x", "edge_index"), ("edge_attr", "return_attention_weights"))
    if bound is None:
        return reason("GA206", "the arguments do not fit TransformerConv.forward")
    x, edge_index, edge_attr, weights = bound
    if isinstance(weights, bool):
        return reason("GA208", "attention weights were asked for", "call the layer without return_attention_weights")
    if not isinstance(x, Tensor) and not (isinstance(x, (tuple, list)) and len(x) == 2):
        return reason("GA206", f"x is a {type(x).__name__}")
    x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
    why = (guards.features_reason(x_src) or guards.features_reason(x_dst, "x[1]")
           or guards.lazy_reason(layer.lin_key, layer.lin_query, layer.lin_value, layer.lin_edge, layer.lin_skip))
    if why is not None:
        return why
    plain = edges.plain(edge_index, x_src.shape[0], x_dst.shape[0], x_src.device)
    if type(plain) is Reason:
        return plain
    if (edge_attr is None) != (layer.lin_edge is None) or (edge_attr is not None and edge_attr.shape[0] != plain.shape[1]):
        return reason("GA206", "edge_attr does not fit the layer or the edges")
    row, out = calls.dtypes(x_src, layer.lin_value.weight)
    program = programs.dot_product(1.0 / math.sqrt(layer.out_channels), layer.dropout if layer.training else 0.0,
                                   edge_attr is not None)
    return Stated(program, "TransformerConv", layer.heads, layer.out_channels, row, out, plain, x_src.shape[0], x_dst.shape[0],
                  0, bool(layer.concat) and not layer.root_weight, dict(x_src=x_src, x_dst=x_dst, edge_attr=edge_attr))


def run(layer: Any, stated: Stated, attend: Any) -> Tensor:
    h, c, given = layer.heads, layer.out_channels, stated.host
    x_src, x_dst = given["x_src"], given["x_dst"]
    tensors = {"queries": layer.lin_query(x_dst).view(-1, h, c), "keys": layer.lin_key(x_src).view(-1, h, c),
               "values": layer.lin_value(x_src).view(-1, h, c)}
    if given["edge_attr"] is not None:
        tensors["edges"] = layer.lin_edge(given["edge_attr"]).view(-1, h, c)
    out = attend(tensors)
    out = out.flatten(1) if layer.concat else out.mean(dim=1)
    if not layer.root_weight:
        return out
    skip = layer.lin_skip(x_dst)
    if layer.lin_beta is None:
        return out + skip
    gate = layer.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
    return gate * skip + (1 - gate) * out
