"""The calls of `HeteroBasisConv` in the graph of a model that
`torch_geometric.nn.to_hetero_with_bases` made, over edges of all types that the model puts
together."""
from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from gnnaccel.adapters.pyg.fx import basis


def replace(graph: Graph, root: torch.nn.Module) -> int:
    """Let `basis.called` be called in the place of each, on the edges as they were given. Returns
    the number of calls."""
    from torch_geometric.nn import to_hetero_with_bases_transformer as host

    edges: dict[tuple[Node, Node], Node] = {}
    calls = [node for node in graph.nodes if _is_call(node, root, host)]
    for node in calls:
        edge_type, x, grouped = node.args
        if (edge_type, grouped) not in edges:
            with graph.inserting_before(node):
                edges[edge_type,
                      grouped] = graph.create_node("call_function", basis.Edges, grouped.args)
        with graph.inserting_before(node):
            layer = graph.create_node("get_attr", node.target)
            out = graph.create_node("call_function", basis.called,
                                    (layer, x, edges[edge_type, grouped]))
        node.replace_all_uses_with(out)
        graph.erase_node(node)
    for node in dict.fromkeys(node for pair in edges for node in pair):
        if not node.users:
            graph.erase_node(node)
    return len(calls)


def _is_call(node: Node, root: torch.nn.Module, host: Any) -> bool:
    """Whether a node calls a `HeteroBasisConv` on edges and their types that come of one argument
    of the model."""
    if (node.op != "call_module"
        or type(_module(node.target, root)) is not host.HeteroBasisConv):  # type: ignore[arg-type]
        return False
    if (len(node.args) != 3 or node.kwargs
        or not all(isinstance(value, Node) for value in node.args)):
        return False
    edge_type: Node
    grouped: Node
    edge_type, _, grouped = node.args  # type: ignore[assignment]
    return (edge_type.op == grouped.op == "call_function" and edge_type.target is host.get_edge_type
            and grouped.target is host.group_edge_placeholder and len(grouped.args) == 3
            and tuple(edge_type.args) == tuple(grouped.args[:2]) and not edge_type.kwargs
            and not grouped.kwargs)


def _module(target: str, root: torch.nn.Module) -> Any:
    module: Any = root
    for part in target.split("."):
        module = None if module is None else module._modules.get(part)
    return module
