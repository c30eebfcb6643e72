"""TypedLinear as a Program: row i is the only edge of node i, and its type the relation."""
from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gnnaccel.adapters import calls, guards, layout
from gnnaccel.adapters.calls import without_autocast
from gnnaccel.adapters.dgl.layers import typed_weights
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import statements
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec, shapes_of
from gnnaccel.dispatch.relational.edges import rows_by_type

ARGUMENTS = ("x", "x_type"), ("sorted_by_type",)
FIELDS = ("regularizer", "num_types", "num_bases", "in_size", "out_size", "submat_in", "submat_out")


class _Operands(NamedTuple):
    x: Tensor


def state(layer: Any, x: Any, x_type: Any,
          ordered: Any) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    why = (guards.features_reason(x) or typed_weights.shapes_reason(layer, "the layer", x)
           or guards.types_reason(x_type, x, "x_type"))
    if why is not None:
        return why
    rows, row = x.shape[0], calls.mapped(x)
    if not rows:
        return reason("GA303", "there are no rows")
    program = statements.typed_linear(typed_weights.has_bases(layer))
    shapes = shapes_of(program, dict(x=x, **typed_weights.operands(layer)))
    view = layout.viewer((x_type,), rows, rows, layer.num_types, rows_by_type)
    spec = RelationalSpec(program, _native(layer, ordered), shapes, row, row, rows, rows, rows,
                          layer.num_types, view, layout="rows by type")
    return spec, RelationalInputs((x_type,), x.device, _Operands(x))


def _native(layer: Any, ordered: Any) -> str:
    """The host's way of running the call; the ways differ in cost."""
    if layer.regularizer == "bdd":
        return "dgl.TypedLinear bdd"
    return "dgl.TypedLinear sorted" if ordered else "dgl.TypedLinear"


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any) -> Tensor:
    tensors = dict(x=inputs.operands.x, **typed_weights.operands(layer))
    with without_autocast(inputs.device.type):
        return attend({name: t.to(spec.row) for name, t in tensors.items()})
