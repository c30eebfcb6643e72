"""HGTConv as a Program between its maps by node type, which stay the host's own, but on CUDA where
they are plain."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import calls, guards, layout
from gnnaccel.adapters.calls import bind, without_autocast
from gnnaccel.adapters.dgl import graphs
from gnnaccel.adapters.dgl.layers import typed_weights
from gnnaccel.adapters.guards import Shapes
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import by_type, statements
from gnnaccel.dispatch.relational.pairs import Typed
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec

ONE_DTYPE = True
FIELDS = ("num_heads", "head_size", "sqrt_d")


class _Operands(NamedTuple):
    """``x_dst``, ``dst_type``: of the destinations; ``presorted``: a promise that the host's maps
    by node type may rely on."""

    x: Tensor
    ntype: Tensor
    x_dst: Tensor
    dst_type: Tensor
    presorted: bool


def state(layer: Any, args: tuple,
          kwargs: dict) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    kwargs = dict(kwargs)
    presorted = kwargs.pop("presorted", False)
    bound = bind(args, kwargs, ("g", "x", "ntype", "etype"), ())
    if bound is None:
        return reason("GA206", "the arguments do not fit HGTConv.forward")
    g, x, ntype, etype = bound
    why = (guards.parametrized_reason(layer) or _modules_reason(layer) or guards.features_reason(x)
           or typed_weights.shapes_reason(layer.linear_k, "linear_k", x))
    if why is not None:
        return why
    typed = graphs.typed(g, etype, x.device)
    if type(typed) is Reason:
        return typed
    row, src, dst = calls.mapped(x), typed[0].num_src, typed[0].num_dst
    edges = etype.shape[0]
    why = guards.types_reason(ntype, x, "ntype")
    if why is not None:
        return why
    operands = (_Operands(x, ntype, x[:dst], ntype[:dst], presorted)
                if g.is_block else _Operands(x, ntype, x, ntype, presorted))
    if (x.shape[0], operands.x_dst.shape[0]) != (src, dst):
        return reason("GA206", f"x has {x.shape[0]} rows for {src} sources and {dst} destinations")
    heads, width, count = layer.num_heads, layer.head_size, layer.relation_att[0].num_types
    program = statements.hgt(1 / layer.sqrt_d, heads)
    structure: tuple = typed[0].edge_index, etype
    view = layout.viewer(structure, src, dst, count)
    spec = RelationalSpec(program, "dgl.HGTConv", statements.hgt_shapes(heads, width), row,
                          _out(layer, row, x), src, dst, edges, count, view, heads=heads,
                          width=width)
    return spec, RelationalInputs(structure, x.device, operands)


def reads(layer: Any, args: tuple, kwargs: dict) -> Any:
    """The path of maps by type, whose weights are read in their place."""
    return typed_weights.path()


def _modules_reason(layer: Any) -> Reason | None:
    """Why the layer's parts are not the host's own. The maps by node type are called, so they may
    be watched."""
    for name in ("linear_k", "linear_q", "linear_v"):
        module = getattr(layer, name)
        if not typed_weights.is_typed_linear(module):
            return reason("GA208", f"{name} is a {type(module).__name__}, not a TypedLinear")
    for name in ("relation_att", "relation_msg"):
        if len(getattr(layer, name)) != layer.num_heads:
            return reason("GA208", f"{name} are not {layer.num_heads} maps")
        for at, module in enumerate(getattr(layer, name)):
            why = typed_weights.module_reason(module, f"{name}[{at}]")
            if why is not None or module.regularizer is not None:
                return why or reason("GA208", f"{name} have a regularizer")
    if len(layer.relation_pri) != layer.num_heads or not guards.ordinary(layer.relation_pri):
        return reason("GA208", "relation_pri are not one Parameter for each head")
    return None


def shapes(layer: Any, inputs: RelationalInputs) -> Shapes:
    heads, width, count = layer.num_heads, layer.head_size, layer.relation_att[0].num_types
    maps = [f"{name}.{at}.W" for name in ("relation_att", "relation_msg") for at in range(heads)]
    return {**dict.fromkeys(maps, (count, width, width)),
            **dict.fromkeys([f"relation_pri.{at}" for at in range(heads)], (count,))}


def _out(layer: Any, row: torch.dtype, x: Tensor) -> torch.dtype:
    """The dtype of the host's sums: the priors widen scores, and so messages."""
    for prior in () if typed_weights.narrows(x) else layer.relation_pri:
        row = torch.promote_types(row, prior.dtype)
    return row


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any) -> Tensor:
    x, ntype, x_dst, dst_type, presorted = inputs.operands
    if attend.kernels and _maps_are_plain(layer, spec, inputs.operands):
        return _run_by_kernels(layer, spec, inputs, attend)
    h = _attended(layer, spec, inputs, attend, layer.linear_k(x, ntype, presorted),
                  layer.linear_q(x_dst, dst_type, presorted), layer.linear_v(x, ntype, presorted))
    return _finish(layer, layer.drop(layer.linear_a(h, dst_type, presorted)), x_dst, dst_type)


def _attended(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any,
              keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    """[destinations, channels]: the messages' sums."""
    width = spec.heads * spec.width  # of maps that nobody knows
    with without_autocast(inputs.device.type):
        tensors = dict(keys=keys.view(spec.num_src, width),
                       queries=queries.view(spec.num_dst, width),
                       values=values.view(spec.num_src, width),
                       w_att=_by_head(layer.relation_att), w_msg=_by_head(layer.relation_msg))
        tensors = {name: t.to(spec.row) for name, t in tensors.items()}
        return attend({**tensors, "p": torch.stack(list(layer.relation_pri), 1)}).flatten(1)


def _maps_are_plain(layer: Any, spec: RelationalSpec, operands: _Operands) -> bool:
    """Whether the maps by node type can run as products by segment: one matrix per type and nothing
    else, of one dtype; and what is added to the last has a number for each of its channels."""
    maps = [getattr(layer, name) for name in ("linear_k", "linear_q", "linear_v", "linear_a")]
    if not typed_weights.all_plain(maps):
        return False
    count, width = layer.skip.shape[0], layer.num_heads * layer.head_size
    channels = operands.x.shape[1]
    shapes = [(count, channels, width)] * 3 + [(count, width, width)]
    dtypes = {spec.row, spec.out, operands.x.dtype, layer.skip.dtype,
              *[module.W.dtype for module in maps]}
    return (layer.skip.dim() == 1 and len(dtypes) == 1
            and (channels == width or layer.residual_w.shape == (channels, width))
            and [tuple(module.W.shape) for module in maps] == shapes)


def _run_by_kernels(layer: Any, spec: RelationalSpec, inputs: RelationalInputs,
                    attend: Any) -> Tensor:
    x, ntype, x_dst, dst_type, presorted = inputs.operands
    attend.build(torch.is_grad_enabled() and layer.linear_k.W.requires_grad)
    blocks = _typed(layer, ntype)
    ends = blocks if dst_type is ntype else _typed(layer, dst_type)
    key, query, value = [getattr(layer, name).W for name in ("linear_k", "linear_q", "linear_v")]
    if x_dst is x:
        rows, keys, queries, values = by_type.project(blocks, torch.stack([key, query, value], 1),
                                                      False, None, [x])
    else:
        _, keys, values = by_type.project(blocks, torch.stack([key, value], 1), False, None, [x])
        rows, queries = by_type.project(ends, query.unsqueeze(1), False, None, [x_dst])
    h = _attended(layer, spec, inputs, attend, keys, queries, values)
    matrix, nodes = layer.linear_a.W, (x_dst.shape[0],)
    if layer.training and layer.drop.p > 0 or not guards.plain(layer.drop, torch.nn.Dropout):
        mapped, = by_type.finish(ends, nodes, h, matrix, False, None, None, None, gelu=False)
        return _finish(layer, layer.drop(mapped), x_dst, dst_type)
    skipped = rows if x_dst.shape[1] == h.shape[1] else x_dst @ layer.residual_w
    result, = by_type.finish(ends, nodes, h, matrix, False, None, layer.skip.sigmoid(), skipped,
                             gelu=False)
    return layer.norm(result) if layer.use_norm else result


def _typed(layer: Any, types: Tensor) -> Typed:
    """The nodes by type, kept with the tensor of their types."""
    count = layer.skip.shape[0]
    return cache.lookup_many((types,), ("node types", count), lambda own: Typed(types, count))[0]


def _by_head(modules: Any) -> Tensor:
    """[relations, heads, D, D]."""
    return torch.stack([module.W for module in modules], 1)


def _finish(layer: Any, h: Tensor, x_dst: Tensor, dst_type: Tensor) -> Tensor:
    """The host's steps after the last map: the gated skip and the norm."""
    alpha = torch.sigmoid(layer.skip[dst_type]).unsqueeze(-1)
    skipped = x_dst @ layer.residual_w if x_dst.shape != h.shape else x_dst
    h = h * alpha + skipped * (1 - alpha)
    return layer.norm(h) if layer.use_norm else h
