"""Raw attention as the kernel suite calls it: everything below the layer, nothing of the host.

Both functions prepare what is the same for every call (structure, random inputs) and return two
functions of no arguments, (forward, forward and backward), which do what one call costs: Python,
allocation of the output, the launches. Forward runs under ``torch.no_grad()``; backward starts from
a fixed random gradient and leaves the gradients of all inputs in ``.grad``, set to None before.
"""
from __future__ import annotations

from typing import Any

import torch

from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir import attention_programs, patterns
from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.run import attention
from gnnaccel.profile.bench.cells import Pair
from gnnaccel.profile.bench.shapes import Graph


def additive(graph: Graph, heads: int, width: int) -> Pair:
    """GAT's scores. The scalars per node come out of the values, so their product with the two
    attention vectors (one pass over the nodes) is part of the call."""
    vectors = {name: torch.randn(heads, width, device=graph.device)
               for name in ("att_src", "att_dst")}
    tensors = {"x": _rows(graph, heads, width), **vectors}
    return _pair(graph, attention_programs.gat(0.2, 0.0, True, True, False), tensors, heads, width)


def dot(graph: Graph, heads: int, width: int) -> Pair:
    """The Transformer's scores, <query[destination], key[source]> / sqrt(width)."""
    tensors = {name: _rows(graph, heads, width) for name in ("queries", "keys", "values")}
    return _pair(graph, attention_programs.dot_product(width ** -0.5, 0.0, False), tensors, heads,
                 width)


SCORES = {"additive": additive, "dot": dot}


def _rows(graph: Graph, heads: int, width: int) -> torch.Tensor:
    return torch.randn(graph.num_nodes, heads, width, device=graph.device)


def _pair(graph: Graph, program: Program, tensors: dict[str, Any], heads: int, width: int) -> Pair:
    view = GraphView(graph.edge_index, graph.num_nodes, graph.num_nodes)
    fused = patterns.attention(program)
    assert fused is not None
    call = attention.Call(program, fused, view, heads, width, torch.float32)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    grad = _rows(graph, heads, width)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention.run_cuda(call, tensors)

    def training() -> torch.Tensor:
        for leaf in leaves.values():
            leaf.grad = None
        out = attention.run_cuda(call, leaves)
        out.backward(grad)
        return out.detach()

    return forward, training
