"""A call of a message-passing layer over a part."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.pyg.distributed import layers, maps, norm, types
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.distributed.building import EDGE, Relation
from gnnaccel.dispatch.distributed.session import Session
from gnnaccel.errors import PartitionError

_STEPS = ("propagate", "edge_updater")


class _Call(NamedTuple):
    """A layer's call over a part: the part's session, the relation of its edges, and the layer."""

    session: Session
    relation: Relation
    layer: Any
    watched: maps.Watched | None = None

    @property
    def name(self) -> str:
        return type(self.layer).__name__

    def extend(self, x: Tensor, what: str, dim: int = 0) -> Tensor:
        """``x`` with the halo's rows, along ``dim``."""
        kind = self.relation[0]
        mapped = self.watched.extended(x) if self.watched is not None else None
        if mapped is not None:
            return mapped
        if x.dim() and dim % x.dim():
            rows = self.session.extend(kind, x.movedim(dim, 0).contiguous(), what, self.name,
                                       self.layer)
            return rows.movedim(0, dim)
        return self.session.extend(kind, x, what, self.name, self.layer)

    @property
    def size(self) -> tuple[int, int]:
        rows = self.session.part.rows
        return rows[self.relation[0]].extended, len(rows[self.relation[2]].own)


_inside = 0


def install(patches: PatchSet) -> None:
    """Replace the calling of layers, and of modules that need all nodes, through ``patches``."""
    from torch_geometric import nn
    from torch_geometric.nn import LayerNorm, MessagePassing
    from torch_geometric.nn.aggr import Aggregation

    active = ("While a part is active (`gnnaccel.distributed.use` or `init`), or within "
              "`gnnaccel.offload`.")
    refuses = "Refuses what would need all nodes of the graph, of which a part has some."
    patches.set(MessagePassing, "__call__", _over_parts(MessagePassing.__call__),
                "Gets the rows of other parts' nodes before the layer gathers them.", active=active)
    patches.set(Aggregation, "__call__", _refusing(Aggregation.__call__, _readout), refuses,
                active=active)
    patches.set(LayerNorm, "__call__", _refusing(LayerNorm.__call__, layers.whole_graph), refuses,
                active=active)
    for name in layers.REFUSED:
        cls = getattr(nn, name, None)  # versions differ
        if cls is not None and not issubclass(cls, MessagePassing):
            patches.set(cls, "__call__", _refusing(cls.__call__, layers.whole_graph), refuses,
                        active=active)


def _refusing(native: Callable, why: Callable) -> Callable:
    @functools.wraps(native)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        refusal = why(self) if state.current is not None else None
        if refusal is not None:
            raise PartitionError(f"{refusal}. {refusal.hint}")
        return native(self, *args, **kwargs)

    return call


def _readout(aggregation: Any) -> Any:
    """Why an aggregation cannot be called here: outside of a layer it is one over all nodes."""
    from gnnaccel.dispatch.policy.reasons import reason

    return None if _inside else reason(
        "GA701", f"{type(aggregation).__name__} is called outside of a layer: a readout adds up "
                 "the own nodes alone")


def _over_parts(native: Callable) -> Callable:
    from torch.compiler import disable
    from torch.fx import Proxy
    from torch.nn import Module

    # compilers break the graph here, and compile what is around
    over_part, divided = disable(_over_part), disable(_divided)

    @functools.wraps(native)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = state.current
        # the base's, as it is now: torch.fx replaces it while it traces
        if (not state.each_layer()
                or any(isinstance(value, Proxy) for value in (*args, *kwargs.values()))):
            return Module.__call__(self, *args, **kwargs)
        if session is None:
            return divided(Module.__call__, self, args, kwargs)
        return over_part(session, Module.__call__, self, args, kwargs)

    return call


def _divided(native: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
    return state.divider.call(native, layer, args, kwargs)


def _over_part(session: Session, native: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
    why = layers.refusal(layer)
    if why is not None:
        raise PartitionError(f"{why}. {why.hint}")
    bound = layers.signature(type(layer).forward).bind_partial(layer, *args, **kwargs)
    if layers.is_typed(layer):
        with within():
            return types.over_part(session, native, layer, bound)
    edge_index = _edges(layer, bound.arguments.get("edge_index"), (*args, *kwargs.values()))
    relation = _relation(session, edge_index, type(layer).__name__)
    session.check_edges(edge_index, relation[0], relation[2])
    call = _Call(session, relation, layer)
    if layers.is_bipartite(layer):
        _loops_possible(layer, relation)
        x = bound.arguments.get("x")
        if bound.arguments.get("size") is not None:
            bound.arguments["size"] = call.size
        with maps.before_exchange(call, x) as sources, within():
            bound.arguments["x"] = (sources, x) if sources is not None else _pair(call, x)
            return native(*bound.args, **bound.kwargs)
    originals = norm.replaced(type(layer), functools.partial(norm.over_part, call))
    watched = maps.Watched(call, bound.arguments.get("x"))
    step = functools.partial(_step, layer, call._replace(watched=watched))
    try:
        with watched.block(), steps(layer, step), within():
            return native(layer, *args, **kwargs)
    finally:
        norm.put_back(originals)


def _edges(layer: Any, named: Any, arguments: tuple) -> Tensor:
    edges = named
    if edges is None:  # a class of the user's may name it otherwise
        edges = next((value for value in arguments if isinstance(value, Tensor)
                      and value.dim() == 2 and len(value) == 2 and not value.is_floating_point()),
                     None)
    if not isinstance(edges, Tensor) or edges.layout is not _strided():
        raise PartitionError(f"{type(layer).__name__} was called with a "
                             f"{type(edges).__name__} as edge_index; over a part it needs a dense "
                             "tensor [2, E] of integers")
    return edges


@functools.cache
def _strided() -> Any:
    import torch

    return torch.strided


def _relation(session: Session, edge_index: Tensor, name: str) -> Relation:
    """The part's relation that has these edges. In a graph without types edges may have been
    dropped or added; with types the tensor has to be the part's own."""
    part = session.part
    if not part.hetero:
        return EDGE
    for relation in part.edges:
        own_edges = part.data[relation].edge_index
        if own_edges is edge_index or (own_edges.numel() and own_edges.shape == edge_index.shape
                                       and own_edges.data_ptr() == edge_index.data_ptr()):
            return relation
    raise PartitionError(f"{name} was called with edges [2, {edge_index.shape[1]}] that are none "
                         "of this part's relations. Use the tensors of part.data; part.to(device) "
                         "moves them")


def _loops_possible(layer: Any, relation: Relation) -> None:
    if relation[0] != relation[2] and getattr(layer, "add_self_loops", False):
        raise PartitionError(f"{type(layer).__name__} adds self loops to {relation}, between nodes "
                             "that are none of one another; set add_self_loops=False")


def _pair(call: _Call, x: Any) -> tuple[Any, Any]:
    if isinstance(x, Tensor):
        return call.extend(x, "x"), x
    if isinstance(x, (tuple, list)) and len(x) == 2 and isinstance(x[0], Tensor):
        return call.extend(x[0], "x"), x[1]
    raise PartitionError(f"{call.name} was called with x of type {type(x).__name__}; over a part "
                         "it needs the rows of the own nodes. Layers with a weight for each node "
                         "take part.own, the nodes' numbers in the whole graph, for x")


@contextlib.contextmanager
def within() -> Iterator[None]:
    global _inside
    _inside += 1
    try:
        yield
    finally:
        _inside -= 1


@contextlib.contextmanager
def steps(layer: Any, run: Callable[[str, Any, Any, dict], Any]) -> Iterator[None]:
    """A block in which ``run(name, edge_index, size, kwargs)`` stands for the layer's `propagate`
    and `edge_updater`. It is put on the layer itself, and taken off while it runs: it may call the
    class's own, which gnnaccel may have replaced too."""
    own = layer.__dict__
    before = {name: own[name] for name in _STEPS if name in own}

    def put() -> None:
        own.update(propagate=propagate, edge_updater=edge_updater)

    def take_off() -> None:
        for name in _STEPS:
            own.pop(name, None)
        own.update(before)

    def instead(name: str, edge_index: Any, size: Any, kwargs: dict) -> Any:
        take_off()
        try:
            return run(name, edge_index, size, kwargs)
        finally:
            put()

    def propagate(edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        return instead("propagate", edge_index, size, kwargs)

    def edge_updater(edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        return instead("edge_updater", edge_index, size, kwargs)

    put()
    try:
        yield
    finally:
        take_off()


def _step(layer: Any, call: _Call, name: str, edge_index: Any, size: Any, kwargs: dict) -> Any:
    """A step that gets halo rows first."""
    names = layer._user_args if name == "propagate" else layer._edge_user_args
    return getattr(layer, name)(edge_index, **_extended(layer, names, {**kwargs,
                                                                       "size": call.size}, call))


def _extended(layer: Any, arguments: Any, kwargs: dict, call: _Call) -> dict:
    """``kwargs`` in which tensors that are gathered by source have the halo's rows."""
    named = set(arguments)
    for argument in named:
        if not argument.endswith("_j"):
            continue
        name = argument[:-2]
        value = kwargs.get(name)
        if isinstance(value, Tensor):
            extended = call.extend(value, name, layer.node_dim)
            kwargs[name] = (extended, value) if f"{name}_i" in named else extended
        elif isinstance(value, (tuple, list)) and isinstance(value[0], Tensor):
            kwargs[name] = (call.extend(value[0], name, layer.node_dim), value[1])
    return kwargs
