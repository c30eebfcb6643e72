"""GATv2Conv as a Program."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from gnnaccel.adapters.calls import rows
from gnnaccel.adapters.guards import Shapes
from gnnaccel.adapters.pyg import calls, edges, guards
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason

FIELDS = ("heads", "out_channels", "concat", "negative_slope", "dropout", "add_self_loops",
          "share_weights")
WATCHED = ()
TURNS = True
ARGUMENTS = ("x", "edge_index"), ("edge_attr", "return_attention_weights")
again = calls.again(ARGUMENTS)
resized = calls.resized(again)


def state(layer: Any, x: Any, edge_index: Any, edge_attr: Any,
          weights: Any) -> tuple[CallSpec, CallInputs] | Reason:
    if weights is not None:  # PyG before 2.8 returns them for False as well
        return reason("GA208", "attention weights were asked for",
                      "call the layer without return_attention_weights")
    pair = not isinstance(x, Tensor)
    if pair and not (isinstance(x, (tuple, list)) and len(x) == 2):
        return reason("GA206", f"x is a {type(x).__name__}")
    x_l, x_r = x if pair else (x, x)
    why = (guards.features_reason(x_l) or guards.features_reason(x_r, "x[1]")
           or guards.lazy_reason(layer.lin_l, layer.lin_r, layer.lin_edge,
                                 getattr(layer, "res", None)))
    if why is not None:
        return why
    plain = edges.plain(edge_index, x_l.shape[0], x_r.shape[0], x_l.device)
    if type(plain) is Reason:
        return plain
    if edge_attr is not None:
        why = guards.edge_reason(edge_attr, plain.shape[1], x_l)
        if why is not None or layer.lin_edge is None:
            return why or reason("GA206", "edge_attr was given to a layer without edge_dim")
    row, out = calls.dtypes(x_l, guards.declared(layer, "att"))
    program = programs.gatv2(layer.negative_slope, layer.dropout if layer.training else 0.0,
                             edge_attr is not None, calls.bias_inside(layer, out))
    spec = CallSpec(program, "GATv2Conv", layer.heads, layer.out_channels, row, out, x_l.shape[0],
                    x_r.shape[0], plain.shape[1],
                    min(x_l.shape[0], x_r.shape[0]) if layer.add_self_loops else 0,
                    calls.exposed(layer))
    return spec, CallInputs(x_l, x_r, plain, edge_attr, (pair,))


def shapes(layer: Any, inputs: CallInputs) -> Shapes:
    return calls.shapes(layer, ("lin_l", "lin_r", "lin_edge"), ("att",))


def run(layer: Any, spec: CallSpec, inputs: CallInputs, attend: Any) -> Tensor:
    h, c, modules = spec.heads, spec.width, layer._modules
    residual = modules["res"](inputs.x_dst) if modules.get("res") is not None else None
    left, right, edge = modules["lin_l"], modules["lin_r"], modules.get("lin_edge")
    plain, (pair,) = guards.plain_linears((left, right, edge)) is not None, inputs.extra
    keys = rows(left, inputs.x_src, h, c, plain)
    # for one tensor the host asks no lin_r, whatever it is; of a pair it maps each
    shared = inputs.x_src is inputs.x_dst and ((layer.share_weights and not pair)
                                               or (left is right and plain))
    queries = (keys if shared else
               rows(right, inputs.x_dst, h, c, plain))  # type: ignore[arg-type]  # both
    tensors = {"keys": keys, "queries": queries, "att": calls.parameter(layer, "att")}
    if inputs.edge_attr is not None:
        edge_rows = edges.mapped(edge, inputs.edge_attr, inputs.edge_index, spec.loops,
                                 layer.fill_value, plain)
        tensors["edges"] = edge_rows.view(spec.num_edges + spec.loops, h, c)
    biased = spec.program.has_input("bias")
    if biased:
        tensors["bias"] = layer.bias
    return calls.finish(layer, attend(tensors), residual, biased)
