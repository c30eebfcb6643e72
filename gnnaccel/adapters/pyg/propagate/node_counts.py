"""How many nodes there are at both ends of the edges of one call of ``propagate``."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from gnnaccel.adapters.guards import TENSORS
from gnnaccel.adapters.pyg import guards
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.policy.reasons import Reason, reason


def sizes(layer: Any, edge_index: Any, kwargs: dict,
          read: tuple[tuple[str, str], ...]) -> tuple[int, int] | Reason:
    """The numbers of nodes at both ends, as the host finds them in the arguments ``read`` at these
    ends."""
    forward, node_dim, size = layer.flow == "source_to_target", layer.node_dim, kwargs.get("size")
    if type(edge_index).__name__ == "EdgeIndex":
        size = edge_index.sparse_size()
    size, paired = [None, None] if size is None else list(size), False
    for name, end in read:
        x = kwargs[name]
        pair = isinstance(x, (tuple, list))
        if pair and len(x) != 2:
            return reason("GA206", f"{name} is no pair")
        if pair and not forward:
            if x[0] is not x[1] and guards.by_position(layer):
                return reason("GA202", "a pair of features with flow='target_to_source', of which "
                              "PyG's general propagate gathers the second")
            paired = True
        for side, features in enumerate(x if pair else (x,)):
            if features is None and side and end == "j":
                continue
            dims = features.dim() if type(features) in TENSORS else 0
            if not -dims <= node_dim < dims:
                return reason("GA206",
                              f"features are a {type(features).__name__}, node_dim={node_dim}")
            at = side if pair else int((end == "i") == forward)
            rows = features.shape[node_dim]
            if size[at] is not None and size[at] != rows:
                return reason("GA206", f"{rows} rows of features where {size[at]} nodes are")
            size[at] = rows
    src, dst = size if forward else size[::-1]
    if paired:  # the first of a pair is gathered and says how many receive
        src = dst if src is None else src
        if src != dst:
            return reason("GA202", f"features of {dst} and {src} nodes with "
                          "flow='target_to_source'")
    return src, src if dst is None else dst


def of_edges(layer: Any, edge_index: Any, kwargs: dict,
             ends: tuple[tuple[str, str], ...]) -> tuple[int, int] | Reason:
    """`sizes` of messages without features of the sources. Where the arguments do not tell, the
    device is asked for the last node that an edge leaves or enters; the host asks for the latter,
    too."""
    counts: Any = sizes(layer, edge_index, kwargs, ends)
    if type(counts) is Reason or None not in counts:
        return counts
    if type(edge_index) is not Tensor or not edge_index.numel() or capture.capturing():
        return reason("GA206", "nobody says how many nodes there are",
                      "give propagate a size=(sources, destinations)")
    src, dst = [last + 1 for last in edge_index.amax(1).tolist()]
    if layer.flow != "source_to_target":
        src, dst = dst, src
    return src if counts[0] is None else counts[0], dst if counts[1] is None else counts[1]
