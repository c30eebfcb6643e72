"""HGTConv as a Program between its maps by node type, which stay the host's own, but on CUDA where
they are plain."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.guards import Shapes, of_heads
from gnnaccel.adapters.pyg import calls, guards
from gnnaccel.adapters.pyg.hetero import dicts, relations
from gnnaccel.adapters.pyg.layers import hetero_linear
from gnnaccel.adapters.pyg.layers.hetero_dict_linear import called_as_part
from gnnaccel.dispatch.distributed import state as active
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational import by_type, pair_maps, statements
from gnnaccel.dispatch.relational.pairs import Blocks
from gnnaccel.dispatch.relational.prepare import MapsByType
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec, shapes_of

ONE_DTYPE = True
FIELDS = ("heads", "out_channels", "edge_types", "edge_types_map", "dst_node_types")
ARGUMENTS = ("x_dict", "edge_index_dict"), ()


class _Operands(NamedTuple):
    """Tensors of a call. ``types``: node types that take part, in the order of their nodes;
    ``graph``: the first node of each, and the edge types given; ``plain``: whether the maps by node
    type are; ``own``: over a part, how many nodes of each type, the first ones, are
    destinations."""

    x_dict: Mapping[str, Tensor]
    types: tuple[str, ...]
    graph: dicts.Graph
    plain: bool
    own: tuple[int, ...] | None


def state(layer: Any, x_dict: Any,
          edge_index_dict: Any) -> tuple[RelationalSpec, RelationalInputs] | Reason:
    if not isinstance(x_dict, Mapping):
        return reason("GA206", f"x_dict is a {type(x_dict).__name__}",
                      "pass a dictionary by node type")
    why = guards.parametrized_reason(layer) or _modules_reason(layer)
    if why is not None:
        return why
    lins, weight = layer.kqv_lin.lins, layer.k_rel.weight
    # in the host's order of nodes; it passes over unknown types
    types = tuple(name for name in lins if name in x_dict)
    why = (guards.lazy_reason(*[dicts.module(lins, name) for name in types])
           or dicts.features_reason(x_dict, types, weight.device))
    if why is not None:
        return why
    own = None if active.own_rows is None else _own(x_dict, types)
    graph = _graph(layer, x_dict, edge_index_dict, types, weight.device, own)
    if type(graph) is Reason:
        return graph
    why = _order_reason(layer, edge_index_dict)
    if why is not None:
        return why
    row, out = calls.dtypes(x_dict[types[0]],
                            *[dicts.parameter(layer.p_rel, "__".join(name))
                              for name in graph.present])
    heads, relation_count = layer.heads, len(layer.edge_types)
    width, ends = layer.out_channels // heads, (graph.num_nodes, graph.num_dst)
    program = statements.hgt(1 / math.sqrt(width), heads)
    view = relations.viewer(graph.structure, *ends, relation_count, graph.layout)
    maps = _maps(layer, x_dict, types, {row, out}, own is not None)
    spec = RelationalSpec(program, "HGTConv", statements.hgt_shapes(heads, width), row, out,
                          *ends, graph.num_edges, relation_count, view, heads=heads, width=width,
                          layout=graph.layout, beside=maps)
    return spec, RelationalInputs(graph.structure, weight.device,
                                  _Operands(x_dict, types, graph, maps is not None, own))


def _own(x_dict: Mapping[str, Tensor], types: tuple[str, ...]) -> tuple[int, ...]:
    """`_Operands.own`. Types that a part does not know have no halo."""
    return tuple([active.own_rows.get(name, x_dict[name].shape[0]) for name in types])


def _graph(layer: Any, x_dict: Mapping[str, Tensor], edge_index_dict: Any, types: tuple[str, ...],
           device: torch.device, own: tuple[int, ...] | None) -> dicts.Graph | Reason:
    sizes = {name: x_dict[name].shape[0] for name in types}
    return dicts.graph(edge_index_dict, sizes, layer.edge_types_map, device,
                       None if own is None else dict(zip(types, own)))


def _order_reason(layer: Any, names: Iterable[tuple]) -> Reason | None:
    """Why edge types in this order stay native: PyG maps rows as if they were sorted by type."""
    numbers = [layer.edge_types_map[name] for name in names]
    if not (layer.k_rel.is_sorted or layer.v_rel.is_sorted) or numbers == sorted(numbers):
        return None
    return reason("GA206", "edge types are in another order than the layer's metadata, on which "
                  "PyG's result depends", "pass them in the order of the metadata")


def reads(layer: Any, args: tuple, kwargs: dict) -> list:
    """Values that the route depends on beside the layer's own attributes and the arguments."""
    modules = layer._modules
    return [tuple(map(one.__dict__.get, hetero_linear.FIELDS))
            for one in (modules["k_rel"], modules["v_rel"]) if one is not None]


def keep(spec: RelationalSpec, inputs: RelationalInputs) -> _Operands:
    """The operands without their tensors."""
    operands = inputs.operands
    return operands._replace(x_dict={}, graph=operands.graph._replace(structure=()))


def again(layer: Any, args: tuple, kwargs: dict, kept: _Operands) -> RelationalInputs:
    x_dict, edge_index_dict = calls.bound(args, kwargs, *ARGUMENTS)
    return RelationalInputs(tuple(edge_index_dict.values()), layer.k_rel.weight.device,
                            kept._replace(x_dict=x_dict))


def resized(layer: Any, args: tuple, kwargs: dict, spec: RelationalSpec,
            kept: _Operands) -> tuple[RelationalSpec, RelationalInputs] | None:
    x_dict, edge_index_dict = calls.bound(args, kwargs, *ARGUMENTS)
    types, device, maps = kept.types, layer.k_rel.weight.device, spec.beside
    # keys say how many rows are own
    graph = _graph(layer, x_dict, edge_index_dict, types, device, kept.own)
    if type(graph) is Reason:
        return None
    if maps is not None:
        maps = maps._replace(rows_grad=any([x_dict[name].requires_grad for name in types]))
    ends = graph.num_nodes, graph.num_dst
    view = relations.viewer(graph.structure, *ends, spec.num_relations, graph.layout)
    return (spec.resized(*ends, graph.num_edges, view, spec.rows_grad, graph.layout, maps),
            RelationalInputs(graph.structure, device, kept._replace(x_dict=x_dict, graph=graph)))


def _modules_reason(layer: Any) -> Reason | None:
    """Why the layer's parts are not the host's own. The maps by node type are called, so they may
    hold anything inside."""
    for name in ("kqv_lin", "out_lin"):
        module = layer._modules[name]
        if not hasattr(module, "lins"):
            return reason("GA208", f"{name} is a {type(module).__name__}, not a HeteroDictLinear")
    for name in ("k_rel", "v_rel"):
        module = layer._modules[name]
        if not guards.plain_hetero_linear(module):
            return reason("GA208",
                          f"{name} is no plain HeteroLinear: a {type(module).__name__}, "
                          "perhaps with hooks or a weight of another type")
        sizes = module.num_types, module.in_channels, module.out_channels
        if module.bias is not None or module.weight.shape != sizes:
            return reason("GA208", f"{name} has a bias, or other sizes than its weight")
    return None


def shapes(layer: Any, inputs: RelationalInputs) -> Shapes:
    n, heads, operands = layer.out_channels, layer.heads, inputs.operands
    matrices = heads * len(layer.edge_types), n // heads, n // heads
    names = map("__".join, operands.graph.present)
    maps = dicts.paths("kqv_lin.lins", layer.kqv_lin.lins, operands.types)
    return {"k_rel.weight": matrices, "v_rel.weight": matrices,
            **dict.fromkeys(dicts.paths("p_rel", layer.p_rel, names), (1, heads)),
            **of_heads(layer, 3, n, maps, (), guards.plain_linear)}


def run(layer: Any, spec: RelationalSpec, inputs: RelationalInputs,
        attend: Any) -> dict[str, Tensor]:
    x_dict, types, graph, plain, own = inputs.operands
    if attend.kernels and plain:
        return _run_by_kernels(layer, spec, inputs, attend)
    kqv = called_as_part(layer.kqv_lin, x_dict)
    keys, queries, values = zip(*[kqv[name].split(layer.out_channels, 1) for name in types])
    if own is not None:
        queries = tuple([rows[:count] for rows, count in zip(queries, own)])
        x_dict = {name: x_dict[name][:count] for name, count in zip(types, own)}
    out = _attended(layer, spec, inputs, attend, *map(torch.cat, (keys, queries, values)))
    counts = {name: rows.shape[0] for name, rows in zip(types, queries)}
    out_dict = {name: out[graph.ends[name]:graph.ends[name] + counts[name]] for name in types
                if name in layer.dst_node_types}
    return _finish(layer, x_dict, out_dict)


def _attended(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any,
              keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    """[destinations, channels]: the messages' sums."""
    rows = spec.num_src, spec.heads * spec.width  # of maps that nobody knows
    tensors = dict(keys=keys.view(rows), queries=queries.view(spec.num_dst, rows[1]),
                   values=values.view(rows),
                   w_att=_by_relation(layer, layer.k_rel.weight),
                   w_msg=_by_relation(layer, layer.v_rel.weight))
    with calls.without_autocast(keys.device.type):
        tensors = {name: t.to(spec.row) for name, t in tensors.items()}
        return attend({**tensors, "p": _priors(layer, inputs.operands.graph.present)}).flatten(1)


def _maps(layer: Any, x_dict: Mapping[str, Tensor], types: tuple[str, ...],
          dtypes: set[torch.dtype], apart: bool) -> MapsByType | None:
    """The maps by node type, where they are plain. ``apart``: as there."""
    if not _maps_are_plain(layer, x_dict, types, dtypes):
        return None
    k, n = x_dict[types[0]].shape[1], layer.out_channels
    return MapsByType(k, n, len(types), k == n, True,
                      any(x_dict[name].requires_grad for name in types), apart)


def _maps_are_plain(layer: Any, x_dict: Mapping[str, Tensor], types: tuple[str, ...],
                    dtypes: set[torch.dtype]) -> bool:
    """Whether the maps by node type can run as products by segment: linear maps and nothing else,
    alike for all types, each of which has both."""
    maps = [layer._modules[name] for name in ("kqv_lin", "out_lin")]
    if (not all(map(guards.plain_hetero_dict_linear, maps))
        or not layer.dst_node_types.issuperset(types)):
        return False
    lins = [[dicts.module(module.lins, name) for name in types] for module in maps]
    if not all(guards.plain_linear(lin) for group in lins for lin in group):
        return False
    n = layer.out_channels
    if any(lin.weight.shape != (n, n) or lin.bias is not None and lin.bias.shape != (n,)
           for lin in lins[1]) or any(
               getattr(dicts.parameter(layer.skip, name), "shape", ()) != (1,)
               for name in types):
        return False
    widths = {x_dict[name].shape[1] for name in types}  # where the weights are for others it raises
    shapes: tuple[set[Any], ...] = (widths.union([lin.weight.shape[1] for lin in lins[0]]),
                                    {lin.weight.shape for lin in lins[0]},
                                    *({lin.bias is None for lin in group} for group in lins))
    dtypes = {*dtypes, *(x_dict[name].dtype for name in types),
              *[dicts.parameter(layer.skip, name).dtype for name in types]}
    dtypes.update(t.dtype for group in lins for lin in group for t in (lin.weight, lin.bias)
                  if t is not None)
    return all(len(values) == 1 for values in (*shapes, dtypes))


def _run_by_kernels(layer: Any, spec: RelationalSpec, inputs: RelationalInputs,
                    attend: Any) -> dict[str, Tensor]:
    x_dict, types, _, _, own = inputs.operands
    x = [x_dict[name] for name in types]
    attend.build(torch.is_grad_enabled() and _wants_grad(layer, x))
    together = by_type.together(x) if own is None else None
    sizes = tuple([t.shape[0] for t in x])
    blocks = attend.graph.blocks(sizes)
    weight: Any
    bias: Any
    weight, bias = [None if t is None else t.unflatten(1, (3, -1))
                    for t in _stacked(layer.kqv_lin, types)]
    if own is not None:
        rows, out = _with_own(layer, spec, inputs, attend, x, blocks, weight, bias)
        sizes, blocks = own, attend.graph.blocks(own)
    elif pair_maps.worth(attend.graph, spec.row, x[0].shape[1], layer.out_channels):
        rows, queries = by_type.project(blocks, weight[:, 1:2], True,
                                        None if bias is None else bias[:, 1:2], x, together)
        rows, keys, values = pair_maps.pair_maps(attend.graph, rows,
                                                 *_folded(layer, inputs.operands, weight, bias))
        out = _attended_pairs(layer, attend, keys, queries, values)
    else:
        rows, keys, queries, values = by_type.project(blocks, weight, True, bias, x, together)
        out = _attended(layer, spec, inputs, attend, keys, queries, values)
    lins = [dicts.module(layer.out_lin.lins, name) for name in types]
    biases = [] if lins[0].bias is None else [lin.bias for lin in lins]
    gates = ([dicts.parameter(layer.skip, name) for name in types]
             if x[0].shape[1] == layer.out_channels else [])
    return dict(zip(types,
                    by_type.finish_types(blocks, sizes, out, [lin.weight for lin in lins], biases,
                                         gates, rows)))


def _with_own(layer: Any, spec: RelationalSpec, inputs: RelationalInputs, attend: Any,
              x: list[Tensor], blocks: Blocks, weight: Tensor,
              bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The own rows of ``x``, type after type, and the messages' sums there. Keys and values are of
    all rows, queries of own ones. weight [types, 3, ...], bias: the maps by type, in ``blocks``."""
    own: Any = inputs.operands.own
    every, first = by_type.with_leading(x, own)
    rows, queries = by_type.project(attend.graph.blocks(own), weight[:, 1:2], True,
                                    None if bias is None else bias[:, 1:2], [first])
    if pair_maps.worth(attend.graph, spec.row, every.shape[1], layer.out_channels):
        _, keys, values = pair_maps.pair_maps(attend.graph, every,
                                              *_folded(layer, inputs.operands, weight, bias))
        return rows, _attended_pairs(layer, attend, keys, queries, values)
    _, keys, values = by_type.project(blocks, weight[:, ::2], True,
                                      None if bias is None else bias[:, ::2], [every])
    return rows, _attended(layer, spec, inputs, attend, keys, queries, values)


def _wants_grad(layer: Any, x: list[Tensor]) -> bool:
    """Whether backward goes through the attention."""
    before = chain((layer.k_rel.weight, layer.v_rel.weight), x, layer.kqv_lin.parameters(),
                   layer.p_rel.parameters())
    return any(t.requires_grad for t in before)


def _folded(layer: Any, operands: _Operands, weight: Tensor,
            bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The maps of keys and values by relation, those of its source's type and the priors in them.
    An edge type without a source here has no edges either: any weights do."""
    place = {name: at for at, name in enumerate(operands.types)}
    sources = tuple([place.get(name[0], 0) for name in layer.edge_types])
    keys, values = (_by_relation(layer, layer._modules[name].weight) for name in ("k_rel", "v_rel"))
    with calls.without_autocast(weight.device.type):
        return pair_maps.fold(sources, weight, bias, keys, values,
                              _priors(layer, operands.graph.present))


def _attended_pairs(layer: Any, attend: Any, keys: Tensor, queries: Tensor,
                    values: Tensor) -> Tensor:
    """`_attended` with keys and values of pairs."""
    program = statements.hgt_of_pairs(1 / math.sqrt(layer.out_channels // layer.heads), layer.heads)
    tensors = dict(keys=keys, values=values, queries=queries)
    with calls.without_autocast(keys.device.type):
        return attend.of(program, shapes_of(program, tensors))(tensors).flatten(1)


def _stacked(module: Any, types: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
    lins = [dicts.module(module.lins, name) for name in types]
    return (torch.stack([lin.weight for lin in lins]),
            None if lins[0].bias is None else torch.stack([lin.bias for lin in lins]))


def _by_relation(layer: Any, weight: Tensor) -> Tensor:
    """[relations, heads, D, D] of the host's [heads * relations, D, D], without a copy."""
    return weight.unflatten(0, (layer.heads, len(layer.edge_types))).transpose(0, 1)


def _priors(layer: Any, present: frozenset) -> Tensor:
    """[relations, heads] priors. Rows of edge types that the call does not name are not the layer's
    parameters, so that they get no gradient, as in the host."""
    rows = [dicts.parameter(layer.p_rel, "__".join(name)) if name in present else None
            for name in layer.edge_types]
    if len(present) < len(rows):
        unused = layer.k_rel.weight.new_zeros(1, layer.heads)
        rows = [unused if row is None else row for row in rows]
    return torch.cat(rows)  # type: ignore[arg-type]  # None only where `present` lacks one


def _finish(layer: Any, x_dict: Mapping[str, Tensor],
            out_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The host's steps after the messages: GELU, the map by node type, the gated skip."""
    mapped = called_as_part(layer.out_lin,
                            {name: torch.nn.functional.gelu(out) for name, out in out_dict.items()})
    results = {}
    for name in out_dict:
        out, x = mapped[name], x_dict[name]
        if out.size(-1) == x.size(-1):
            alpha = layer.skip[name].sigmoid()
            out = alpha * out + (1 - alpha) * x
        results[name] = out
    return results
