"""HEATConv as a Program."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.adapters.guards import Shapes
from gnnaccel.adapters.pyg import calls, guards
from gnnaccel.adapters.pyg.hetero import relations
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import statements
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec

ONE_DTYPE = True
FIELDS = ("heads", "out_channels", "negative_slope", "dropout")
ARGUMENTS = ("x", "edge_index", "node_type", "edge_type"), ("edge_attr",)
#: options of an embedding that change its weights or their gradient
_EMBEDDING = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")


def state(layer: Any, x: Any, edge_index: Any, node_type: Any, edge_type: Any,
          edge_attr: Any) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    why = (guards.features_reason(x) or guards.parametrized_reason(layer)
           or guards.lazy_reason(layer.edge_attr_emb, layer.att, layer.lin)
           or _modules_reason(layer))
    if why is not None:
        return why
    if torch.is_autocast_enabled(x.device.type):
        return reason("GA203", "autocast is on", "call the layer outside of autocast")
    nodes = x.shape[0]
    structure = relations.plain(edge_index, edge_type, nodes, nodes, x.device)
    if type(structure) is Reason:
        return structure
    if edge_attr is None:
        return reason("GA206", "edge_attr is missing")
    why = guards.edge_reason(edge_attr, structure[0].shape[1], x)
    if why is not None or edge_attr.dim() != 2:
        return why or reason("GA206", f"edge_attr has {edge_attr.dim()} dimensions")
    h, width, types = layer.heads, layer.out_channels, layer.edge_type_emb.num_embeddings
    program = statements.heat(layer.negative_slope, layer.dropout if layer.training else 0.0, h)
    k = layer.edge_attr_emb.out_channels + (layer.lin.bias is not None)
    shapes = (("rows", (width,)), ("a_src", (h,)), ("a_dst", (h,)), ("a_rel", (h,)),
              ("a_edge", (h,)), ("edges", (k,)), ("w_edge", (k, width)))
    spec = RelationalSpec(program, "HEATConv", shapes, x.dtype, x.dtype, nodes, nodes,
                          structure[0].shape[1], types,
                          relations.viewer(structure, nodes, nodes, types))
    return spec, RelationalInputs(structure, x.device, (x, node_type, edge_attr))


def reads(layer: Any, args: tuple, kwargs: dict) -> tuple:
    """Values that the route depends on beside the layer's own attributes and the arguments."""
    emb = layer.edge_type_emb
    return (getattr(emb, "num_embeddings", None),
            None if emb is None else tuple(map(emb.__dict__.get, _EMBEDDING)),
            getattr(layer.edge_attr_emb, "out_channels", None))


def again(layer: Any, args: tuple, kwargs: dict, kept: None) -> RelationalInputs:
    x, edge_index, node_type, edge_type, edge_attr = calls.bound(args, kwargs, *ARGUMENTS)
    return RelationalInputs((edge_index, edge_type), x.device, (x, node_type, edge_attr))


def resized(layer: Any, args: tuple, kwargs: dict, spec: RelationalSpec,
            kept: None) -> tuple[RelationalSpec, RelationalInputs] | None:
    inputs = again(layer, args, kwargs, kept)
    x, _, edge_attr = inputs.operands
    return relations.resized(spec, inputs, x, x, edge_attr)


def _modules_reason(layer: Any) -> Reason | None:
    """Why the layer's maps are not those that it has by default: they are taken apart, so they must
    be."""
    for name in ("att", "lin"):
        module = layer._modules[name]
        if not guards.plain_linear(module):
            return reason("GA208", f"{name} is a {type(module).__name__}, or has hooks or a "
                          "weight of another type", f"use the layer's own {name}")
    if layer.att.bias is not None:
        return reason("GA208", "att has a bias", "use the layer's own att")
    if not isinstance(getattr(layer.edge_attr_emb, "out_channels", None), int):
        return reason("GA208", "edge_attr_emb does not say how wide its result is",
                      "give the module in its place the attribute out_channels")
    emb = layer.edge_type_emb
    if not guards.plain(emb, torch.nn.Embedding) or any(
            option is not None and option is not False
            for option in map(emb.__dict__.get, _EMBEDDING)):
        return reason("GA208", "edge_type_emb is not a plain embedding",
                      "use the layer's own edge_type_emb")
    return None


def shapes(layer: Any, inputs: RelationalInputs) -> Shapes:
    width, k, emb = layer.out_channels, layer.edge_attr_emb.out_channels, layer.edge_type_emb
    by_name: Shapes = {"att.weight": (layer.heads, 2 * width + emb.embedding_dim + k),
                       "lin.weight": (width, width + k),
                       "edge_type_emb.weight": (emb.num_embeddings, emb.embedding_dim)}
    return by_name if layer.lin.bias is None else {**by_name, "lin.bias": (width,)}


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any) -> Tensor:
    x, node_type, edge_attr = inputs.operands
    width, h, slope = layer.out_channels, layer.heads, layer.negative_slope
    x = layer.hetero_lin(x, node_type)
    edge = F.leaky_relu(layer.edge_attr_emb(edge_attr), slope)
    kinds = F.leaky_relu(layer.edge_type_emb.weight, slope)
    to_dst, to_src, to_kind, to_edge = layer.att.weight.split([width, width, kinds.shape[1],
                                                               edge.shape[1]], dim=1)
    from_rows, from_edges = layer.lin.weight.split([width, edge.shape[1]], dim=1)
    w_edge, edges = from_edges.t(), edge
    if layer.lin.bias is not None:  # a channel of ones carries the bias through the weighted sum
        w_edge = torch.cat([w_edge, layer.lin.bias.unsqueeze(0)])
        edges = torch.cat([edge, edge.new_ones(edge.shape[0], 1)], 1)
    out = attend({"rows": F.linear(x, from_rows), "a_src": F.linear(x, to_src),
                  "a_dst": F.linear(x, to_dst), "a_rel": F.linear(kinds, to_kind),
                  "a_edge": F.linear(edge, to_edge), "edges": edges, "w_edge": w_edge})
    out = out.view(-1, h, width)
    if not layer.concat:
        out = out.mean(dim=1)
        return out + x if layer.root_weight else out
    if layer.root_weight:
        out = out + x.view(-1, 1, width)
    return out.reshape(-1, h * width)
