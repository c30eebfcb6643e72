"""EGATConv as a Program: the features of edges as the host makes them, for they are returned, then
attention by their scores."""
from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gnnaccel.adapters.dgl import guards, reading
from gnnaccel.adapters.guards import Shapes, declared, edge_reason
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason

ARGUMENTS = ("graph", "nfeats", "efeats"), ("edge_weight", "get_attention")
FIELDS = ("_num_heads", "_out_node_feats", "_out_edge_feats")


def state(layer: Any, graph: Any, nfeats: Any, efeats: Any, edge_weight: Any,
          weights: Any) -> tuple[CallSpec, CallInputs] | Reason:
    nodes = reading.attention(graph, nfeats, weights, edge_weight)
    if type(nodes) is Reason:
        return nodes
    edges: Any
    edges, x_src, x_dst, _ = nodes
    if x_dst is None:  # an error in the host, which takes all sources for destinations
        return reason("GA206", "nfeats is one tensor for a block",
                      "pass a pair: features of sources and of destinations")
    why = (edge_reason(efeats, edges.edge_index.shape[1], x_src)
           or guards.dtype_reason(x_src, declared(layer, "attn"), declared(layer, "bias")))
    if why is not None or efeats.dim() != 2:
        return why or reason("GA206", f"efeats has {efeats.dim()} dimensions")
    if edges.has_bare():
        return reason("GA204", "there are nodes of in-degree 0, which the layer does not allow",
                      "use dgl.add_self_loop(g)")
    row, out = guards.dtypes(x_src)
    # the scores are all there: a leaky_relu of slope 1 leaves them as they are
    program = programs.additive_terms(1.0, 0.0, False, True)
    spec = CallSpec(program, "dgl.EGATConv", layer._num_heads, layer._out_node_feats, row, out,
                    edges.num_src, edges.num_dst, edges.edge_index.shape[1], 0, True)
    return spec, CallInputs(x_src, x_dst, edges.edge_index, efeats, (graph,))


def shapes(layer: Any, inputs: CallInputs) -> Shapes:
    return {**reading.shapes(layer, ("fc_node_src",), (), layer._out_node_feats),
            **reading.shapes(layer, ("fc_ni", "fc_nj", "fc_fij"), ("attn",), layer._out_edge_feats)}


def run(layer: Any, spec: CallSpec, inputs: CallInputs, attend: Any) -> tuple[Tensor, Tensor]:
    from dgl import ops

    h, (graph,) = spec.heads, inputs.extra
    sums = ops.u_add_v(graph, layer.fc_ni(inputs.x_src),
                       layer.fc_nj(inputs.x_dst)) + layer.fc_fij(inputs.edge_attr)
    sums = sums if layer.bias is None else sums + layer.bias
    edges = F.leaky_relu(sums).view(spec.num_edges, h, layer._out_edge_feats)
    rows = layer.fc_node_src(inputs.x_src).view(spec.num_src, h, spec.width)
    scores = (edges * layer.attn).sum(-1)
    nodes = attend({"x": rows, "a_src": scores.new_zeros(spec.num_src, h), "a_edge": scores})
    return nodes.contiguous(), edges  # as the host's result is: models call view
