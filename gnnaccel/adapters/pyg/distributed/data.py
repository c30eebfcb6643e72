"""PyG's data objects as graphs to be cut, and parts as data objects."""
from __future__ import annotations

import importlib.util
import json
from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.distributed import storage
from gnnaccel.dispatch.distributed.building import EDGE, NODE, Graph
from gnnaccel.dispatch.distributed.part import Part, load
from gnnaccel.errors import PartitionError

def load_part(folder: Any, rank: int | None = None, *, device: Any = None,
              verify: bool = True) -> Part:
    """A rank's part of a folder that `partition` wrote; ``part.data`` is a `Data` or `HeteroData`
    over the own nodes.

    ``rank``: which part; None: this process's rank in torch.distributed. ``verify`` False skips the
    SHA-256 digests, which read every file once. Sources in ``part.data.edge_index`` are numbered
    over [own | halo], destinations over [own]. Raises PartitionError for a folder that is
    half-written, was changed, or has another count of parts than there are processes.
    """
    import torch.distributed as dist

    joined = dist.is_available() and dist.is_initialized()
    if rank is None:
        if not joined:
            raise PartitionError("load_part needs a rank: torch.distributed is not initialised. "
                                 "Call init_process_group before, or give rank=")
        rank = dist.get_rank()
    part = load(folder, rank, verify)
    if joined and dist.get_world_size() != part.parts:
        raise PartitionError(f"{part.folder} has {part.parts} parts and there are "
                             f"{dist.get_world_size()} processes; start {part.parts}, or partition "
                             "the graph anew")
    part.data = _data_of(part)
    return part if device is None else part.to(device)


def read(data: Any) -> Graph:
    """A data object as a graph of arrays, which share its memory."""
    from torch_geometric.data import Data, HeteroData

    if isinstance(data, HeteroData):
        return _read_hetero(data)
    if not isinstance(data, Data):
        raise PartitionError(f"partition needs a Data or HeteroData, not a {type(data).__name__}")
    count = data.num_nodes
    if count is None or not isinstance(data.edge_index, Tensor):
        raise PartitionError("the data has no edge_index, or nothing that says how many nodes "
                             "there are; adj_t is not read: pass edge_index, and set num_nodes")
    graph = Graph({NODE: int(count)}, {EDGE: _ends(data.edge_index)}, {NODE: {}}, {EDGE: {}})
    for key, value in data:
        if key in ("edge_index", "num_nodes"):
            continue
        kind = ("node" if data.is_node_attr(key) else "edge" if data.is_edge_attr(key) else "")
        _sort_in(graph, key, value, NODE if kind == "node" else None,
                 EDGE if kind == "edge" else None)
    return graph


def _read_hetero(data: Any) -> Graph:
    graph = Graph({}, {}, hetero=True)
    for kind in data.node_types:
        store = data[kind]
        if store.num_nodes is None:
            raise PartitionError(f"nothing says how many nodes of type {kind!r} there are; set "
                                 f"data[{kind!r}].num_nodes")
        graph.nodes[kind], graph.node_rows[kind] = int(store.num_nodes), {}
        for key, value in store.items():
            if key != "num_nodes":
                _sort_in(graph, key, value, kind if store.is_node_attr(key) else None, None, kind)
    for relation in data.edge_types:
        store = data[relation]
        if not isinstance(store.get("edge_index"), Tensor):
            raise PartitionError(f"{relation} has no edge_index; adj_t is not read")
        graph.edges[relation], graph.edge_rows[relation] = _ends(store.edge_index), {}
        for key, value in store.items():
            if key != "edge_index":
                _sort_in(graph, key, value, None,
                         relation if store.is_edge_attr(key) else None, "__".join(relation))
    for key, value in data._global_store.items():
        _sort_in(graph, key, value, None, None)
    return graph


def _sort_in(graph: Graph, key: str, value: Any, node: Any, edge: Any, owner: str = "") -> None:
    """Put one attribute among the rows of nodes, the rows of edges, or those of the whole graph."""
    if isinstance(value, Tensor) and not value.is_sparse:
        where = (graph.node_rows[node] if node is not None
                 else graph.edge_rows[edge] if edge is not None else graph.whole)
        if owner and where is graph.whole:
            raise PartitionError(f"{key} of {owner} has shape {list(value.shape)}: neither one row "
                                 "a node nor one an edge; move it to data itself, or remove it")
        where[key] = storage.to_array(value)
        return
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise PartitionError(f"{key} is a {type(value).__name__}, which cannot be written to a "
                             "part; needed are dense tensors or plain values. Remove it before"
                             ) from None
    if owner:
        raise PartitionError(f"{key} of {owner} is a {type(value).__name__}; only tensors are cut "
                             "with a type's nodes. Move it to data itself, or remove it")
    graph.plain[key] = value


def _ends(edge_index: Tensor) -> tuple[Any, Any]:
    if edge_index.dim() != 2 or len(edge_index) != 2 or edge_index.is_floating_point():
        raise PartitionError(f"edge_index is {edge_index.dtype} of shape "
                             f"{list(edge_index.shape)}; needed are integers [2, E]")
    source, target = edge_index.as_subclass(Tensor).detach().cpu().numpy()
    return source, target


def _data_of(part: Part) -> Any:
    """The host's data object over a part's own nodes."""
    from torch_geometric.data import Data, HeteroData

    data = HeteroData() if part.hetero else Data()
    for kind, rows in part.rows.items():
        (data[kind] if part.hetero else data).num_nodes = len(rows.own)
    for relation, edge_index in part.edges.items():
        (data[relation] if part.hetero else data).edge_index = edge_index
    for key, value in part.tensors.items():
        place, names, name = key[0], key[1:-1], key[-1]
        if place == "whole" or not part.hetero:
            data[name] = value
        else:
            data[names if place == "edge_rows" else names[0]][name] = value
    for name, value in part.plain.items():
        data[name] = value
    return data


def metis(pointers: Tensor, neighbours: Tensor, parts: int) -> Tensor | None:
    """Each node's part by METIS (Karypis and Kumar, 1998), of pyg-lib or torch-sparse; None where
    neither has it. ``pointers``, ``neighbours``: from `cutting.symmetric`."""
    from torch_geometric import typing

    if getattr(typing, "WITH_METIS", False):
        import pyg_lib  # type: ignore[import-not-found, import-untyped, unused-ignore]

        return pyg_lib.partition.metis(pointers, neighbours, parts)
    if importlib.util.find_spec("torch_sparse") is not None:
        import torch_sparse  # noqa: F401  (registers the operator)

        return torch.ops.torch_sparse.partition(pointers, neighbours, None, parts, False)
    return None
