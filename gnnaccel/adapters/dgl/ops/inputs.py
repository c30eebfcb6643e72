"""DGL's index objects and tensors, as the operations of `dispatch.ops` take them."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl import graphs
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.reasons import Reason, reason

_JOINED = "gnnaccel.joined"
_TARGETS = {"u": "u", "v": "v", "e": "e", "src": "u", "dst": "v", "edge": "e"}


def first_tensor(args: Any) -> Tensor | None:
    """The first tensor among arguments, and among those in lists and tuples."""
    for a in args:
        if isinstance(a, Tensor):
            return a
        if isinstance(a, (list, tuple)):
            tensor = first_tensor(a)
            if tensor is not None:
                return tensor
    return None


def target(name: str) -> str | Reason:
    """ "u", "v" or "e" for DGL's name of an operand's target."""
    return (_TARGETS.get(name)
            or reason("GA208", f"target={name!r} is none of {', '.join(_TARGETS)}"))


def relation(index: Any, device: torch.device, etype: int = 0) -> OpGraph:
    """One relation of an index object, on ``device``."""
    edges: Any = graphs.of_index(index, etype).on(device)
    return OpGraph(edges.edge_index, edges.num_src, edges.num_dst)


def single(index: Any, device: torch.device) -> OpGraph | Reason:
    """The only relation of an index object."""
    count = index.number_of_etypes()
    return (relation(index, device)
            if count == 1
            else reason("GA204", f"the graph has {count} types of edges; this takes one"))


def subgraph(graph: OpGraph, ids: Any) -> OpGraph | Reason:
    """The edges with these ids, in their order."""
    if (not isinstance(ids, Tensor) or ids.dim() != 1 or ids.is_floating_point()
        or ids.dtype == torch.bool):
        return reason("GA206", "eids are not a tensor of integers of one dimension")
    return OpGraph(graph.edge_index.index_select(1, ids.to(graph.edge_index.device)), graph.num_src,
                   graph.num_dst)


def ends(index: Any) -> list[tuple[int, int]]:
    """(source type, destination type) of each relation."""
    return [index.metagraph.find_edge(etype) for etype in range(index.number_of_etypes())]


def joined(index: Any, device: torch.device) -> OpGraph:
    """All relations as one graph over all nodes, those of a type behind those of the types before;
    kept with the index object."""
    by_device = index._cache.setdefault(_JOINED, {})
    fields = by_device.get(device)
    if fields is None:
        fields = by_device.setdefault(device, _join(index, device))
    return OpGraph(*fields)


@torch.inference_mode(False)  # made in inference mode they could not take part in training later
def _join(index: Any, device: torch.device) -> tuple[Tensor, int, int]:
    sizes = [index.num_nodes(kind) for kind in range(index.number_of_ntypes())]
    begins = [sum(sizes[:kind]) for kind in range(len(sizes))]
    parts = []
    for etype, (src, dst) in enumerate(ends(index)):
        both_ends = graphs.of_index(index, etype).on(device).edge_index.unbind(0)
        parts.append(torch.stack([end.long() + begins[kind]
                                  for end, kind in zip(both_ends, (src, dst))]))
    return torch.cat(parts, 1), sum(sizes), sum(sizes)
