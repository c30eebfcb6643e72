"""HeteroConv of GATv2Conv as one attention over the virtual graph of `hetero_gat`: rows of each
relation, with a vector each."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import reachability
from gnnaccel.adapters.pyg import calls
from gnnaccel.adapters.pyg.hetero import hetero_gat, inner_convs
from gnnaccel.adapters.pyg.hetero.inner_convs import Together
from gnnaccel.adapters.pyg.layers import gatv2
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.plan.request import JoinedSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational.request import RelationalInputs
from gnnaccel.dispatch.run.autograd import turned


class _Parameters(NamedTuple):
    """Parameters of the relations, in their order: maps of sources and destinations [heads * out,
    in] and their biases, attention vectors [1, heads, out], biases."""

    src: list[Tensor]
    dst: list[Tensor]
    bias_src: list[Tensor] | None
    bias_dst: list[Tensor] | None
    att: list[Tensor]
    biases: list[Tensor] | None


def state(layer: Any, together: Together, x_dict: Mapping[str, Any],
          edge_index_dict: Mapping) -> tuple[JoinedSpec, RelationalInputs] | Reason:
    parameters = _parameters(together)
    if type(parameters) is Reason:
        return parameters
    operands = hetero_gat.Operands(x_dict, together, parameters)
    return hetero_gat.attention("HeteroConv of GATv2Conv", operands, edge_index_dict,
                                parameters.att[0], programs.gatv2_vectors)


keep = hetero_gat.keep


def again(layer: Any, x_dict: Mapping[str, Tensor], structure: tuple[Tensor, ...],
          kept: Together) -> hetero_gat.Operands:
    return hetero_gat.Operands(x_dict, kept, _taken(kept))


def resized(layer: Any, spec: JoinedSpec, x_dict: Mapping[str, Tensor], edge_index_dict: Mapping,
            kept: Together) -> tuple[JoinedSpec, RelationalInputs] | None:
    return hetero_gat.of_size(spec, again(layer, x_dict, (), kept), edge_index_dict)


def _taken(together: Together) -> _Parameters:
    """The parameters as they are, unchecked."""
    maps, biases = ([together.parameters(part, name) for part in ("lin_l", "lin_r")]
                    for name in ("weight", "bias"))
    return _Parameters(*maps, *biases,  # type: ignore[call-arg, arg-type]  # unchecked
                       together.parameters("", "att"), together.parameters("", "bias"))


def _parameters(together: Together) -> _Parameters | Reason:
    parameters = _taken(together)
    if parameters.att is None or parameters.src is None or parameters.dst is None:
        return reason("GA208", "a layer's linear map or attention vector was replaced")
    return (inner_convs.tensors_reason(*parameters)
            or hetero_gat.shapes_reason(together, gatv2.shapes) or parameters)


def run(layer: Any, spec: JoinedSpec, inputs: RelationalInputs, attend: Any) -> dict[str, Tensor]:
    x_dict, together, parameters = inputs.operands
    autocast = torch.is_autocast_enabled(inputs.device.type)
    sources, targets = (together.sources,
                        together.of_source), (together.targets, together.of_target)
    of_src, of_dst = attend.graph.derived(("vectors", *sources, *targets), lambda: tuple(
        _numbers(x_dict, *end, inputs.device) for end in (sources, targets)))
    results, readers = hetero_gat.watched(together, x_dict, parameters[:-1])
    stack = functools.partial(hetero_gat.of_members, results, readers)
    with calls.without_autocast(inputs.device.type):
        keys = _rows(x_dict, *sources, parameters.src, parameters.bias_src, spec, stack)
        queries = _rows(x_dict, *targets, parameters.dst, parameters.bias_dst, spec, stack)
        keys = reachability.watch(results, keys, readers.sources)
        queries = reachability.watch(results, queries, readers.targets)
        att = reachability.watch(results, torch.cat(parameters.att), readers.relations)
        out = attend({"keys": keys, "queries": queries, "att": att, "of_src": of_src,
                      "of_dst": of_dst})
        return hetero_gat.finished(results, out, together, x_dict, parameters.biases, layer.aggr,
                                   autocast)


def _rows(x_dict: Mapping[str, Tensor], types: tuple[str, ...],
          of_type: tuple[tuple[int, ...], ...], weights: list[Tensor], biases: list[Tensor] | None,
          spec: JoinedSpec, stack: Callable[[list[Tensor], tuple[int, ...]], Tensor]) -> Tensor:
    """[rows of the virtual graph at this end, heads, channels]: the maps of a node type's relations
    as one batched product."""
    parts = []
    for name, members in zip(types, of_type):
        weight = turned(stack(weights, members).to(spec.row))
        rows = torch.matmul(x_dict[name].to(spec.row), weight)
        if biases is not None:
            rows = rows + stack(biases, members).to(spec.row).unsqueeze(1)
        parts.append(rows.view(-1, spec.heads, spec.width))
    return hetero_gat.joined(parts)


def _numbers(x_dict: Mapping[str, Tensor], types: tuple[str, ...],
             of_type: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """[rows of the virtual graph at this end] int32: the relation of each."""
    counts = [x_dict[name].shape[0] for name, members in zip(types, of_type) for _ in members]
    relations = [at for members in of_type for at in members]
    if capture.capturing():  # a copy from the host would wait
        return torch.cat([torch.full((count,), at, dtype=torch.int32, device=device)
                          for count, at in zip(counts, relations)])
    numbers, counted = torch.tensor([relations, counts], dtype=torch.int32, device="cpu").to(device)
    return numbers.repeat_interleave(counted, output_size=sum(counts))
