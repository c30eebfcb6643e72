"""EdgeGATConv as a Program: GAT whose messages hold the edges' features, so that they take part
beyond the logits."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.adapters import layout
from gnnaccel.adapters.dgl import graphs, guards, reading
from gnnaccel.adapters.guards import Shapes, declared, edge_reason
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import statements
from gnnaccel.dispatch.relational.edges import Ends
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec
from gnnaccel.dispatch.run.autograd import turned

ARGUMENTS = ("graph", "feat", "edge_feat"), ("get_attention",)
FIELDS = ("_num_heads", "_out_feats", "_allow_zero_in_degree")
#: rows of fc_edge, one per edge, are never made: its weight goes into the Program
ABSORBED = {"attn_drop": torch.nn.Dropout, "leaky_relu": torch.nn.LeakyReLU,
            "fc_edge": torch.nn.Linear}


class _Operands(NamedTuple):
    """``x_dst`` None: a block's, the first sources; ``same``: one tensor is for both ends."""

    x_src: Tensor
    x_dst: Tensor | None
    edge_feat: Tensor
    same: bool


def state(layer: Any, graph: Any, feat: Any, edge_feat: Any,
          weights: Any) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    nodes = reading.attention(graph, feat, weights)
    if type(nodes) is Reason:
        return nodes
    edges, x_src, x_dst, same = nodes
    why = (_layer_reason(layer, feat) or _edge_reason(edge_feat, edges, x_src)
           or guards.dtype_reason(x_src, declared(layer, "attn_l"), declared(layer, "attn_r"),
                                  declared(layer, "attn_edge"), declared(layer.fc_edge))
           or graphs.zero_in_degree_reason(layer, edges))
    if why is not None:
        return why
    h, width, k, row = layer._num_heads, layer._num_heads * layer._out_feats, edge_feat.shape[
        1], x_src.dtype
    program = statements.edge_gat(layer.leaky_relu.negative_slope, guards.dropout(layer.attn_drop),
                                  h)
    shapes = (("rows", (width,)), ("a_src", (h,)), ("a_dst", (h,)), ("a_edge", (h,)),
              ("edges", (k,)), ("w_edge", (k, width)))
    structure: Any
    structure, sizes = (edges.edge_index,), (edges.num_src, edges.num_dst)
    spec = RelationalSpec(program, "dgl.EdgeGATConv", shapes, row, row, *sizes,
                          edges.edge_index.shape[1], 1,
                          layout.viewer(structure, *sizes, 1, _one_relation),
                          layout="one relation")
    return spec, RelationalInputs(structure, x_src.device, _Operands(x_src, x_dst, edge_feat, same))


def shapes(layer: Any, inputs: RelationalInputs) -> Shapes:
    return reading.shapes(layer, ("fc", "fc_src", "fc_dst", "fc_edge"),
                         ("attn_l", "attn_r", "attn_edge"))


def _one_relation(edge_index: Tensor) -> Ends:
    src, dst = edge_index.unbind(0)
    return src, dst, torch.zeros_like(src)


def _layer_reason(layer: Any, feat: Any) -> Reason | None:
    if "fc" not in layer._modules and not isinstance(feat, tuple):  # an error in the host
        return reason("GA206", "feat is one tensor, the layer was built for a pair")
    if layer.fc_edge.bias is not None:
        return reason("GA205", "fc_edge was replaced by one with a bias")
    return None


def _edge_reason(edge_feat: Any, edges: graphs.Edges, x: Tensor) -> Reason | None:
    why = edge_reason(edge_feat, edges.edge_index.shape[1], x)
    if why is not None or edge_feat.dim() != 2:
        return why or reason("GA206", f"edge_feat has {edge_feat.dim()} dimensions")
    if torch.is_autocast_enabled(x.device.type):
        return reason("GA203", "autocast is on", "call the layer outside of autocast")
    return None


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any) -> Tensor:
    h, c, num_dst = layer._num_heads, layer._out_feats, spec.num_dst
    rows, rows_dst, h_dst = _rows(layer, inputs.operands, num_dst)
    out = attend({"rows": rows.flatten(1), "a_src": (rows * layer.attn_l).sum(-1),
                  "a_dst": (rows_dst * layer.attn_r).sum(-1),
                  **_edge_terms(layer, inputs.operands.edge_feat)}).view(num_dst, h, c)
    if layer.res_fc is not None:
        out = out + layer.res_fc(h_dst).view(num_dst, -1, c)
    if layer.bias is not None:
        out = out + layer.bias.view(1, h, c)
    return layer.activation(out) if layer.activation else out


def _rows(layer: Any, given: _Operands, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mapped rows of sources and of destinations, and the destinations' features before the
    map."""
    h, c, modules = layer._num_heads, layer._out_feats, layer._modules
    drop, one = modules["feat_drop"], modules.get("fc")
    fc_src, fc_dst = modules.get("fc_src", one), modules.get("fc_dst", one)
    h_src = drop(given.x_src)
    if given.same or given.x_dst is None:
        rows = fc_src(h_src).view(h_src.shape[0], h, c)
        return (rows, rows, h_src) if given.same else (rows, rows[:num_dst], h_src[:num_dst])
    h_dst = drop(given.x_dst)
    return (fc_src(h_src).view(h_src.shape[0], h, c), fc_dst(h_dst).view(h_dst.shape[0], h, c),
            h_dst)


def _edge_terms(layer: Any, edge_feat: Tensor) -> dict[str, Tensor]:
    """<fc_edge(edge_feat), attn_edge> as one product with the folded weight, and the messages'
    operands."""
    weight = layer.fc_edge.weight
    folded = (weight.view(*layer.attn_edge.shape[1:],
                          -1) * layer.attn_edge.squeeze(0).unsqueeze(-1)).sum(1)
    return {"a_edge": F.linear(edge_feat, folded), "edges": edge_feat, "w_edge": turned(weight)}
