"""Small steps that the adapters of relational layers share."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.layout import viewer as viewer
from gnnaccel.adapters.pyg import edges
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.relational.request import RelationalInputs, RelationalSpec


def plain(edge_index: Any, edge_type: Any, num_src: int, num_dst: int,
          device: torch.device) -> tuple[Tensor, Tensor] | Reason:
    """The plain [2, E] edges and their [E] relations, or why there are none."""
    plain_index = edges.plain(edge_index, num_src, num_dst, device)
    if type(plain_index) is Reason:
        return plain_index
    if type(edge_type) is not Tensor or edge_type.layout != torch.strided:
        return reason("GA204", f"edge_type is a {type(edge_type).__name__}",
                      "pass edge_type as a tensor of shape [E]")
    if (edge_type.dim() != 1 or edge_type.shape[0] != plain_index.shape[1]
            or edge_type.device != device):
        return reason("GA206",
                      f"edge_type is of shape {list(edge_type.shape)} on "
                      f"{edge_type.device} for {plain_index.shape[1]} edges on "
                               f"{device}")
    if edge_type.dtype not in (torch.int64, torch.int32):
        return reason("GA204", f"edge_type is {edge_type.dtype}", "use int64 or int32 relations")
    return plain_index, edge_type


def resized(spec: RelationalSpec, inputs: RelationalInputs, x_src: Tensor, x_dst: Tensor,
            edge_attr: Tensor | None = None,
            watched: bool = False) -> tuple[RelationalSpec, RelationalInputs] | None:
    """`Contract.resized` of a layer with plain edges and their relations. ``x_src``, ``x_dst``,
    ``edge_attr``: features of nodes and edges; ``watched``: `RelationalSpec.rows_grad` says whether
    those of sources want gradients."""
    num_src, num_dst = x_src.shape[0], x_dst.shape[0]
    edge_index, edge_type = structure = inputs.structure
    plain_edges = plain(edge_index, edge_type, num_src, num_dst, x_src.device)
    if type(plain_edges) is Reason or plain_edges[0] is not edge_index:
        return None
    count = edge_index.shape[1]
    if edge_attr is not None and edge_attr.shape[0] != count:
        return None
    view = viewer(structure, num_src, num_dst, spec.num_relations, ignore=spec.ignore)
    return spec.resized(num_src, num_dst, count, view,
                        x_src.requires_grad if watched else spec.rows_grad), inputs
