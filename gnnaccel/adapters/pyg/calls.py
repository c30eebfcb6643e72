"""Small steps that the layers' adapters share."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters import calls
from gnnaccel.adapters.calls import (bind as bind, bound as bound, dtypes as dtypes,
                                     mapped as mapped, without_autocast as without_autocast)
from gnnaccel.adapters.guards import Shapes, of_heads
from gnnaccel.adapters.pyg.edges import plain
from gnnaccel.adapters.pyg.guards import plain_linear
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.run.attention_maps import Mapped


def rows(module: Any, x: Tensor, heads: int, width: int) -> Tensor | Mapped:
    """The rows of a linear layer's map of x, as attention takes them."""
    return calls.rows(module, x, heads, width, plain_linear(module))


def shapes(layer: Any, maps: tuple[str, ...], vectors: tuple[str, ...] = (),
           columns: int | None = None) -> Shapes:
    """`adapters.guards.of_heads` of a layer of PyG's."""
    return of_heads(layer, layer.heads, layer.out_channels, maps, vectors, plain_linear, columns)


def bias_inside(layer: Any, out: torch.dtype) -> bool:
    """Whether the bias goes into the Program, whose result is in ``out``: it has a number for each
    channel, in that dtype, heads lie side by side, and no residual comes in between."""
    bias = parameter(layer, "bias")
    return (bias is not None and bool(layer.concat) and layer._modules.get("res") is None
            and bias.shape == (layer.heads * layer.out_channels,) and bias.dtype is out)


def finish(layer: Any, out: Tensor, residual: Tensor | None, biased: bool = False) -> Tensor:
    """Heads side by side or averaged, then residual and bias: [N, H, C] -> [N, H * C] or [N, C]."""
    n, h, c = out.shape
    out = out.reshape(n, h * c) if layer.concat else out.mean(dim=1)
    if residual is not None:
        out = out + residual
    return out if biased or layer.bias is None else out + layer.bias


def parameter(layer: Any, name: str) -> Tensor | None:
    """``layer.name``, past ``Module.__getattr__`` where it is a plain parameter (it may be
    computed, by a parametrization)."""
    value = layer._parameters.get(name)
    return getattr(layer, name) if value is None else value


def exposed(layer: Any) -> bool:
    """Whether the kernel's own result is the layer's."""
    return bool(layer.concat) and layer._modules.get("res") is None


def resized(again: Callable[..., CallInputs]) -> Callable[..., tuple[CallSpec, CallInputs] | None]:
    """`Contract.resized` of an attention layer with this ``again``."""

    def of_size(layer: Any, args: tuple, kwargs: dict, spec: CallSpec,
                kept: None) -> tuple[CallSpec, CallInputs] | None:
        if not spec.num_src or not spec.num_dst:  # which does not show whether loops are added
            return None
        inputs = again(layer, args, kwargs, kept)
        x, x_dst, edge_index, edge_attr, _ = inputs
        num_src = x.shape[0]
        num_dst = num_src if x_dst is None else x_dst.shape[0]
        if plain(edge_index, num_src, num_dst, x.device) is not edge_index:
            return None
        count, loops = edge_index.shape[1], num_src if num_src < num_dst else num_dst
        if edge_attr is not None and edge_attr.shape[0] != count:
            return None
        return CallSpec(spec.program, spec.native, spec.heads, spec.width, spec.row,
                        spec.out, num_src, num_dst, count, loops if spec.loops else 0,
                        spec.exposed, spec.folded, spec.around), inputs

    return of_size


def again(names: tuple[tuple[str, ...], tuple[str, ...]]) -> Callable[..., CallInputs]:
    """`Adapter.again` of an attention layer. ``names``: of its required and its optional arguments,
    as `bind` takes them; x and edge_index come first, then edge_attr. ``extra`` of the inputs:
    whether x is a pair."""

    def tensors(layer: Any, args: tuple, kwargs: dict, kept: None) -> CallInputs:
        x, edge_index, edge_attr = bound(args, kwargs, *names)[:3]
        pair = isinstance(x, tuple)
        x_src, x_dst = x if pair else (x, x)
        return CallInputs(x_src, x_dst, edge_index, edge_attr, (pair,))

    return tensors
