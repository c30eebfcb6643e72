"""Layers of a model that `torch_geometric.nn.to_hetero_with_bases` made, `HeteroBasisConv`s, each
as one relational layer; and their calls in the model's graph, over edges of all types that the
model puts together.

In such a model all nodes and edges lie in one graph, and each of several layers (the bases)
multiplies its messages, in a hook, by a number learnt for each edge type. Where messages are added
up that is RGCN with a decomposition into bases (arXiv 1703.06103): the matrix of a relation is the
sum of the bases' matrices, each times its number for the relation. So the bases run at once, over
the caller's own edges, which are known when they come again; and nothing is made of the edges put
together.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from gnnaccel.adapters import alike
from gnnaccel.adapters.layout import EdgeType
from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.pyg.fx.layers import module_at
from gnnaccel.adapters.pyg.hetero import dicts, inner_convs, relations
from gnnaccel.adapters.pyg.propagate import kept_results
from gnnaccel.dispatch import router
from gnnaccel.dispatch.policy.config import current
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.relational import statements
from gnnaccel.dispatch.relational.added import ADDED, Added
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec
from gnnaccel.dispatch.run.autograd import turned

_HOOK = "_message_forward_hooks"
_OTHER_HOOKS = tuple(name for name in guards.HOOKS if name != _HOOK)
#: the linear maps of neighbours and of the node itself
_MAPS = {"SAGEConv": ("lin_l", "lin_r"), "GraphConv": ("lin_rel", "lin_root"),
         "GCNConv": ("lin", None)}


class Edges:
    """The edges of all types, and as one graph where that is asked for. ``types``: the number of
    each edge type; ``starts``: the first node of each node type."""

    def __init__(self, edge_index_dict: Mapping[EdgeType, Any], types: Mapping[EdgeType, int],
                 starts: Mapping[str, int]):
        self.edge_index_dict, self.types, self.starts = edge_index_dict, types, starts

    def tensors(self) -> tuple[Any, ...]:
        """The tensors that the edges are made of."""
        return tuple(self.edge_index_dict.values())

    @functools.cached_property
    def together(self) -> tuple[Tensor, Tensor]:
        """(edge_type, edge_index), as the host makes them."""
        from torch_geometric.nn import to_hetero_with_bases_transformer as host

        return (host.get_edge_type(self.edge_index_dict, self.types),
                host.group_edge_placeholder(self.edge_index_dict, self.types, self.starts))


class _Parameters(NamedTuple):
    """Parameters, one of each kind for each basis: matrices [out, in], numbers [1, relations],
    biases [out], matrices of the node itself."""

    weights: list[Tensor]
    numbers: list[Tensor]
    biases: list[Tensor] | None
    roots: list[Tensor] | None


class _Operands(NamedTuple):
    """Tensors of a call. ``shares``: the arguments of `_shares`, None where edges count alike."""

    x: Tensor
    parameters: _Parameters
    shares: tuple | None


def called(layer: Any, x: Any, edges: Edges) -> Tensor:
    """Replacement of the call of a HeteroBasisConv in a model's generated code."""
    config = current()
    if config is None:
        return _native(layer, x, edges)
    return router.route(layer, _guarded(type(layer)),  # type: ignore[arg-type]  # is Hashable
                        _native, (x, edges), {}, config)


def _native(layer: Any, x: Any, edges: Edges) -> Tensor:
    edge_type, edge_index = edges.together
    return layer(edge_type, x, edge_index)


@functools.cache
def _guarded(cls: type) -> Any:
    from gnnaccel.adapters.pyg import _Guarded

    return _Guarded(cls, "fx.basis", None)


@functools.cache
def _hook() -> Callable:
    from torch_geometric.nn.to_hetero_with_bases_transformer import hook

    return hook


def state(layer: Any, args: tuple,
          kwargs: dict) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    x, edges = args
    convs = tuple(layer.convs)
    why = _layers_reason(layer, convs)
    parameters = _parameters(convs) if why is None else why
    if type(parameters) is Reason:
        return reason("GA210", f"{parameters.code} {parameters.text}")
    weight = parameters.weights[0]
    why = _features_reason(x, weight)
    if why is not None:
        return why
    graph = _graph(x, edges, weight.device)
    if type(graph) is Reason:
        return graph
    kind = type(convs[0]).__name__
    how = "mean" if type(convs[0].aggr_module).__name__ == "MeanAggregation" else (
        "gcn" if kind == "GCNConv" and convs[0].normalize else None)
    n, bases = x.shape[0], len(convs)
    shapes = (("x", (weight.shape[1],)), ("comp", (bases,)), ("bases", (bases, *weight.t().shape)),
              *(() if how is None else (("norm", ()),)))
    program = statements.rgcn(False, True, weighted=how is not None)
    view = relations.viewer(graph.structure, n, n, len(edges.types), graph.layout)
    spec = RelationalSpec(program, "HeteroBasisConv", shapes, x.dtype, x.dtype, n, n,
                          graph.num_edges, len(edges.types), view, layout=graph.layout,
                          around=True)
    starts = tuple(start for part in graph.layout.parts for start in (part.src, part.dst))
    shares = (None
              if how is None
              else (*graph.structure, how, torch.promote_types(x.dtype, torch.float32), n, *starts))
    return spec, RelationalInputs(graph.structure, weight.device, _Operands(x, parameters, shares))


def _layers_reason(layer: Any, convs: tuple[Any, ...]) -> Reason | None:
    """Why the bases cannot run as one."""
    cls, config = type(convs[0]), current()
    if guards.has_hooks(layer) or guards._any_global_hook():
        return reason("GA501", "it has hooks")
    if "forward" in layer.__dict__:
        return reason("GA205", "forward is replaced on the layer object")
    if cls.__name__ not in _MAPS or not cls.__module__.startswith("torch_geometric."):
        return reason("GA208", f"the bases are {cls.__name__}",
                      f"bases that run as one: {', '.join(_MAPS)}")
    kind = inner_convs.KINDS[cls.__name__]
    for conv in convs:
        if type(conv) is not cls:
            return reason("GA208", "the bases are of several classes")
        why = inner_convs.conv_reason(conv, cls, kind, _OTHER_HOOKS)
        if why is not None:
            return why
        if [*conv.__dict__[_HOOK].values()] != [_hook()]:
            return reason("GA501", f"{_HOOK.strip('_')} are registered")
        if config is not None and settings.asked(conv, config) is not None:
            return reason("GA603", "the bases are to be quantized, which is done one by one")
    if len({inner_convs.settings_of(conv, kind) for conv in convs}) > 1:
        return reason("GA208", "the bases' options differ")
    if cls.__name__ == "GCNConv" and convs[0].normalize and convs[0].add_self_loops:
        return reason("GA208", "add_self_loops=True: self loops have no edge type",
                      "set add_self_loops=False")
    return None


def _parameters(convs: tuple[Any, ...]) -> _Parameters | Reason:
    neighbours, own = _MAPS[type(convs[0]).__name__]
    rooted = (own is not None and convs[0]._modules.get(own) is not None
              and convs[0].__dict__.get("root_weight") is not False)
    parts = ([conv._modules.get(neighbours) for conv in convs],
             [conv._modules.get(own) for conv in convs] if rooted else [])
    if (None in parts[0] or None in parts[1]
        or any(part._parameters.get("bias") is not None for part in parts[1])):
        return reason("GA208", f"{neighbours} or {own} was replaced")
    weights, roots = ([part._parameters.get("weight") for part in of] for of in parts)
    biases = [(conv if own is None else part)._parameters.get("bias")
              for conv, part in zip(convs, parts[0])]
    numbers = [conv._parameters.get("edge_type_weight") for conv in convs]
    parameters = _Parameters(weights, numbers, None if biases == [None] * len(convs) else biases,
                             roots if rooted else None)
    why = inner_convs.tensors_reason(*parameters)
    if (why is None
        and not all(inner_convs.one_shape(group) for group in parameters if group is not None)):
        why = reason("GA206", "the bases' parameters are of several shapes")
    why = why or alike.shapes_reason(
        alike.Parameters(weights, parameters.biases, parameters.roots), True)
    return parameters if why is None else why


def _features_reason(x: Any, weight: Tensor) -> Reason | None:
    why = guards.features_reason(x)
    if why is not None:
        return why
    if x.device != weight.device or x.shape[1] != weight.shape[1]:
        return reason("GA206",
                      f"x is of shape {list(x.shape)} on {x.device}, the weights "
                      f"{list(weight.shape)} on "
                               f"{weight.device}")
    if torch.is_autocast_enabled(x.device.type):
        return reason("GA203", "autocast is on", "call the model outside of autocast")
    return (reason("GA203", f"x is {x.dtype}, the weights are {weight.dtype}")
            if x.dtype != weight.dtype else None)


def _graph(x: Tensor, edges: Edges, device: torch.device) -> dicts.Graph | Reason:
    by_type = {name: edges.edge_index_dict.get(name) for name in edges.types}
    for name, edge_index in by_type.items():
        if (type(edge_index) is not Tensor or edge_index.dtype != torch.long
            or edge_index.dim() != 2 or edge_index.shape[0] != 2):
            return reason("GA204", f"edge_index_dict[{name!r}] is no tensor of shape [2, E]")
    starts = [*edges.starts.values(), x.shape[0]]
    sizes = {name: end - start for name, start, end in zip(edges.starts, starts, starts[1:])}
    if len(by_type) == 1 and any(edges.starts[name[end]] for name in by_type for end in (0, -1)):
        return reason("GA208",
                      "PyG reads the ids of a single edge type as those of the first node type")
    if min(sizes.values()) < 0:
        return reason("GA206", f"x has {x.shape[0]} rows, fewer than there are nodes")
    return dicts.graph(by_type, sizes, edges.types, device)


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any) -> Tensor:
    x, (weights, numbers, biases, roots), shares = inputs.operands
    operands = {"x": x, "comp": turned(torch.cat(numbers)),
                "bases": turned(torch.stack(weights))}
    if shares is not None:
        # checks the ids, with which the shares are indexed
        attend.graph.statistics()
        operands["norm"] = _kept(*shares)[0].to(spec.row)
    root, bias = (None if group is None else alike.total(group) for group in (roots, biases))
    if root is not None or bias is not None:
        operands[ADDED] = Added((spec.num_dst,), None if root is None else x, root, bias, True)
    return attend(operands)


def _shares(*given: Any) -> tuple[Tensor]:
    """([E],) factor of each edge beside its number: one over the destination's degree ("mean"), or
    over the root of the product of both ends' ("gcn"). ``given``: edges by type, which of the two,
    the dtype, the number of nodes, and the first node of each type, at both ends."""
    edges = [t for t in given if isinstance(t, Tensor)]
    how, dtype, n, *starts = given[len(edges):]
    src, dst = (torch.cat([t[end] + start for t, start in zip(edges, starts[end::2])])
                for end in (0, 1))
    degree = torch.zeros(n, dtype=dtype,
                         device=src.device).index_add_(0, dst, torch.ones_like(dst, dtype=dtype))
    if how == "mean":
        return (degree.reciprocal()[dst],)
    root = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
    return (root[src] * root[dst],)


_kept = kept_results.keeping(_shares)


# --- in the graph of a model ----------------------------------------------------------------------

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
                edges[edge_type, grouped] = graph.create_node("call_function", Edges, grouped.args)
        with graph.inserting_before(node):
            layer = graph.create_node("get_attr", node.target)
            out = graph.create_node("call_function", called, (layer, x, edges[edge_type, grouped]))
        node.replace_all_uses_with(out)
        graph.erase_node(node)
    for node in dict.fromkeys(node for pair in edges for node in pair):
        if not node.users:
            graph.erase_node(node)
    return len(calls)


def _is_call(node: Node, root: torch.nn.Module, host: Any) -> bool:
    """Whether a node calls a `HeteroBasisConv` on edges and their types that come of one argument
    of the model."""
    if node.op != "call_module":
        return False
    module = module_at(node.target, root)  # type: ignore[arg-type]
    if type(module) is not host.HeteroBasisConv:
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
