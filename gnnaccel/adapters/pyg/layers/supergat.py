"""SuperGATConv as a Program. The self-supervised part of training, on sampled edges, stays the
layer's own."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.guards import Shapes
from gnnaccel.adapters.pyg import calls, edges, guards
from gnnaccel.adapters.pyg.propagate import kept_results
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.reasons import Reason

FIELDS = ("heads", "out_channels", "concat", "negative_slope", "dropout", "add_self_loops",
          "attention_type")
WATCHED = ()
TURNS = True
ARGUMENTS = ("x", "edge_index"), ("neg_edge_index", "batch")
_VECTORS = "att_l", "att_r"
_unused = [0]  # edges that were kept with loops since such edges were used again


def state(layer: Any, x: Any, edge_index: Any, negative: Any,
          batch: Any) -> tuple[CallSpec, CallInputs] | Reason:
    why = guards.features_reason(x) or guards.lazy_reason(layer.lin)
    if why is not None:
        return why
    nodes = x.shape[0]
    plain = edges.plain(edge_index, nodes, nodes, x.device)
    if type(plain) is Reason:
        return plain
    dropout = layer.dropout if layer.training else 0.0
    if _added(layer):
        program = programs.supergat_mx(layer.negative_slope, dropout)
        row, out = calls.dtypes(x, *[guards.declared(layer, name) for name in _VECTORS])
    else:
        program = programs.supergat_sd(1.0 / math.sqrt(layer.out_channels), layer.negative_slope,
                                       dropout)
        row, out = calls.dtypes(x)
    spec = CallSpec(program, "SuperGATConv", layer.heads, layer.out_channels, row, out, nodes,
                    nodes, plain.shape[1], nodes if layer.add_self_loops else 0,
                    calls.exposed(layer))
    return spec, CallInputs(x, x, plain, None, (negative, batch))


def shapes(layer: Any, inputs: CallInputs) -> Shapes:
    return calls.shapes(layer, ("lin",), _VECTORS if _added(layer) else ())


def _added(layer: Any) -> bool:
    """Whether products with attention vectors are added to scores."""
    return layer.attention_type == "MX"


def run(layer: Any, spec: CallSpec, inputs: CallInputs, attend: Any) -> Tensor:
    rows = layer.lin(inputs.x_src).view(spec.num_src, spec.heads, spec.width)
    tensors = {"keys": rows, "queries": rows}
    if _added(layer):
        tensors["c_src"], tensors["c_dst"] = (rows
                                              * layer.att_l).sum(-1), (rows * layer.att_r).sum(-1)
    out = attend(tensors)
    if layer.training:
        _supervise(layer, rows, inputs)
    return calls.finish(layer, out, None)


def _supervise(layer: Any, rows: Tensor, inputs: CallInputs) -> None:
    """Store the logits of sampled positive and negative edges where ``get_attention_loss`` reads
    them. The host asks for the logits of both kinds of edges one after the other."""
    edge_index, (negative, batch) = inputs.edge_index, inputs.extra or (None, None)
    nodes = rows.shape[0]
    if layer.add_self_loops:
        args = edge_index, nodes
        edge_index, = (kept_results.find("edges with self loops anew", _with_loops, args, {},
                                         unused=_unused) or _with_loops(*args))
    positive = layer.positive_sampling(edge_index)
    if negative is None:
        negative = layer.negative_sampling(edge_index, nodes, batch)
    src, dst = torch.cat([positive, negative], 1)
    layer.att_x = layer.get_attention(dst, rows.index_select(0, dst), rows.index_select(0, src),
                                      nodes, return_logits=True)
    layer.att_y = torch.zeros(layer.att_x.shape[0], dtype=layer.att_x.dtype, device=rows.device)
    layer.att_y[:positive.shape[1]] = 1.0


def _with_loops(edge_index: Tensor, num_nodes: int) -> tuple[Tensor]:
    """The edges as the layer makes them: without self loops, then one at each node."""
    from torch_geometric.utils import add_self_loops, remove_self_loops

    return (add_self_loops(remove_self_loops(edge_index)[0], num_nodes=num_nodes)[0],)
