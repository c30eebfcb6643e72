"""Arguments of a layer's call that is to be divided over ranges of nodes: which of them have a row
for each node or edge."""
from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters import guards
from gnnaccel.adapters.pyg.distributed import layers
from gnnaccel.dispatch.distributed.building import EDGE, Relation
from gnnaccel.dispatch.distributed.ranges import BETWEEN
from gnnaccel.dispatch.policy.reasons import Reason, reason

#: kind of rows of edges in `Arguments.kinds`
EDGES = "edges"
Place = tuple[str, "int | None"]


class Arguments(NamedTuple):
    """A call's arguments. ``bound``: by name; ``sizes``: how many sources and destinations there
    are; ``one``: whether these are the same nodes; ``kinds``: of each tensor, by the argument's
    name (and place, where it is a pair), whether it has rows of `EDGES` or of a type of nodes;
    None: of neither."""

    bound: Any
    edge_index: Tensor
    sizes: tuple[int, int]
    one: bool
    kinds: dict[Place, str | None]

    @property
    def relation(self) -> Relation:
        """The types of sources and destinations, as in `ranges.Cut`."""
        return EDGE if self.one else BETWEEN

    @property
    def device(self) -> torch.device:
        x = self.bound.arguments["x"]
        return (x if isinstance(x, Tensor) else x[0]).device

    def copy(self) -> Arguments:
        """A copy, whose arguments can be replaced without changing these."""
        bound = inspect.BoundArguments(self.bound.signature, dict(self.bound.arguments))
        return self._replace(bound=bound)

    def value(self, place: Place) -> Tensor:
        name, at = place
        argument = self.bound.arguments[name]
        return argument if at is None else argument[at]

    def put(self, place: Place, value: Any) -> None:
        """Replace the argument at a place."""
        name, at = place
        arguments = self.bound.arguments
        if at is None:
            arguments[name] = value
        else:
            pair = list(arguments[name])
            pair[at] = value
            arguments[name] = tuple(pair)


def read(layer: Any, args: tuple, kwargs: dict, least: int = 0) -> Arguments | Reason:
    """The arguments of a layer's call, or why it cannot be divided. ``least``: the fewest edges of
    a graph that is."""
    why = undividable(layer)
    if why is not None:
        return why
    bound = layers.signature(type(layer).forward).bind(layer, *args, **kwargs)
    arguments = bound.arguments
    edge_index, x = arguments.get("edge_index"), arguments.get("x")
    if (type(edge_index) is not Tensor or edge_index.dtype != torch.long
            or edge_index.dim() != 2 or len(edge_index) != 2
            or edge_index.layout is not torch.strided):
        return reason("GA704", "edge_index is no plain tensor [2, E] of int64")
    edges = edge_index.shape[1]
    if edges < least:
        return reason("GA704", f"its graphs have less than {least} edges",
                      "--partition=EDGES sets another limit")
    if arguments.get("return_attention_weights") is not None:
        return reason("GA704", "return_attention_weights asks for rows of edges")
    sizes, why = _sizes(layer, x, edges)
    if why is not None:
        return why
    one = isinstance(x, Tensor)
    kinds = _kinds(arguments, sizes, edges, EDGE if one else BETWEEN)
    if kinds is None:
        return reason("GA704", "an argument besides x could be rows of sources or of "
                      "destinations")
    return Arguments(bound, edge_index, sizes, one, kinds)


def undividable(layer: Any) -> Reason | None:
    """Why a layer runs whole, whatever it is called with."""
    why = guards.context_reason() or layers.refusal(layer)
    if why is not None:
        return why
    base = next(cls for cls in type(layer).__mro__ if cls.__module__.startswith("torch_geometric."))
    if base.__name__ not in layers.COMPARED or not layers.forward_is_hosts(layer):
        return reason("GA704", "its forward is the script's own, which may look at all nodes")
    if guards.has_hooks(layer) or guards.lazy_reason(*layer.modules()) is not None:
        return reason("GA704", "it has hooks, or parameters that are not initialised yet")
    if base.__name__ == "SuperGATConv" and layer.training:
        return reason("GA704", "its loss draws pairs of all nodes")
    for module in layer.modules():
        if module is layer:
            continue
        why = layers.whole_graph(module)
        if why is not None:
            return why
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and (
                module.training or module.running_mean is None):
            return reason("GA704", "batch normalisation inside it takes statistics of all nodes")
    return None


def _sizes(layer: Any, x: Any, edges: int) -> tuple[tuple[int, int], Reason | None]:
    """The numbers of sources and destinations, or why they are not clear."""
    pair = x if isinstance(x, (tuple, list)) else (x, x)
    if len(pair) != 2 or not all(type(one) in (Tensor, torch.nn.Parameter) and one.dim()
                                 for one in pair):
        return (0, 0), reason("GA704", "x is no tensor, and no pair of tensors, with a row a node")
    if any(layer.node_dim % one.dim() for one in pair if one.is_floating_point() and one.dim() > 1):
        return (0, 0), reason("GA704", "its nodes are not the first dimension of x")
    if pair is x and getattr(layer, "add_self_loops", False):
        return (0, 0), reason("GA704", "it adds self loops between a pair's nodes")
    sizes = len(pair[0]), len(pair[1])
    if edges in sizes:
        return sizes, reason("GA704", "the graph has as many edges as nodes, so arguments could be "
                             "rows of either")
    return sizes, None


def _kinds(given: Any, sizes: tuple[int, int], edges: int, relation: Relation
           ) -> dict[Place, str | None] | None:
    """`Arguments.kinds`; or None, where that is not clear."""
    source, _, target = relation

    def of(value: Tensor, kind: str) -> str | None:
        rows = len(value) if value.dim() else -1
        return EDGES if rows == edges else kind if rows == sizes[kind == target] else None

    kinds: dict[Place, str | None] = {}
    for name, value in given.items():
        if name in ("self", "edge_index", "size"):
            continue
        if isinstance(value, Tensor):
            kinds[name, None] = of(value, target)
            if source != target and value.dim() and len(value) in sizes:
                return None
        elif isinstance(value, (tuple, list)):
            for at, one in enumerate(value[:2]):
                if isinstance(one, Tensor):
                    kinds[name, at] = of(one, (source, target)[at])
    return kinds


@contextlib.contextmanager
def caches(layer: Any, kept: dict[str, Any]) -> Iterator[None]:
    """A block in which ``kept`` stands for the tensors that ``cached=True`` keeps, and is brought
    up to date."""
    own = layer.__dict__
    names = [name for name in own if name.startswith("_cached")]
    before = {name: own[name] for name in names}
    own.update({name: kept.get(name) for name in names})
    try:
        yield
    finally:
        kept.update({name: own[name] for name in names})
        own.update(before)
