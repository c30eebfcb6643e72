"""Partition of a graph of any host, or one in arrays, into parts on disk."""
from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnaccel.dispatch.distributed import building, cutting, storage
from gnnaccel.dispatch.distributed.building import EDGE, NODE, Graph
from gnnaccel.errors import HostLimitError, PartitionError

METHODS = ("edges", "metis")
#: package -> the module of its adapter that reads its graphs (``read``) and may have METIS
#: (``metis``), in the order in which they are asked for that
_HOSTS = {"torch_geometric": "gnnaccel.adapters.pyg.distributed.data",
          "dgl": "gnnaccel.adapters.dgl.parts"}


def partition(data: Any, parts: int, method: Any = "edges", *, out: Any,
              chunk: int = cutting.CHUNK) -> Path:
    """Cut a graph into parts and write them to a folder. Returns the folder.

    ``data``: `Data` or `HeteroData` with ``edge_index``, or a `DGLGraph`; ``parts``: how many, at
    least 1; ``method``: "edges" cuts each type's nodes into ranges into which about equally many
    edges enter; "metis" (Karypis and Kumar, 1998) asks pymetis, pyg-lib, torch-sparse or DGL, in
    this order, for a cut with few edges between parts, of homogeneous graphs; an integer tensor
    [N], or a dictionary of tensors by node type, gives each node's part. ``out``: a folder that
    must not exist; it gets its name once all is written. ``chunk``: edges that are looked at
    together.

    Tensors with a row for each node or edge are cut with them, others go to every part whole.
    Raises PartitionError for data that cannot be cut, GraphError for edges of nodes that do not
    exist, HostLimitError where no installed package has METIS.
    """
    _check_parts(parts)
    return _write(_read(data), parts, method, Path(out), chunk)


def partition_arrays(edge_index: Any, num_nodes: int, parts: int, method: Any = "edges", *,
                     out: Any, node_arrays: Mapping[str, Any] | None = None,
                     edge_arrays: Mapping[str, Any] | None = None,
                     chunk: int = cutting.CHUNK) -> Path:
    """`partition` of a graph in arrays: numpy arrays, or paths of ``.npy`` files, which are mapped
    into memory and read chunk by chunk. No process ever holds all edges.

    ``edge_index``: [2, E], or a pair of [E], integers; ``node_arrays``: by name, such as ``x`` and
    ``y``, one row a node; ``edge_arrays``: one row an edge. ``method`` "metis" needs the whole
    graph in memory. Memory besides a chunk: some 50 bytes a node. Raises as `partition`.
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
    return _write(graph, parts, method, Path(out), chunk)


def _write(graph: Graph, parts: int, method: Any, out: Path, chunk: int) -> Path:
    assignment, name = _assignment(graph, parts, method)
    building.write(graph, building.owners(graph, parts, assignment, chunk), parts, out, name, chunk)
    return out


def _read(data: Any) -> Graph:
    packages = {cls.__module__.partition(".")[0] for cls in type(data).__mro__}
    for package, module in _HOSTS.items():
        if package in packages:
            return importlib.import_module(module).read(data)
    raise PartitionError(f"partition needs a Data, a HeteroData or a DGLGraph, not a "
                         f"{type(data).__name__}; partition_arrays takes arrays")


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
    if graph.hetero:
        raise PartitionError("method='metis' cuts graphs without types of nodes; give a dictionary "
                             "of assignments by type, or use method='edges'")
    nodes, edges = graph.nodes[NODE], graph.edges[EDGE]
    if cutting.has_pymetis():
        return cutting.by_pymetis(edges, nodes, parts)
    if parts == 1 or nodes == 0:
        return np.zeros(nodes, np.int32)
    pointers, neighbours = (torch.from_numpy(array) for array in cutting.symmetric(edges, nodes))
    for package, module in _HOSTS.items():
        if importlib.util.find_spec(package) is not None:
            assignment = importlib.import_module(module).metis(pointers, neighbours, parts)
            if assignment is not None:
                return assignment.numpy()
    raise HostLimitError("method='metis' needs pymetis, pyg-lib or torch-sparse with METIS, or "
                         "DGL; none is installed. pip install pymetis, or use method='edges'")


def _mapped(array: Any) -> Any:
    """An array, mapped into memory where it is given as a path."""
    if isinstance(array, (str, Path)):
        return np.load(array, mmap_mode="r", allow_pickle=False)
    if isinstance(array, Tensor):
        return storage.to_array(array)[0]
    return array if isinstance(array, np.ndarray) else np.asarray(array)


def _named(arrays: Mapping[str, Any]) -> building.Named:
    rows = {}
    for name, array in arrays.items():
        rows[name] = (storage.to_array(array) if isinstance(array, Tensor)
                      else ((mapped := _mapped(array)), mapped.dtype.name))
    return rows
