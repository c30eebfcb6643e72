"""RGATConv as a Program."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.adapters.guards import Shapes
from gnnaccel.adapters.pyg import calls, guards
from gnnaccel.adapters.pyg.hetero import relations
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import added, statements
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec, shapes_of
from gnnaccel.dispatch.relational.view import RelationView

ONE_DTYPE = True
FIELDS = ("in_channels", "out_channels", "num_relations", "num_bases", "heads", "dim", "concat",
          "negative_slope", "dropout", "mod", "attention_mode", "attention_mechanism")
ARGUMENTS = ("x", "edge_index"), ("edge_type", "edge_attr", "size", "return_attention_weights")
MODS = ("additive", "scaled", "f-additive", "f-scaled")  # the host takes any other value for None


class _Operands(NamedTuple):
    """Tensors of a call. ``x_dst``: None where destinations are the sources; ``edge_attr``: None
    where there is none."""

    x: Tensor
    x_dst: Tensor | None
    edge_attr: Tensor | None
    edge_type: Tensor


def state(layer: Any, x: Any, edge_index: Any, edge_type: Any, edge_attr: Any, size: Any,
          weights: Any) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    if weights is not None:
        return reason("GA208", "attention weights were asked for",
                      "call the layer without return_attention_weights")
    why = guards.parametrized_reason(layer)
    if why is not None:
        return why
    pair = x if isinstance(x, (tuple, list)) else (x, x)
    if len(pair) != 2:
        return reason("GA206", f"x is a tuple of {len(pair)}")
    x_src, x_dst = pair
    device = layer.q.device
    why = (_features_reason(layer, x_src, "x", device)
           or _features_reason(layer, x_dst, "x[1]", device) or _module_reason(layer))
    if why is not None:
        return why
    sizes = x_src.shape[0], x_dst.shape[0]
    if (size is not None
        and (len(size) != 2 or any(length not in (None, n) for length, n in zip(size, sizes)))):
        return reason("GA206",
                      f"size={tuple(size)} does not fit features of {sizes[0]} and "
                      f"{sizes[1]} nodes")
    structure = relations.plain(edge_index, edge_type, *sizes, device)
    if type(structure) is Reason:
        return structure
    operands = _Operands(x_src, None if x_dst is x_src else x_dst, edge_attr, structure[1])
    why = _edge_reason(layer, operands) or _dtype_reason(layer, operands)
    if why is not None:
        return why
    return _stated(layer, operands, structure), RelationalInputs(structure, device, operands)


def again(layer: Any, args: tuple, kwargs: dict, kept: None) -> RelationalInputs:
    x, edge_index, edge_type, edge_attr = calls.bound(args, kwargs, *ARGUMENTS)[:4]
    x_src, x_dst = x if isinstance(x, tuple) else (x, x)
    return RelationalInputs((edge_index, edge_type), edge_index.device,
                            _Operands(x_src, None if x_dst is x_src else x_dst, edge_attr,
                                     edge_type))


def resized(layer: Any, args: tuple, kwargs: dict, spec: RelationalSpec,
            kept: None) -> tuple[RelationalSpec, RelationalInputs] | None:
    inputs = again(layer, args, kwargs, kept)
    x, x_dst, edge_attr, _ = inputs.operands
    return relations.resized(spec, inputs, x, x if x_dst is None else x_dst, edge_attr)


def _stated(layer: Any, operands: _Operands, found: tuple[Tensor, Tensor]) -> RelationalSpec:
    mod, product, per_head = (layer.mod, layer.attention_mode == "multiplicative-self-attention",
                              layer.dim)
    dropout = layer.dropout if layer.training and mod not in MODS else 0.0
    edge, same = operands.edge_attr is not None, operands.x_dst is None
    program = statements.rgat(layer.negative_slope, dropout, layer.num_bases is not None, edge,
                              layer.attention_mechanism == "within-relation", layer.heads, same,
                              mod if mod in ("additive", "f-additive") else None, product, per_head)
    tensors = _inputs(layer, operands)
    if edge:
        tensors["a_edge"] = layer.q.new_empty(0, layer.heads * per_head)  # for its shape
    row, out = calls.dtypes(operands.x, *_promoting(layer))
    num_src = operands.x.shape[0]
    num_dst = num_src if same else operands.x_dst.shape[0]  # type: ignore[union-attr]
    view = relations.viewer(found, num_src, num_dst, layer.num_relations)
    return RelationalSpec(program, "RGATConv", shapes_of(program, tensors), row, out, num_src,
                          num_dst, found[0].shape[1], layer.num_relations, view,
                          heads=layer.heads, width=layer.out_channels)


# --- parameters and arguments of the host's layer -------------------------------------------------

def _weights(layer: Any) -> dict[str, Tensor]:
    if layer.num_bases is not None:
        return {"comp": layer.att, "bases": layer.basis}
    return {"weight": layer.weight}


def _inputs(layer: Any, operands: _Operands) -> dict[str, Tensor]:
    """The Program's operands by name, without those made from edge features."""
    tensors = {"x": operands.x, **_weights(layer), "q": layer.q, "k": layer.k}
    if operands.x_dst is not None:
        tensors["x_dst"] = operands.x_dst
    if layer.mod == "additive":
        tensors["w"] = layer.w
    return tensors


def _promoting(layer: Any) -> tuple[Tensor, ...]:
    """Parameters that the host multiplies messages with, so that autocast has no say in the
    result."""
    return {"additive": (layer.w,), "scaled": (layer.b2,)}.get(layer.mod, ())


def _features_reason(layer: Any, x: Any, name: str, device: torch.device) -> Reason | None:
    # the host's own layer fails with ids, whatever its documentation says
    why = guards.features_reason(x, name)
    if why is None and x.device != device:
        return reason("GA206", f"{name} is on {x.device}, the weights on {device}")
    if why is None and x.shape[1] != layer.in_channels:
        return reason("GA206", f"{name} has {x.shape[1]} features, the layer {layer.in_channels}")
    return why


def _module_reason(layer: Any) -> Reason | None:
    activation = layer._modules.get("activation")
    if layer.mod == "scaled" and not guards.plain(activation, torch.nn.ReLU):
        # ours runs by node, not by edge
        return reason("GA205", f"the activation of the degrees is {activation}, or has hooks")
    return guards.lazy_reason(layer.lin_edge)


def shapes(layer: Any, inputs: RelationalInputs) -> Shapes:
    h, out, bases, blocks = layer.heads, layer.out_channels, layer.num_bases, layer.num_blocks
    vectors, maps = (h * out, h * layer.dim), (layer.in_channels, h * out)
    extra: Shapes = {"additive": {"w": (out,)}, "scaled": {  # type: ignore[assignment]  # of these
        "l1": (1, out), "b1": (1, out), "l2": (out, out)}}.get(layer.mod, {})
    if inputs.operands.edge_attr is not None:
        extra = {**extra, **calls.shapes(layer, ("lin_edge",)), "e": vectors}
    if bases is not None:
        weights: Shapes = {"att": (layer.num_relations, bases), "basis": (bases, *maps)}
    else:
        of_one = maps if blocks is None else (blocks, *(size // blocks for size in maps))
        weights = {"weight": (layer.num_relations, *of_one)}
    return {"q": vectors, "k": vectors, **weights, **extra}


def _edge_reason(layer: Any, operands: _Operands) -> Reason | None:
    """Why the edge features do not go with the features."""
    edge_type, edge_attr = operands.edge_type, operands.edge_attr
    if edge_attr is None:
        return None
    if layer.lin_edge is None:
        return reason("GA206", "there are edge features, but the layer has no edge_dim")
    return guards.edge_reason(edge_attr, edge_type.shape[0], operands.x)


def _dtype_reason(layer: Any, operands: _Operands) -> Reason | None:
    x, x_dst = operands.x, operands.x_dst
    autocast = torch.is_autocast_enabled(x.device.type)
    if x_dst is not None and x_dst.dtype != x.dtype and not autocast:
        return reason("GA203", f"x is {x.dtype} and {x_dst.dtype}")
    if autocast and x.is_cuda and layer.attention_mechanism == "within-relation":
        return reason("GA203", "within-relation attention under autocast",
                      "the host's own layer mixes dtypes there")
    return None


# --- running --------------------------------------------------------------------------------------

def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any) -> Tensor:
    operands, scaled, bias = inputs.operands, layer.mod in ("scaled", "f-scaled"), layer.bias
    tensors = _inputs(layer, operands)
    if operands.edge_attr is not None:
        tensors["a_edge"] = _edge_term(layer, operands)
    # the bias, where heads lie side by side
    inside = layer.concat is True and not scaled and added.fits(
        spec.out, layer.heads * layer.out_channels, None, None, bias)
    bias_operand = added.of_one_type(None, None, bias, spec.num_dst) if inside else {}
    with calls.without_autocast(inputs.device.type):
        out = attend({**{name: t if name == "w" else t.to(spec.row)
                         for name, t in tensors.items()}, **bias_operand})
    if scaled:
        out = out * _of_degree(layer, attend.graph, out)
    out = out.flatten(1) if layer.concat is True else out.mean(dim=1).flatten(1)
    layer._alpha = None  # as the host leaves it
    return out if inside or bias is None else out + bias


def _edge_term(layer: Any, operands: _Operands) -> Tensor:
    """[E, heads * dim]: lin_edge(edge_attr) @ e, as one product with the folded weight where nobody
    watches lin_edge: the rows [E, heads * width] between are never made."""
    attr: Tensor = operands.edge_attr  # type: ignore[assignment]  # else there is no term
    if attr.dim() == 1:
        attr = attr.view(-1, 1)
    if guards.plain_linear(layer.lin_edge) and layer.lin_edge.bias is None:
        with calls.without_autocast(attr.device.type):
            folded = layer.e.t() @ layer.lin_edge.weight.to(layer.e.dtype)
            return F.linear(attr.to(folded.dtype), folded)
    rows = layer.lin_edge(attr).view(-1, layer.heads * layer.out_channels)
    if rows.shape[0] != attr.shape[0]:  # one row per relation, as the host has it
        rows = rows.index_select(0, operands.edge_type)
    return torch.matmul(rows, layer.e)


def _of_degree(layer: Any, view: RelationView, out: Tensor) -> Tensor:
    """The factor of all messages to one node in the host, so of their sum [num_dst, heads, ..,
    width] as well."""
    shape = out.shape[0], *(1,) * (out.dim() - 2), -1
    degree = view.degree().to(out.dtype
                              if layer.mod == "f-scaled" else layer.l1.dtype).unsqueeze(-1)
    if layer.mod == "f-scaled":
        return degree.view(shape)
    hidden = torch.relu(torch.matmul(degree, layer.l1) + layer.b1)
    return (torch.matmul(hidden, layer.l2) + layer.b2).view(shape)
