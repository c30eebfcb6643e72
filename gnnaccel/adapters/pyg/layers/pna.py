"""PNAConv: its messages are linear in both ends, so they are made once per node; its reduces come
in one pass.

A message is W x_i + V x_j + b, with features of edges W x_i + V x_j + U (E e + c) + b. The terms of
node i shift the mean and the extrema of node i's messages and leave their variance as it is, so
only V x_j and U E e travel.

The products before and after the reductions are those of all towers at once. Their tensors, with T
towers of F channels, R aggregations and S scalers: x [N, F], of a divided input [N, T * F];
messages [N, T, R, F]; results [N, T * F_out]. `towers` has the arithmetic.
"""
from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.guards import Shapes, of_heads
from gnnaccel.adapters.pyg import calls, edges, guards
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.ops import several, towers
from gnnaccel.dispatch.ops.plain import PlainInputs, PlainSpec, in_degrees
from gnnaccel.dispatch.ops.towers import Degrees, Runs
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import settings

AGGREGATIONS = ("DegreeScalerAggregation",)
INSIDE = ("MultiAggregation", "SumAggregation", "MeanAggregation", "MaxAggregation",
          "MinAggregation", "VarAggregation", "StdAggregation")
ONE_DTYPE = True
#: scaler of degrees -> attribute of the training graph that it divides by or multiplies with
_DEGREES = {"amplification": "avg_deg_log", "attenuation": "avg_deg_log",
            "linear": "avg_deg_lin", "inverse_linear": "avg_deg_lin"}
FIELDS = ("edge_dim", "F_in", "towers", "divide_input")
ARGUMENTS = ("x", "edge_index"), ("edge_attr",)
_REDUCES = {f"{name.capitalize()}Aggregation": name
            for name in ("sum", "mean", "max", "min", "var", "std")}


def state(layer: Any, x: Any, edge_index: Any,
          edge_attr: Any) -> tuple[PlainSpec, PlainInputs] | Reason:
    if (edge_attr is None) is not (layer.edge_dim is None):  # an error in the host
        return reason("GA206", f"edge_dim is {layer.edge_dim}, edge_attr is "
                      f"{type(edge_attr).__name__}")
    reduces = _reduces(layer.aggr_module)
    if type(reduces) is Reason:
        return reduces
    why = (guards.features_reason(x) or _maps_reason(layer, x)
           or (None if edge_attr is None else _encoder_reason(layer)))
    if why is not None:
        return why
    # an error in the host
    if x.shape[1] != layer.F_in * (layer.towers if layer.divide_input else 1):
        return reason("GA206", f"x has {x.shape[1]} channels")
    nodes = x.shape[0]
    plain = edges.plain(edge_index, nodes, nodes, x.device)
    if type(plain) is Reason:
        return plain
    if edge_attr is not None:
        why = guards.edge_reason(edge_attr, plain.shape[1], x)
        if why is None and edge_attr.shape[1:] != layer.edge_encoder.weight.shape[1:]:
            why = reason("GA206", f"edge_attr is {list(edge_attr.shape)}")
        if why is not None:
            return why
    name = "PNAConv" if edge_attr is None else "PNAConv with edges"
    spec = PlainSpec(name, several.name_of(reduces, edge_attr is not None), False,
                     layer.towers * layer.F_in, x.dtype, nodes, nodes, plain.shape[1], False,
                     layer.towers)
    constants = runs_of(reduces), joins(layer.post_nns, x.dtype)
    return spec, PlainInputs(plain, x.device, (x, edge_attr, *constants))


def reads(layer: Any, args: tuple, kwargs: dict) -> tuple:
    """Values that the route depends on beside the layer's own attributes and the arguments."""
    aggr = layer._modules["aggr_module"]._modules.get("aggr")
    if type(aggr).__name__ != "MultiAggregation":  # the user's own, in their place
        return (type(aggr),)
    moments = [one._modules.get("var_aggr", one)
               for one in aggr._modules["aggrs"]._modules.values()]
    return aggr.mode, [(type(one), one.__dict__.get("semi_grad")) for one in moments]


def keep(spec: PlainSpec, inputs: PlainInputs) -> tuple[list[tuple[str, int]], bool]:
    """(the aggregations by `runs_of`, whether the maps after them are one product)."""
    return inputs.operands[2:]


def again(layer: Any, args: tuple, kwargs: dict,
          kept: tuple[list[tuple[str, int]], bool]) -> PlainInputs:
    x, edge_index, edge_attr = calls.bound(args, kwargs, *ARGUMENTS)
    return PlainInputs(edge_index, x.device, (x, edge_attr, *kept))


def resized(layer: Any, args: tuple, kwargs: dict, spec: PlainSpec,
            kept: tuple) -> tuple[PlainSpec, PlainInputs] | None:
    inputs = again(layer, args, kwargs, kept)
    (x, edge_attr, *_), edge_index = inputs.operands, inputs.edge_index
    nodes = x.shape[0]
    if edges.plain(edge_index, nodes, nodes, x.device) is not edge_index:
        return None
    count = edge_index.shape[1]
    if edge_attr is not None and edge_attr.shape[0] != count:
        return None
    return PlainSpec(spec.native, spec.reduce, spec.weighted, spec.width, spec.row,
                     nodes, nodes, count, spec.on_cpu, spec.parts), inputs


def _reduces(scaled: Any) -> list[str] | Reason:
    """The aggregations of the layer, by name."""
    several_ = scaled.aggr
    if type(several_).__name__ != "MultiAggregation" or several_.mode != "cat":
        return reason("GA201",
                      f"the aggregation is {type(several_).__name__}, or in another mode than cat")
    why = next(filter(None, map(guards.reducing_reason, (several_, *several_.aggrs))), None)
    if why is not None:
        return why
    for aggr in several_.aggrs:
        supported = (type(aggr).__name__ in _REDUCES
                     and type(aggr).__module__.startswith("torch_geometric."))
        if not supported or guards.moments_reason(aggr) is not None:
            return reason("GA201",
                          f"one of the aggregations is {type(aggr).__name__}, changed or "
                          "with half of its gradient")
    names = [_REDUCES[type(aggr).__name__] for aggr in several_.aggrs]
    return (names if len(set(names)) == len(names) else
            reason("GA201", "an aggregation is given twice"))


def _maps_reason(layer: Any, x: Tensor) -> Reason | None:
    if torch.is_autocast_enabled(x.device.type):
        return reason("GA203", "autocast is on", "call the layer outside of autocast")
    for nn in layer.pre_nns:
        if (len(nn) != 1 or not guards.plain_linear(nn[0])
            or not guards.plain(nn, torch.nn.Sequential)):
            return reason("GA208", "messages are made by more than a linear map",
                          "use pre_layers=1")
        if nn[0].bias is None:
            return reason("GA208", "messages are made without a bias")
    return None


def _encoder_reason(layer: Any) -> Reason | None:
    """Why the map of edges' features is more than a linear map, or does not fit."""
    encoder = layer._modules.get("edge_encoder")
    why = guards.lazy_reason(encoder)
    if why is not None:
        return why
    return (None if guards.plain_linear(encoder) else
            reason("GA208", f"the map of edges' features is a {type(encoder).__name__}, with hooks "
                   "or a weight of another type", "use the layer's own map"))


def shapes(layer: Any, inputs: PlainInputs) -> Shapes:
    """Shapes without those of the maps after the reductions, which `joins` looks at."""
    width = layer.F_in
    by_name: Shapes = {f"aggr_module.{_DEGREES[name]}": (1,) for name in layer.aggr_module.scaler
                       if name in _DEGREES}
    for at in range(len(layer.pre_nns)):
        by_name[f"pre_nns.{at}.0.weight"] = width, width * (2 if layer.edge_dim is None else 3)
        by_name[f"pre_nns.{at}.0.bias"] = width,
    if inputs.operands[1] is not None:
        by_name.update(of_heads(layer, 1, width, ("edge_encoder",), (), guards.plain_linear))
    return by_name


def run(layer: Any, spec: PlainSpec, inputs: PlainInputs, attend: Any) -> Tensor:
    x, edge_attr, runs, joined = inputs.operands
    own, sent, added = before(layer, x, edge_attr)
    reduced = attend({"x": sent, "edge": added})  # [N, reduces, towers * F]
    maps = (after if joined and not settings.maps_asked() else one_by_one)
    return layer.lin(maps(layer, x, reduced, own, degrees(attend, x.dtype), runs))


# --- the products ---------------------------------------------------------------------------------

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
        own, sent, *added = towers.Ends(layer.towers, layer.F_in).apply(*inputs, *maps[0], *maps[1])
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
