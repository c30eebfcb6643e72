"""GATConv as a Program."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl import graphs, guards, reading
from gnnaccel.adapters.guards import Shapes, declared
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason

ARGUMENTS = ("graph", "feat"), ("edge_weight", "get_attention")
FIELDS = ("_num_heads", "_out_feats", "_allow_zero_in_degree", "activation", "has_explicit_bias")
ABSORBED = {"attn_drop": torch.nn.Dropout, "leaky_relu": torch.nn.LeakyReLU}


def state(layer: Any, graph: Any, feat: Any, edge_weight: Any,
          weights: Any) -> tuple[CallSpec, CallInputs] | Reason:
    nodes = reading.attention(graph, feat, weights, edge_weight)
    if type(nodes) is Reason:
        return nodes
    edges: Any
    edges, x_src, x_dst, same = nodes
    vectors = declared(layer, "attn_l"), declared(layer, "attn_r")
    why = (_map_reason(layer, feat) or guards.dtype_reason(x_src, *vectors)
           or graphs.zero_in_degree_reason(layer, edges))
    if why is not None:
        return why
    row, out = guards.dtypes(x_src)
    # a bias of another form goes to the host's own step, which says what it is
    biased = (layer.bias is not None and layer.res_fc is None
              and layer.bias.shape == (layer._num_heads * layer._out_feats,))
    program = programs.gat(layer.leaky_relu.negative_slope, guards.dropout(layer.attn_drop), same,
                           True, False, biased)
    spec = CallSpec(program, "dgl.GATConv", layer._num_heads, layer._out_feats, row,
                    torch.promote_types(out, layer.bias.dtype) if biased else out, edges.num_src,
                    edges.num_dst, edges.edge_index.shape[1], 0,
                    layer.res_fc is None and not layer.activation)
    return spec, CallInputs(x_src, x_dst, edges.edge_index)


def shapes(layer: Any, inputs: CallInputs) -> Shapes:
    return reading.shapes(layer, ("fc", "fc_src", "fc_dst"), ("attn_l", "attn_r"))


def _map_reason(layer: Any, feat: Any) -> Reason | None:
    biased = layer.bias is not None
    if getattr(layer, "has_explicit_bias", biased) is not biased:  # which newer versions go by
        return reason("GA206", "the bias was taken away, or put where there was none")
    if isinstance(feat, tuple) or "fc" in layer._modules:
        return None
    # an error in the host
    return reason("GA206", "feat is one tensor, the layer was built for a pair")


def run(layer: Any, spec: CallSpec, inputs: CallInputs, attend: Any) -> Tensor:
    h, c, modules = spec.heads, spec.width, layer._modules
    drop, num_dst = modules["feat_drop"], spec.num_dst
    fc_src, fc_dst = ((modules["fc_src"], modules["fc_dst"])
                      if "fc_src" in modules else (modules["fc"], modules["fc"]))
    h_src = h_dst = drop(inputs.x_src)
    tensors = {"att_src": layer.attn_l, "att_dst": layer.attn_r}
    if inputs.x_dst is None:
        tensors["x"] = fc_src(h_src).view(spec.num_src, h, c)
        h_dst, tensors["x_dst"] = h_src[:num_dst], tensors["x"][:num_dst]
    elif spec.program.has_input("x_dst"):
        h_dst = drop(inputs.x_dst)
        tensors["x"], tensors["x_dst"] = reading.rows(fc_src, h_src, h,
                                                     c), reading.rows(fc_dst, h_dst, h, c)
    else:
        tensors["x"] = reading.rows(fc_src, h_src, h, c)
    residual = layer.res_fc
    if spec.program.has_input("bias"):
        tensors["bias"] = layer.bias
    out = attend(tensors).contiguous()  # as the host's is, and users view it in other shapes
    if residual is not None:
        out = out + residual(h_dst).view(num_dst, -1, c)
    if layer.bias is not None and "bias" not in tensors:
        out = out + layer.bias.view(1, h, c)
    return layer.activation(out) if layer.activation else out
