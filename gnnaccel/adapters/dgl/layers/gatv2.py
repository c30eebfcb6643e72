"""GATv2Conv as a Program."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl import graphs, guards, reading
from gnnaccel.adapters.guards import Shapes, declared, plain
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.reasons import Reason

ARGUMENTS = ("graph", "feat"), ("get_attention",)
FIELDS = ("_num_heads", "_out_feats", "_allow_zero_in_degree", "share_weights", "activation")
ABSORBED = {"attn_drop": torch.nn.Dropout, "leaky_relu": torch.nn.LeakyReLU}


def state(layer: Any, graph: Any, feat: Any,
          weights: Any) -> tuple[CallSpec, CallInputs] | Reason:
    nodes = reading.attention(graph, feat, weights)
    if type(nodes) is Reason:
        return nodes
    edges: Any
    edges, x_src, x_dst, same = nodes
    why = (guards.dtype_reason(x_src, declared(layer, "attn"))
           or graphs.zero_in_degree_reason(layer, edges))
    if why is not None:
        return why
    row, out = guards.dtypes(x_src)
    program = programs.gatv2(layer.leaky_relu.negative_slope, guards.dropout(layer.attn_drop),
                             False)
    spec = CallSpec(program, "dgl.GATv2Conv", layer._num_heads, layer._out_feats, row, out,
                    edges.num_src, edges.num_dst, edges.edge_index.shape[1], 0,
                    layer.res_fc is None)
    return spec, CallInputs(x_src, x_dst, edges.edge_index, None, (same,))


def shapes(layer: Any, inputs: CallInputs) -> Shapes:
    return reading.shapes(layer, ("fc_src", "fc_dst"), ("attn",))


def run(layer: Any, spec: CallSpec, inputs: CallInputs, attend: Any) -> Tensor:
    h, c, modules, num_dst = spec.heads, spec.width, layer._modules, spec.num_dst
    (same,), block, fc_dst = inputs.extra, inputs.x_dst is None, modules["fc_dst"]
    h_src = h_dst = modules["feat_drop"](inputs.x_src)
    if not same and not block:
        h_dst = modules["feat_drop"](inputs.x_dst)
    # the host maps all sources, of which it then drops most
    if block and plain(fc_dst, torch.nn.Linear):
        h_dst = h_dst[:num_dst]
    rows: Callable[..., Any] = _rows_to_slice if block else reading.rows
    keys = rows(modules["fc_src"], h_src, h, c)
    queries = keys if layer.share_weights and (same or block) else rows(fc_dst, h_dst, h, c)
    if block:
        queries, h_dst = queries[:num_dst], h_dst[:num_dst]
    # contiguous as the host's result is: models call view
    out = attend({"keys": keys, "queries": queries, "att": layer.attn}).contiguous()
    if layer.res_fc is not None:
        out = out + layer.res_fc(h_dst).view(num_dst, -1, c)
    return layer.activation(out) if layer.activation else out


def _rows_to_slice(module: Any, x: Tensor, heads: int, width: int) -> Tensor:
    return module(x).view(x.shape[0], heads, width)
