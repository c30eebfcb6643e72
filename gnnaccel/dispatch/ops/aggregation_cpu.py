"""Weighted neighbours summed on the CPU without a message per edge, by embedding bags over edges
sorted by destination."""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.dispatch.ops import aggregation_means as means
from gnnaccel.dispatch.ops import messages
from gnnaccel.dispatch.ops.aggregation import Aggregation, named
from gnnaccel.dispatch.ops.aggregation_means import PowerMean
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.messages import Shifted
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.torch_segments import FOLD, Segments, weighted_sum

_DTYPES = (torch.float32, torch.float64)


def unfit(graph: OpGraph, aggregation: Aggregation) -> Reason | None:
    """Why this cannot be computed so; then `aggregation.plain` can."""
    if type(aggregation.more) not in (type(None), Shifted):
        return reason("GA301", "such messages have no faster way on a CPU")
    aggregation = means.inner(aggregation)
    if aggregation.reduce not in ("sum", "mean"):
        return reason("GA301",
                      f"{named(aggregation.reduce)} over neighbours has no faster way on a CPU")
    if aggregation.kind == "channel" or not all(aggregation.shape):
        return reason("GA208",
                      f"weights of shape {list(aggregation.weight.shape)}"
                      if aggregation.weight is not None else "rows are empty")
    if aggregation.x.dtype not in _DTYPES:
        return reason("GA203", f"{aggregation.x.dtype} features on a CPU")
    return None if graph.num_edges else reason("GA303")


def run(graph: OpGraph, aggregation: Aggregation) -> Tensor:
    """`aggregation.plain` of an aggregation that is not `unfit`."""
    if type(aggregation.reduce) is PowerMean:
        return means.around(run)(graph, aggregation)
    if aggregation.more is not None:
        return messages.split(run, graph, aggregation)
    view = graph.view()
    edges = view.edges(ids=aggregation.weight is not None)
    segments = edges.segments(graph.num_src)
    if aggregation.weight is None:
        out = weighted_sum(segments, None, aggregation.x.flatten(1))
    else:
        weight = (aggregation.weight if edges.eid is None
                  else aggregation.weight.index_select(0, edges.eid))
        out = (weighted_sum(segments, weight.reshape(-1), aggregation.x.flatten(1))
               if aggregation.kind == "edge" else _by_head(
            segments, weight.flatten(1), aggregation.x.flatten(1, -2)))
    if aggregation.reduce == "mean":
        out = out * view.inverse_degree(out.dtype).unsqueeze(1)
    out = out.view(-1, *aggregation.shape)
    # no view: views made without gradients cannot be changed in place with
    return out if torch.is_grad_enabled() else out.detach()


def _by_head(segments: Segments, weight: Tensor, x: Tensor) -> Tensor:
    """[num_dst, heads * width]: weight [E, heads], x [num_src, heads, width]; head by head, or
    folded into one graph."""
    heads = x.shape[1]
    if segments.src.shape[0] * heads <= FOLD:
        sums = weighted_sum(segments.fold(heads), weight.t().reshape(-1),
                            x.transpose(0, 1).flatten(0, 1))
        return sums.view(heads, segments.num_dst, -1).transpose(0, 1).flatten(1)
    return torch.cat([weighted_sum(segments, w, rows)
                      for w, rows in zip(weight.unbind(1), x.unbind(1))], 1)
