"""Messages and aggregations of PyG's own layers that read the layer, so that standing in for their
arguments is not enough.

Each is known by its function, so it holds for classes that inherit it. What it reads of the layer
is its *stamp*: a form is good for all layers with the same.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from gnnaccel.adapters.own import path_of
from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.tracing.rows.standins import Arguments, Form, rows
from gnnaccel.dispatch.ops.aggregation import Reduce
from gnnaccel.dispatch.ops.messages import Gated, Rectified
from gnnaccel.dispatch.policy.reasons import Reason, reason


HALF = (torch.float16, torch.bfloat16)


class Stock(NamedTuple):
    """A ``message`` of the host's: ``stamp(layer)``; ``form(stamp, kinds)``, as `message.form`,
    with a reason where there is none; ``usual``: the stamp of a layer as it is constructed."""

    stamp: Callable[[Any], tuple]
    form: Callable[[tuple, dict[str, str]], Form | Reason | None]
    usual: tuple


class Aggregate(NamedTuple):
    """An aggregation that a layer does itself: ``reduces(layer)``, as `Aggregation.by` takes them,
    () for others; ``weight``: the argument of ``propagate`` with weights [E] or None, or None where
    there is no such argument; ``combine(layer, results, arguments)``, a result for each, and the
    arguments of ``propagate``."""

    reduces: Callable[[Any], tuple[Reduce, ...]]
    weight: str | None
    combine: Callable[[Any, list[Tensor], Arguments], Any]


@functools.cache
def _messages() -> dict[type, Stock]:
    from torch_geometric import nn

    return {nn.GINEConv: Stock(lambda layer: (layer.lin is not None,), _gine, (False,)),
            nn.GENConv: Stock(_gen_stamp, _gen, (False, 1e-7)),
            nn.ResGatedGraphConv: Stock(_gated_stamp, _gated, (None, None))}


def of_message(function: Any) -> Stock | None:
    """`Stock` of a ``message`` that is one of the host's own."""
    return _found(_messages(), function, "message")


def of_aggregate(function: Any) -> Aggregate | None:
    """`Aggregate` of an ``aggregate`` that is one of the host's own."""
    from torch_geometric.nn import EGConv

    return _found({EGConv: Aggregate(_eg_reduces, "symnorm_weight", _eg_combined)}, function,
                  "aggregate")


def _found(known: dict[type, Any], function: Any, name: str) -> Any:
    """Entry of the class that the function was written for, where that runs what the host wrote."""
    for cls, entry in known.items():
        if getattr(cls, name) is function:
            return entry if path_of(cls, (name,)).why is None else None
    return None


def divides(cls: type[Any]) -> bool:
    """Whether the class's forward divides what it aggregates by a sum of the same weights, which
    the host takes in the features' type. In 16 bits on a GPU that sum stops growing, and so does
    the host's over the neighbours, but not that of kernels: the two errors would not cancel."""
    from torch_geometric.nn import WLConvContinuous

    return cls.forward is WLConvContinuous.forward


# --- relu(x_j + e) --------------------------------------------------------------------------------

def _gine(stamp: tuple, kinds: dict[str, str]) -> Form | None:
    (mapped,) = stamp
    return (_rectified("lin" if mapped else None, 0.0)
            if kinds.get("edge_attr") == "tensor" else None)


def _gen_stamp(layer: Any) -> tuple:
    return hasattr(layer, "lin_edge"), layer.eps if type(layer.eps) in (int, float) else None


def _gen(stamp: tuple, kinds: dict[str, str]) -> Form | None:
    mapped, constant = stamp
    if constant is None:
        return None
    if kinds.get("edge_attr") == "none":
        return Form("x", None, lambda x: x.relu() + constant)
    return _rectified("lin_edge" if mapped else None, constant)


def _rectified(lin: str | None, constant: float) -> Form:
    def more(arguments: Arguments, layer: Any) -> Rectified:
        edge = arguments["edge_attr"]
        return Rectified(edge if lin is None else getattr(layer, lin)(edge), constant)

    return Form("x", None, None, more, costly=lin is not None)


# --- gates ----------------------------------------------------------------------------------------

def _gated_stamp(layer: Any) -> tuple:
    """Channels of messages where edges have features; the reason against a form."""
    act, maps = layer.act, (layer.lin_key, layer.lin_query, layer.lin_value)
    if not guards.plain(act, torch.nn.Sigmoid):
        return None, f"its gates are not plain sigmoids but {type(act).__name__}"
    if layer.edge_dim is None:
        return None, None
    plain = all(guards.plain_linear(lin) and type(lin.weight) is Parameter for lin in maps)
    return (layer.out_channels,
            None if plain else "one of its maps is no plain linear one, or not initialised")


def _gated(stamp: tuple, kinds: dict[str, str]) -> Form | Reason | None:
    width, why = stamp
    if why is not None:
        return reason("GA208", why)
    if (kinds.get("edge_attr", "none") == "none") is not (width is None):
        return None  # an error in the host
    ends = (("q", "j"), ("k", "i"))
    if width is not None:
        return Form("v", None, None, _gated_by_edges, ends, True, width)
    return Form("v", None, None, lambda given,
                layer: Gated(rows(given, "q", "j"), rows(given, "k", "i")), ends)


def _gated_by_edges(arguments: Arguments, layer: Any) -> tuple[Tensor, Gated] | Reason:
    """The maps of what nodes and edges bring are applied to each alone: they are linear. Both parts
    of a score that edges bring are one map."""
    edge, maps = arguments["edge_attr"], dict(k=layer.lin_key, q=layer.lin_query, v=layer.lin_value)
    cut, nodes = -edge.shape[-1], {name: rows(arguments, name, "i" if name == "k" else "j")
                                   for name in maps}
    for name, lin in maps.items():
        if edge.dim() != 2 or nodes[name].shape[-1] - cut != lin.weight.shape[1]:
            return reason("GA206",
                          f"{nodes[name].shape[-1]} and {-cut} channels for a map of "
                          f"{lin.weight.shape[1]}")
        if edge.dtype != nodes[name].dtype and not (
            edge.is_floating_point() and torch.is_autocast_enabled(edge.device.type)):
            return reason("GA203", f"edge_attr is {edge.dtype}, with nodes' {nodes[name].dtype} "
                          "beside it the host's maps take what both promote to")
    k, q, v = (linear(nodes[name], lin.weight[:, :cut], lin.bias) for name, lin in maps.items())
    score = linear(edge, layer.lin_key.weight[:, cut:] + layer.lin_query.weight[:, cut:])
    return v, Gated(q, k, score, linear(edge, layer.lin_value.weight[:, cut:]))


# --- EGConv ---------------------------------------------------------------------------------------

def _eg_reduces(layer: Any) -> tuple[str, ...]:
    if "std" in layer.aggregators and not _clamps():
        return ()
    names = dict(symnorm="sum", std="var")
    reduces = [names.get(name, name) for name in layer.aggregators]
    if "symnorm" not in layer.aggregators:
        return tuple(reduces)
    return tuple(name if aggregator == "symnorm" else f"{name} unweighted"
                 for name, aggregator in zip(reduces, layer.aggregators))


@functools.cache
def _clamps() -> bool:
    """Whether deviations are what `_eg_combined` makes of variances; older versions of PyG add a
    constant."""
    from torch_geometric.nn import EGConv

    return "clamp" in EGConv.aggregate.__code__.co_names


def _eg_combined(layer: Any, results: list[Tensor], arguments: Arguments) -> Tensor:
    outputs = [out.clamp(min=1e-5).sqrt() if name == "std" else out
               for name, out in zip(layer.aggregators, results)]
    return torch.stack(outputs, dim=1) if len(outputs) > 1 else outputs[0]
