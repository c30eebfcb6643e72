"""GATConv as a Program."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.adapters.guards import Shapes
from gnnaccel.adapters.pyg import calls, edges, guards
from gnnaccel.dispatch.distributed import state as active
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run import attention_bound

FIELDS = ("heads", "out_channels", "concat", "negative_slope", "dropout", "add_self_loops")
WATCHED = ("lin_edge",)
TURNS = True
LINEAR = ("lin",)
_MAPS = ("lin", "lin_src", "lin_dst", "lin_edge", "res")
_VECTORS = ("att_src", "att_dst", "att_edge")
ARGUMENTS = ("x", "edge_index"), ("edge_attr", "size", "return_attention_weights")
_again = calls.again(ARGUMENTS)
_FOLDED_FROM = 1 << 18  # numbers of the [E, H, C] rows of edges, from which on none are made


def state(layer: Any, x: Any, edge_index: Any, edge_attr: Any, size: Any,
          weights: Any) -> tuple[CallSpec, CallInputs] | Reason:
    if weights is not None:  # PyG before 2.8 returns them for False as well
        return reason("GA208", "attention weights were asked for",
                      "call the layer without return_attention_weights")
    pair = not isinstance(x, Tensor)
    if pair and not (isinstance(x, (tuple, list)) and len(x) == 2):
        return reason("GA206", f"x is a {type(x).__name__}")
    x_src, x_dst = x if pair else (x, x)
    modules = layer._modules  # past `Module.__getattr__`
    why = (guards.features_reason(x_src)
           or (guards.features_reason(x_dst, "x[1]")
               if x_dst is not None and x_dst is not x_src else None)
           or guards.lazy_reason(*map(modules.get, _MAPS)))
    if why is not None:
        return why
    num_src = x_src.shape[0]
    num_dst = x_dst.shape[0] if x_dst is not None else size[1] if size is not None else num_src
    if size is not None and (num_dst is None or tuple(size) != (num_src, num_dst)):
        return reason("GA206",
                      f"size={tuple(size)} does not fit features of {num_src} and {num_dst} nodes")
    plain = edges.plain(edge_index, num_src, num_dst, x_src.device)
    if type(plain) is Reason:
        return plain
    edge = edge_attr is not None and modules.get("lin_edge") is not None
    why = guards.edge_reason(edge_attr, plain.shape[1], x_src) if edge_attr is not None else None
    if why is not None:
        return why
    # the host maps each of a pair, which only for a plain map gives the same
    same = modules.get("lin") is not None and (
        x_src is active.leading
        or x_src is x_dst and (not pair or guards.plain_linear(modules["lin"])))
    row, out = calls.dtypes(x_src, *[guards.declared(layer, name)
                                     for name in (_VECTORS if edge else _VECTORS[:2])])
    program = programs.gat(layer.negative_slope, layer.dropout if layer.training else 0.0, same,
                           x_dst is not None, edge, calls.bias_inside(layer, out))
    spec = CallSpec(program, "GATConv", layer.heads, layer.out_channels, row, out, num_src,
                    num_dst, plain.shape[1], min(num_src, num_dst) if layer.add_self_loops else 0,
                    calls.exposed(layer))
    return spec, CallInputs(x_src, x_dst, plain, edge_attr if edge else None, (pair,))


def shapes(layer: Any, inputs: CallInputs) -> Shapes:
    vectors = _VECTORS if layer._modules.get("lin_edge") is not None else _VECTORS[:2]
    return calls.shapes(layer, _MAPS[:-1], vectors)


def again(layer: Any, args: tuple, kwargs: dict, kept: None) -> CallInputs:
    inputs = _again(layer, args, kwargs, kept)
    return inputs if layer.lin_edge is not None else inputs._replace(edge_attr=None)


resized = calls.resized(again)


def run(layer: Any, spec: CallSpec, inputs: CallInputs, attend: Any) -> Tensor:
    h, c, modules = spec.heads, spec.width, layer._modules
    x_src, x_dst = inputs.x_src, inputs.x_dst
    residual = (modules["res"](x_dst) if modules.get("res") is not None
                and x_dst is not None else None)
    shared = modules.get("lin") is not None
    tensors = {"x": calls.rows(modules["lin" if shared else "lin_src"], x_src, h, c),
               "att_src": calls.parameter(layer, "att_src")}
    if x_dst is not None:
        tensors["att_dst"] = calls.parameter(layer, "att_dst")
        if spec.program.has_input("x_dst"):
            tensors["x_dst"] = calls.rows(modules["lin" if shared else "lin_dst"], x_dst, h, c)
    if inputs.edge_attr is not None:
        tensors["a_edge"] = _edge_term(layer, spec, inputs)
    biased = spec.program.has_input("bias")
    if biased:
        tensors["bias"] = calls.parameter(layer, "bias")
    return calls.finish(layer, attend(tensors), residual, biased)


def bind(layer: Any, call: Any) -> Any:
    """A plain call bound to the layer's weights, which the signature knows by identity; None where
    only `run` can do it."""
    lin, own = layer._modules.get("lin"), layer._parameters
    if not (layer.concat and guards.plain_linear(lin) and layer._modules.get("res") is None
            and lin.bias is None):
        return None
    tensors = [lin._parameters.get("weight"), own.get("att_src"), own.get("att_dst")]
    biased = call.program.has_input("bias")
    tensors += [own.get("bias")] if biased else []
    for t in tensors:
        if type(t) is not torch.nn.Parameter:
            return None
    if (calls.parameter(layer, "bias") is None) is biased:
        return None
    return attention_bound.bind(call, attention_bound.Weights(*tensors))


def _edge_term(layer: Any, spec: CallSpec, inputs: CallInputs) -> Tensor:
    """[E + loops, H]: <lin_edge(edge_attr), att_edge>. Where nobody watches lin_edge and there are
    many edges, one product with the folded weight: the [E, H, C] rows between are never made.
    Where there are few, as the host computes it: its sums over edges round less."""
    h, c, plain = layer.heads, layer.out_channels, guards.plain_linear(layer.lin_edge)
    attr: Any = inputs.edge_attr
    looped = (inputs.edge_index, spec.loops, layer.fill_value)
    if not plain or layer.lin_edge.bias is not None:
        rows = edges.mapped(layer.lin_edge, attr, *looped, plain)
        # an unknown map must give as many rows as there are edges, else this raises
        return (rows.view(spec.num_edges + spec.loops, h, c) * layer.att_edge).sum(-1)
    attr = edges.with_loops(attr, *looped)
    if attr.dim() == 1:
        attr = attr.view(-1, 1)
    cast = torch.is_autocast_enabled(attr.device.type)  # else torch refuses other dtypes
    with calls.without_autocast(attr.device.type):
        weight, att = layer.lin_edge.weight, layer.att_edge
        attr = attr.to(weight.dtype) if cast else attr
        if attr.shape[0] * h * c < _FOLDED_FROM:
            return (F.linear(attr, weight).view(-1, h, c) * att).sum(-1)
        return F.linear(attr, (weight.view(h, c, -1) * att.view(h, c, 1)).sum(1))
