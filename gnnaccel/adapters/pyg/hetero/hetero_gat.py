"""HeteroConv of GATConv as one attention: each relation has nodes of its own on a virtual graph.

Its sources are the (relation, source node) rows, its destinations the (relation, destination node)
rows. The maps of all relations that leave (or enter) a node type are one batched product, and the
logits' terms another, with the attention vectors multiplied into the maps.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import alike, reachability
from gnnaccel.adapters.guards import Shapes, unfit
from gnnaccel.adapters.pyg import calls
from gnnaccel.adapters.pyg.hetero import dicts, inner_convs
from gnnaccel.adapters.pyg.hetero.inner_convs import Together
from gnnaccel.adapters.pyg.layers import gat
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.plan.request import JoinedSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational.inner_products import mapped_products
from gnnaccel.dispatch.relational.request import RelationalInputs
from gnnaccel.dispatch.run.autograd import turned


class _Parameters(NamedTuple):
    """Parameters of the relations, in their order: maps of sources and destinations [heads * out,
    in], attention vectors [1, heads, out], biases."""

    src: list[Tensor]
    dst: list[Tensor]
    att_src: list[Tensor]
    att_dst: list[Tensor]
    biases: list[Tensor] | None


class Operands(NamedTuple):
    """Tensors of a call. ``parameters``: of the layers' kind, with maps ``src`` and ``dst`` and
    ``biases``."""

    x_dict: Mapping[str, Tensor]
    together: Together
    parameters: Any


def state(layer: Any, together: Together, x_dict: Mapping[str, Any],
          edge_index_dict: Mapping) -> tuple[JoinedSpec, RelationalInputs] | Reason:
    parameters = _parameters(together)
    if type(parameters) is Reason:
        return parameters
    return attention("HeteroConv of GATConv", Operands(x_dict, together, parameters),
                     edge_index_dict, parameters.att_src[0], lambda slope,
                     dropout: programs.additive_terms(slope, dropout, True, False))


def keep(operands: Operands) -> Together:
    return operands.together


def again(layer: Any, x_dict: Mapping[str, Tensor], structure: tuple[Tensor, ...],
          kept: Together) -> Operands:
    return Operands(x_dict, kept, _taken(kept))


def resized(layer: Any, spec: JoinedSpec, x_dict: Mapping[str, Tensor], edge_index_dict: Mapping,
            kept: Together) -> tuple[JoinedSpec, RelationalInputs] | None:
    return of_size(spec, again(layer, x_dict, (), kept), edge_index_dict)


def of_size(spec: JoinedSpec, operands: Operands,
            edge_index_dict: Mapping) -> tuple[JoinedSpec, RelationalInputs] | None:
    """`Contract.resized` of a call with these ``operands``."""
    x_dict, together, _ = operands
    device = x_dict[together.nodes[0]].device
    joined = _graph(together, x_dict, edge_index_dict, device)
    if type(joined) is Reason:
        return None
    return (spec.resized(joined.num_nodes, joined.num_dst, joined.num_edges, joined.layout,
                         _loops(together, joined)),
            RelationalInputs(joined.structure, device, operands))


def attention(native: str, operands: Operands, edge_index_dict: Mapping, att: Tensor,
              program: Callable[[float, float],
                                Program]) -> tuple[JoinedSpec, RelationalInputs] | Reason:
    """The call as an attention over the virtual graph, or why it is none. ``att``: an attention
    vector; ``program``: of a negative slope and a dropout."""
    x_dict, together, parameters = operands
    why = _features_reason(x_dict, together, parameters.src, parameters.dst)
    if why is not None:
        return why
    weight = parameters.src[0]
    joined = _graph(together, x_dict, edge_index_dict, weight.device)
    if type(joined) is Reason:
        return joined
    dropout = together.option("dropout") if together.option("training") else 0.0
    row, loops = calls.mapped(weight), _loops(together, joined)
    out = torch.promote_types(row, att.dtype)
    spec = JoinedSpec(program(together.option("negative_slope"), dropout), native,
                      together.option("heads"), together.option("out_channels"), row, out,
                      joined.num_nodes, joined.num_dst, joined.num_edges, loops, False,
                      join=joined.layout, around=True)
    return spec, RelationalInputs(joined.structure, weight.device, operands)


def _graph(together: Together, x_dict: Mapping[str, Tensor], edge_index_dict: Mapping,
           device: torch.device) -> dicts.Graph | Reason:
    """The virtual graph: at both ends rows of each relation, those of one node type side by
    side."""
    sizes, targets = ({together.names[at]: x_dict[t].shape[0] for t, members in zip(types, of)
                       for at in members}
                      for types, of in ((together.sources, together.of_source),
                                        (together.targets, together.of_target)))
    return dicts.graph(edge_index_dict, sizes, together.numbers, device, targets,
                       rows=lambda name: (name, name))


def _loops(together: Together, joined: dicts.Graph) -> int:
    """Nodes that get a self loop. The host adds loops only where both ends are of one type; then
    both ends' rows lie in the same order."""
    return joined.num_dst if together.option("add_self_loops") else 0


def _maps(together: Together) -> tuple[str, str]:
    return ("lin", "lin") if together.has("lin") else ("lin_src", "lin_dst")


def _taken(together: Together) -> _Parameters:
    """The parameters as they are, unchecked."""
    maps = [together.parameters(part, "weight") for part in _maps(together)]
    return _Parameters(*maps,  # type: ignore[arg-type]  # unchecked
                       *[together.parameters("", name) for name in ("att_src", "att_dst", "bias")])


def _parameters(together: Together) -> _Parameters | Reason:
    parameters = _taken(together)
    biased = any(together.parameters(part, "bias") is not None for part in _maps(together))
    if biased or any(t is None for t in parameters[:4]):
        return reason("GA208", "a layer's linear map or attention vector was replaced")
    return (inner_convs.tensors_reason(*parameters) or shapes_reason(together, gat.shapes)
            or parameters)


def shapes_reason(together: Together, shapes: Callable[..., Shapes]) -> Reason | None:
    """Why the layers' parameters are not of the ``shapes`` that those of their class have."""
    return next(filter(None, [unfit(conv, shapes(conv, None)) for conv in together.convs]), None)


def _features_reason(x_dict: Mapping[str, Any], together: Together, src: list[Tensor],
                     dst: list[Tensor]) -> Reason | None:
    """Why these features cannot be taken; ``src``, ``dst``: the relations' maps of them."""
    why = dicts.features_reason(x_dict, together.nodes, src[0].device)
    if why is not None:
        return why
    if together.option("add_self_loops") and any(name[0] != name[-1] for name in together.names):
        return reason("GA208", "self loops between different node types")
    for weights, end in ((src, 0), (dst, -1)):
        for name, weight in zip(together.names, weights):
            if weight.shape[1] != x_dict[name[end]].shape[1]:
                return reason("GA206",
                              f"x_dict[{name[end]!r}] has {x_dict[name[end]].shape[1]} "
                              f"features, {name!r} takes "
                                       f"{weight.shape[1]}")
    return dicts.dtypes_reason(x_dict, together.nodes, src[0])


def run(layer: Any, spec: JoinedSpec, inputs: RelationalInputs, attend: Any) -> dict[str, Tensor]:
    x_dict, together, parameters = inputs.operands
    h, c = spec.heads, spec.width
    terms = torch.promote_types(spec.row, torch.float32)
    autocast = torch.is_autocast_enabled(inputs.device.type)
    results, readers = watched(together, x_dict, parameters[:-1])
    with calls.without_autocast(inputs.device.type):
        x, operands = [], []
        for name, members in zip(together.sources, together.of_source):
            weight = of_members(results, readers, parameters.src, members)
            operands.append((x_dict[name], weight,
                             of_members(results, readers, parameters.att_src, members, torch.cat)))
            x.append(torch.matmul(x_dict[name].to(spec.row),
                                  turned(weight.to(spec.row))).view(-1, h, c))
        a_src = _terms(results, operands, terms, readers.sources)
        operands = [(x_dict[name], torch.stack([parameters.dst[at] for at in members]),
                     torch.cat([parameters.att_dst[at] for at in members]))
                    for name, members in zip(together.targets, together.of_target)]
        out = attend({"x": reachability.watch(results, joined(x), readers.sources), "a_src": a_src,
                      "a_dst": _terms(results, operands, terms, readers.targets)})
        return finished(results, out, together, x_dict, parameters.biases, layer.aggr, autocast)


def watched(together: Together, x_dict: Mapping[str, Tensor],
            parameters: Iterable[
                list[Tensor] | None]) -> tuple[reachability.Results | None, reachability.Readers]:
    """The results of the attention, of each destination type, made with these parameters of
    relations; and the readers of each tensor."""
    kinds, names = [ts for ts in parameters if ts is not None], together.names
    made_of = (chain((ts[at] for ts in kinds for at in members),
                     (x_dict[names[at][0]] for at in members), (x_dict[name],))
               for name, members in zip(together.targets, together.of_target))
    return (reachability.results(len(together.targets), made_of),
            reachability.readers(together.of_source, together.of_target))


def of_members(results: reachability.Results | None, readers: reachability.Readers,
               tensors: list[Tensor], members: tuple[int, ...],
               join: Callable[[list[Tensor]], Tensor] = torch.stack) -> Tensor:
    """The ``tensors`` of some relations of a node type, joined. Where one result reads all, a
    tensor that is put together later is watched instead."""
    tensor = join([tensors[at] for at in members])
    if results is None or len(members) == 1:
        return tensor
    read = [readers.relations[at] for at in members]
    return tensor if read.count(read[0]) == len(read) else reachability.watch(results, tensor, read)


def _terms(results: reachability.Results | None, made: list[tuple[Tensor, Tensor, Tensor]],
           dtype: torch.dtype, readers: tuple[tuple[int, ...], ...]) -> Tensor:
    """[rows of the virtual graph at an end, heads]: <x W_r, att_r> per head. ``made``: of each node
    type x, the maps [relations, heads * out, in] and the attention vectors [relations, heads, out]
    of its relations; ``readers``: of each, the results."""
    x, weights, vectors = [[t.to(dtype) for t in of_kind] for of_kind in zip(*made)]
    return mapped_products(x, weights, vectors, reachability.reads(results, readers))


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def finished(results: reachability.Results | None, out: Tensor, together: Together,
             x_dict: Mapping[str, Tensor], biases: list[Tensor] | None, aggr: Any,
             autocast: bool) -> dict[str, Tensor]:
    """The layer's result from that of the attention, [rows of the virtual graph, heads, width]."""
    out = out.flatten(1) if together.option("concat") else out.mean(1)
    sizes = [len(members) * x_dict[name].shape[0]
             for name, members in zip(together.targets, together.of_target)]
    parts = reachability.split(results, out, sizes)
    return {name: _finish(part, members, biases, aggr, autocast)
            for name, members, part in zip(together.targets, together.of_target, parts)}


def _finish(part: Tensor, members: tuple[int, ...], biases: list[Tensor] | None, aggr: Any,
            autocast: bool) -> Tensor:
    """The result of one node type from [relations * nodes, width]: the relations, with a bias each,
    put together.

    Never a view: its neighbour in memory, another node type's result, may be changed in place.
    """
    count = len(members)
    if aggr not in dicts.ADDED_UP:
        parts = part.view(count, -1, part.shape[1]).unbind(0)
        return dicts.grouped([_biased(one, biases, at) for one, at in zip(parts, members)], aggr)
    if count == 1:
        return _biased(part, biases, members[0])
    part = part.view(count, -1, part.shape[1])
    if aggr == "sum":
        part = part.to(dicts.summed(part.dtype, autocast, part.device))
    part = part.mean(0) if aggr == "mean" else part.sum(0)
    if biases is None:
        return part
    bias = alike.total([biases[at] for at in members])
    return part + (bias / count if aggr == "mean" else bias)


def _biased(part: Tensor, biases: list[Tensor] | None, at: int) -> Tensor:
    return part.clone() if biases is None else part + biases[at]
