"""HeteroConv of SAGEConv, GraphConv or GCNConv as one relational layer.

A layer of neighbours' mean (or sum), linear map, bias and root term for each relation, summed (or
averaged) over the relations of a node type, is RGCN with the relations' root weights and biases
added up. Where relations are not added up, each has rows of its own for its destinations. GCN's
sums are weighted: its normalisation and self loops, relation by relation, are made for all
relations at once.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import alike
from gnnaccel.adapters.alike import Parameters
from gnnaccel.adapters.layout import EdgeType, Layout
from gnnaccel.adapters.pyg import calls
from gnnaccel.adapters.pyg.hetero import dicts, inner_convs, relations
from gnnaccel.adapters.pyg.hetero.inner_convs import Together
from gnnaccel.adapters.pyg.propagate import kept_results
from gnnaccel.dispatch.graph import joining
from gnnaccel.dispatch.graph.joining import Range
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import statements
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec


class _Rows(NamedTuple):
    """Places of rows. ``names``: edge types by the number of their relation; ``sizes``,
    ``targets``, ``of``: arguments of `hetero.graph`; ``x_dst``: features of the targets;
    ``of_source``, ``of_target``: the relations that leave and enter each."""

    names: list[EdgeType]
    sizes: dict[str, int]
    targets: dict[Any, int]
    of: Callable[[EdgeType], tuple]
    x_dst: list[Tensor]
    of_source: tuple[tuple[int, ...], ...]
    of_target: tuple[tuple[int, ...], ...]


class _Operands(NamedTuple):
    """Tensors of a call. ``norms``: the arguments of `weights`; None where edges have no
    weights."""

    together: Together
    parameters: Parameters
    x_src: list[Tensor]
    rows: _Rows
    norms: tuple | None


def state(layer: Any, together: Together, x_dict: Mapping[str, Any],
          edge_index_dict: Mapping) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    parameters = _parameters(together)
    if type(parameters) is Reason:
        return parameters
    why = _features_reason(x_dict, together, parameters)
    if why is not None:
        return why
    weight, apart = parameters.weights[0], layer.aggr not in dicts.ADDED_UP
    rows = _rows_apart(together, x_dict) if apart else _rows(together, x_dict)
    weighted = together.kind == "GCNConv" and together.option("normalize")
    looped = weighted and together.option("add_self_loops")
    graph = _graph(rows, edge_index_dict, looped, weight.device)
    if type(graph) is Reason:
        return graph
    row = calls.mapped(weight)
    shapes = (("x", (weight.shape[1],)), ("weight", tuple(weight.shape)),
              *((("norm", ()),) if weighted else ()))
    # costs are known only of the latter
    native = "HeteroConv apart" if apart or together.kind == "GCNConv" else "HeteroConv"
    program = statements.rgcn(together.mean, False, transposed=True, weighted=weighted)
    view = relations.viewer(graph.structure, graph.num_nodes, graph.num_dst, len(rows.names),
                            graph.layout)
    x_src = [x_dict[name] for name in together.sources]
    spec = RelationalSpec(program, native, shapes, row, row, graph.num_nodes, graph.num_dst,
                          graph.num_edges, len(rows.names), view, layout=graph.layout,
                          rows_grad=any(x.requires_grad for x in x_src),
                          beside=alike.root_term(parameters, len(rows.x_dst)))
    ordered = _ordered(parameters, together, rows)
    norms = _norms(graph, rows, looped, row) if weighted else None
    return spec, RelationalInputs(graph.structure, weight.device, _Operands(
        together, ordered, x_src, rows, norms))


def _graph(rows: _Rows, edge_index_dict: Mapping, looped: bool,
           device: torch.device) -> dicts.Graph | Reason:
    """The graph of a call. ``looped``: with a self loop of each node in each relation."""
    numbers = {name: at for at, name in enumerate(rows.names)}
    graph = dicts.graph(edge_index_dict, rows.sizes, numbers, device, rows.targets, rows.of)
    if not looped or type(graph) is Reason:
        return graph
    layout = with_loops(graph, numbers, rows.of, rows.targets)
    return graph._replace(layout=layout, num_edges=graph.num_edges + sum(
        [own.num_src for own in layout.loops]))


def keep(operands: _Operands) -> tuple:
    norms = operands.norms
    return operands.together, operands.rows._replace(x_dst=[]), None if norms is None else norms[1:]


def again(layer: Any, x_dict: Mapping[str, Tensor], structure: tuple[Tensor, ...],
          kept: tuple) -> _Operands:
    together, rows, norms = kept
    apart = layer.aggr not in dicts.ADDED_UP
    ends = [name[-1] for name in rows.names] if apart else together.targets
    return _Operands(together, _ordered(_taken(together), together, rows),
                     [x_dict[name] for name in together.sources],
                     rows._replace(x_dst=[x_dict[name] for name in ends]),
                     None if norms is None else (structure, *norms))


def resized(layer: Any, spec: RelationalSpec, x_dict: Mapping[str, Tensor],
            edge_index_dict: Mapping,
            kept: tuple) -> tuple[RelationalSpec, RelationalInputs] | None:
    together, _, norms = kept
    rows = (_rows if layer.aggr in dicts.ADDED_UP else _rows_apart)(together, x_dict)
    x_src = [x_dict[name] for name in together.sources]
    device, looped = x_src[0].device, norms is not None and together.option("add_self_loops")
    graph = _graph(rows, edge_index_dict, looped, device)
    if type(graph) is Reason:
        return None
    view = relations.viewer(graph.structure, graph.num_nodes, graph.num_dst, spec.num_relations,
                            graph.layout)
    operands = _Operands(together, _ordered(_taken(together), together, rows), x_src, rows,
                         None if norms is None else _norms(graph, rows, looped, spec.row))
    return (spec.resized(graph.num_nodes, graph.num_dst, graph.num_edges, view,
                         any([x.requires_grad for x in x_src]), graph.layout),
            RelationalInputs(graph.structure, device, operands))


def _ordered(found: Parameters, together: Together, rows: _Rows) -> Parameters:
    """The parameters of each kind in the order of the relations' numbers."""
    at = [together.numbers[name] for name in rows.names]
    return Parameters(*[None if ts is None  # type: ignore[arg-type]  # as in `found`
                        else [ts[i] for i in at] for ts in found])


def _norms(graph: dicts.Graph, rows: _Rows, looped: bool, row: torch.dtype) -> tuple:
    """The arguments of `weights`."""
    relations_of = tuple(part.relation for part in graph.layout.parts)
    counts = tuple(rows.targets[rows.of(name)[1]] for name in rows.names)
    return graph.structure, relations_of, counts, looped, torch.promote_types(row, torch.float32)


def _rows(together: Together, x_dict: Mapping[str, Tensor]) -> _Rows:
    """Places of rows where relations are added up: destinations are nodes."""
    sizes, targets = ({name: x_dict[name].shape[0] for name in types}
                      for types in (together.sources, together.targets))
    return _Rows(list(together.names), sizes, targets, itemgetter(0, -1),
                 [x_dict[name] for name in together.targets], together.of_source,
                 together.of_target)


def _rows_apart(together: Together, x_dict: Mapping[str, Tensor]) -> _Rows:
    """Places of rows where relations stay apart: destinations are nodes of a relation, those of one
    node type side by side."""
    names = [together.names[at] for at in chain(*together.of_target)]
    x_dst = [x_dict[name[-1]] for name in names]
    return _Rows(names, {name: x_dict[name].shape[0] for name in together.sources},
                 {name: x.shape[0] for name, x in zip(names, x_dst)}, lambda name: (name[0], name),
                 x_dst,
                 tuple(tuple(at for at, name in enumerate(names) if name[0] == source)
                       for source in together.sources), tuple((at,) for at in range(len(names))))


def _maps(together: Together) -> tuple[str, str | None]:
    """The names of the maps of neighbours and of the root term, None where there is none."""
    neighbours, root = {"SAGEConv": ("lin_l", "lin_r"),
                        "GraphConv": ("lin_rel", "lin_root")}[together.kind]
    return (neighbours,
            root if together.has(root) and together.option("root_weight") is not False else None)


def _taken(together: Together) -> Parameters:
    """The parameters as they are, unchecked."""
    if together.kind == "GCNConv":
        return Parameters(together.parameters("lin", "weight"),  # type: ignore[arg-type]
                          together.parameters("", "bias"), None)
    neighbours, root = _maps(together)
    return Parameters(together.parameters(neighbours, "weight"),  # type: ignore[arg-type]
                      together.parameters(neighbours, "bias"),
                      None if root is None else together.parameters(root, "weight"))


def _parameters(together: Together) -> Parameters | Reason:
    if together.kind == "GCNConv":
        return _of_gcn(together)
    parameters, (neighbours, root) = _taken(together), _maps(together)
    if (parameters.weights is None
        or (root and (parameters.roots is None or together.parameters(root, "bias") is not None))):
        return reason("GA208", f"{neighbours} or {root} was replaced")
    return _checked(parameters)


def _of_gcn(together: Together) -> Parameters | Reason:
    if any(name[0] != name[-1] for name in together.names):  # an error in the host
        return reason("GA208", "GCNConv between different node types")
    parameters = _taken(together)
    if parameters.weights is None or together.parameters("lin", "bias") is not None:
        return reason("GA208", "lin was replaced")
    checked = _checked(parameters)
    if (type(checked) is Parameters
        and calls.mapped(checked.weights[0]) != checked.weights[0].dtype):
        return reason("GA203", "autocast is on: GCN's sums are then in two dtypes")
    return checked


def _checked(found: Parameters) -> Parameters | Reason:
    return inner_convs.tensors_reason(*found) or alike.shapes_reason(found, True) or found


def _features_reason(x_dict: Mapping[str, Any], together: Together,
                     parameters: Parameters) -> Reason | None:
    weight = parameters.weights[0]
    why = dicts.features_reason(x_dict, together.nodes, weight.device)
    if why is not None:
        return why
    out, width = weight.shape
    for name in together.sources:
        if x_dict[name].shape[1] != width:
            return reason("GA206",
                          f"x_dict[{name!r}] has {x_dict[name].shape[1]} features, the "
                          f"weights are for {width}")
    for name, members in zip(together.targets, together.of_target):
        fits = out, x_dict[name].shape[1]
        if (parameters.roots is not None
            and not all(parameters.roots[at].shape == fits for at in members)):
            return reason("GA206",
                          f"x_dict[{name!r}] has {fits[1]} features, the layers' root "
                          "weights are for others")
    return dicts.dtypes_reason(x_dict, together.nodes, weight)


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs,
        attend: Any) -> dict[str, Tensor]:
    together, parameters, x_src, rows, norms = inputs.operands
    row, mean, apart = spec.row, layer.aggr == "mean", layer.aggr not in dicts.ADDED_UP
    autocast = torch.is_autocast_enabled(inputs.device.type)

    def weighted(operands: dict) -> Tensor:
        if norms is None:
            return attend(operands)
        # checks the ids, with which the weights are indexed
        attend.graph.statistics()
        return attend({**operands, "norm": weights(*norms).to(row)})

    with calls.without_autocast(inputs.device.type):
        parts = alike.run(weighted, parameters, x_src, rows.x_dst, rows.of_source, rows.of_target,
                          mean, row)
    if apart:
        of = dict(zip(rows.names, parts))
        return {name: dicts.grouped([of[together.names[at]] for at in members], layer.aggr)
                for name, members in zip(together.targets, together.of_target)}
    wide = dicts.summed(row, autocast, inputs.device) if layer.aggr == "sum" else row
    return {name: part if len(members) == 1 else part.to(wide)
            for name, part, members in zip(together.targets, parts, together.of_target)}


# --- GCN's normalisation and self loops -----------------------------------------------------------

def with_loops(graph: dicts.Graph, relations: Mapping[EdgeType, int],
               rows: Callable[[EdgeType], tuple], targets: Mapping[Any, int]) -> Layout:
    """The layout of ``graph`` with a self loop for each node of all ``relations``, those without
    edges too. Loops that were there weigh nothing. ``rows``, ``targets``: arguments of
    `hetero.graph`."""
    loops = []
    for name, at in relations.items():
        src, dst = rows(name)
        loops.append(Range(at, graph.starts[src], targets[dst], graph.ends[dst], targets[dst]))
    return Layout(graph.layout.parts, tuple(loops))


def weights(edge_indices: tuple[Tensor, ...], relations: tuple[int, ...], counts: tuple[int, ...],
            loops: bool, dtype: torch.dtype) -> Tensor:
    """Weights [E], with ``loops`` [E + sum of ``counts``]: each edge's ``1 / sqrt(degree of source
    * degree of destination)`` within its relation, then that of each loop, as PyG's ``gcn_norm``
    has them.

    ``relations``: that of each tensor of edges; ``counts``: nodes of each relation. Kept while the
    same edges come again.
    """
    return _kept(*edge_indices, loops, dtype, *counts, *relations)[0]


def _normalised(*given: Any) -> tuple[Tensor]:
    edges = [t for t in given if isinstance(t, Tensor)]
    loops, dtype, *numbers = given[len(edges):]
    counts, relations = numbers[:-len(edges)], numbers[-len(edges):]
    starts = [0, *accumulate(counts)]
    src, dst = _joined(edges,
                       [Range(at, starts[at], counts[at], starts[at], counts[at])
                        for at in relations], starts[-1])
    counted = (src != dst).to(dtype) if loops else torch.ones_like(src, dtype=dtype)
    degree = torch.zeros(starts[-1], dtype=dtype, device=src.device).index_add_(0, dst, counted)
    if loops:
        root = (degree + 1).pow(-0.5)
        return (torch.cat([root.index_select(0, src) * counted * root.index_select(0, dst),
                           root * root]),)
    root = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
    return (root.index_select(0, src) * root.index_select(0, dst),)


def _joined(edges: list[Tensor], ranges: list[Range], nodes: int) -> tuple[Tensor, ...]:
    """Sources and destinations over the nodes of all relations."""
    if joining.serves(edges, nodes):
        src, dst, _ = joining.by_kernel(edges, ranges)[0]
        # ids out of range are told of where the graph is built
        return src.clamp_(min=0), dst.clamp_(min=0)
    return tuple(torch.cat([t[end].long() + into.src for t, into in zip(edges, ranges)])
                 for end in (0, 1))


_kept = kept_results.keeping(_normalised)
