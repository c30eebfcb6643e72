"""HeteroConv of GINConv: the sums over all relations' neighbours as one, then each relation's
network on its own rows.

The sums run over a virtual graph whose destinations are (relation, destination node) rows.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import reachability
from gnnaccel.adapters.pyg import calls
from gnnaccel.adapters.pyg.hetero import dicts
from gnnaccel.adapters.pyg.hetero.inner_convs import Together
from gnnaccel.dispatch.ops.plain import JoinedPlainSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational.request import RelationalInputs


class _Operands(NamedTuple):
    x_dict: Mapping[str, Tensor]
    together: Together


def state(layer: Any, together: Together, x_dict: Mapping[str, Any],
          edge_index_dict: Mapping) -> tuple[JoinedPlainSpec, RelationalInputs] | Reason:
    first = x_dict[together.sources[0]]
    if not isinstance(first, Tensor):
        return reason("GA206", f"x_dict[{together.sources[0]!r}] is a {type(first).__name__}")
    why = dicts.features_reason(x_dict, together.nodes, first.device)
    if why is not None:
        return why
    sources = [x_dict[name] for name in together.sources]
    if len({(x.shape[1], x.dtype) for x in sources}) > 1:
        return reason("GA206", "the sources' features are of several widths or dtypes")
    graph = _graph(together, x_dict, edge_index_dict, first.device)
    if type(graph) is Reason:
        return graph
    spec = JoinedPlainSpec("HeteroConv of GINConv", "sum", False, first.shape[1], first.dtype,
                           graph.num_nodes, graph.num_dst, graph.num_edges, first.is_cpu,
                           join=graph.layout)
    return spec, RelationalInputs(graph.structure, first.device, _Operands(x_dict, together))


def _graph(together: Together, x_dict: Mapping[str, Tensor], edge_index_dict: Mapping,
           device: torch.device) -> dicts.Graph | Reason:
    """The virtual graph: destinations are rows of each relation."""
    sizes = {name: x_dict[name].shape[0] for name in together.sources}
    targets = {name: x_dict[name[-1]].shape[0] for name in together.names}
    return dicts.graph(edge_index_dict, sizes, together.numbers, device, targets,
                       rows=lambda name: (name[0], name))


def keep(operands: _Operands) -> Together:
    return operands.together


def again(layer: Any, x_dict: Mapping[str, Tensor], structure: tuple[Tensor, ...],
          kept: Together) -> _Operands:
    return _Operands(x_dict, kept)


def resized(layer: Any, spec: JoinedPlainSpec, x_dict: Mapping[str, Tensor],
            edge_index_dict: Mapping,
            kept: Together) -> tuple[JoinedPlainSpec, RelationalInputs] | None:
    device = x_dict[kept.sources[0]].device
    graph = _graph(kept, x_dict, edge_index_dict, device)
    if type(graph) is Reason:
        return None
    return (replace(spec, num_src=graph.num_nodes, num_dst=graph.num_dst,
                    num_edges=graph.num_edges, join=graph.layout),
            RelationalInputs(graph.structure, device, _Operands(x_dict, kept)))


def run(layer: Any, spec: JoinedPlainSpec, inputs: RelationalInputs,
        attend: Any) -> dict[str, Tensor]:
    x_dict, together = inputs.operands
    sources = [x_dict[name] for name in together.sources]
    # results of the relations
    results = reachability.results(len(together.names),
                                   ((x_dict[name[0]],) for name in together.names))
    with calls.without_autocast(inputs.device.type):
        x = reachability.watch(results, torch.cat(sources) if len(sources) > 1 else sources[0],
                               together.of_source)
        sums = attend({"x": x})
    parts: dict[str, list[Tensor]] = {name: [] for name in together.targets}
    counts = [x_dict[name[-1]].shape[0] for name in together.names]
    for name, conv, own in zip(together.names, together.convs,
                               reachability.split(results, sums, counts)):
        parts[name[-1]].append(conv.nn(own + (1 + conv.eps) * x_dict[name[-1]]))
    return {name: dicts.grouped(of_target, layer.aggr) for name, of_target in parts.items()}
