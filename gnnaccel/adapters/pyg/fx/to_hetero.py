"""A layer of a model that `torch_geometric.nn.to_hetero` made, run as the HeteroConv that it is.

The layer goes the way of any HeteroConv (of the same layer objects), but for its native side: the
layers one by one, put together in pairs, as the model's own code has it. The user did not ask for a
HeteroConv, so staying native is no fallback.
"""
from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.fx.layers import Layer
from gnnaccel.adapters.pyg.hetero import dicts, hetero_conv, hetero_groups
from gnnaccel.adapters.pyg.hetero.dicts import EdgeType
from gnnaccel.dispatch import router
from gnnaccel.dispatch.policy import names
from gnnaccel.dispatch.policy.config import current
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.relational.request import RelationalSpec

FIELDS, keep, again = hetero_conv.FIELDS, hetero_conv.keep, hetero_conv.again
resized, run = hetero_conv.resized, hetero_conv.run


def state(layer: Any, args: tuple, kwargs: dict) -> Any:
    result = _unquantized(layer) or hetero_conv.state(layer, args, kwargs)
    if type(result) is Reason:
        return result if result.code == "GA210" else reason("GA210", f"{result.code} {result.text}")
    spec, inputs = result
    return ((dataclasses.replace(spec, around=True), inputs)
            if type(spec) is RelationalSpec else result)


def parts(layer: Any, args: tuple) -> list | None:
    return hetero_conv.parts(layer, args) if _unquantized(layer) is None else None


def _unquantized(layer: Any) -> Reason | None:
    config = current()
    if (config is not None
        and any(settings.asked(conv, config) is not None
                for conv in layer.convs._modules.values())):
        return reason("GA210", "layers inside it are to be quantized, which is done one by one")
    return None


def one_by_one(layer: Any, x_dict: Mapping[str, Any], edge_index_dict: Mapping[EdgeType, Any],
               more: Mapping[EdgeType, tuple] | None = None) -> dict[str, Tensor]:
    """The computation of the model's own code: the layers one by one."""
    parts: dict[str, list[Tensor]] = {}
    for name, conv in zip(edge_index_dict, layer.convs._modules.values()):
        src, _, dst = name
        x = x_dict[src] if src == dst else (x_dict[src], x_dict[dst])
        tail, kwargs = ((), {}) if more is None else more[name]
        parts.setdefault(dst, []).append(conv(x, edge_index_dict[name], *tail, **kwargs))
    return {dst: _put_together(tensors, layer.aggr) for dst, tensors in parts.items()}


def _put_together(parts: list[Tensor], aggr: Any) -> Tensor:
    if aggr is None:  # of a group in a layer whose relations are not added up
        return torch.stack(parts, dim=1)
    if aggr != "mean" or len(parts) == 1:
        return dicts.in_pairs(parts, aggr)
    return torch.div(dicts.in_pairs(parts, torch.add), len(parts))


def _routed(layer: Any, *given: Any) -> dict[str, Tensor]:
    config = current()
    return (router.route(layer, _guarded(), _native(), given, {}, config)
            if config is not None else one_by_one(layer, *given))


@functools.cache
def _native() -> Callable:
    return hetero_groups.inside(one_by_one, _routed)


@functools.cache
def _guarded() -> Any:
    from torch_geometric.nn import HeteroConv

    from gnnaccel.adapters.pyg import _Guarded

    return _Guarded(HeteroConv, "fx.to_hetero", None)


def call_of(found: Layer) -> Callable[..., dict[str, Tensor]]:
    """The function that is called in the layer's place, see `layers.replace`."""
    # the HeteroConv, the layers that it was made of, and a reference by which it ends with them:
    # the generated code around this is a cycle, which may live until a later garbage collection
    memo: list[Any] = [None, (), None]

    def gone(_: Any) -> None:
        memo[:] = None, (), None

    def heterogeneous(modules: torch.nn.ModuleDict, x: tuple, edges: tuple,
                      more: tuple) -> dict[str, Tensor]:
        convs = tuple(map(modules._modules.get, found.keys))
        if None in convs:
            # with the model's own error
            convs = tuple([getattr(modules, key) for key in found.keys])
        layer, before, _ = memo
        if before != convs:
            layer = hetero_groups.layer_of(found.names, convs, found.aggr)
            names.stand_for(layer, modules)
            memo[:] = layer, convs, weakref.ref(modules, gone)
        layer.training = modules.training
        arguments = dict(zip(found.x, x)), dict(zip(found.names, edges))
        if any(value is not None for tail, kwargs in more for value in (*tail, *kwargs.values())):
            return _routed(layer, *arguments, dict(zip(found.names, more)))
        return _routed(layer, *arguments)

    return heterogeneous
