"""PNAConv: its messages are linear in both ends, so they are made once per node; its reduces come
in one pass.

A message is W x_i + V x_j + b. What is of node i shifts the mean and the extrema of node i's
messages and leaves their variance as it is, so only V x_j travels.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import calls, edges, guards
from gnnaccel.dispatch.ops import several
from gnnaccel.dispatch.ops.plain import PlainInputs, PlainSpec, in_degrees
from gnnaccel.dispatch.policy.reasons import Reason, reason

AGGREGATIONS = ("DegreeScalerAggregation",)
INSIDE = ("MultiAggregation", "SumAggregation", "MeanAggregation", "MaxAggregation",
          "MinAggregation", "VarAggregation", "StdAggregation")
FIELDS = ("edge_dim", "F_in", "towers", "divide_input")
_ARGUMENTS = ("x", "edge_index"), ("edge_attr",)
_REDUCES = {f"{name.capitalize()}Aggregation": name
            for name in ("sum", "mean", "max", "min", "var", "std")}
_SHIFTED = ("mean", "max", "min")


def state(layer: Any, args: tuple, kwargs: dict) -> tuple[PlainSpec, PlainInputs] | Reason:
    bound = calls.bind(args, kwargs, *_ARGUMENTS)
    if bound is None:
        return reason("GA206", "the arguments do not fit PNAConv.forward")
    x, edge_index, edge_attr = bound
    if edge_attr is not None or layer.edge_dim is not None:
        return reason("GA208", "messages have features of edges")
    reduces = _reduces(layer.aggr_module)
    if type(reduces) is Reason:
        return reduces
    why = guards.features_reason(x) or _maps_reason(layer, x)
    if why is not None:
        return why
    # an error in the host
    if x.shape[1] != layer.F_in * (layer.towers if layer.divide_input else 1):
        return reason("GA206", f"x has {x.shape[1]} channels")
    nodes = x.shape[0]
    plain = edges.plain(edge_index, nodes, nodes, x.device)
    if type(plain) is Reason:
        return plain
    stated = PlainSpec("PNAConv", several.name_of(reduces), False, layer.towers * layer.F_in,
                       x.dtype, nodes, nodes, plain.shape[1], False)
    return stated, PlainInputs(plain, x.device, (x, reduces))


def reads(layer: Any, args: tuple, kwargs: dict) -> tuple:
    """What the route depends on beside the layer's own attributes and the arguments."""
    aggr = layer._modules["aggr_module"]._modules["aggr"]
    moments = [one._modules.get("var_aggr", one)
               for one in aggr._modules["aggrs"]._modules.values()]
    return aggr.mode, [one.__dict__.get("semi_grad") for one in moments]


def keep(stated: PlainSpec, given: PlainInputs) -> list[str]:
    """The aggregations, by name."""
    return given.operands[1]


def again(layer: Any, args: tuple, kwargs: dict, kept: list[str]) -> PlainInputs:
    x, edge_index, _ = calls.bound(args, kwargs, *_ARGUMENTS)
    return PlainInputs(edge_index, x.device, (x, kept))


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
        known = (type(aggr).__name__ in _REDUCES
                 and type(aggr).__module__.startswith("torch_geometric."))
        moments = getattr(aggr, "var_aggr", aggr)
        if (not known or getattr(moments, "semi_grad", False)
            or guards.reducing_reason(moments) is not None):
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
        if nn[0].weight.dtype != x.dtype:
            return reason("GA203", f"x is {x.dtype}, the layer's weights are {nn[0].weight.dtype}")
        if nn[0].bias is None:
            return reason("GA208", "messages are made without a bias")
    return None


def run(layer: Any, stated: PlainSpec, given: PlainInputs, attend: Any) -> Tensor:
    (x, reduces), towers, width = given.operands, layer.towers, layer.F_in
    x = x.view(-1, towers, width) if layer.divide_input else x.unsqueeze(1).expand(-1, towers, -1)
    weight = torch.stack([nn[0].weight for nn in layer.pre_nns])
    bias = torch.stack([nn[0].bias for nn in layer.pre_nns])
    own = _mapped(x, weight[..., :width]) + bias
    found = attend({"x": _mapped(x, weight[..., width:])})  # [N, reduces, towers, F]
    degree = in_degrees(attend.graph, attend.kernels).to(x.dtype)
    some = (degree > 0).to(x.dtype)
    shares = [some if name in _SHIFTED else degree if name == "sum" else torch.zeros_like(some)
              for name in reduces]
    found = torch.addcmul(found, torch.stack(shares, 1).view(-1, len(reduces), 1, 1),
                          own.unsqueeze(1))
    out = _scaled(layer.aggr_module, found.transpose(1, 2).flatten(2), degree.view(-1, 1, 1))
    out = torch.cat([x, out], dim=-1)
    return layer.lin(torch.cat([nn(out[:, i]) for i, nn in enumerate(layer.post_nns)], dim=1))


def _mapped(x: Tensor, weight: Tensor) -> Tensor:
    """[N, towers, F]: each tower's rows times its matrix."""
    if weight.shape[0] == 1:
        return (x[:, 0] @ weight[0].t()).unsqueeze(1)
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def _scaled(module: Any, out: Tensor, degree: Tensor) -> Tensor:
    """The scalers' shares of ``out`` side by side, as `DegreeScalerAggregation` makes them."""
    parts = []
    for scaler in module.scaler:
        if scaler == "identity":
            parts.append(out)
        elif scaler == "amplification":
            parts.append(out * (torch.log(degree + 1) / module.avg_deg_log))
        elif scaler == "attenuation":
            parts.append(out * (module.avg_deg_log / torch.log(degree.clamp(min=1) + 1)))
        elif scaler == "linear":
            parts.append(out * (degree / module.avg_deg_lin))
        else:
            parts.append(out * (module.avg_deg_lin / degree.clamp(min=1)))
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
