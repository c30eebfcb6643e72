"""Layers over edge types in the graph of a model that `torch_geometric.nn.to_hetero` made.

In such a graph a message-passing layer is a ModuleDict with a copy for each edge type, called one
by one; their results are then added up (or multiplied, or the larger or smaller taken) by
destination type, in pairs. Together they are a HeteroConv.

Only the graph is read, not how it came about: inputs have to be one node per type, and nothing else
may use the nodes in between.
"""
from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from gnnaccel.adapters.layout import EdgeType
from gnnaccel.adapters.pyg.hetero import dicts
from gnnaccel.adapters.pyg.hetero.inner_convs import KINDS


class Layer(NamedTuple):
    """A layer over edge types. ``path``: of the ModuleDict; ``keys``: of its modules; ``names``:
    their edge types; ``aggr``: as HeteroConv's here, see `hetero`; ``calls``: of the modules;
    ``between``: the nodes that put them together; ``x``, ``edges``: the inputs, by node type and
    one for each call; ``more``: further positional and keyword arguments of each, () where there
    are none; ``results``: by destination type."""

    path: str
    keys: tuple[str, ...]
    names: tuple[EdgeType, ...]
    aggr: Any
    calls: tuple[Node, ...]
    between: tuple[Node, ...]
    x: dict[str, Node]
    edges: tuple[Node, ...]
    more: tuple[tuple[tuple, dict], ...]
    results: dict[str, Node]


def find(graph: Graph, root: torch.nn.Module) -> list[Layer]:
    """The layers in the graph of ``root`` that could run as one, in its order."""
    names = _edge_types(graph)
    layers = (_read(path, calls, names) for path, calls in _runs(graph, root))
    return [layer for layer in layers if layer is not None]


def replace(graph: Graph, layer: Layer, target: Callable) -> None:
    """Let ``target(modules, x, edges, more)`` be called in place of the layer; it gives a
    dictionary by destination type."""
    with graph.inserting_before(layer.calls[0]):
        modules = graph.create_node("get_attr", layer.path)
        out = graph.create_node("call_function", target,
                                (modules, tuple(layer.x.values()), layer.edges, layer.more))
        items = {dst: graph.create_node("call_function", operator.getitem, (out, dst))
                 for dst in layer.results}
    for dst, result in layer.results.items():
        result.replace_all_uses_with(items[dst])
    for node in (*reversed(layer.between), *reversed(layer.calls)):
        graph.erase_node(node)


def _edge_types(graph: Graph) -> dict[str, EdgeType | None]:
    """The edge types that are looked up in the model's arguments, by the keys of their modules;
    None where two have one."""
    from torch_geometric.nn.to_hetero_transformer import key2str

    types: dict[str, EdgeType | None] = {}
    for node in graph.nodes:
        name = (node.args[1] if node.op == "call_method" and node.target == "get"
                and len(node.args) == 3 else None)
        if (isinstance(name, tuple) and len(name) == 3
            and all(isinstance(part, str) for part in name)):
            key = key2str(name)
            types[key] = name if types.get(key, name) == name else None
    return types


def _runs(graph: Graph, root: torch.nn.Module) -> Iterator[tuple[str, dict[str, Node]]]:
    """Calls of modules in one ModuleDict that follow each other, each of another one."""
    path: str | None
    calls: dict[str, Node]
    path, calls = None, {}
    for node in graph.nodes:
        at, key = _conv(node, root)
        if calls and (at != path or key in calls):
            assert path is not None
            yield path, calls
            calls = {}
        path = at
        if at is not None:
            calls[key] = node
    if calls:
        assert path is not None
        yield path, calls


def _conv(node: Node, root: torch.nn.Module) -> tuple[str | None, str]:
    """The place of a called layer, if it is one of those that run together: (path of its
    ModuleDict, key in there); else (None, "")."""
    if node.op != "call_module":
        return None, ""
    path, _, key = node.target.rpartition(".")  # type: ignore[union-attr]
    # the container may be any module: copies of a GraphModule have others than it has
    modules = module_at(path, root)
    if modules is None:
        return None, ""
    return (path, key) if is_kind(modules._modules.get(key)) else (None, "")


def module_at(path: str, root: torch.nn.Module) -> Any:
    """The module with this dotted name inside ``root``; None where there is none."""
    module: Any = root
    for part in path.split("."):
        module = None if module is None else module._modules.get(part)
    return module


def is_kind(module: Any) -> bool:
    return type(module).__name__ in KINDS and type(module).__module__.startswith("torch_geometric.")


def _read(path: str, calls: dict[str, Node], known: dict[str, EdgeType | None]) -> Layer | None:
    names: list[EdgeType] = [known.get(key) for key in calls]  # type: ignore[misc]
    inputs = (None if None in names
              or len(set(names)) < len(names) else _inputs(names, list(calls.values())))
    if inputs is None:
        return None
    by_type: dict[str, list[Node]] = {}
    for name, node in zip(names, calls.values()):
        by_type.setdefault(name[-1], []).append(node)
    combined = _together(by_type)
    if combined is None:
        return None
    aggr, between, results = combined
    return Layer(path, tuple(calls), tuple(names), aggr, tuple(calls.values()), between, *inputs,
                 results)


def _inputs(names: list[EdgeType],
            calls: list[Node]) -> tuple[dict[str, Node], tuple[Node, ...], tuple] | None:
    """(features by node type, edges by edge type, further arguments); None where the inputs are
    others."""
    x: dict[str, Node] = {}
    edges: list[Node]
    edges, rest, own = [], [], set(calls)
    for (src, _, dst), node in zip(names, calls):
        kwargs = dict(node.kwargs)
        args: list[Any] = list(node.args[:2]) + [
            kwargs.pop(name, None) for name in ("x", "edge_index")[len(node.args):]]
        features = (args[0], args[0]) if src == dst else args[0]
        if not isinstance(features, (tuple, list)) or len(features) != 2:
            return None
        for name, feature in zip((src, dst), features):
            if not isinstance(feature, Node) or x.setdefault(name, feature) is not feature:
                return None
        edges.append(args[1])
        rest.append((tuple(node.args[2:]), kwargs))
        if not isinstance(args[1], Node) or not own.isdisjoint(node.all_input_nodes):
            return None
    plain = all(value is None for tail, kwargs in rest for value in (*tail, *kwargs.values()))
    return x, tuple(edges), () if plain else tuple(rest)


def _together(by_type: dict[str,
                            list[Node]]) -> tuple[Any, tuple[Node, ...], dict[str, Node]] | None:
    """(aggr, the nodes that put calls together, the result of each type); None where other nodes
    do."""
    several = {dst: calls for dst, calls in by_type.items() if len(calls) > 1}
    results = {dst: calls[0] for dst, calls in by_type.items()}
    if not several:
        return torch.add, (), results
    first = next(iter(several.values()))[0]
    fold = next((user.target for user in first.users), None)
    if fold not in dicts.IN_PAIRS:
        return None
    between: list[Node] = []
    for dst, calls in several.items():
        nodes = _pairs(calls, fold)
        if not nodes:
            return None
        between += nodes
        results[dst] = nodes[-1]
    divided: dict[str, Node] = {dst: _divided(results[dst], len(calls))  # type: ignore[misc]
                                for dst, calls in several.items()}
    if fold is torch.add and None not in divided.values():
        return "mean", (*between, *divided.values()), {**results, **divided}
    return fold, tuple(between), results


def _pairs(calls: list[Node], fold: Callable) -> list[Node]:
    """The nodes that put ``calls`` together, first the first two, their result last in the queue;
    [] where others do."""
    queue, nodes = deque(calls), []
    while len(queue) > 1:
        a, b = queue.popleft(), queue.popleft()
        node = next(iter(a.users), None)
        if list(a.users) != [node] or list(b.users) != [node] or not _calls(node, fold, (a, b)):
            return []
        assert node is not None
        queue.append(node)
        nodes.append(node)
    return nodes


def _divided(result: Node, count: int) -> Node | None:
    node = next(iter(result.users), None)
    return node if len(result.users) == 1 and _calls(node, torch.div, (result, count)) else None


def _calls(node: Any, function: Callable, args: tuple) -> bool:
    return (node.op == "call_function" and node.target is function and node.args == args
            and not node.kwargs)
