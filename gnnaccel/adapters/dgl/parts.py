"""DGL's graphs as graphs to be cut, and DGL's METIS."""
from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.distributed import storage
from gnnaccel.dispatch.distributed.building import EDGE, NODE, Graph, Named
from gnnaccel.errors import PartitionError


def read(graph: Any) -> Graph:
    """A `DGLGraph` as a graph of arrays: edges by their ids, and ``ndata`` and ``edata`` but for
    DGL's own names, which begin with an underscore. PartitionError for a block, and for a name that
    both nodes and edges of a graph without types have."""
    if graph.is_block:
        raise PartitionError("partition cuts whole graphs; this is a block, of a sampled batch")
    if not graph.is_homogeneous:
        arrays = Graph({kind: graph.num_nodes(kind) for kind in graph.ntypes},
                       {relation: _ends(graph, relation) for relation in graph.canonical_etypes},
                       hetero=True)
        arrays.node_rows = {kind: _named(graph.nodes[kind].data) for kind in graph.ntypes}
        arrays.edge_rows = {relation: _named(graph.edges[relation].data)
                            for relation in graph.canonical_etypes}
        return arrays
    rows, edge_rows = _named(graph.ndata), _named(graph.edata)
    wrong = (rows.keys() & edge_rows.keys()) | ({"edge_index", "num_nodes"}
                                                & (rows.keys() | edge_rows.keys()))
    if wrong:
        raise PartitionError(f"{', '.join(sorted(wrong))}: a part has one place for names of "
                             "nodes, of edges and of its own (edge_index, num_nodes). Rename them "
                             "in ndata or edata")
    return Graph({NODE: graph.num_nodes()}, {EDGE: _ends(graph, graph.canonical_etypes[0])},
                 {NODE: rows}, {EDGE: edge_rows})


def metis(pointers: Tensor, neighbours: Tensor, parts: int) -> Tensor | None:
    """Each node's part by METIS (Karypis and Kumar, 1998), as `dgl.metis_partition_assignment`
    gives it, silently; None where this DGL lacks it. ``pointers``, ``neighbours``: from
    `cutting.symmetric`."""
    import dgl

    assign = getattr(dgl, "metis_partition_assignment", None)
    if assign is None:
        return None
    nodes = len(pointers) - 1
    source = torch.arange(nodes, device="cpu").repeat_interleave(pointers.diff())
    graph = dgl.graph((source, neighbours), num_nodes=nodes)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return torch.as_tensor(assign(graph, parts), device="cpu")


def _ends(graph: Any, relation: tuple[str, str, str]) -> tuple[Any, Any]:
    source, target = graph.edges(order="eid", etype=relation)
    return source.cpu().long().numpy(), target.cpu().long().numpy()


def _named(frame: Any) -> Named:
    return {name: storage.to_array(value) for name, value in frame.items()
            if not name.startswith("_")}
