"""The products of `PNAConv` before and after its reductions: those of all towers at once.

Its tensors, with T towers of F channels, R aggregations and S scalers: x [N, F], of a divided input
[N, T * F]; messages [N, T, R, F]; results [N, T * F_out]. `towers` has the arithmetic.
"""
from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import guards
from gnnaccel.cuda import capture
from gnnaccel.dispatch.ops import towers
from gnnaccel.dispatch.ops.plain import in_degrees
from gnnaccel.dispatch.ops.towers import Degrees, Runs

_SHIFTED = ("mean", "max", "min")


def runs_of(reduces: list[str]) -> Runs:
    """How often the term that all messages of a node share is in the results of ``reduces``, for
    each run of these that are alike, and the length of the run."""
    kinds = ["one" if one in _SHIFTED else "all" if one == "sum" else "none" for one in reduces]
    return [(kind, len(list(alike))) for kind, alike in itertools.groupby(kinds)]


def degrees(call: Any, dtype: torch.dtype) -> Degrees:
    """Degrees of the graph of a `PlainCall`; made once where kernels keep its structure, for all
    layers."""
    def make() -> Degrees:
        return towers.degrees(in_degrees(call.graph, call.kernels), dtype)

    if not call.kernels or capture.capturing():
        return make()
    return call.graph.view().derived(("degrees", dtype), make)


# --- before ---------------------------------------------------------------------------------------

def before(layer: Any, x: Tensor, edge: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The terms of a message: of the node that receives it and of the one that sends it, [N, T *
    F], and of its edge [E, T * F], where ``edge`` [E, edge_dim] has features."""
    maps = [nn[0].weight for nn in layer.pre_nns], [nn[0].bias for nn in layer.pre_nns]
    encoder = shift = None
    if edge is not None:
        encoder, shift = layer.edge_encoder.weight, layer.edge_encoder.bias
    inputs = x, edge, encoder, shift
    if _divided(layer):
        own, sent, *added = towers.ends_of_parts(layer.F_in, *inputs, *map(torch.cat, maps))
    else:
        own, sent, *added = towers.Ends(layer.towers, layer.F_in).apply(*inputs, *maps[0],
                                                                        *maps[1])
    return own, sent, added[0] if added else None


def _divided(layer: Any) -> bool:
    """Whether each tower maps a part of x of its own."""
    return layer.divide_input and layer.towers > 1


# --- after ----------------------------------------------------------------------------------------

def joins(post_nns: Any, dtype: torch.dtype) -> bool:
    """Whether the maps after the reductions are one for each tower and nothing else, so that one
    product can make them all."""
    return (all([len(nn) == 1 and guards.plain(nn, torch.nn.Sequential)
                 and guards.plain_linear(nn[0]) and nn[0].weight.dtype == dtype
                 and (nn[0].bias is None or (nn[0].bias.shape == nn[0].weight.shape[:1]
                                             and nn[0].bias.dtype == dtype))
                 for nn in post_nns])
            and len({(nn[0].weight.shape, nn[0].bias is None) for nn in post_nns}) == 1)


def _scales(module: Any, of: Degrees) -> list[Tensor | None]:
    """Factors [N] of each scaler of a `DegreeScalerAggregation`; None for ones. Any number will do
    for nodes without edges, whose results are zeros."""
    scales: list[Tensor | None] = []
    for scaler in module.scaler:
        if scaler == "identity":
            scales.append(None)
        elif scaler == "linear":
            scales.append(of.least_one / module.avg_deg_lin)
        elif scaler == "inverse_linear":
            scales.append(module.avg_deg_lin / of.least_one)
        else:
            scales.append(of.log / module.avg_deg_log if scaler == "amplification"
                          else module.avg_deg_log / of.log)
    return scales


def after(layer: Any, x: Tensor, found: Tensor, own: Tensor, of: Degrees, runs: Runs) -> Tensor:
    """[N, T * F_out]: `one_by_one`, by one product of all towers with x and one with the messages;
    arguments as in `towers.shifted`."""
    scales = _by_node(_scales(layer.aggr_module, of), of)
    weights = [nn[0].weight for nn in layer.post_nns]
    biases = [] if layer.post_nns[0][0].bias is None else [nn[0].bias for nn in layer.post_nns]
    if not _divided(layer) and (scales is None or not scales.requires_grad):
        return towers.Scaled(layer.towers, of, runs, scales, bool(biases)).apply(
            x, own, found, *weights, *biases)
    messages, weight = towers.shifted(layer.towers, found, own, of, runs), torch.cat(weights)
    out = towers.mapped(messages, weight, layer.F_in, scales)
    parts = x.unflatten(1, (-1, layer.F_in)).transpose(0, 1)  # [T or 1, N, F]
    of_x = weight[:, :layer.F_in].unflatten(0, (layer.towers, -1))
    out = (parts @ of_x.mT).transpose(0, 1) + out
    out = out.flatten(1)
    return out + torch.cat(biases) if biases else out


def _by_node(scales: list[Tensor | None], of: Degrees) -> Tensor | None:
    """The scales as [N, S]; None where all are ones of a single scaler."""
    if scales == [None]:
        return None
    ones = of.log.new_ones(()).expand_as(of.log)
    return torch.stack([ones if scale is None else scale for scale in scales], 1)


def one_by_one(layer: Any, x: Tensor, found: Tensor, own: Tensor, of: Degrees,
               runs: Runs) -> Tensor:
    """[N, T * F_out]: the modules of each tower, called on its features and on its messages,
    scaled. Arguments as in `towers.shifted`."""
    messages = towers.shifted(layer.towers, found, own, of, runs).flatten(2)
    x = x.unflatten(1, (-1, layer.F_in)).expand(-1, layer.towers, -1)
    parts = [messages if scale is None else messages * scale.view(-1, 1, 1)
             for scale in _scales(layer.aggr_module, of)]
    out = torch.cat([x, *parts], dim=-1)
    return torch.cat([nn(out[:, i]) for i, nn in enumerate(layer.post_nns)], dim=1)
