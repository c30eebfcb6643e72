"""`TrimToLayer`, which PyG's own models call before each layer, in the graph of a model that
`to_hetero` made.

Where no numbers of sampled nodes and edges are given it hands back its arguments, but for each edge
type anew: so in the graph it hides that layers' inputs are one for each node type.
"""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from gnnaccel.adapters.pyg.fx.layers import module_at

_RESULTS = 3  # features, edges, attributes of edges: the last three arguments


def passed_through(graph: Graph, root: torch.nn.Module) -> list[str] | None:
    """Take out all calls of `TrimToLayer`. Returns the names of the model's arguments that have to
    be None for that; None if it cannot be done, when the graph may be half changed."""
    absent: dict[str, None] = {}
    numbers: list[Node] = []
    for node in list(graph.nodes):
        if node.op != "call_module" or not _trims(root, node.target):
            continue
        args = (*node.args, None)[:3 + _RESULTS]
        items = list(node.users)
        if len(args) < 3 + _RESULTS or node.kwargs or not all(_is_item(item) for item in items):
            return None
        counts = _nodes(args[1:3])
        names: list[str] = [_argument(one) for one in counts]  # type: ignore[misc]
        if None in names:
            return None
        absent.update(dict.fromkeys(names))
        numbers += counts
        for item in items:
            _put(item, args[3 + item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)
    for node in dict.fromkeys(numbers):
        if not node.users:
            graph.erase_node(node)
    return list(absent)


def _trims(root: torch.nn.Module, target: str) -> bool:
    module = module_at(target, root)
    return (type(module).__name__ == "TrimToLayer"
            and type(module).__module__.startswith("torch_geometric."))


def _is_item(node: Node) -> bool:
    return (node.op == "call_function" and node.target is operator.getitem
            and type(node.args[1]) is int
            and 0 <= node.args[1] < _RESULTS)


def _nodes(value: Any) -> list[Node]:
    nodes: list[Node] = []
    map_arg(value, nodes.append)
    return nodes


def _argument(node: Any) -> str | None:
    """The model's argument that ``node`` looks up a type in."""
    while (node.op == "call_method" and node.target == "get" or node.op == "call_function"
           and len(node.all_input_nodes) == 1):
        node = node.all_input_nodes[0]
    return node.target if node.op == "placeholder" else None


def _put(item: Node, value: Any) -> None:
    """Put ``value`` in the place of ``item``."""
    for user in list(item.users):
        user.args, user.kwargs = (  # type: ignore[assignment]
            map_arg(arguments, lambda node: value if node is item else node)
            for arguments in (user.args, user.kwargs))
