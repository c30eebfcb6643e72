"""HeteroConv of alike layers, one for each relation, run as one layer.

Other calls stay native: layers of them that are alike run in groups (`hetero_groups`), the others
are routed one by one. Which layers can run together: `inner_convs.KINDS`.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gnnaccel.adapters.pyg import calls
from gnnaccel.adapters.pyg.hetero import (dicts, hetero_gat, hetero_gatv2, hetero_gin,
                                          hetero_groups, hetero_sage, inner_convs)
from gnnaccel.adapters.pyg.hetero.inner_convs import Together
from gnnaccel.dispatch.distributed import state as distributed
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec

FIELDS = ("aggr",)
inside = hetero_groups.inside

_OF_KIND = {"SAGEConv": hetero_sage, "GraphConv": hetero_sage, "GATConv": hetero_gat,
            "GATv2Conv": hetero_gatv2, "GCNConv": hetero_sage, "GINConv": hetero_gin}


def state(layer: Any, args: tuple, kwargs: dict) -> Any:
    if distributed.each_layer():
        return reason("GA210", "over a part of a graph each layer gets its halo rows")
    result = _state(layer, args, kwargs)
    if type(result) is not Reason:
        return result
    call = hetero_groups.divided(layer, args, kwargs)
    if call is not None:
        return reason("GA210",
                      f"in groups that run as one: {call.division}; as a whole not: "
                      f"{result.code} {result.text}")
    return (reason("GA210", f"{result.code} {result.text}")
            if inner_convs.routed_alone(layer) else result)


def _state(layer: Any, args: tuple, kwargs: dict) -> Any:
    bound = calls.bind(args, kwargs, ("x_dict", "edge_index_dict"), ())
    if bound is None or not all(isinstance(argument, Mapping) for argument in bound):
        return reason("GA208", "the call is more than two dictionaries, of features and of edges")
    x_dict, edge_index_dict = bound
    if layer.aggr not in dicts.GROUPINGS and layer.aggr not in dicts.IN_PAIRS:
        return reason("GA208", f"aggr={layer.aggr!r} over relations",
                      f"use one of {dicts.GROUPINGS}")
    together = inner_convs.look_through(layer, edge_index_dict)
    if type(together) is Reason:
        return together
    why = _dicts_reason(x_dict, together)
    if why is not None:
        return why
    edges = {name: edge_index_dict[name] for name in together.names}
    return _OF_KIND[together.kind].state(layer, together, x_dict, edges)


def parts(layer: Any, args: tuple) -> list | None:
    """The state of the layers inside; None where they do not run as one."""
    if len(args) != 2 or type(args[1]) is not dict:
        return None
    together = inner_convs.look_through(layer, args[1])
    return None if type(together) is Reason else [together, *together.looks()]


def keep(spec: Any, inputs: Any) -> tuple:
    """(the layers, the edge types that have edges, values that their kind needs)."""
    together = inputs.operands.together
    layout: Any = spec.layout if isinstance(spec, RelationalSpec) else spec.join
    return (together, tuple(part.name for part in layout.parts),
            _OF_KIND[together.kind].keep(inputs.operands))


def again(layer: Any, args: tuple, kwargs: dict, kept: tuple) -> RelationalInputs:
    x_dict, edge_index_dict = args
    together, names, of_kind = kept
    structure = tuple([edge_index_dict[name] for name in names])
    return RelationalInputs(structure, structure[0].device,
                            _OF_KIND[together.kind].again(layer, x_dict, structure, of_kind))


def resized(layer: Any, args: tuple, kwargs: dict, spec: Any,
            kept: tuple) -> tuple[Any, RelationalInputs] | None:
    if distributed.each_layer():
        return None
    (x_dict, edge_index_dict), (together, _, of_kind) = args, kept
    edges = {name: edge_index_dict[name] for name in together.names}
    return _OF_KIND[together.kind].resized(layer, spec, x_dict, edges, of_kind)


def _dicts_reason(x_dict: Mapping[str, Any], together: Together) -> Reason | None:
    missing = [name for name in together.nodes if name not in x_dict]
    if missing:
        return reason("GA206", f"there are edges, but no features for {missing[0]!r}")
    if not x_dict.keys().isdisjoint(together.names):
        return reason("GA206", "x_dict holds edge types")
    return None


def run(layer: Any, spec: Any, inputs: Any, attend: Any) -> dict[str, Tensor]:
    return _OF_KIND[inputs.operands.together.kind].run(layer, spec, inputs, attend)
