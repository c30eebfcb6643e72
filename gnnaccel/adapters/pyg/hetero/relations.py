"""Small steps that the adapters of relational layers share."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import edges
from gnnaccel.adapters.views import viewer as viewer
from gnnaccel.dispatch.policy.reasons import Reason, reason


def plain(edge_index: Any, edge_type: Any, num_src: int, num_dst: int,
          device: torch.device) -> tuple[Tensor, Tensor] | Reason:
    """The plain [2, E] edges and their [E] relations, or why there are none."""
    found = edges.plain(edge_index, num_src, num_dst, device)
    if type(found) is Reason:
        return found
    if type(edge_type) is not Tensor or edge_type.layout != torch.strided:
        return reason("GA204", f"edge_type is a {type(edge_type).__name__}",
                      "pass edge_type as a tensor of shape [E]")
    if edge_type.dim() != 1 or edge_type.shape[0] != found.shape[1] or edge_type.device != device:
        return reason("GA206",
                      f"edge_type is of shape {list(edge_type.shape)} on "
                      f"{edge_type.device} for {found.shape[1]} edges on "
                               f"{device}")
    if edge_type.dtype not in (torch.int64, torch.int32):
        return reason("GA204", f"edge_type is {edge_type.dtype}", "use int64 or int32 relations")
    return found, edge_type
