"""HANConv as one attention: each edge type has nodes of its own on a virtual graph.

Its sources are the (edge type, source node) rows, its destinations the (edge type, destination
node) rows, so that the softmax is over the edges of one type. Projections and the attention over
edge types are the host's own.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import reachability
from gnnaccel.adapters.guards import Shapes
from gnnaccel.adapters.pyg import calls, guards
from gnnaccel.adapters.pyg.hetero import dicts
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import JoinedSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational.inner_products import inner_products
from gnnaccel.dispatch.relational.request import RelationalInputs


class _Operands(NamedTuple):
    """``names``: the call's edge types, in its order; ``weights``: whether semantic attention
    weights were asked for."""

    x_dict: Mapping[str, Tensor]
    names: tuple[dicts.EdgeType, ...]
    weights: bool


FIELDS = ("heads", "out_channels", "negative_slope", "dropout")
ARGUMENTS = ("x_dict", "edge_index_dict"), ("return_semantic_attention_weights",)


def state(layer: Any, x_dict: Any, edge_index_dict: Any,
          weights: Any) -> tuple[JoinedSpec, RelationalInputs] | Reason:
    if not (isinstance(x_dict, Mapping) and isinstance(edge_index_dict, Mapping)):
        return reason("GA206", "features or edges are no dictionary")
    names, device = tuple(edge_index_dict), guards.declared(layer, "q").device
    why = guards.parametrized_reason(layer) or _layer_reason(layer, x_dict, names, device)
    if why is not None:
        return why
    graph = _graph(edge_index_dict, x_dict, device)
    if type(graph) is Reason:
        return graph
    heads, width = layer.heads, layer.out_channels // layer.heads
    vectors = [dicts.parameter(table, _key(name)) for name in names
               for table in (layer.lin_src, layer.lin_dst)]
    row, out = calls.dtypes(x_dict[names[0][0]], *vectors)
    program = programs.additive_terms(layer.negative_slope,
                                      layer.dropout if layer.training else 0.0, True, False)
    spec = JoinedSpec(program, "HANConv", heads, width, row, out, graph.num_nodes,
                      graph.num_dst, graph.num_edges, 0, False, join=graph.layout)
    return spec, RelationalInputs(graph.structure, device, _Operands(x_dict, names, bool(weights)))


def again(layer: Any, args: tuple, kwargs: dict, kept: None) -> RelationalInputs:
    x_dict, edge_index_dict, weights = calls.bound(args, kwargs, *ARGUMENTS)
    structure = tuple(edge_index_dict.values())
    return RelationalInputs(structure, structure[0].device,
                            _Operands(x_dict, tuple(edge_index_dict), bool(weights)))


def resized(layer: Any, args: tuple, kwargs: dict, spec: JoinedSpec,
            kept: None) -> tuple[JoinedSpec, RelationalInputs] | None:
    x_dict, edge_index_dict, weights = calls.bound(args, kwargs, *ARGUMENTS)
    names = tuple(edge_index_dict)
    device = x_dict[names[0][0]].device
    graph = _graph(edge_index_dict, x_dict, device)
    if type(graph) is Reason:
        return None
    return (spec.resized(graph.num_nodes, graph.num_dst, graph.num_edges, graph.layout),
            RelationalInputs(graph.structure, device, _Operands(x_dict, names, bool(weights))))


def _layer_reason(layer: Any, x_dict: Mapping[str, Any], names: tuple,
                  device: torch.device) -> Reason | None:
    if layer.out_channels % layer.heads:
        return reason("GA208", f"{layer.out_channels} channels for {layer.heads} heads")
    for table in ("lin_src", "lin_dst"):
        if not guards.ordinary(layer._modules[table]):
            return reason("GA208", f"some of {table} are of another type than Parameter")
    for name in x_dict:
        if name not in layer.proj:
            return reason("GA206", f"the layer does not know the node type {name!r}")
    for name in names:
        if type(name) is not tuple or len(name) != 3:
            return reason("GA206",
                          f"the edge type {name!r} is no (source type, name, destination type)")
        if name[0] not in x_dict or name[-1] not in x_dict:
            return reason("GA206",
                          f"there are edges of type {name!r}, but no features for one of its ends")
        if _key(name) not in layer.lin_src or _key(name) not in layer.lin_dst:
            return reason("GA206", f"the layer does not know the edge type {name!r}")
    return (guards.lazy_reason(*(layer.proj[name] for name in x_dict))
            or dicts.features_reason(x_dict, x_dict, device))


def shapes(layer: Any, inputs: RelationalInputs) -> Shapes:
    names = list(map(_key, inputs.operands.names))
    return dict.fromkeys([*dicts.paths("lin_src", layer.lin_src, names),
                          *dicts.paths("lin_dst", layer.lin_dst, names)],
                         (1, layer.heads, layer.out_channels // layer.heads))


def _key(name: dicts.EdgeType) -> str:
    return "__".join(name)


def _graph(edge_index_dict: Mapping, x_dict: Mapping[str, Tensor],
           device: torch.device) -> dicts.Graph | Reason:
    """The virtual graph: `hetero.graph` with rows for each edge type instead of each node type."""
    sources, targets = ({name: x_dict[name[end]].shape[0] for name in edge_index_dict}
                        for end in (0, -1))
    return dicts.graph(edge_index_dict, sources,
                       {name: at for at, name in enumerate(edge_index_dict)}, device, targets,
                       rows=lambda name: (name, name))


def run(layer: Any, spec: JoinedSpec, inputs: RelationalInputs, attend: Any) -> Any:
    x_dict, names, weights = inputs.operands
    h, c = spec.heads, spec.width
    rows = {name: dicts.module(layer.proj, name)(x).view(x.shape[0], h, c)
            for name, x in x_dict.items()}
    tables = layer.lin_src, layer.lin_dst
    made_of = ((rows[name[0]], rows[name[-1]],
                *[dicts.parameter(table, _key(name)) for table in tables]) for name in names)
    # results of the edge types
    results, own = reachability.results(len(names), made_of), tuple(zip(range(len(names))))
    with calls.without_autocast(inputs.device.type):
        x = [rows[name[0]] for name in names]
        tensors = {"x": torch.cat(x) if len(x) > 1 else x[0],
                   **_terms(rows, names, tables, spec.out, results)}
        out = attend({name: reachability.watch(results, t, own)
                      for name, t in tensors.items()}).flatten(1).relu()
    outs: dict[str, list[Tensor]] = {name: [] for name in x_dict}
    for name, part in zip(names,
                          reachability.split(results, out,
                                             [x_dict[name[-1]].shape[0] for name in names])):
        outs[name[-1]].append(part)
    return _semantic(layer, outs, weights)


def _terms(rows: dict[str, Tensor], names: tuple, tables: tuple[Any, Any], dtype: torch.dtype,
           results: reachability.Results | None) -> dict[str, Tensor]:
    """[rows of the virtual graph at an end, heads], of both ends: inner products of each edge
    type's nodes with its vector there, made for all of a node type in one pass over its rows."""
    terms: dict[tuple[int, int], Tensor] = {}
    for node, x in rows.items():
        here = [(end, at) for end in (0, -1) for at, name in enumerate(names) if name[end] == node]
        if here:
            vectors = torch.cat([dicts.parameter(tables[end], _key(names[at])) for end, at in here])
            stacked = reachability.watch(results, vectors, tuple([(at,) for _, at in here]))
            terms.update(zip(here, inner_products(x.to(dtype), stacked.to(dtype)).unbind(0)))
    return {name: torch.cat([terms[end, at] for at in range(len(names))])
            for name, end in (("a_src", 0), ("a_dst", -1))}


def _semantic(layer: Any, outs: dict[str, list[Tensor]], weights: bool) -> Any:
    """The host's own attention over the edge types of each node type."""
    from torch_geometric.nn.conv import han_conv

    results, attention = {}, {}
    for name, parts in outs.items():
        results[name], attention[name] = han_conv.group(parts, layer.q, layer.k_lin)
    return (results, attention) if weights else results
