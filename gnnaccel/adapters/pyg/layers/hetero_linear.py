"""HeteroLinear as a Program: row i is the only edge of node i, and its type the relation."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.guards import Shapes, types_reason
from gnnaccel.adapters.pyg import calls, guards
from gnnaccel.adapters.pyg.hetero import relations
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import statements
from gnnaccel.dispatch.relational.edges import rows_by_type
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec, shapes_of

ARGUMENTS = ("x", "type_vec"), ()
FIELDS = ("num_types", "in_channels", "out_channels", "is_sorted")


def state(layer: Any, x: Any,
          type_vec: Any) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    why = guards.lazy_reason(layer) or guards.features_reason(x) or _reason(layer, x, type_vec)
    if why is not None:
        return why
    rows, (row, _) = x.shape[0], calls.dtypes(x)
    program = statements.typed_linear(bias=layer.bias is not None)
    shapes = shapes_of(program, dict(x=x, weight=layer.weight, bias=layer.bias))
    view = relations.viewer((type_vec,), rows, rows, layer.num_types, rows_by_type)
    spec = RelationalSpec(program, "HeteroLinear", shapes, row, x.dtype, rows, rows, rows,
                          layer.num_types, view, layout="rows by type")
    return spec, RelationalInputs((type_vec,), x.device, x)


def shapes(layer: Any, inputs: RelationalInputs) -> Shapes:
    kinds, columns = layer.num_types, layer.out_channels
    by_name: Shapes = {"weight": (kinds, layer.in_channels, columns)}
    return by_name if layer.bias is None else {**by_name, "bias": (kinds, columns)}


def again(layer: Any, args: tuple, kwargs: dict, kept: None) -> RelationalInputs:
    x, type_vec = calls.bound(args, kwargs, ("x", "type_vec"), ())
    return RelationalInputs((type_vec,), x.device, x)


def resized(layer: Any, args: tuple, kwargs: dict, spec: RelationalSpec,
            kept: None) -> tuple[RelationalSpec, RelationalInputs] | None:
    inputs = again(layer, args, kwargs, kept)
    x, type_vec = inputs.operands, inputs.edge_index
    if types_reason(type_vec, x, "type_vec") is not None or not x.shape[0]:
        return None
    rows = x.shape[0]
    view = relations.viewer((type_vec,), rows, rows, spec.num_relations, rows_by_type)
    return spec.resized(rows, rows, rows, view, spec.rows_grad, spec.layout), inputs


def _reason(layer: Any, x: Tensor, type_vec: Any) -> Reason | None:
    why = types_reason(type_vec, x, "type_vec")
    if why is None and layer.is_sorted:  # HGTConv says so of types that are not
        why = reason("GA208", "is_sorted=True, with which the host's result depends on the order",
                     "leave is_sorted out")
    if why is None and x.shape[1] != layer.in_channels:
        why = reason("GA206", f"x is {list(x.shape)}, the layer takes {layer.in_channels}")
    if why is None and layer.weight.dtype != x.dtype and (
            torch.float64 in (layer.weight.dtype, x.dtype)
            or not torch.is_autocast_enabled(x.device.type)):
        why = reason("GA203", f"x is {x.dtype}, the weights are {layer.weight.dtype}",
                     "convert one of them")
    return why or (None if x.shape[0] else reason("GA303", "there are no rows"))


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any) -> Tensor:
    x = inputs.operands
    tensors = dict(x=x.to(spec.row), weight=layer.weight.to(spec.row))
    if layer.bias is not None:
        tensors["bias"] = layer.bias
    with calls.without_autocast(x.device.type):
        return attend(tensors)
