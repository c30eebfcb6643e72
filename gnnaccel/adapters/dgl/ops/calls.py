"""Calls of DGL's backend operations, read as calls of `dispatch.ops`: its index objects and tensors
as these take them, then the operations. Each has its original's signature, and gives an `OpCall`,
or a `Reason` why it is not one."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl import graphs
from gnnaccel.dispatch.ops import calls, operands, products
from gnnaccel.dispatch.ops.call import OpCall
from gnnaccel.dispatch.ops.calls import Part
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.operands import Operands
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


def target_of(name: str) -> str | Reason:
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


_ALL = "__ALL__"
_REDUCES = ("sum", "max", "min")


def cast(x: Any) -> Any:
    """``x`` as DGL's operations cast it under autocast: floating tensors on a GPU, but not float64.
    Resolved where it is a view that negates its numbers, which kernels do not read."""
    if not isinstance(x, Tensor):
        return x
    x = x.resolve_neg()
    if x.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return x
    return (x.to(torch.get_autocast_dtype("cuda")) if x.is_floating_point()
            and x.dtype != torch.float64 else x)


def _reduce_reason(name: Any) -> Reason | None:
    return (None
            if name in _REDUCES
            else reason("GA208", f"reduce={name!r} is none of {', '.join(_REDUCES)}"))


# --- one relation ---------------------------------------------------------------------------------

def gspmm(gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> OpCall | Reason:
    pair: Any = operands.prepare(op, cast(lhs_data), cast(rhs_data))
    why = pair if type(pair) is Reason else _reduce_reason(reduce_op)
    if why is not None:
        return why
    graph = _graph(gidx, pair, ("u", "e"))
    return graph if type(graph) is Reason else calls.gspmm(graph, pair, reduce_op)


def gsddmm(gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u",
           rhs_target: str = "v") -> OpCall | Reason:
    pair: Any
    targets: Any
    pair = operands.prepare(op, cast(lhs_data), cast(rhs_data))
    targets = (target_of(lhs_target), target_of(rhs_target))
    for argument in (pair, *targets):
        if type(argument) is Reason:
            return argument
    graph = _graph(gidx, pair, targets)
    return graph if type(graph) is Reason else calls.gsddmm(graph, pair, targets)


def _graph(gidx: Any, given: Operands, targets: tuple[str, str]) -> OpGraph | Reason:
    """The only relation, if the operands are of its nodes and edges."""
    graph = single(gidx, given.first.device)
    if type(graph) is Reason:
        return graph
    return operands.size_reason(graph, given, targets) or graph


def edge_softmax(gidx: Any, logits: Any, eids: Any = _ALL, norm_by: str = "dst") -> OpCall | Reason:
    pair = operands.prepare("copy_rhs", None, cast(logits))
    if type(pair) is Reason:
        return pair
    graph = single(gidx, pair.first.device)
    if type(graph) is OpGraph and not _is_all(eids):
        graph = subgraph(graph, eids)
    if type(graph) is Reason:
        return graph
    why = operands.size_reason(graph, pair, ("u", "e"))
    return why or calls.edge_softmax(graph, cast(logits), "u" if norm_by == "src" else "v")


def _is_all(ids: Any) -> bool:
    return isinstance(ids, str) and ids == _ALL


# --- several relations ----------------------------------------------------------------------------

def gspmm_hetero(g: Any, op: str, reduce_op: str, lhs_len: int,
                 *lhs_and_rhs_tuple: Any) -> OpCall | Reason:
    parts = _reduce_reason(reduce_op) or _parts(g, op, ("u", "e"), lhs_len, lhs_and_rhs_tuple)
    if type(parts) is Reason:
        return parts
    tails: dict[int, set] = {}
    for part in parts:
        tails.setdefault(part.target, set()).add((part.given.shape, part.given.scalar))
    if any(len(forms) > 1 for forms in tails.values()):
        return reason("GA206", "messages of several shapes go to one type of nodes")
    return calls.gspmm_hetero(parts, g.number_of_ntypes(), reduce_op)


def gsddmm_hetero(g: Any, op: str, lhs_len: int, lhs_target: str = "u", rhs_target: str = "v",
                  *lhs_and_rhs_tuple: Any) -> OpCall | Reason:
    targets: Any = target_of(lhs_target), target_of(rhs_target)
    for target in targets:
        if type(target) is Reason:
            return target
    parts = _parts(g, op, targets, lhs_len, lhs_and_rhs_tuple)
    return parts if type(parts) is Reason else calls.gsddmm_hetero(parts, targets)


def _parts(g: Any, op: str, targets: tuple[str, str], lhs_len: int,
           tensors: tuple) -> list[Part] | Reason:
    """Each relation with its operands: those at an edge's ends by type of nodes, those at the edge
    by relation."""
    sides, parts = (tensors[:lhs_len], tensors[lhs_len:]), []
    for etype, (src, dst) in enumerate(ends(g)):
        at = {"u": src, "v": dst, "e": etype}
        chosen = [_at(side, at[target]) for side, target in zip(sides, targets)]
        pair = operands.prepare(op, *map(cast, chosen))
        if type(pair) is Reason:
            return pair
        graph = relation(g, pair.first.device, etype)
        why = operands.size_reason(graph, pair, targets)
        if why is not None:
            return why
        parts.append(Part(graph, pair, dst))
    if len({(p.given.first.device, p.given.first.dtype) for p in parts}) > 1:
        return reason("GA203",
                      "the relations' features are of several dtypes or on several devices")
    return parts or reason("GA204", "the graph has no types of edges")


def _at(side: tuple, place: int) -> Any:
    return side[place] if place < len(side) else None


def edge_softmax_hetero(gidx: Any, eids: Any = _ALL, norm_by: str = "dst",
                        *logits: Any) -> OpCall | Reason:
    if not _is_all(eids):
        return reason("GA206", "eids are given for a graph of several relations")
    parts = _parts(gidx, "copy_rhs", ("u", "e"), 0, logits)
    if type(parts) is Reason:
        return parts
    scores = [cast(t) for t in logits]
    if len({t.shape[1:] for t in scores}) > 1:
        return reason("GA206", "the relations' logits are of several shapes")
    return calls.edge_softmax_joined(joined(gidx, scores[0].device), scores,
                                     "u" if norm_by == "src" else "v")


# --- without a graph ------------------------------------------------------------------------------

def segment_reduce(op: str, x: Any, offsets: Any) -> OpCall | Reason:
    x = cast(x)
    pair = operands.prepare("copy_rhs", None, x)
    why = (_reduce_reason(op)
           or (pair if type(pair) is Reason else _index_reason(offsets, x, "offsets")))
    return why or calls.segment_reduce(x, offsets, op)


def scatter_add(x: Any, idx: Any, m: int) -> OpCall | Reason:
    x = cast(x)
    pair = operands.prepare("copy_rhs", None, x)
    why = pair if type(pair) is Reason else _index_reason(idx, x, "idx")
    return why or calls.scatter_add(x, idx, int(m))


def segment_mm(A: Any, B: Any, seglen_A: Any) -> OpCall | Reason:
    A, B = cast(A), cast(B)
    why = products.shape_reason(A, B) or _index_reason(seglen_A, None, "seglen_A")
    if why is None and seglen_A.shape[0] != B.shape[0]:
        why = reason("GA206", f"{seglen_A.shape[0]} segments and {B.shape[0]} matrices")
    return why or calls.segment_mm(A, B, seglen_A)


def gather_mm(A: Any, B: Any, idx_A: Any = None, idx_B: Any = None) -> OpCall | Reason:
    A, B = cast(A), cast(B)
    why = products.shape_reason(A, B)
    for index, name in ((idx_A, "idx_A"), (idx_B, "idx_B")):
        if why is None and index is not None:
            why = _index_reason(index, A, name)
    return why or calls.gather_mm(A, B, idx_A, idx_B)


def _index_reason(index: Any, x: Tensor | None, name: str) -> Reason | None:
    if (not isinstance(index, Tensor) or index.dim() != 1
        or index.dtype not in (torch.int32, torch.int64)):
        return reason("GA206", f"{name} is no tensor of integers of one dimension")
    if x is not None and index.device != x.device:
        return reason("GA206", f"{name} is on {index.device}, the rows on {x.device}")
    return None
