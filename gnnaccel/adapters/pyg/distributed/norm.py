"""GCN's normalisation over a part: degrees of own nodes are complete, those of the halo come from
their owners."""
from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from gnnaccel.dispatch.distributed.session import OF_THE_GRAPH
from gnnaccel.dispatch.graph.ordered_weights import of_the_graph

_NAME = "gcn_norm"


@functools.cache
def modules_of(cls: type) -> tuple[Any, ...]:
    """The modules, of a layer class and those that it derives from, that call `gcn_norm`."""
    modules = (sys.modules.get(base.__module__) for base in cls.__mro__)
    return tuple(dict.fromkeys(module for module in modules
                               if module is not None and _NAME in vars(module)))


def replaced(cls: type, norm: Any) -> list[tuple[Any, Any]]:
    """Put ``norm`` in place of `gcn_norm` for a call of a layer. Returns the originals for
    `put_back`. For the call alone: gnnaccel itself may replace the function, before or in
    between."""
    originals = [(module, getattr(module, _NAME)) for module in modules_of(cls)]
    for module, native in originals:
        setattr(module, _NAME, functools.wraps(native)(functools.partial(norm, native)))
    return originals


def put_back(held: list[tuple[Any, Any]]) -> None:
    for module, native in held:
        setattr(module, _NAME, native)


def over_part(call: Any, native: Any, edge_index: Any,
              edge_weight: Tensor | None = None, num_nodes: int | None = None,
              improved: bool = False, add_self_loops: bool = True,
              flow: str = "source_to_target", dtype: Any = None) -> tuple[Tensor, Tensor]:
    """`gcn_norm` (Kipf and Welling, 2017) of a part's edges: each edge's weight over the square
    roots of the degrees of both ends. ``edge_index``: int64 [2, E] over [own | halo] and [own].
    Differentiable by the weights. Without weights it is computed once for each ``edge_index``, and
    the same tensors are given each time. ``call``: the layer's, `calls._Call`; ``native``, the
    host's function, is not asked."""
    if edge_weight is not None or edge_index.is_inference():
        return _computed(call, edge_index, edge_weight, improved, add_self_loops, dtype)
    by_options = call.session.norms.get(edge_index) or {}
    key = call.relation, improved, add_self_loops, dtype
    if key not in by_options:
        # not in inference mode: kept tensors may take part in training later
        with torch.inference_mode(False), torch.no_grad():
            by_options[key] = edges, weight = _computed(call, edge_index, None, improved,
                                                        add_self_loops, dtype)
            exact = None
            if weight.element_size() == 2:
                exact = _computed(call, edge_index, None, improved, add_self_loops,
                                  torch.float32)[1]
            of_the_graph(weight, exact)
        call.session.norms.set(edge_index, by_options)
    return by_options[key]


def _computed(call: Any, edge_index: Tensor, edge_weight: Tensor | None, improved: bool,
              add_self_loops: bool, dtype: Any) -> tuple[Tensor, Tensor]:
    own, what = len(call.session.part.rows[call.relation[0]].own), "the degrees"
    if edge_weight is None and edge_index is call.session.part.edges.get(call.relation):
        what = f"{OF_THE_GRAPH}, {improved=}, {add_self_loops=}, {dtype}"
    if add_self_loops:
        # the function of the layer's module: gnnaccel keeps its edges
        loops = sys.modules["torch_geometric.nn.conv.gcn_conv"].add_remaining_self_loops
        edge_index, edge_weight = loops(edge_index, edge_weight, 2.0 if improved else 1.0, own)
    if edge_weight is None:
        edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
    from torch_geometric.utils import scatter

    degrees = scatter(edge_weight, edge_index[1], dim=0, dim_size=own, reduce="sum")
    inverse = degrees.pow(-0.5)
    inverse = inverse.masked_fill(inverse == float("inf"), 0)
    extended = call.extend(inverse, what)
    return edge_index, extended[edge_index[0]] * edge_weight * inverse[edge_index[1]]
