"""Layers whose ``forward`` may look at all nodes: it runs once, over rows in the host's memory, and
only its `propagate` and `edge_updater` run in bands."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnnaccel.adapters.pyg.distributed.arguments import EDGES
from gnnaccel.dispatch.distributed.building import EDGE, Relation
from gnnaccel.dispatch.distributed.ranges import BETWEEN
from gnnaccel.dispatch.offload.session import BandSession
from gnnaccel.errors import OffloadError

#: arguments of messages that a band numbers otherwise than the graph
_NUMBERS = ("edge_index", "edge_index_j", "adj_t")
_STEPS = {"propagate": ("message", "aggregate", "update"), "edge_updater": ("edge_update",)}


class Nodes(NamedTuple):
    """An argument with rows of nodes: the places of its rows among the inputs, of sources (None:
    not gathered) and of destinations."""

    name: str
    source: int | None
    target: int | None


class Step(NamedTuple):
    """A call of a step of a layer. ``edge_index``: by source and destination, or ``reversed``;
    ``sizes``: their numbers; ``inputs``: rows, of ``kinds``; ``edges``, ``whole``: the names of
    arguments that are rows of edges, and of other tensors, ``whole_values``; ``plain``: all
    else."""

    layer: Any
    name: str
    edge_index: Tensor
    reversed: bool
    sizes: tuple[int, int]
    relation: Relation
    inputs: list[Tensor]
    kinds: list[str]
    nodes: list[Nodes]
    edges: dict[str, int]
    whole: list[str]
    whole_values: list[Tensor]
    plain: dict[str, Any]

    @property
    def title(self) -> str:
        return f"{type(self.layer).__name__}.{self.name}"

    @property
    def result(self) -> str:
        """The kind of the rows that the step gives."""
        return self.relation[2] if self.name == "propagate" else EDGES

    def over_band(self, session: BandSession, inputs: list[Tensor], whole: list[Tensor],
                  weights: dict[str, Tensor]) -> Tensor:
        """The result of the layer's own step over a band."""
        source, _, target = self.relation
        rows = session.part.rows
        kwargs = dict(self.plain) | dict(zip(self.whole, whole))
        kwargs.update({name: inputs[at] for name, at in self.edges.items()})
        for name, at, own in self.nodes:
            kwargs[name] = (None if at is None else session.extend(source, inputs[at], name,
                                                                   self.title, self.layer),
                            None if own is None else inputs[own])
        size = rows[source].extended, len(rows[target].own)
        with _forwards(self.layer):
            return torch.func.functional_call(
                _Holder(self.layer, self.name), {f"layer.{key}": t for key, t in weights.items()},
                (next(iter(session.part.edges.values())),), {**kwargs, "size": size})


@contextlib.contextmanager
def _forwards(layer: Any) -> Iterator[None]:
    """A block in which the layer takes edges by source and destination, as bands have them."""
    flow, layer.flow = layer.flow, "source_to_target"
    try:
        yield
    finally:
        layer.flow = flow


class _Holder(nn.Module):
    """A step as a module's call, which can be given other weights."""

    def __init__(self, layer: Any, name: str):
        super().__init__()
        self.layer, self._name = layer, name

    def forward(self, edge_index: Tensor, **kwargs: Any) -> Any:
        return getattr(self.layer, self._name)(edge_index, **kwargs)


def read(layer: Any, name: str, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Step:
    """The step of a call with these arguments. Raises OffloadError where bands would not give the
    same."""
    title = f"{type(layer).__name__}.{name}"
    names = _asked(layer, name)
    numbers = [one for one in _NUMBERS if one in names]
    if numbers:
        raise OffloadError(f"{title} cannot run in bands: its {' or '.join(_STEPS[name])} asks for "
                           f"{numbers[0]}, and a band numbers its nodes by itself")
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided or (
            edge_index.dtype != torch.long or edge_index.dim() != 2 or len(edge_index) != 2):
        raise OffloadError(f"{title} cannot run in bands: edge_index is no plain tensor [2, E] of "
                           "int64")
    flipped = layer.flow != "source_to_target"
    i, j = (0, 1) if flipped else (1, 0)
    gathered = {one[:-2]: one[-2:] for one in names if one[-2:] in ("_i", "_j")}
    pairs = {key: _pair(title, layer, key, kwargs[key]) for key in gathered if key in kwargs}
    if flipped and any(a is not b for a, b in pairs.values()):
        raise OffloadError(f"{title} cannot run in bands: it is given pairs, and its flow is "
                           f"{layer.flow!r}")
    raw = [key for key in pairs if key in names and kwargs[key] is not None]
    if raw:
        raise OffloadError(f"{title} cannot run in bands: it asks for {raw[0]} both at the ends of "
                           "edges and as it is")
    sizes = _sizes(title, names, pairs, list(size or (None, None)), i, j)
    one = sizes[0] == sizes[1] and all(a is b for a, b in pairs.values())
    relation = EDGE if one else BETWEEN
    return _sorted(layer, name, edge_index, flipped, (sizes[j], sizes[i]), relation, names, pairs,
                   {key: kwargs[key] for key in names if key in kwargs and key not in pairs}, i, j)


def _asked(layer: Any, name: str) -> set[str]:
    """The names that the functions of a step are given by."""
    special = layer.special_args - set(_NUMBERS)
    return set(layer.inspector.get_flat_param_names(list(_STEPS[name]), exclude=special))


def _pair(title: str, layer: Any, key: str, value: Any) -> tuple[Any, Any]:
    """A node argument by the rows of edge_index that gather it."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    for one in pair:
        if isinstance(one, Tensor) and (not one.dim() or layer.node_dim % one.dim()):
            raise OffloadError(f"{title} cannot run in bands: nodes are not the first dimension of "
                               f"{key}, {list(one.shape)}")
    if len(pair) != 2:
        raise OffloadError(f"{title} cannot run in bands: {key} is no tensor, and no pair")
    return pair


def _sizes(title: str, asked: set[str], pairs: dict[str, tuple[Any, Any]], size: list[Any], i: int,
           j: int) -> tuple[int, int]:
    """Numbers of nodes, by the rows of edge_index."""
    for key, pair in pairs.items():
        alone = pair[0] is pair[1]
        for at, end in ((i, "_i"), (j, "_j")):
            if size[at] is None and isinstance(pair[at], Tensor) and (
                    not alone or key + end in asked):
                size[at] = len(pair[at])
    counts = [one for one in size if one is not None]
    if not counts:
        raise OffloadError(f"{title} cannot run in bands: it has no argument with a row a node, "
                           "and no size")
    return tuple(counts[0] if one is None else one for one in size)


def _sorted(layer: Any, name: str, edge_index: Tensor, flipped: bool, sizes: tuple[int, int],
            relation: Relation, asked: set[str], pairs: dict[str, tuple[Any, Any]],
            others: dict[str, Any], i: int, j: int) -> Step:
    """The step, whose arguments are sorted by the kind of their rows."""
    inputs: list[Tensor] = []
    kinds: list[str] = []

    def place(t: Any, kind: str) -> int | None:
        if not isinstance(t, Tensor):
            return None
        index = next((at for at, (tensor, own) in enumerate(zip(inputs, kinds))
                      if tensor is t and own == kind), None)
        if index is None:
            inputs.append(t)
            kinds.append(kind)
        return len(inputs) - 1 if index is None else index

    source, _, target = relation
    nodes = [Nodes(key, place(pair[j], source) if key + "_j" in asked else None,
                   place(pair[i], target) if key + "_i" in asked else None)
             for key, pair in pairs.items()]
    edges = edge_index.shape[1]
    of_edges = {key: at for key, value in others.items() if isinstance(value, Tensor)
                and value.dim() and len(value) == edges
                and (at := place(value, EDGES)) is not None}
    whole = [key for key, value in others.items()
             if isinstance(value, Tensor) and key not in of_edges]
    plain = {key: value for key, value in others.items() if not isinstance(value, Tensor)}
    for key, value in plain.items():
        if isinstance(value, (tuple, list)) and any(isinstance(one, Tensor) for one in value):
            raise OffloadError(f"{type(layer).__name__}.{name} cannot run in bands: {key} holds "
                               "several tensors")
    return Step(layer, name, edge_index, flipped, sizes, relation, inputs, kinds, nodes, of_edges,
                whole, [others[key] for key in whole], plain)
