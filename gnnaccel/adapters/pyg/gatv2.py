"""GATv2Conv as a Program."""
from __future__ import annotations

from typing import Any

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
        return reason("GA206", "the arguments do not fit GATv2Conv.forward")
    x, edge_index, edge_attr, weights = bound
    if weights:
        return reason("GA208", "attention weights were asked for", "call the layer without return_attention_weights")
    pair = not isinstance(x, Tensor)
    if pair and not (isinstance(x, (tuple, list)) and len(x) == 2):
        return reason("GA206", f"x is a {type(x).__name__}")
    x_l, x_r = x if pair else (x, x)
    why = (guards.features_reason(x_l) or guards.features_reason(x_r, "x[1]")
           or guards.lazy_reason(layer.lin_l, layer.lin_r, layer.lin_edge, layer.res))
    if why is not None:
        return why
    plain = edges.plain(edge_index, x_l.shape[0], x_r.shape[0], x_l.device)
    if type(plain) is Reason:
        return plain
    if edge_attr is not None:
        why = guards.edge_reason(edge_attr, plain.shape[1], x_l)
        if why is not None or layer.lin_edge is None:
            return why or reason("GA206", "edge_attr was given to a layer without edge_dim")
    row, out = calls.dtypes(x_l, layer.att)
    program = programs.gatv2(layer.negative_slope, layer.dropout if layer.training else 0.0, edge_attr is not None)
    return Stated(program, "GATv2Conv", layer.heads, layer.out_channels, row, out, plain, x_l.shape[0], x_r.shape[0],
                  min(x_l.shape[0], x_r.shape[0]) if layer.add_self_loops else 0, calls.exposed(layer),
                  dict(x_l=x_l, x_r=x_r, pair=pair, edge_attr=edge_attr))


def run(layer: Any, stated: Stated, attend: Any) -> Tensor:
    h, c, given = layer.heads, layer.out_channels, stated.host
    residual = layer.res(given["x_r"]) if layer.res is not None else None
    keys = layer.lin_l(given["x_l"]).view(-1, h, c)
    shared = layer.share_weights and not given["pair"]
    tensors = {"keys": keys, "queries": keys if shared else layer.lin_r(given["x_r"]).view(-1, h, c), "att": layer.att}
    if given["edge_attr"] is not None:
        attr = edges.with_loops(given["edge_attr"], stated.edge_index, stated.loops, layer.fill_value)
        tensors["edges"] = layer.lin_edge(attr.view(-1, 1) if attr.dim() == 1 else attr).view(-1, h, c)
    return calls.finish(layer, attend(tensors), residual)
