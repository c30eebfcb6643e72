"""HeteroConv of SAGEConv or GraphConv as one relational layer.

A layer of neighbours' mean (or sum), linear map, bias and root term for each relation, summed (or averaged) over the relations of
a node type, is RGCN with the relations' root weights and biases added up.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import alike
from gnnaccel.adapters.alike import Parameters
from gnnaccel.adapters.pyg import hetero, inner_convs, relations
from gnnaccel.adapters.pyg.inner_convs import Together
from gnnaccel.dispatch.reasons import Reason, reason
from gnnaccel.dispatch.relational import statements
from gnnaccel.dispatch.relational.request import RelationalGiven, RelationalStated


class _Operands(NamedTuple):
    x_dict: Mapping[str, Tensor]
    together: Together
    parameters: Parameters
    mean: bool


def state(layer: Any, together: Together, x_dict: Mapping[str, Any],
          edge_index_dict: Mapping) -> tuple[RelationalStated, RelationalGiven] | Reason:
    found = _parameters(together)
    if type(found) is Reason:
        return found
    why = _features_reason(x_dict, together, found)
    if why is not None:
        return why
    weight = found.weights[0]
    sizes, targets = ({name: x_dict[name].shape[0] for name in types} for types in (together.sources, together.targets))
    graph = hetero.graph(edge_index_dict, sizes, together.numbers, weight.device, targets)
    if type(graph) is Reason:
        return graph
    program = statements.rgcn(together.mean, False, transposed=True)
    view = relations.viewer(graph.structure, graph.num_nodes, graph.num_dst, len(together.names), graph.layout)
    row = hetero.mapped(weight)
    shapes = (("x", (weight.shape[1],)), ("weight", tuple(weight.shape)))
    stated = RelationalStated(program, "HeteroConv", shapes, row, row, graph.num_nodes, graph.num_dst, graph.num_edges,
                              len(together.names), view, layout=graph.layout)
    return stated, RelationalGiven(graph.structure, weight.device, _Operands(x_dict, together, found, layer.aggr == "mean"))


def _parameters(together: Together) -> Parameters | Reason:
    neighbours, root = ("lin_l", "lin_r") if together.kind == "SAGEConv" else ("lin_rel", "lin_root")
    rooted = together.has(root) and together.option("root_weight") is not False
    weights, roots = together.parameters(neighbours, "weight"), together.parameters(root, "weight") if rooted else None
    if weights is None or (rooted and (roots is None or together.parameters(root, "bias") is not None)):
        return reason("GA208", f"{neighbours} or {root} are not the host's")
    found = Parameters(weights, together.parameters(neighbours, "bias"), roots)
    why = inner_convs.tensors_reason(*found)
    if why is None and not inner_convs.one_shape(weights):
        why = reason("GA206", "the weights are of several shapes")
    return found if why is None else why


def _features_reason(x_dict: Mapping[str, Any], together: Together, parameters: Parameters) -> Reason | None:
    weight = parameters.weights[0]
    why = hetero.features_reason(x_dict, together.nodes, weight.device)
    if why is not None:
        return why
    out, width = weight.shape
    for name in together.sources:
        if x_dict[name].shape[1] != width:
            return reason("GA206", f"x_dict[{name!r}] has {x_dict[name].shape[1]} features, the weights are for {width}")
    for name, members in zip(together.targets, together.of_target):
        fits = out, x_dict[name].shape[1]
        if parameters.roots is not None and not all(parameters.roots[at].shape == fits for at in members):
            return reason("GA206", f"x_dict[{name!r}] has {fits[1]} features, the layers' root weights are for others")
    return hetero.dtypes_reason(x_dict, together.nodes, weight)


def run(layer: Any, stated: RelationalStated, given: RelationalGiven, attend: Any) -> dict[str, Tensor]:
    x_dict, together, parameters, mean = given.operands
    row, autocast = stated.row, torch.is_autocast_enabled(given.device.type)
    x_src, x_dst = ([x_dict[name] for name in types] for types in (together.sources, together.targets))
    with torch.autocast(given.device.type, enabled=False):
        parts = alike.run(attend, parameters, x_src, x_dst, together.of_target, mean, row)
    wide = row if mean else hetero.summed(row, autocast, given.device)
    return {name: part if len(members) == 1 else part.to(wide)
            for name, part, members in zip(together.targets, parts, together.of_target)}
