"""Steps of layers that take dictionaries, by node type and by (source type, name, destination
type).

All nodes lie in one range, type after type, and each edge type is a relation. The structure belongs
to the caller's own tensors, one for each edge type that has edges.

A lookup in PyG's ModuleDict or ParameterDict translates the name and goes through several functions
of torch's; layers by type make dozens in each call. `module` and `parameter` are quicker.
"""
from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.layout import EdgeType, Layout, Part
from gnnaccel.adapters.pyg import edges, guards
from gnnaccel.dispatch.policy.reasons import Reason, reason

#: functions by which the models of to_hetero put relations together, two at a time. (HeteroConv's
#: "sum" differs from `torch.add` under autocast, its extrema in the gradients of equal numbers.)
IN_PAIRS = (torch.add, torch.max, torch.min, torch.mul)
#: ways of putting relations together that add them up: then none needs a result of its own
ADDED_UP = ("sum", "mean", torch.add)
#: all ways of HeteroConv, None for side by side in a dimension of their own
GROUPINGS = ("sum", "mean", "min", "max", "cat", None)


def grouped(parts: list[Tensor], aggr: Any) -> Tensor:
    """Results of the relations that enter a node type, put together as the host does; never a view
    of one of several."""
    if aggr in IN_PAIRS:
        return in_pairs(parts, aggr)
    from torch_geometric.nn.conv.hetero_conv import group

    return group(parts, aggr)


def in_pairs(parts: list[Tensor], fold: Callable) -> Tensor:
    """Results put together as the models of to_hetero do: the first two, whose result goes to the
    end of the queue."""
    queue = deque(parts)
    while len(queue) > 1:
        queue.append(fold(queue.popleft(), queue.popleft()))
    return queue[0]


class Graph(NamedTuple):
    """The edges of one call: ``structure``, the plain tensors of ``layout``'s parts; ``present``:
    the edge types that the caller named, with edges or without; ``starts``: the first node of each
    type; ``num_dst``, ``ends``: the same of destinations."""

    structure: tuple[Tensor, ...]
    layout: Layout
    present: frozenset[EdgeType]
    starts: dict[Any, int]
    num_nodes: int
    num_edges: int
    num_dst: int
    ends: dict[Any, int]


def features_reason(x_dict: Mapping[str, Any], types: Iterable[str],
                    device: torch.device) -> Reason | None:
    """Why the features of these node types cannot be taken: not dense [N, F] floats of one dtype on
    ``device``. (Autocast evens out dtypes other than float64.)"""
    dtypes = set()
    for name in types:
        x = x_dict[name]
        why = guards.features_reason(x, f"x_dict[{name!r}]")
        if why is not None:
            return why
        if x.device != device:
            return reason("GA206", f"x_dict[{name!r}] is on {x.device}, the weights on {device}")
        dtypes.add(x.dtype)
    if len(dtypes) > 1 and (torch.float64 in dtypes or not torch.is_autocast_enabled(device.type)):
        return reason("GA203", f"the features are {' and '.join(sorted(map(str, dtypes)))}",
                      "convert them to one dtype")
    return None


def dtypes_reason(x_dict: Mapping[str, Tensor], types: Iterable[str],
                  weight: Tensor) -> Reason | None:
    """Why these features cannot be multiplied with weights of this dtype."""
    dtypes = {weight.dtype, *(x_dict[name].dtype for name in types)}
    if (len(dtypes) > 1
        and (torch.float64 in dtypes or not torch.is_autocast_enabled(weight.device.type))):
        return reason("GA203", f"features and weights are {' and '.join(sorted(map(str, dtypes)))}",
                      "convert them to one dtype")
    return None


def summed(dtype: torch.dtype, autocast: bool, device: torch.device) -> torch.dtype:
    """The dtype of ``torch.sum`` of such numbers: on CUDA autocast sums in fp32."""
    return (torch.promote_types(dtype, torch.float32) if autocast
            and device.type == "cuda" else dtype)


def graph(edge_index_dict: Any, sizes: Mapping[Any, int], relations: Mapping[EdgeType, int],
          device: torch.device, targets: Mapping[Any, int] | None = None,
          rows: Callable[[EdgeType], tuple] = itemgetter(0, -1)) -> Graph | Reason:
    """The graph of a call, or why there is none. ``sizes``: nodes of each type, in the order in
    which they lie; ``relations``: the number of each edge type that the layer knows; ``targets``:
    ``sizes`` of the destinations where they lie in a range of their own; ``rows``: the keys in
    ``sizes`` and ``targets`` of the nodes at the ends of an edge type."""
    if not isinstance(edge_index_dict, Mapping):
        return reason("GA204", f"edge_index_dict is a {type(edge_index_dict).__name__}",
                      "pass a dictionary by edge type")
    starts, num_nodes = _starts(sizes)
    targets, (ends,
              num_dst) = ((sizes, (starts, num_nodes))
                          if targets is None else (targets, _starts(targets)))
    parts, structure = [], []
    for name, edge_index in edge_index_dict.items():
        if name not in relations:
            return reason("GA206", f"the layer does not know the edge type {name!r}")
        src, dst = rows(name)
        if src not in sizes or dst not in targets:
            return reason("GA206",
                          f"there are edges of type {name!r}, but no features for one of its ends")
        tensor = edges.plain(edge_index, sizes[src], targets[dst], device)
        if type(tensor) is Reason:
            if tensor.code == "GA303":  # other types may have edges
                continue
            return Reason(tensor.code, f"edge_index_dict[{name!r}]: {tensor.text}", tensor.hint)
        parts.append(Part(name, relations[name], starts[src], sizes[src], ends[dst], targets[dst]))
        structure.append(tensor)
    if not parts:
        return reason("GA303")
    return Graph(tuple(structure), Layout(tuple(parts)), frozenset(edge_index_dict), starts,
                 num_nodes, sum(t.shape[1] for t in structure), num_dst, ends)


def _starts(sizes: Mapping[Any, int]) -> tuple[dict[Any, int], int]:
    """The first row of each type, and the number of rows."""
    starts, total = {}, 0
    for name, count in sizes.items():
        starts[name], total = total, total + count
    return starts, total


# --- entries of PyG's ModuleDict and ParameterDict, by the names that users know ------------------

@functools.lru_cache(maxsize=4096)
def _internal(cls: Any, name: Any) -> str:
    """The name under which a dictionary of class ``cls`` keeps an entry."""
    return cls.to_internal_key(name) if hasattr(cls, "to_internal_key") else name


def paths(path: str, entries: Any, names: Iterable[str]) -> list[str]:
    """Dotted names of entries of a dictionary whose own is ``path``."""
    cls: Any = type(entries)
    return [f"{path}.{_internal(cls, name)}" for name in names]


def module(entries: Any, name: Any) -> Any:
    """``entries[name]`` of a ModuleDict."""
    cls: Any = type(entries)
    value = entries._modules.get(_internal(cls, name))
    return entries[name] if value is None else value


def parameter(entries: Any, name: Any) -> Tensor:
    """``entries[name]`` of a ParameterDict."""
    cls: Any = type(entries)
    value = entries._parameters.get(_internal(cls, name))
    return entries[name] if value is None else value
