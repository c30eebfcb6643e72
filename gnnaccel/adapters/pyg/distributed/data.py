"""PyG's data objects as graphs to be cut, and parts as data objects."""
from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnaccel.dispatch.distributed import building, cutting, storage
from gnnaccel.dispatch.distributed.building import EDGE, NODE, Graph
from gnnaccel.dispatch.distributed.part import Part, load
from gnnaccel.errors import HostLimitError, PartitionError

METHODS = ("edges", "metis")


def partition(data: Any, parts: int, method: Any = "edges", *, out: Any,
              chunk: int = cutting.CHUNK) -> Path:
    """Cut a graph into parts and write them to a folder; the folder.

    ``data``: `Data` or `HeteroData` with ``edge_index``; ``parts``: how many, at least 1;
    ``method``: "edges" cuts each type's nodes into ranges into which about equally many edges
    enter; "metis" (Karypis and Kumar, 1998) asks pymetis, pyg-lib or torch-sparse for a cut with
    few edges between parts, of homogeneous graphs; an integer tensor [N], or a dictionary of
    tensors by node type, gives each node's part. ``out``: a folder that must not exist; it gets its
    name once all is written. ``chunk``: edges that are looked at together.

    What has a row for each node or edge is cut with them, other tensors go to every part whole.
    Raises PartitionError for data that cannot be cut, GraphError for edges of nodes that do not
    exist, HostLimitError where no installed package has METIS.
    """
    _check_parts(parts)
    graph = read(data)
    given, name = _assignment(graph, parts, method)
    building.write(graph, building.owners(graph, parts, given, chunk), parts, Path(out), name,
                   chunk)
    return Path(out)


def partition_arrays(edge_index: Any, num_nodes: int, parts: int, method: Any = "edges", *,
                     out: Any, node_arrays: Mapping[str, Any] | None = None,
                     edge_arrays: Mapping[str, Any] | None = None,
                     chunk: int = cutting.CHUNK) -> Path:
    """`partition` of a graph in arrays: numpy arrays, or paths of ``.npy`` files, which are mapped
    into memory and read chunk by chunk. No process ever holds all edges.

    ``edge_index``: [2, E], or a pair of [E], integers; ``node_arrays``: by name, such as ``x`` and
    ``y``, one row a node; ``edge_arrays``: one row an edge. ``method`` "metis" needs the whole
    graph in memory. What is held besides a chunk: some 50 bytes a node. Raises as `partition`.
    """
    _check_parts(parts)
    ends = edge_index if isinstance(edge_index, (tuple, list)) else _mapped(edge_index)
    source, target = _mapped(ends[0]), _mapped(ends[1])
    for end in (source, target):
        if end.ndim != 1 or end.dtype.kind not in "iu":
            raise PartitionError(f"edge_index is {end.dtype} of {end.ndim + 1} dimensions; "
                                 "needed are integers [2, E]")
    graph = Graph({NODE: num_nodes}, {EDGE: (source, target)},
                  {NODE: _named(node_arrays or {})}, {EDGE: _named(edge_arrays or {})})
    given, name = _assignment(graph, parts, method)
    building.write(graph, building.owners(graph, parts, given, chunk), parts, Path(out), name,
                   chunk)
    return Path(out)


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
                _sort_in(graph, key, value, kind if store.is_node_attr(key) else None, None,
                         kind)
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
    """Put one attribute where it belongs: rows of nodes, rows of edges, or the whole."""
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


def _check_parts(parts: Any) -> None:
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise PartitionError(f"parts={parts!r}; needed is a whole number of at least 1")


def _assignment(graph: Graph, parts: int, method: Any) -> tuple[dict[str, Any] | None, str]:
    """(each node's part by type; None: ranges by edges), and the method's name."""
    if isinstance(method, str):
        if method not in METHODS:
            raise PartitionError(f"method={method!r}; it has to be one of {METHODS}, a tensor with "
                                 "each node's part, or a dictionary of these by node type")
        if method == "edges":
            return None, method
        return {NODE: _metis(graph, parts)}, method
    if isinstance(method, Mapping):
        return {kind: torch.as_tensor(value, device="cpu").numpy()
                for kind, value in method.items()}, "given"
    if graph.hetero:
        raise PartitionError("a graph with node types needs a dictionary of assignments by type, "
                             f"for {sorted(graph.nodes)}")
    return {NODE: torch.as_tensor(method, device="cpu").numpy()}, "given"


def _metis(graph: Graph, parts: int) -> np.ndarray:
    from torch_geometric import typing

    if graph.hetero:
        raise PartitionError("method='metis' cuts graphs without types of nodes; give a dictionary "
                             "of assignments by type, or use method='edges'")
    nodes, edges = graph.nodes[NODE], graph.edges[EDGE]
    if cutting.has_pymetis():
        return cutting.by_pymetis(edges, nodes, parts)
    pointers, neighbours = (torch.from_numpy(array)
                            for array in cutting.symmetric(edges, nodes))
    if getattr(typing, "WITH_METIS", False):
        import pyg_lib  # type: ignore[import-not-found, import-untyped, unused-ignore]

        return pyg_lib.partition.metis(pointers, neighbours, parts).numpy()
    if importlib.util.find_spec("torch_sparse") is not None:
        import torch_sparse  # noqa: F401  (registers the operator)

        return torch.ops.torch_sparse.partition(pointers, neighbours, None, parts, False).numpy()
    raise HostLimitError("method='metis' needs pymetis, or a pyg-lib or torch-sparse with METIS; "
                         "none is installed. pip install pymetis, or use method='edges'")


def _mapped(array: Any) -> Any:
    """An array, mapped into memory where it is given as a path."""
    if isinstance(array, (str, Path)):
        return np.load(array, mmap_mode="r", allow_pickle=False)
    if isinstance(array, Tensor):
        return storage.to_array(array)[0]
    return array if isinstance(array, np.ndarray) else np.asarray(array)


def _named(arrays: Mapping[str, Any]) -> building.Named:
    found = {}
    for name, array in arrays.items():
        found[name] = (storage.to_array(array) if isinstance(array, Tensor)
                       else ((mapped := _mapped(array)), mapped.dtype.name))
    return found
