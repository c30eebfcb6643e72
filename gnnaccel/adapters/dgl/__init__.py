"""DGL: ``forward`` of the known layer classes, replaced by a wrapper that asks the router.

Classes are patched, never instances, so state_dict, pickle, deepcopy, DDP and hooks see nothing.
Next to the layers, DGL's way to single relations of a heterograph is made to give the same object
each time (`graphs.remembering`), and the operations under all message passing are routed (`ops`).
"""
from __future__ import annotations

import importlib
from typing import Any

from gnnaccel.adapters import contract
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.reasons import Reason, reason

#: host class -> adapter module
LAYERS = {
    "GATConv": "layers.gat",
    "GATv2Conv": "layers.gatv2",
    "DotGatConv": "layers.dotgat",
    "AGNNConv": "layers.agnn",
    "EdgeGATConv": "layers.edge_gat",
    "EGATConv": "layers.egat",
    "RelGraphConv": "layers.relgraph",
    "HGTConv": "layers.hgt",
    "TypedLinear": "layers.typed_linear",
    "HeteroGraphConv": "layers.hetero",
    "GraphConv": "layers.graphconv",
    "SAGEConv": "layers.sageconv",
    "GINConv": "layers.ginconv",
    "GatedGCNConv": "layers.gatedgcn",
    "NNConv": "layers.nnconv",
}
#: layers that run by the host's own kernels on the CPU
PLAIN = ("GraphConv", "SAGEConv", "GINConv", "GatedGCNConv", "NNConv")


def install(patches: PatchSet) -> list[str]:
    """Patch the layer classes through ``patches``. Returns the dotted names of the patched
    functions.

    DGL on another backend than PyTorch is left alone, and so is another module of this name.
    """
    import importlib.util

    import dgl

    if not hasattr(dgl, "__path__") or importlib.util.find_spec("dgl.backend") is None:
        return []
    from dgl.backend import backend_name

    if backend_name != "pytorch":
        return []
    from dgl.heterograph import DGLBlock
    from dgl.heterograph_index import HeteroGraphIndex

    from gnnaccel.adapters import own
    from gnnaccel.adapters.dgl import bridge, graphs
    from gnnaccel.adapters.dgl.ops import replaced
    from gnnaccel.adapters.dgl.udf import replaced as users
    from gnnaccel.dispatch.memory import native_cache

    _install_layers(patches)
    if own.is_method(HeteroGraphIndex.get_relation_graph, HeteroGraphIndex, "get_relation_graph",
                     "dgl"):
        patches.set(HeteroGraphIndex, "get_relation_graph",
                    graphs.remembering(HeteroGraphIndex.get_relation_graph),
                    "Gives the same object each time for one relation of a heterograph, so that "
                    "the structure built for it is found again.")
    native_cache.GRAPHS.update(dict.fromkeys((dgl.DGLGraph, DGLBlock), native_cache.HostGraph(
        graphs.signs, graphs.num_edges, graphs.structure, graphs.names)))
    replaced.install(patches)
    users.install(patches)
    names = patches.names()
    bridge.install(patches)
    return names


def _install_layers(patches: PatchSet) -> None:
    from dgl.nn import pytorch as nn

    from gnnaccel.adapters.dgl.bridge import zero_degree
    from gnnaccel.adapters.dgl.layers import plain
    from gnnaccel.adapters.dgl.ops import replaced
    from gnnaccel.dispatch.router import routed

    for name, module in LAYERS.items():
        cls = getattr(nn, name, None)
        if cls is None:  # older versions have fewer layers
            continue
        native = zero_degree.telling(cls.forward) if name in PLAIN else cls.forward
        forward = routed(native, _Guarded(cls, module))
        patches.set(cls, "forward",
                    replaced.around(plain.on_cpu_native(forward, native, name)
                                    if name in PLAIN else forward, native),
                    "Runs the layer by gnnaccel's kernels where that is faster.")
        rules.register_class(f"{cls.__module__}.{cls.__qualname__}")


def adapter_of(layer: Any) -> _Guarded | None:
    """The adapter of the layer's class, or of the host class that it derives from."""
    for cls in type(layer).__mro__:
        if cls.__name__ in LAYERS and cls.__module__.startswith("dgl."):
            return _Guarded(cls, LAYERS[cls.__name__])
    return None


def path_of(cls: type) -> Any:
    """The functions that calls of a known layer class run; None for other classes."""
    module = LAYERS.get(cls.__name__)
    return module and _Guarded(cls, module).paths.of(cls)


def storable(layer: Any) -> Reason | bool | None:
    """`gnnaccel.adapters.storable` for DGL. Plain layers run operation by operation, and an
    operation knows no layer."""
    path = rules.path_of(type(layer))
    if not path.startswith("dgl.nn.pytorch.") or ".conv." not in path:
        return None
    if type(layer).__name__ == "GATConv":
        return True
    return reason("GA603",
                  f"no kernel of {type(layer).__name__} takes rows in fewer bytes"
                  if adapter_of(layer) is not None else
                  f"DGL runs {type(layer).__name__} one operation at a time, and no "
                  "operation knows its layer")


class _Guarded(contract.Unread):
    """An adapter behind the checks that hold for every layer of its class."""

    host, bind, resized = "dgl", None, None

    def _read(self, cls: type, module: str) -> None:
        from gnnaccel.adapters import own
        from gnnaccel.adapters import guards as shared
        from gnnaccel.adapters.dgl import guards, repeated

        adapter = contract.read(importlib.import_module(f"gnnaccel.adapters.dgl.{module}"))
        self.contract = adapter
        self._context_reason, self._layer_reason = shared.context_reason, guards.layer_reason
        self._inference_reason = shared.inference_reason
        self.paths = own.Paths(cls, ("forward",), options=tuple(adapter.FIELDS or ()))
        self._stated, self._absorbed, self.run = shared.stated, adapter.ABSORBED, adapter.run
        self.key = repeated.signature(adapter, self.paths)
        self.keep, self.again = repeated.keep, repeated.again

    def state(self, layer: Any, args: tuple, kwargs: dict) -> Any:
        why = (self._context_reason()
               or self._layer_reason(layer, self.paths.of(type(layer)), self._absorbed)
               or self._inference_reason((*args, *kwargs.values())))
        return why or self._stated(self.contract, layer, args, kwargs)
