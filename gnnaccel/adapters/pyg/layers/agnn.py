"""AGNNConv as a Program."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from gnnaccel.adapters.guards import Shapes
from gnnaccel.adapters.pyg import calls, edges, guards
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.reasons import Reason

FIELDS = ("add_self_loops",)
WATCHED = ()
TURNS = True
ARGUMENTS = ("x", "edge_index"), ()


def state(layer: Any, x: Any, edge_index: Any) -> tuple[CallSpec, CallInputs] | Reason:
    why = guards.features_reason(x)
    if why is not None:
        return why
    nodes = x.shape[0]
    plain = edges.plain(edge_index, nodes, nodes, x.device)
    if type(plain) is Reason:
        return plain
    row, out = calls.dtypes(x, guards.declared(layer, "beta"), mapped=False)
    spec = CallSpec(programs.cosine(), "AGNNConv", 1, x.shape[1], x.dtype, out, nodes, nodes,
                    plain.shape[1], nodes if layer.add_self_loops else 0, True)
    return spec, CallInputs(x, x, plain)


def shapes(layer: Any, inputs: CallInputs) -> Shapes:
    return {"beta": (1,)}


def run(layer: Any, spec: CallSpec, inputs: CallInputs, attend: Any) -> Tensor:
    x = inputs.x_src
    length = x.norm(p=2, dim=-1, keepdim=True).clamp_min(1e-12)
    tensors = {"keys": x.unsqueeze(1), "queries": (layer.beta * (x / length)).unsqueeze(1),
               "c_src": 1 / length}
    return attend(tensors).squeeze(1)
