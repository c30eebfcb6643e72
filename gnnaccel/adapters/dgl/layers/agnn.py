"""AGNNConv as a Program."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from gnnaccel.adapters.dgl import graphs, guards, reading
from gnnaccel.adapters.guards import Shapes, declared
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason

ARGUMENTS = ("graph", "feat"), ()
FIELDS = ("_allow_zero_in_degree",)


def state(layer: Any, graph: Any, feat: Any) -> tuple[CallSpec, CallInputs] | Reason:
    nodes = reading.nodes(graph, feat)
    if type(nodes) is Reason:
        return nodes
    edges: Any
    edges, x_src, x_dst, _ = nodes
    if x_dst is not None and x_dst.shape[1] != x_src.shape[1]:  # an error in the host
        return reason("GA206", f"feat has {x_src.shape[1]} and {x_dst.shape[1]} channels")
    # the host then compares destinations' rows
    if isinstance(feat, tuple) and x_dst is not x_src and reading.one_frame(graph):
        return reason("GA206", "feat is a pair, the graph has one set of nodes",
                      "pass features of the nodes as one tensor")
    why = (guards.dtype_reason(x_src, declared(layer, "beta"))
           or graphs.zero_in_degree_reason(layer, edges))
    if why is not None:
        return why
    row, out = guards.dtypes(x_src)
    spec = CallSpec(programs.cosine(), "dgl.AGNNConv", 1, x_src.shape[1], row, out, edges.num_src,
                    edges.num_dst, edges.edge_index.shape[1], 0, True)
    return spec, CallInputs(x_src, x_dst, edges.edge_index)


def shapes(layer: Any, inputs: CallInputs) -> Shapes:
    return {"beta": (1,)}


def run(layer: Any, spec: CallSpec, inputs: CallInputs, attend: Any) -> Tensor:
    x_src, x_dst = inputs.x_src, inputs.x_dst
    inverse = _inverse_length(x_src)
    if x_dst is None or x_dst is x_src:
        unit = (x_src * inverse)[:spec.num_dst]
    else:
        unit = x_dst * _inverse_length(x_dst)
    tensors = {"keys": x_src.to(spec.row).unsqueeze(1),
               "queries": (layer.beta * unit).unsqueeze(1), "c_src": inverse}
    return attend(tensors).squeeze(1)


def _inverse_length(x: Tensor) -> Tensor:
    """[N, 1]: 1 / |x|, bounded as in `torch.nn.functional.normalize`: rows of zeros stay rows of
    zeros."""
    return 1 / x.norm(p=2, dim=-1, keepdim=True).clamp_min(1e-12)
