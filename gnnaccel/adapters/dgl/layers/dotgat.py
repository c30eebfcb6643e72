"""DotGatConv as a Program: dot-product attention whose values are its keys."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from gnnaccel.adapters.dgl import graphs, guards, reading
from gnnaccel.adapters.guards import Shapes
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason

ARGUMENTS = ("graph", "feat"), ("get_attention",)
FIELDS = ("_num_heads", "_out_feats", "_allow_zero_in_degree")


def state(layer: Any, graph: Any, feat: Any,
          weights: Any) -> tuple[CallSpec, CallInputs] | Reason:
    nodes = reading.attention(graph, feat, weights)
    if type(nodes) is Reason:
        return nodes
    if ("fc" in layer._modules) is isinstance(feat, tuple):  # an error in the host
        return reason("GA206",
                      "the layer was built for a pair and feat is none, or the other way round")
    # the host then sends destinations' rows as well
    if isinstance(feat, tuple) and reading.one_frame(graph):
        return reason("GA206", "feat is a pair, the graph has one set of nodes",
                      "pass features of the nodes as one tensor")
    edges: Any
    edges, x_src, x_dst, _ = nodes
    why = guards.dtype_reason(x_src) or graphs.zero_in_degree_reason(layer, edges)
    if why is not None:
        return why
    row, out = guards.dtypes(x_src)
    program = programs.dot_product_shared(layer._out_feats**-0.5, 0.0)
    spec = CallSpec(program, "dgl.DotGatConv", layer._num_heads, layer._out_feats, row, out,
                    edges.num_src, edges.num_dst, edges.edge_index.shape[1], 0, True)
    return spec, CallInputs(x_src, x_dst, edges.edge_index)


def shapes(layer: Any, inputs: CallInputs) -> Shapes:
    return reading.shapes(layer, ("fc", "fc_src", "fc_dst"))


def run(layer: Any, spec: CallSpec, inputs: CallInputs, attend: Any) -> Tensor:
    h, c, modules = spec.heads, spec.width, layer._modules
    if "fc" not in modules:
        keys, queries = reading.rows(modules["fc_src"], inputs.x_src, h,
                                    c), reading.rows(modules["fc_dst"],
                                                    inputs.x_dst, h, c)  # type: ignore[arg-type]
    elif inputs.x_dst is None:
        keys = modules["fc"](inputs.x_src).view(spec.num_src, h, c)
        queries = keys[:spec.num_dst]
    else:
        keys = queries = reading.rows(modules["fc"], inputs.x_src, h, c)
    # contiguous as the host's result is: models call view
    return attend({"keys": keys, "queries": queries}).contiguous()
