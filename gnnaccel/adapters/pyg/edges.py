"""PyG's ways to give a graph, and self loops as PyG's layers add them."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import guards
from gnnaccel.cuda.runtime.capture import capturing
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run import skinny_matmul

#: whether a tensor is one of functorch's, which has no memory of its own, also after the transform
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def plain(edge_index: Any, num_src: int, num_dst: int, device: torch.device) -> Tensor | Reason:
    """The plain [2, E] tensor behind ``edge_index`` (a tensor or an EdgeIndex that fits the sizes),
    or why there is none."""
    if (type(edge_index).__name__ == "EdgeIndex"
        and type(edge_index).__module__.startswith("torch_geometric.")):
        rows, cols = edge_index.sparse_size()
        if (rows not in (None, num_src)) or (cols not in (None, num_dst)):
            return reason("GA204",
                          f"the EdgeIndex is for {rows} x {cols} nodes, the features for "
                          f"{num_src} x {num_dst}")
        # a change of which the tensor behind it knows nothing
        if not edge_index.is_inference() and edge_index._version:
            return reason("GA204", "the EdgeIndex was changed in place", "make a new one")
        edge_index = getattr(edge_index, "_data", None)
        if edge_index is None:
            return reason("GA204", "this version of PyG keeps no plain tensor in its EdgeIndex",
                          "update torch-geometric")
    if type(edge_index) is not Tensor:
        return reason("GA204", f"edge_index is a {type(edge_index).__name__}")
    if edge_index.layout != torch.strided or edge_index.ndim != 2 or edge_index.shape[0] != 2:
        return reason("GA204",
                      f"edge_index is {edge_index.layout} of shape {list(edge_index.shape)}")
    if edge_index.dtype not in (torch.int64, torch.int32):
        return reason("GA204", f"edge_index is {edge_index.dtype}", "use int64 or int32 ids")
    if edge_index.device != device:
        return reason("GA204", f"edge_index is on {edge_index.device}, the features on {device}")
    if _wrapped(edge_index):
        return reason("GA204", "edge_index was made inside a function transform",
                      "what the layer caches of edges is made anew by reset_parameters()")
    if not edge_index.shape[1]:
        return reason("GA303")
    return edge_index


def with_loops(edge_attr: Tensor, edge_index: Tensor, loops: int, fill_value: Any) -> Tensor:
    """Edge features by edge id: those of the caller's edges, then those of the added self loops [E
    + loops, ...].

    The rows of self loops that the layer drops are still there; no kernel reads them.
    ``fill_value`` as in PyG's ``add_self_loops``: a number, a tensor, or a reduction over the edges
    that enter the node.
    """
    if not loops:
        return edge_attr
    shape = (loops, *edge_attr.shape[1:])
    if fill_value is None:
        attr = edge_attr.new_ones(shape)
    elif isinstance(fill_value, str):
        from torch_geometric.utils import scatter

        # a part of the layer's call, not one of its own
        scatter = getattr(scatter, "__original_fn", scatter)

        src, dst = edge_index.unbind(0)
        # dropped loops, and nodes without one, to a spare row
        target = dst.long().masked_fill(src == dst, loops).clamp(max=loops)
        attr = scatter(edge_attr, target, 0, loops + 1, fill_value)[:loops]
    elif isinstance(fill_value, Tensor):
        fill = fill_value.to(edge_attr.device, edge_attr.dtype)
        attr = (fill if fill.dim() == edge_attr.dim() else fill.unsqueeze(0)).expand(shape)
    else:
        attr = edge_attr.new_full(shape, fill_value)
    return torch.cat([edge_attr, attr])


def linear(module: Any, attr: Tensor) -> Tensor:
    """``module`` of many rows of edges; by the product of tall matrices where it is a linear map
    and nothing else."""
    if not guards.plain_linear(module):
        return module(attr)
    parameters = module._parameters
    return skinny_matmul.mapped(attr, parameters["weight"], parameters["bias"])


def mapped(module: Any, edge_attr: Tensor, edge_index: Tensor, loops: int, fill_value: Any,
           row_by_row: bool) -> Tensor:
    """``module`` of the rows that `with_loops` gives, by edge id.

    A map that is not known to treat each row by itself, such as one with a batch norm or dropout,
    gets the rows that the host gives it: those of dropped self loops are left out.
    """
    attr = with_loops(edge_attr, edge_index, loops, fill_value)
    if attr.dim() == 1:
        attr = attr.view(-1, 1)
    if row_by_row or not loops or capturing():  # no capture may count the loops
        return module(attr) if attr.shape[0] < skinny_matmul.TALL else linear(module, attr)
    is_kept = torch.cat([edge_index[0] != edge_index[1], edge_index.new_ones(loops).bool()])
    rows = module(attr[is_kept])
    # a dropped loop gets some row, which no kernel reads
    return rows[(is_kept.cumsum(0) - 1).clamp(min=0)]
