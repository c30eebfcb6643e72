"""The products of `PNAConv` before and after its reductions: those of all towers at once.

Its tensors, with T towers of F channels, R aggregations and S scalers: x [N, F], of a divided input
[N, T * F]; messages [N, T, R, F]; results [N, T * F_out].
"""
from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import guards

_SHIFTED = ("mean", "max", "min")


# --- before ---------------------------------------------------------------------------------------

def before(layer: Any, x: Tensor, edge: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What goes into a message: of the node that receives it and of the one that sends it, [N, T *
    F], and of its edge [E, T * F], where ``edge`` [E, edge_dim] has features."""
    width = layer.F_in
    weight = _stacked([nn[0].weight for nn in layer.pre_nns])
    bias = _stacked([nn[0].bias for nn in layer.pre_nns])
    to_own, to_sent, *to_edge = weight.split(width, 2)
    added = None
    if edge is not None:
        encoder, to_edge = layer.edge_encoder, to_edge[0].flatten(0, 1)
        if encoder.bias is not None:  # the same in all messages
            bias = torch.addmv(bias.flatten(), to_edge, encoder.bias).view_as(bias)
        added = _of_edges(edge, encoder.weight, to_edge)
    if layer.divide_input and layer.towers > 1:
        parts = x.view(-1, layer.towers, width).transpose(0, 1)
        own = torch.baddbmm(bias.unsqueeze(1), parts, to_own.transpose(1, 2))
        sent = torch.bmm(parts, to_sent.transpose(1, 2))
        return own.transpose(0, 1).flatten(1), sent.transpose(0, 1).flatten(1), added
    own = torch.addmm(bias.flatten(), x, to_own.flatten(0, 1).t())
    return own, x @ to_sent.flatten(0, 1).t(), added


def _stacked(tensors: list[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _of_edges(edge: Tensor, encoder: Tensor, weight: Tensor) -> Tensor:
    """[E, T * F]: ``edge`` [E, D] times two maps, ``encoder`` [F, D] and ``weight`` [T * F, F],
    which are multiplied first where that is less work."""
    (width, size), rows = encoder.shape, weight.shape[0]
    at_once = edge.shape[0] * size * rows + rows * width * size
    if at_once <= edge.shape[0] * width * (size + rows):
        return edge @ (weight @ encoder).t()
    return (edge @ encoder.t()) @ weight.t()


# --- between --------------------------------------------------------------------------------------

def runs_of(reduces: list[str]) -> list[tuple[str, int]]:
    """How often what all messages of a node share is in the results of ``reduces``, "one", "all" or
    "none", for each run of these that are alike, and how many those are."""
    kinds = ["one" if one in _SHIFTED else "all" if one == "sum" else "none" for one in reduces]
    return [(kind, len(list(alike))) for kind, alike in itertools.groupby(kinds)]


def shifted(layer: Any, found: Tensor, own: Tensor, degree: Tensor,
            runs: list[tuple[str, int]]) -> Tensor:
    """[N, T, R, F]: the reductions of whole messages, of those ``found`` [N, R, T * F] of what
    travels. ``own``: as of `before`; ``degree`` [N]: integers; ``runs``: as of `runs_of`. Nodes
    without edges keep zeros."""
    nodes, towers, width = own.shape[0], layer.towers, layer.F_in
    found = found.view(nodes, -1, towers, width).transpose(1, 2)
    own = own.view(nodes, towers, 1, width)
    parts = found.split([count for _, count in runs], 2) if len(runs) > 1 else [found]
    if runs == [("none", found.shape[2])]:  # it gets a gradient, of zeros, as with the host
        return found + own * degree.clamp(max=0).view(-1, 1, 1, 1)
    moved, by_kind = [], {}
    for (kind, _), part in zip(runs, parts):
        if kind != "none":
            if kind not in by_kind:
                count = degree if kind == "all" else degree.clamp(max=1)
                by_kind[kind] = own * count.view(-1, 1, 1, 1)
            part = part + by_kind[kind]
        moved.append(part)
    return torch.cat(moved, 2) if len(moved) > 1 else moved[0]


def _scales(module: Any, degree: Tensor, dtype: torch.dtype) -> list[Tensor | None]:
    """[N] of each scaler of a `DegreeScalerAggregation`; None for ones. Any number will do for
    nodes without edges, whose results are zeros."""
    scalers, log = module.scaler, None
    found: list[Tensor | None] = []
    if scalers == ["identity"]:
        return [None]
    degree = degree.clamp(min=1).to(dtype)
    for scaler in scalers:
        if scaler == "identity":
            found.append(None)
        elif scaler == "linear":
            found.append(degree / module.avg_deg_lin)
        elif scaler == "inverse_linear":
            found.append(module.avg_deg_lin / degree)
        else:
            log = torch.log(degree + 1) if log is None else log
            found.append(log / module.avg_deg_log if scaler == "amplification"
                         else module.avg_deg_log / log)
    return found


# --- after ----------------------------------------------------------------------------------------

def joins(post_nns: Any, dtype: torch.dtype) -> bool:
    """Whether the maps after the reductions are one for each tower and nothing else, so that one
    product can make them all."""
    return (all([len(nn) == 1 and guards.plain(nn, torch.nn.Sequential)
                 and guards.plain_linear(nn[0]) and nn[0].weight.dtype == dtype
                 for nn in post_nns])
            and len({(nn[0].weight.shape, nn[0].bias is None) for nn in post_nns}) == 1)


def after(layer: Any, x: Tensor, messages: Tensor, degree: Tensor) -> Tensor:
    """[N, T * F_out]: `one_by_one`, by one product of all towers with x, and one with the
    ``messages``, whose results are scaled rather than they."""
    nodes, towers, reduces, width = messages.shape
    scales = _scales(layer.aggr_module, degree, x.dtype)
    weight = _stacked([nn[0].weight for nn in layer.post_nns])  # [T, F_out, (1 + S * R) * F]
    bias = (None if layer.post_nns[0][0].bias is None
            else _stacked([nn[0].bias for nn in layer.post_nns]))
    of_x, of_messages = weight.split([width, len(scales) * reduces * width], 2)
    out = _of_x(layer, x, of_x, bias).view(nodes, towers, -1)
    # [T, R * F, S * F_out]
    of_messages = of_messages.unflatten(2, (len(scales), reduces * width)).permute(0, 3, 2, 1)
    of_messages = of_messages.reshape(towers, reduces * width, -1)
    if towers == 1:
        found = messages.reshape(nodes, -1) @ of_messages.squeeze(0)
    else:
        messages = messages.reshape(nodes, towers, -1)
        found = torch.bmm(messages.transpose(0, 1), of_messages).transpose(0, 1)
    found = found.view(nodes, towers, len(scales), -1)
    if scales != [None]:
        ones = degree.new_ones((), dtype=x.dtype).expand(nodes)
        by_row = torch.stack([ones if scale is None else scale for scale in scales], 1)
        found = found * by_row.view(nodes, 1, -1, 1)
    return (out + (found.sum(2) if len(scales) > 1 else found.squeeze(2))).reshape(nodes, -1)


def _of_x(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N, T * F_out]: x times ``weight`` [T, F_out, F], plus ``bias`` [T, F_out]."""
    if layer.divide_input and layer.towers > 1:
        parts = x.view(-1, layer.towers, layer.F_in).transpose(0, 1)
        out = torch.bmm(parts, weight.transpose(1, 2)).transpose(0, 1).flatten(1)
        return out if bias is None else out + bias.flatten()
    return torch.nn.functional.linear(x, weight.flatten(0, 1),
                                      None if bias is None else bias.flatten())


def one_by_one(layer: Any, x: Tensor, messages: Tensor, degree: Tensor) -> Tensor:
    """[N, T * F_out]: the modules of each tower, called on its features and on its ``messages``,
    scaled."""
    nodes, towers, reduces, width = messages.shape
    x = x.view(nodes, -1, width).expand(-1, towers, -1)
    messages = messages.reshape(nodes, towers, reduces * width)
    parts = [messages if scale is None else messages * scale.view(-1, 1, 1)
             for scale in _scales(layer.aggr_module, degree, x.dtype)]
    out = torch.cat([x, *parts], dim=-1)
    return torch.cat([nn(out[:, i]) for i, nn in enumerate(layer.post_nns)], dim=1)
