"""TransformerConv as a Program."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnaccel.adapters.calls import ordinary_weight, rows as plain_rows
from gnnaccel.adapters.guards import Shapes, of_heads
from gnnaccel.adapters.pyg import calls, edges, guards
from gnnaccel.cuda.runtime.launch import MAX_WIDTH
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run import skinny_matmul
from gnnaccel.dispatch.run.attention_folded import Folded

if TYPE_CHECKING:
    class _Both(CallInputs):
        x_dst: Tensor

ONE_DTYPE = True
FIELDS = ("heads", "out_channels", "concat", "dropout", "root_weight")
WATCHED = ("lin_query", "lin_key", "lin_value", "lin_skip")
TURNS = True
_MAPS = ("lin_key", "lin_query", "lin_value", "lin_edge", "lin_skip")
ARGUMENTS = ("x", "edge_index"), ("edge_attr", "return_attention_weights")
again = calls.again(ARGUMENTS)
resized = calls.resized(again)


def state(layer: Any, x: Any, edge_index: Any, edge_attr: Any,
          weights: Any) -> tuple[CallSpec, CallInputs] | Reason:
    if isinstance(weights, bool):
        return reason("GA208", "attention weights were asked for",
                      "call the layer without return_attention_weights")
    if not isinstance(x, Tensor) and not (isinstance(x, (tuple, list)) and len(x) == 2):
        return reason("GA206", f"x is a {type(x).__name__}")
    x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
    modules = layer._modules  # past `Module.__getattr__`
    why = (guards.features_reason(x_src)
           or (guards.features_reason(x_dst, "x[1]") if x_dst is not x_src else None)
           or guards.lazy_reason(*map(modules.get, _MAPS)))
    if why is not None:
        return why
    plain = edges.plain(edge_index, x_src.shape[0], x_dst.shape[0], x_src.device)
    if type(plain) is Reason:
        return plain
    if (edge_attr is None) != (modules.get("lin_edge") is None):
        return reason("GA206",
                      "edge_attr was given to a layer without edge_dim, or not to one with it")
    why = guards.edge_reason(edge_attr, plain.shape[1], x_src) if edge_attr is not None else None
    if why is not None:
        return why
    row, out = calls.dtypes(x_src)
    dropout, scale = layer.dropout if layer.training else 0.0, 1.0 / math.sqrt(layer.out_channels)
    folded = edge_attr is None and _folds(layer, x_src, dropout)
    program = (programs.dot_product_shared(scale, dropout) if folded else
               programs.dot_product(scale, dropout, edge_attr is not None))
    width = x_src.shape[1] if folded else layer.out_channels
    exposed = bool(layer.concat) and not layer.root_weight and not folded
    spec = CallSpec(program, "TransformerConv", layer.heads, width, row, out, x_src.shape[0],
                    x_dst.shape[0], plain.shape[1], 0, exposed, folded)
    return spec, CallInputs(x_src, x_dst, plain, edge_attr)


def shapes(layer: Any, given: _Both) -> Shapes:
    source, target = given.x_src.shape[1], given.x_dst.shape[1]
    skip = ("lin_skip",) if layer.root_weight else ()
    return {**calls.shapes(layer, ("lin_key", "lin_value"), (), source),
            **calls.shapes(layer, ("lin_query",), (), target), **calls.shapes(layer, ("lin_edge",)),
            **of_heads(layer, layer.heads if layer.concat else 1, layer.out_channels, skip, (),
                       guards.plain_linear, target)}


def _folds(layer: Any, x: Tensor, dropout: float) -> bool:
    """Whether the maps of keys and values go to the destinations: one head, where gathering x once
    moves less than keys and values do, nobody watches those maps, and the softmax weights sum to
    one (which dropout ends)."""
    return (layer.heads == 1 and x.shape[1] < 2 * layer.out_channels and x.shape[1] <= MAX_WIDTH
            and not torch.is_autocast_enabled(x.device.type)
            and all(_plain(m, x) for m in (layer.lin_query, layer.lin_key, layer.lin_value))
            and (dropout == 0.0 or layer.lin_value.bias is None))


def _plain(module: Any, x: Tensor) -> bool:
    return guards.plain_linear(module) and ordinary_weight(module, x)


def _folded(modules: dict, given: _Both, skip: Any) -> Folded:
    maps = [modules["lin_query"], modules["lin_key"], modules["lin_value"],
            *([] if skip is None else [skip])]
    return Folded(given.x_src, given.x_dst,
                  *(p for m in maps for p in (m._parameters["weight"], m._parameters.get("bias"))))


def _attend_plain(modules: dict, h: int, c: int, given: _Both, attend: Any) -> Tensor:
    maps = modules["lin_key"], modules["lin_query"], modules["lin_value"]
    rows = plain_rows if guards.plain_linears(maps) is not None else calls.rows
    tensors = {"keys": rows(maps[0], given.x_src, h, c),
               "queries": rows(maps[1], given.x_dst, h, c),
               "values": rows(maps[2], given.x_src, h, c)}
    if given.edge_attr is not None:
        attr, lin = given.edge_attr, modules["lin_edge"]
        count = attr.shape[0]
        edge_rows = lin(attr) if count < skinny_matmul.TALL else edges.linear(lin, attr)
        tensors["edges"] = edge_rows.view(count, h, c)
    return attend(tensors)


def run(layer: Any, spec: CallSpec, given: _Both, attend: Any) -> Tensor:
    modules = layer._modules
    if spec.folded:
        gated = modules.get("lin_beta") is not None
        skip = (modules["lin_skip"] if layer.root_weight and not gated
                and _plain(modules["lin_skip"], given.x_dst) else None)
        out = attend(_folded(modules, given, skip))
        if skip is not None:
            return out
    else:
        out = _attend_plain(modules, spec.heads, spec.width, given, attend)
        out = out.flatten(1) if layer.concat else out.mean(dim=1)
    if not layer.root_weight:
        return out
    skip = modules["lin_skip"](given.x_dst)
    if modules.get("lin_beta") is None:
        return out + skip
    gate = modules["lin_beta"](torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
    return gate * skip + (1 - gate) * out
