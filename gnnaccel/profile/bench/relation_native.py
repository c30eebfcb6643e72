"""How much memory PyG's own relational layers need, so that no machine is driven into swapping to
find out.

A GPU says itself that memory is out, and the next cell goes on. A CPU's process would be ended
instead.
"""
from __future__ import annotations

import os

import torch

from gnnaccel.adapters.pyg.bench.layers import IN_CHANNELS
from gnnaccel.adapters.pyg.bench.relational import BASES, MODELS, RelationLayer
from gnnaccel.profile.bench.relation_graph import RelationGraph

GIB = 1024**3
FLOAT = 4


def needed_bytes(layer: RelationLayer, graph: RelationGraph, mode: str) -> int:
    """A rough count, from what PyG 2.8 keeps: bytes at the peak of one native step in fp32."""
    nodes, edges, relations = graph.num_nodes, graph.num_edges, graph.num_relations
    row = FLOAT * max(IN_CHANNELS, layer.out_channels)
    weights_per_edge = FLOAT * edges * IN_CHANNELS * layer.out_channels
    training = mode == "training"
    if layer.class_name == "RGCNConv":
        # Each relation's aggregate has a row per node and stays until backward.
        return row * (nodes * (relations if training else 4) + edges)
    if layer.class_name == "FastRGCNConv":
        return weights_per_edge * (2 if training else 1) + edges * (3 * row + 3 * FLOAT * relations)
    if layer.class_name == "RGATConv":
        return weights_per_edge * (3 if training else 1) + 4 * row * edges
    if layer.class_name == "HGTConv":
        sources = sum(graph.node_counts[triple[0]] for triple in graph.typed)
        return row * (edges * (6 if training else 4) + 6 * sources)
    if layer.class_name in MODELS:
        messages = (edges * BASES * (2 if training else 1)
                    if layer.class_name == "to_hetero_with_bases" else 2 * edges)
        return 2 * row * (messages + 2 * nodes * (len(graph.typed) if training else 4))
    return row * (2 * edges + 2 * nodes * (len(graph.typed) if training else 4))


def refusal(layer: RelationLayer, graph: RelationGraph, mode: str) -> str | None:
    """Why the native layer is not to be run here; None when it may be."""
    free = _free_bytes(graph.device)
    needed = needed_bytes(layer, graph, mode)
    if free is None or needed <= 0.8 * free:
        return None
    return f"not run: needs about {needed / GIB:.3g} GiB of {free / GIB:.3g} GiB"


def _free_bytes(device: torch.device) -> int | None:
    """Memory that is free now; None where nobody knows, and on GPUs, which fail in good order."""
    if device.type != "cpu":
        return None
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
