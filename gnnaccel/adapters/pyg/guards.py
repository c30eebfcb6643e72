"""What keeps a PyG layer native whatever its kernels could do: hooks, explanation, overrides, unusual settings."""
from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook as _any_global_hook
from torch.nn.parameter import UninitializedParameter

from gnnaccel.dispatch.reasons import Reason, reason

_tracing, _transform = torch._C._get_tracing_state, torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack

HOOKS = tuple(f"_{stage}_forward{when}_hooks" for stage in
               ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update") for when in ("_pre", ""))
METHODS = ("message", "edge_update", "aggregate", "update", "message_and_aggregate")

_overrides: dict[tuple[type, type], Reason | None] = {}


def layer_reason(layer: Any, host_class: type, methods: tuple[str, ...], node_dim: int,
                 aggregations: tuple[str, ...] = ("SumAggregation",)) -> Reason | None:
    """Why this layer object, as it is now, must run the host's own code; None when nothing speaks against it.

    ``methods``: further methods of the host class that the adapter replaces, next to the message-passing ones;
    ``aggregations``: the host's aggregation classes that the adapter states.
    """
    own = layer.__dict__
    for name in HOOKS:
        if own.get(name):
            return reason("GA501", f"{name.strip('_')} are registered")
    if own.get("_explain"):
        return reason("GA502")
    if own.get("_decomposed_layers", 1) != 1:
        return reason("GA503", f"decomposed_layers={own['_decomposed_layers']}")
    if own["flow"] != "source_to_target" or own["node_dim"] != node_dim:
        return reason("GA202", f"flow={own['flow']!r}, node_dim={own['node_dim']}")
    for name in METHODS + methods:
        if name in own:
            return reason("GA205", f"{name} is replaced on the layer object")
    return _class_reason(type(layer), host_class, methods) or _aggregation_reason(layer, aggregations)


def module_reason(layer: Any, host_class: type, methods: tuple[str, ...]) -> Reason | None:
    """`layer_reason` for layers that pass no messages."""
    changed = [name for name in methods if name in layer.__dict__ or getattr(type(layer), name) is not getattr(host_class, name)]
    return reason("GA205", f"{', '.join(changed)} of {type(layer).__name__} is not the host's") if changed else None


def _class_reason(cls: type, host_class: type, methods: tuple[str, ...]) -> Reason | None:
    key = (cls, host_class)
    if key not in _overrides:
        changed = [name for name in METHODS + methods if getattr(cls, name) is not getattr(host_class, name)
                   or not getattr(cls, name).__module__.startswith("torch_geometric.")]
        _overrides[key] = reason("GA205", f"{cls.__name__} overrides {', '.join(changed)}") if changed else None
    return _overrides[key]


def _aggregation_reason(layer: Any, known: tuple[str, ...]) -> Reason | None:
    module = layer._modules.get("aggr_module")
    if type(module).__name__ not in known or not type(module).__module__.startswith("torch_geometric."):
        return reason("GA201", f"the aggregation is {type(module).__name__}")
    if has_hooks(module):
        return reason("GA501", "the aggregation module has hooks")
    return None


def context_reason() -> Reason | None:
    """Why nothing can be taken over here: tracing, or a transform that must see every operation."""
    if _tracing() is not None:
        return reason("GA404", "torch.jit is tracing")
    if _transform() is not None:
        return reason("GA405")
    if _dispatch_modes():
        return reason("GA405", "a torch dispatch mode is active")
    if forward_ad._current_level >= 0:
        return reason("GA405", "forward-mode differentiation is going on")
    return None


def features_reason(x: Any, name: str = "x") -> Reason | None:
    """Why this feature tensor cannot be taken: not a plain dense [N, F] floating tensor."""
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        return reason("GA206", f"{name} is a {type(x).__name__}")
    if x.dim() != 2:
        return reason("GA206", f"{name} has {x.dim()} dimensions")
    if x.layout != torch.strided or not x.is_floating_point() or x.is_meta:
        return reason("GA206", f"{name} is {x.layout}, {x.dtype}, on the {x.device.type} device")
    return None


def edge_reason(edge_attr: Any, edges: int, x: Tensor) -> Reason | None:
    """Why these edge features cannot be taken: not one plain row of the features' dtype per edge."""
    if type(edge_attr) is not Tensor and type(edge_attr) is not torch.nn.Parameter:
        return reason("GA206", f"edge_attr is a {type(edge_attr).__name__}")
    if edge_attr.layout != torch.strided or edge_attr.dim() not in (1, 2) or edge_attr.shape[0] != edges:
        return reason("GA206", f"edge_attr is {edge_attr.layout} of shape {list(edge_attr.shape)} for {edges} edges")
    if edge_attr.device != x.device:
        return reason("GA206", f"edge_attr is on {edge_attr.device}, the features on {x.device}")
    if edge_attr.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        return reason("GA203", f"edge_attr is {edge_attr.dtype}, x is {x.dtype}")
    return None


def lazy_reason(*modules: Any) -> Reason | None:
    for module in modules:
        if module is not None and isinstance(getattr(module, "weight", None), UninitializedParameter):
            return reason("GA209")
    return None


def has_hooks(module: Any) -> bool:
    """Whether calling the module does more than its ``forward``."""
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"])


def plain_linear(module: Any) -> bool:
    """Whether the module is a linear map and nothing else, so that its weight says all: not a subclass (parametrizations make
    one), not an adapter around it, nobody watching."""
    return type(module) is (_linear or _linear_class()) and not has_hooks(module) and not _any_global_hook()


def plain_hetero_linear(module: Any) -> bool:
    """The same of maps by type."""
    return (type(module) is _hetero_linear_class() and "forward" not in module.__dict__ and not has_hooks(module)
            and not _any_global_hook())


@functools.cache
def _hetero_linear_class() -> type:
    from torch_geometric.nn.dense.linear import HeteroLinear

    return HeteroLinear


_linear: type | None = None


def _linear_class() -> type:
    global _linear
    from torch_geometric.nn.dense.linear import Linear

    _linear = Linear
    return Linear
