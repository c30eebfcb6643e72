"""Shared parts of the plain layers: their graph and features, weights of edges, and the degrees
that they scale with."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.dgl import guards, reading
from gnnaccel.adapters.dgl.reading import Nodes
from gnnaccel.dispatch.ops.plain import PlainInputs, PlainSpec
from gnnaccel.dispatch.policy.reasons import Reason, reason


class Operands(NamedTuple):
    """``edge_weight``: [E] or [E, 1], if the call brings some; ``more``: the layer's own further
    arguments."""

    nodes: Nodes
    edge_weight: Tensor | None
    more: tuple = ()


def by_edge(weight: Tensor) -> Tensor:
    """Weights [E] or [E, 1] as [E], contiguous."""
    return weight.reshape(-1).contiguous()


def state(name: str, reduce: str, graph: Any, feat: Any, edge_weight: Any,
          width: Callable[[int], int], parameters: tuple,
          more: tuple = ()) -> tuple[PlainSpec, PlainInputs] | Reason:
    """The call as one sum or maximum over the graph. ``width``: channels of the rows that travel,
    by those of the features."""
    nodes = reading.nodes(graph, feat)
    if type(nodes) is Reason:
        return nodes
    edges: Any
    x, edges = nodes.x_src, nodes.edges
    if torch.is_autocast_enabled(x.device.type):
        return reason("GA203", "autocast is on: its dtypes differ from step to step",
                      "single operations are taken over instead")
    why = (guards.dtype_reason(x, *parameters)
           or _weight_reason(edge_weight, edges.edge_index.shape[1], x))
    if why is not None:
        return why
    if x.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return reason("GA203", f"features are {x.dtype}")
    channels = width(x.shape[1])
    if not channels:
        return reason("GA206", "rows are empty")
    spec = PlainSpec(f"dgl.{name}", reduce, edge_weight is not None, channels, x.dtype,
                     edges.num_src, edges.num_dst, edges.edge_index.shape[1], x.is_cpu)
    return spec, PlainInputs(edges.edge_index, x.device, Operands(nodes, edge_weight, more))


def _weight_reason(weight: Any, edges: int, x: Tensor) -> Reason | None:
    if weight is None:
        return None
    if type(weight) not in (Tensor, torch.nn.Parameter) or weight.layout != torch.strided:
        return reason("GA206", f"edge_weight is a {type(weight).__name__}")
    if (weight.shape not in ((edges,), (edges, 1)) or weight.device != x.device
        or not weight.is_contiguous()):
        return reason("GA206",
                      f"edge_weight is {list(weight.shape)} on {weight.device} for "
                      f"{edges} edges on {x.device}", "pass one number per edge")
    return (None
            if weight.dtype == x.dtype
            else reason("GA203", f"edge_weight is {weight.dtype}, features are {x.dtype}"))


def destinations(nodes: Nodes, x_src: Tensor, x_dst: Tensor | None) -> Tensor:
    """Rows of the destinations: ``x_dst``, or those of a block, the first of ``x_src``."""
    return x_src[:nodes.edges.num_dst] if x_dst is None else x_dst


def dropped(layer: Any, nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Features of sources and destinations after the layer's ``feat_drop``, called as often and in
    the order of the host's."""
    drop, pair = layer.feat_drop, nodes.x_dst is not None and not nodes.same
    x_src = drop(nodes.x_src)
    return (x_src,
            drop(nodes.x_dst) if pair else x_src if nodes.same else x_src[:nodes.edges.num_dst])


def on_cpu_native(forward: Callable, native: Callable, name: str) -> Callable:
    """``forward``, the routed one, behind a quick look: with features on the CPU the host's own
    kernels are the ones to take, and such calls may be short."""
    from gnnaccel.dispatch.ops import route
    from gnnaccel.dispatch.policy.config import current

    @functools.wraps(native)
    def layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = current()
        if (config is not None and len(args) > 1 and _on_cpu(args[1])
            and route.on_cpu_native(name, config)):
            return native(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return layer


def _on_cpu(feat: Any) -> bool:
    first = feat[0] if type(feat) is tuple and feat else feat
    return isinstance(first, Tensor) and first.is_cpu
