"""PyG: ``forward`` of the known layer classes, replaced by a wrapper that asks the router; of all
others `propagate`.

Classes are patched, never instances, so state_dict, pickle, deepcopy, DDP and hooks see nothing.
"""
from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from gnnaccel.adapters import contract
from gnnaccel.adapters.patching import PatchSet, by_layer
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.reasons import Reason, reason

#: host class -> (adapter module, node_dim of its layers; None for those that pass no messages)
LAYERS = {
    "GATConv": ("layers.gat", 0),
    "GATv2Conv": ("layers.gatv2", 0),
    "TransformerConv": ("layers.transformer", 0),
    "AGNNConv": ("layers.agnn", -2),
    "SuperGATConv": ("layers.supergat", 0),
    "RGCNConv": ("layers.rgcn", 0),
    "FastRGCNConv": ("layers.rgcn", 0),
    "HGTConv": ("layers.hgt", 0),
    "HeteroLinear": ("layers.hetero_linear", None),
    "HeteroDictLinear": ("layers.hetero_dict_linear", None),
    "RGATConv": ("layers.rgat", 0),
    "HANConv": ("layers.han", 0),
    "HeteroConv": ("hetero.hetero_conv", None),
    "FiLMConv": ("layers.film", -2),
    "HEATConv": ("layers.heat", 0),
    "PNAConv": ("layers.pna", 0),
    "NNConv": ("layers.nn_conv", -2),
}
#: those whose modules say how ``forward`` is wrapped (`Contract.inside`, ``around``,
#: ``propagates``) and are read at once; others are read at the first call of such a layer
WRAPPED = frozenset(("HeteroDictLinear", "HeteroConv", "FiLMConv", "NNConv"))


def install(patches: PatchSet) -> list[str]:
    """Patch the layer classes through ``patches``. Returns the dotted names of the patched
    functions."""
    from torch_geometric import nn

    from gnnaccel.adapters.pyg import dense_batch, negatives, shortcuts
    from gnnaccel.adapters.pyg.compile import tracing
    from gnnaccel.adapters.pyg.fx import models
    from gnnaccel.adapters.pyg.propagate import graph_norm, replaced, scatter
    from gnnaccel.dispatch.router import routed

    for name, (module, node_dim) in LAYERS.items():
        cls = getattr(nn, name)
        adapter = _Guarded(cls, module, node_dim)
        inside: Any = None
        around: Any = None
        propagates: Any = None
        if name in WRAPPED:
            found = adapter.contract
            inside, around, propagates = found.inside, found.around, found.propagates
        forward = routed(cls.forward, adapter, inside, tracing.carried(cls))
        if around is not None:
            forward = around(forward, cls.forward)
        if propagates is not None:
            forward = by_layer(propagates, cls.forward, forward)
        patches.set(cls, "forward", forward,
                    "Runs the layer by gnnaccel's kernels where that is faster.")
        rules.register_class(f"{cls.__module__}.{cls.__qualname__}")
    replaced.install(patches)
    graph_norm.install(patches)
    scatter.install(patches)
    negatives.install(patches, scatter.modules())
    dense_batch.install(patches, scatter.modules())
    models.install(patches)
    shortcuts.install(patches)
    return patches.names()


def update_on_demand(patches: PatchSet) -> None:
    """`gnnaccel.adapters.update_on_demand` for PyG."""
    from gnnaccel.adapters.pyg.compile import tracing
    from gnnaccel.adapters.pyg.layers import linear

    linear.update_on_demand(patches)
    tracing.asked(patches)


def on_demand(patches: PatchSet) -> None:
    """Replace all that `update_on_demand` may replace."""
    from gnnaccel.adapters.pyg.layers import linear

    linear.install(patches)


def redone() -> list[Any]:
    """Functions of the host's whose work is done otherwise though they are not replaced, for
    `gnnaccel.adapters.seams`."""
    from torch_geometric.nn import to_hetero_with_bases_transformer as bases

    # older versions lack some of these
    functions = [getattr(bases, name, None)
                 for name in ("hook", "get_edge_type", "group_edge_placeholder")]
    return [bases.HeteroBasisConv.forward,
            *(function for function in functions if function is not None)]


def adapter_of(layer: Any) -> _Guarded | None:
    """The adapter of the layer's class, or of the host class that it derives from; None where there
    is none, or only its ``propagate`` is taken over."""
    cls = known_class(type(layer))
    adapter = None if cls is None else _Guarded(cls, *LAYERS[cls.__name__])
    if adapter is None or adapter.contract.propagates is None:
        return adapter
    return None if adapter.contract.propagates(layer) else adapter


def known_class(cls: type) -> type | None:
    """The class, or the one that it derives from, that has an adapter."""
    return next((base for base in cls.__mro__ if base.__name__ in LAYERS
                 and base.__module__.startswith("torch_geometric.")), None)


def propagates(cls: type) -> Any:
    """`Contract.propagates` of a class with an adapter."""
    return contract.read(importlib.import_module(
        f"gnnaccel.adapters.pyg.{LAYERS[cls.__name__][0]}")).propagates


def redefines(cls: type) -> bool:
    """Whether a subclass of a class with an adapter has methods of its own in place of those that
    the adapter states, so that its layers just pass messages."""
    host = known_class(cls)
    if host is None or host is cls:
        return False
    why = _Guarded(host, *LAYERS[host.__name__]).paths.of(cls).why
    return why is not None and why.code == "GA205"


def path_of(cls: type) -> Any:
    """The functions that calls of a known layer class run; None for other classes."""
    if cls.__name__ not in LAYERS:
        return None
    return _Guarded(cls, *LAYERS[cls.__name__]).paths.of(cls)


def storable(layer: Any) -> Reason | bool | None:
    """`gnnaccel.adapters.storable` for PyG."""
    from torch_geometric.nn import GATConv, HeteroConv, MessagePassing

    from gnnaccel.adapters.pyg.propagate import reading

    if type(layer) is GATConv:
        return True
    if adapter_of(layer) is not None:
        return (reason("GA603", f"no kernel of {type(layer).__name__} takes rows in fewer bytes")
                if not isinstance(
            layer, HeteroConv) else None)
    return reading.storable(layer) if isinstance(layer, MessagePassing) else None


def linear_maps(layer: Any) -> list[tuple[str, Any]]:
    """`gnnaccel.adapters.linear_maps` for PyG."""
    from torch_geometric.nn import MessagePassing

    from gnnaccel.adapters.pyg.layers import linear

    return list(linear.maps(layer)) if isinstance(layer, MessagePassing) else []


class _Guarded(contract.Unread):
    """An adapter behind the checks that hold for every layer of its class."""

    host = "pyg"

    def _read(self, cls: type, module: str, node_dim: int | None) -> None:
        from gnnaccel.adapters import guards as shared
        from gnnaccel.adapters import own
        from gnnaccel.adapters.pyg import guards
        from gnnaccel.dispatch.memory.layer_memory import UNREPEATABLE

        self._replaceable, self._unrepeatable = shared.replaceable, UNREPEATABLE
        self.contract = adapter = contract.read(
            importlib.import_module(f"gnnaccel.adapters.pyg.{module}"))
        self._node_dim, self._guards = node_dim, guards
        self._aggregations = adapter.AGGREGATIONS if node_dim is not None else ()
        start = ("forward", *(own.MESSAGE_PASSING if node_dim is not None else ()))
        self.paths = own.Paths(cls, start,
                               guards.aggregations((*self._aggregations, *adapter.INSIDE)),
                               options=(*(adapter.FIELDS or ()), *(
                                   guards.SETTINGS if node_dim is not None else ())))
        self.run, self.bind, self._stated = adapter.run, adapter.bind, shared.stated
        self.key = guards.signature(adapter, self.paths, node_dim is not None)
        self._keep, self.again = adapter.keep, adapter.repeated()
        self._resized: Any = adapter.resized
        self.resized = None if adapter.resized is None else self._of_another_size

    def keep(self, layer: Any, args: tuple, kwargs: dict, spec: Any, inputs: Any) -> Any:
        if self._replaceable(layer):
            return self._unrepeatable
        return None if self._keep is None else self._keep(spec, inputs)

    def _of_another_size(self, layer: Any, args: tuple, kwargs: dict, like: Any) -> Any:
        """`router.Adapter.resized` of PyG's layers."""
        for a in (*args, *kwargs.values()) if kwargs else args:
            # unless it is a pair of features it says how many nodes there are
            if type(a) is tuple and not (a and hasattr(a[0], "shape")):
                return None
        key = self.key(layer, args, kwargs)
        if key is None or key[1:] != like.key[1:] or self._guards.made.entries:
            return None
        restated = self._resized(layer, args, kwargs, like.stated, like.kept)
        if restated is not None and self.contract.TURNS and layer.flow != "source_to_target":
            turned = self._turned(restated)
            return None if type(turned) is Reason else turned
        return restated

    def state(self, layer: Any, args: tuple, kwargs: dict) -> Any:
        guards = self._guards
        why = guards.context_reason() or guards.repeated_reason(layer)
        if why is None and self._node_dim is None:
            why = guards.module_reason(layer, self.paths.of(type(layer)))
        elif why is None:
            why = guards.layer_reason(layer, self.paths.of(type(layer)), self._node_dim,
                                      self._aggregations, turns=self.contract.TURNS)
        why = why or guards.inference_reason((*args, *kwargs.values()))
        if why is None and "parametrizations" in layer._modules:  # the host asks for a bias twice
            why = guards.parametrized_reason(layer)
        result = why or self._stated(self.contract, layer, args, kwargs)
        if why is None and self.contract.TURNS and layer.flow != "source_to_target":
            result = self._turned(result)
        guards.note_made(layer, type(result) is Reason)
        return result

    def _turned(self, found: Any) -> Any:
        """The stated call over edges that are turned round."""
        if type(found) is Reason:
            return found
        spec, inputs = found
        if spec.num_src != spec.num_dst:  # results would be as many as the first of a pair
            return reason("GA202", f"features of {spec.num_src} and {spec.num_dst} nodes with "
                          "flow='target_to_source'")
        return dataclasses.replace(spec, flipped=True), inputs
