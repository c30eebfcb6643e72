"""RelGraphConv as a Program: RGCN that sums, with a weight for each edge where the call brings
one."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import calls, guards, layout
from gnnaccel.adapters.calls import bind, without_autocast
from gnnaccel.adapters.dgl import graphs
from gnnaccel.adapters.dgl.layers import typed_weights
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import added, statements
from gnnaccel.dispatch.relational.prepare import RootTerm
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec, shapes_of

FIELDS: tuple[str, ...] = ()


class _Operands(NamedTuple):
    """``norm``: [E, 1] if there is one."""

    feat: Tensor
    norm: Tensor | None
    num_dst: int


def state(layer: Any, args: tuple,
          kwargs: dict) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    # a promise that nothing here needs
    kwargs = {name: value for name, value in kwargs.items() if name != "presorted"}
    bound = bind(args, kwargs, ("g", "feat", "etypes"), ("norm",))
    if bound is None:
        return reason("GA206", "the arguments do not fit RelGraphConv.forward")
    g, feat, etypes, norm = bound
    typed = layer.linear_r
    why = (guards.parametrized_reason(layer) or typed_weights.module_reason(typed, "linear_r")
           or guards.features_reason(feat, "feat"))
    why = why or typed_weights.shapes_reason(typed, "linear_r", feat) or _root_reason(layer)
    if why is not None:
        return why
    typed_edges = graphs.typed(g, etypes, feat.device)
    if type(typed_edges) is Reason:
        return typed_edges
    src, dst, edges = typed_edges[0].num_src, typed_edges[0].num_dst, etypes.shape[0]
    if feat.shape[0] != src:
        return reason("GA206", f"feat has {feat.shape[0]} rows for {src} nodes")
    if layer.self_loop and src < dst:  # the host then adds one row to all, or raises
        return reason("GA206", f"{dst} destinations have self loops, of {src} sources")
    # where the host's messages look for it
    norm = g.edata["norm"] if norm is None and "norm" in g.edata else norm
    why = None if norm is None else _norm_reason(norm, edges, feat.device)
    if why is not None:
        return why
    structure: Any
    structure, row = (typed_edges[0].edge_index, etypes), _row(feat, norm)
    program = statements.rgcn(False, typed_weights.has_bases(typed), False, norm is not None)
    shapes = shapes_of(program, _inputs(layer, feat, norm))
    view = layout.viewer(structure, src, dst, typed.num_types)
    # block-diagonal weights and others have little in common in cost
    native = "dgl.RelGraphConv bdd" if typed.regularizer == "bdd" else "dgl.RelGraphConv"
    root = RootTerm(typed.in_size if layer.self_loop else 0, typed.out_size, 1, bool(layer.bias),
                    False)
    spec = RelationalSpec(program, native, shapes, row, row, src, dst, edges, typed.num_types,
                          view, rows_grad=feat.requires_grad,
                          beside=None if layer.layer_norm else root)
    return spec, RelationalInputs(structure, feat.device, _Operands(feat, norm, dst))


def reads(layer: Any, args: tuple, kwargs: dict) -> tuple:
    """Whether the edges have weights of their own, which count where the call brings none; and the
    path of the map by type, whose weights are read in its place."""
    return "norm" in (args[0] if args else kwargs["g"]).edata, typed_weights.path()


def _root_reason(layer: Any) -> Reason | None:
    """Why a parameter that `_finish` adds is missing, although the layer's options ask for it."""
    for option, name in ((layer.self_loop, "loop_weight"), (layer.bias, "h_bias")):
        if option and getattr(layer, name) is None:
            return reason("GA206", f"{name} is None")
    return None


def _norm_reason(norm: Any, edges: int, device: torch.device) -> Reason | None:
    if type(norm) not in (Tensor, torch.nn.Parameter) or norm.layout != torch.strided:
        return reason("GA206", f"norm is a {type(norm).__name__}")
    if norm.shape != (edges, 1) or norm.device != device:
        return reason("GA206",
                      f"norm is {list(norm.shape)} on {norm.device} for {edges} edges on {device}",
                      "pass norm of shape [E, 1]")
    return reason("GA203", f"norm is {norm.dtype}") if norm.is_complex() else None


def _row(feat: Tensor, norm: Tensor | None) -> torch.dtype:
    """The dtype of the host's messages, and so of their sums. Weights widen them."""
    row = calls.mapped(feat)
    return (row if norm is None
            or typed_weights.narrows(feat) else torch.promote_types(row, norm.dtype))


def _inputs(layer: Any, feat: Tensor, norm: Tensor | None) -> dict[str, Tensor]:
    """The Program's operands by name."""
    return dict(x=feat, **typed_weights.operands(layer.linear_r),
                **({} if norm is None else dict(norm=norm.view(-1))))


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any) -> Tensor:
    feat, norm, num_dst = inputs.operands
    own = feat if feat.shape[0] == num_dst else feat[:num_dst]
    root, bias = (layer.loop_weight if layer.self_loop else None,
                  layer.h_bias if layer.bias else None)
    whole = (not layer.layer_norm
             and added.fits(spec.out, layer.linear_r.out_size, feat, root, bias))
    root_and_bias = added.of_one_type(own, root, bias, num_dst) if whole else {}
    with without_autocast(feat.device.type):
        h = attend({**{name: t.to(spec.row) for name, t in _inputs(layer, feat, norm).items()},
                    **root_and_bias})
    if not whole:
        h = _finish(layer, h, own, root, bias)
    if layer.activation:
        h = layer.activation(h)
    return layer.dropout(h)


def _finish(layer: Any, h: Tensor, own: Tensor, root: Tensor | None, bias: Tensor | None) -> Tensor:
    """The host's own steps after the messages."""
    if layer.layer_norm:
        h = layer.layer_norm_weight(h)
    if bias is not None:
        h = h + bias
    return h if root is None else h + own @ root
