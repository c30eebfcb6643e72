"""The first two arguments of DGL's layers: a graph, and features of its nodes."""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import calls, guards
from gnnaccel.adapters.dgl import graphs
from gnnaccel.adapters.guards import Shapes, of_heads
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.attention_maps import Mapped


_linear = functools.partial(guards.plain, cls=torch.nn.Linear)


class Nodes(NamedTuple):
    """``x_src`` [num_src, F] and ``x_dst`` as they were given; ``x_dst`` None: those of a block,
    the first ``num_dst`` sources. ``same``: one tensor is for both ends."""

    edges: graphs.Edges
    x_src: Tensor
    x_dst: Tensor | None
    same: bool


def attention(graph: Any, feat: Any, get_attention: Any,
              edge_weight: Any = None) -> Nodes | Reason:
    """`nodes` of an attention layer's call, which is not taken over where it asks for attention
    weights or gives weights of edges."""
    if edge_weight is not None:
        return reason("GA208", "edge_weight was given", "call the layer without edge_weight")
    if get_attention:
        return reason("GA208", "attention weights were asked for",
                      "call the layer without get_attention")
    return nodes(graph, feat)


def nodes(graph: Any, feat: Any) -> Nodes | Reason:
    """Graph and features of a call ``layer(graph, feat)``, ``feat`` a tensor or a pair, or why they
    are not taken over."""
    edges = graphs.homogeneous(graph)
    if type(edges) is Reason:
        return edges
    pair = isinstance(feat, tuple)
    if pair and len(feat) != 2:
        return reason("GA206", f"feat is a tuple of {len(feat)}")
    x_src, x_dst = feat if pair else (feat, feat)
    why = (guards.features_reason(x_src, "feat[0]" if pair else "feat")
           or guards.features_reason(x_dst, "feat[1]")
           or graphs.place_reason(edges, x_src.device))
    if why is not None:
        return why
    if x_dst.device != x_src.device or x_dst.dtype != x_src.dtype:
        return reason("GA203",
                      f"feat is {x_src.dtype} on {x_src.device} and {x_dst.dtype} on "
                      f"{x_dst.device}")
    first = not pair and graph.is_block
    why = graphs.size_reason(edges, x_src.shape[0], edges.num_dst if first else x_dst.shape[0])
    return why or Nodes(edges, x_src, None if first else x_dst, not pair and not first)


def one_frame(graph: Any) -> bool:
    """Whether sources and destinations are one set of nodes, so that a layer's features of
    destinations overwrite those of sources under the same name."""
    return not graph.is_block and graph.srctypes == graph.dsttypes


def shapes(layer: Any, maps: tuple[str, ...], vectors: tuple[str, ...] = (),
           width: int | None = None) -> Shapes:
    """`adapters.guards.of_heads` of a layer of DGL's; ``width``: if not ``_out_feats``."""
    return of_heads(layer, layer._num_heads, layer._out_feats if width is None else width, maps,
                    vectors, _linear)


def rows(module: Any, x: Tensor, heads: int, width: int) -> Tensor | Mapped:
    """The rows of a linear layer's map of x, as attention takes them."""
    return calls.rows(module, x, heads, width, _linear(module))
