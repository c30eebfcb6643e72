"""GCN's normalisation over weights of edges, which are read in each call."""
from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.propagate import graph_loops, kept_results
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.graph import ordered_weights, self_loops


def over_kept_edges(edge_index: Any, edge_weight: Tensor | None = None,
                    num_nodes: int | None = None, improved: bool = False,
                    add_self_loops: bool = True, flow: str = "source_to_target",
                    dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor] | None:
    """PyG's ``gcn_norm``, by the same operations over the same numbers.

    The edges with their loops, and the check of their ids, are kept (`kept_results.find`), so that
    nothing is left but to read the weights. None where they are not kept, where the weights are not
    plain ones without a gradient, or where no kernels run.
    """
    if (type(edge_index) is not Tensor or not (edge_index.is_cuda or driver.placed())
        or edge_weight is None or edge_weight.dim() != 1 or type(num_nodes) is not int
        or not graph_loops.plain(edge_weight, edge_index) or edge_index.dtype != torch.int64
        or flow not in ("source_to_target", "target_to_source")):
        return None
    kept_edges = kept_results.find("gcn_norm over weights", _edges, (edge_index,),
                                   {"num_nodes": num_nodes, "loops": bool(add_self_loops)})
    if kept_edges is None:
        return None
    edges, source, src, dst = kept_edges
    if add_self_loops:
        edge_weight = torch.nn.functional.pad(edge_weight, (0, 1), value=2.0 if improved else 1.0)
        edge_weight = edge_weight.index_select(0, source)
    ends = (src, dst), dst if flow == "source_to_target" else src
    weight = _normalised(edge_weight, *ends, num_nodes)
    if weight.element_size() == 2:
        ordered_weights.of_the_graph(weight, _normalised(edge_weight.float(), *ends, num_nodes))
    return edges, weight


def _normalised(weight: Tensor, ends: tuple[Tensor, Tensor], end: Tensor, nodes: int) -> Tensor:
    """``weight`` [E] by the square roots of the sums at both ``ends``, added up at ``end``."""
    scale = weight.new_zeros(nodes).scatter_add_(0, end, weight).pow_(-0.5)
    scale.masked_fill_(scale == float("inf"), 0)
    return scale.index_select(0, ends[0]) * weight * scale.index_select(0, ends[1])


def _edges(edge_index: Tensor, num_nodes: int, loops: bool) -> tuple[Tensor | None, ...]:
    """The edges with their loops; for each the number of the edge whose weight it has; their ends.

    The number after the last stands for a loop that was added. GraphError for ids out of range.
    """
    from gnnaccel.adapters.pyg.propagate import graph_norm

    graph_norm.checked(edge_index, num_nodes)
    if not loops:
        return edge_index, None, *edge_index.clone().unbind(0)  # a part of the caller's is not kept
    host = sys.modules["torch_geometric.nn.conv.gcn_conv"].add_remaining_self_loops
    numbers = torch.arange(edge_index.shape[1], device=edge_index.device)
    edges, source = host(edge_index, numbers, -1, num_nodes)
    return edges, source.masked_fill_(source < 0, edge_index.shape[1]), *edges.unbind(0)


def captured(native: Callable, edge_index: Any, edge_weight: Tensor | None = None,
             num_nodes: int | None = None, improved: bool = False, add_self_loops: bool = True,
             flow: str = "source_to_target", dtype: torch.dtype | None = None) -> tuple:
    """GCN's normalisation without waiting for the device to tell which edges are loops.

    `looped` says how such edges are listed.
    """
    plain = type(edge_index) is Tensor and edge_index.layout is torch.strided and add_self_loops
    if (not plain or type(num_nodes) is not int
        or (edge_weight is not None and edge_weight.dim() != 1)):
        return native(edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype)
    src, dst = edge_index
    if edge_weight is None:
        improved = improved and _improves_alone(inspect.unwrap(native))
        edge_weight = torch.ones(src.shape[0], dtype=dtype, device=src.device)
    loop, nodes = src == dst, torch.arange(num_nodes, dtype=src.dtype, device=src.device)
    # a place for each edge that is no loop: atomics on a single place take 0.2 s
    spare = torch.arange(num_nodes, num_nodes + src.shape[0], device=src.device)
    loops = _loops_of(edge_weight, torch.where(loop, src.long(), spare), num_nodes,
                      2.0 if improved else 1.0)
    edges = torch.cat([edge_index, torch.stack([nodes, nodes])], 1)
    weight = torch.cat([edge_weight.masked_fill(loop, 0.0), loops])
    self_loops.note(edges, edge_index, num_nodes)
    return edges, native(edges, weight, num_nodes, improved, False, flow, dtype)[1]


def _loops_of(weight: Tensor, node: Tensor, nodes: int, fill: float) -> Tensor:
    """[nodes]: for each node the weight of its last edge, or ``fill`` if it has none.

    ``node`` [E] is the node of each edge; an edge of no node has a number from ``nodes`` on. The
    gradient goes to all edges of a node, as the host's does.
    """
    last = torch.full((nodes + node.shape[0],), -1, device=node.device)
    last = last.scatter_reduce(
        0, node, torch.arange(node.shape[0], device=node.device), "amax")[:nodes]
    loops = weight.new_full((nodes + node.shape[0],), fill)
    if not weight.shape[0]:
        return loops[:nodes]
    values = weight.index_select(0, last.clamp(min=0))
    if not weight.requires_grad:
        return torch.where(last < 0, loops[:nodes], values)
    loops = loops.scatter(0, node, weight)[:nodes]
    return loops + (torch.where(last < 0, loops, values) - loops).detach()


@functools.cache
def _improves_alone(native: Callable) -> bool:
    """Whether ``improved`` counts where there are no weights: PyG's versions differ in it."""
    weights = native(torch.tensor([[0], [1]], device="cpu"), None, 2, True)[1]
    return float(weights[-1]) > 0.6  # 2 / (1 + 2), not 1 / (1 + 1)
