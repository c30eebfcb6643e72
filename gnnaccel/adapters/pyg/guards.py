"""Reasons why a PyG layer stays native whatever its kernels could do: hooks, explanation,
overrides, unusual settings; and, from `adapters.guards`, those for layers of any host. What of them
may change from call to call is in the signatures of calls."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gnnaccel.adapters.contract import Contract
from gnnaccel.adapters.guards import (MODULE_HOOKS, ORDINARY as ORDINARY,
                                      any_global_hook as _any_global_hook,
                                      context_reason as context_reason, declared as declared,
                                      edge_reason as edge_reason,
                                      features_reason as features_reason, has_hooks as has_hooks,
                                      inference_reason as inference_reason,
                                      lazy_reason as lazy_reason, made as made,
                                      made_here as made_here, module_reason as module_reason,
                                      note_made as note_made, ordinary as ordinary,
                                      parametrized_reason as parametrized_reason, plain as plain,
                                      repeated_reason as repeated_reason,
                                      subclass_reason as subclass_reason)
from gnnaccel.adapters.own import AGGREGATION, Path, Paths, forward_is_own
from gnnaccel.adapters.signature import Signature, none
from gnnaccel.dispatch.policy.reasons import Reason, reason

HOOKS = tuple(f"_{stage}_forward{when}_hooks" for stage in
               ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
              for when in ("_pre", ""))
#: methods that PyG writes for each class, and the module of the general code of others
_WRITTEN = ("_jinja_propagate", "_jinja_edge_updater")
_GENERAL = "torch_geometric.nn.conv.message_passing"
#: methods that must not be on an aggregation object
REDUCING = frozenset(("forward", "reduce"))


def layer_reason(layer: Any, path: Path, node_dim: int,
                 aggregations: tuple[str, ...] = ("SumAggregation",),
                 hooks: tuple[str, ...] = HOOKS, turns: bool = False) -> Reason | None:
    """Why this layer object, as it is now, must run the host's own code; None when nothing speaks
    against it.

    ``path``: the functions that its class runs; ``aggregations``: the host's aggregation classes
    that the adapter states; ``hooks``: those that keep it native; ``turns``: `Contract.TURNS`.
    """
    own = layer.__dict__
    if path.why is not None:
        return path.why
    if any(map(own.get, hooks)):
        name = next(filter(own.get, hooks))
        return reason("GA501", f"{name.strip('_')} are registered")
    if own.get("_explain"):
        return reason("GA502")
    if own.get("_decomposed_layers", 1) != 1:
        return reason("GA503", f"decomposed_layers={own['_decomposed_layers']}")
    if (own["node_dim"] != node_dim or own["flow"] != "source_to_target"
        and (not turns or by_position(layer))):
        return reason("GA202", f"flow={own['flow']!r}, node_dim={own['node_dim']}")
    return module_reason(layer, path) or _aggregation_reason(layer, aggregations)


def by_position(layer: Any) -> bool:
    """Whether a layer against the flow gives the ends of edges features by their places in a pair,
    the first for ``edge_index[0]``. PyG's general code does; in the code that it writes for
    classes, sources have the first of a pair whatever the flow. Numbers of nodes go by places in
    both."""
    written = map(functools.partial(getattr, type(layer)), _WRITTEN, (None, None))
    return any(one is not None and one.__module__ == _GENERAL for one in written)


def _aggregation_reason(layer: Any, known: tuple[str, ...]) -> Reason | None:
    module = layer._modules.get("aggr_module")
    if (type(module).__name__ not in known
        or not type(module).__module__.startswith("torch_geometric.")):
        return reason("GA201", f"the aggregation is {type(module).__name__}")
    return reducing_reason(module)


def reducing_reason(module: Any) -> Reason | None:
    """Why an aggregation of the host's does more than its class's name says."""
    if has_hooks(module):
        return reason("GA501", "the aggregation module has hooks")
    if not module.__dict__.keys().isdisjoint(REDUCING):
        return reason("GA205", "a method is replaced on the aggregation module")
    return (aggregation_path(type(module)).why
            if type(module).__module__.startswith("torch_geometric.") else None)


def moments_reason(module: Any) -> Reason | None:
    """Why a variance or deviation of the host's is another than its class's name says, or has half
    of its gradient. A deviation takes the root of the result of a module of its own."""
    inside = getattr(module, "var_aggr", module)
    if inside is not module and type(inside) not in aggregations(("VarAggregation",)):
        return reason("GA201", f"a deviation is made of {type(inside).__name__}")
    if getattr(inside, "semi_grad", False):
        return reason("GA201", f"{type(module).__name__} has half of its gradient")
    return reducing_reason(inside)


def several_reason(module: Any) -> Reason | None:
    """Why a list of aggregations of the host's is not computed as its members say.

    A `FusedAggregation` computes those that it knows, as they were when the list was made, and of
    two alike computes only the last by the host's formula."""
    fused = module.fused_aggr
    if fused is None:
        return None
    names = [type(module.aggrs[i]).__name__ for i in module.fused_out_index
             if i < len(module.aggrs)]
    if names != fused.aggr_names or len(module.aggrs) != len(module.is_fused_aggr):
        return reason("GA201", "the list of aggregations was changed after it was made")
    if len(set(names)) < len(names):
        return reason("GA201", "an aggregation is given twice")
    if fused.semi_grad:
        return reason("GA201", "a variance in the list was made with half of its gradient")
    return reducing_reason(fused)


_reducing: dict[type, Paths] = {}


def aggregation_path(cls: type) -> Path:
    """The functions that an aggregation of the host's runs."""
    paths = _reducing.get(cls)
    if paths is None:
        paths = _reducing[cls] = Paths(cls, AGGREGATION)
    return paths.of(cls)


def aggregations(names: tuple[str, ...]) -> tuple[type, ...]:
    """The host's aggregation classes of these names."""
    from torch_geometric.nn import aggr

    return tuple(getattr(aggr, name) for name in names)


def plain_linear(module: Any) -> bool:
    """Whether the module is a linear map and nothing else, so that its weight says all: not a
    subclass (parametrizations make one), not an adapter around it, no weight with functions of its
    own, nobody watching."""
    if (type(module) is not (_linear or _linear_class())
            or "forward" in (own := module.__dict__)
            or own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
            or own["_backward_pre_hooks"]):  # `has_hooks`, which runs for every map
        return False
    parameters = own["_parameters"]  # `ordinary`, for the same reason
    for name in parameters:
        if type(parameters[name]) not in ORDINARY:
            return False
    if ("weight" in own and type(own["weight"]) not in ORDINARY
            or "bias" not in parameters):  # a buffer, or an attribute
        return False
    return not _any_global_hook() and forward_is_own(_linear)


def plain_linears(modules: Iterable[Any]) -> list | None:
    """The dtypes and shapes of the modules' parameters, where `plain_linear` holds for each, else
    None; modules that are None are passed over."""
    cls, forms = _linear or _linear_class(), list[Any]()
    for module in modules:
        if module is None:
            continue
        own = module.__dict__
        if (type(module) is not cls or "forward" in own or own["_forward_hooks"]
                or own["_forward_pre_hooks"] or own["_backward_hooks"]
                or own["_backward_pre_hooks"]):
            return None
        parameters = own["_parameters"]
        for name in parameters:
            t = parameters[name]
            if type(t) not in ORDINARY:
                return None
            forms += (t.dtype, t.shape) if type(t) is Parameter else (None,)
        if ("weight" in own and type(own["weight"]) not in ORDINARY
                or "bias" not in parameters):  # a buffer, or an attribute
            return None
    return None if _any_global_hook() or not forward_is_own(cls) else forms


def linear_is_own() -> bool:
    """Whether the host's linear maps run their own ``forward``."""
    return forward_is_own(_linear or _linear_class())


def plain_hetero_linear(module: Any) -> bool:
    """Whether the module is a map by type and nothing else; see `plain_linear`."""
    return plain(module, _hetero_linear_class())


def plain_hetero_dict_linear(module: Any) -> bool:
    """Whether the module does no more than to call its maps by type."""
    return (type(module) is _hetero_dict_linear_class() and "forward" not in module.__dict__
            and not has_hooks(module)
            and forward_is_own(type(module)))


@functools.cache
def _hetero_linear_class() -> type:
    from torch_geometric.nn.dense.linear import HeteroLinear

    return HeteroLinear


@functools.cache
def _hetero_dict_linear_class() -> type:
    from torch_geometric.nn.dense.linear import HeteroDictLinear

    return HeteroDictLinear


_linear: type | None = None


def _linear_class() -> type:
    global _linear
    from torch_geometric.nn.dense.linear import Linear

    _linear = Linear
    return Linear


# --- signatures -----------------------------------------------------------------------------------
#
# Most calls are plain ones, ``layer(x, edge_index)``, of which little has to be looked at; calls
# with more arguments, pairs and dictionaries have the longer signatures of `adapters.signature`.

_autocast_on, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_grad_on, _deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled
_HOOKS = itemgetter(*HOOKS)
SETTINGS = ("training", "_explain", "_decomposed_layers", "flow", "node_dim")


class PlainSignature(Signature):
    """Signatures of layers with ``WATCHED`` submodules."""

    def __init__(self, contract: Contract, paths: Paths):
        super().__init__(contract, paths, SETTINGS, _HOOKS)
        self._watched, self._linear = contract.WATCHED or (), contract.LINEAR
        self._other = self.whole if contract.again else none

    def __call__(self, layer: Any, args: tuple, kwargs: dict) -> tuple | None:
        if kwargs or len(args) != 2:
            return self._other(layer, args, kwargs)
        x, edge_index = args
        if type(x) is not Tensor or type(edge_index) is not Tensor or x.is_meta or x.is_neg():
            return self._other(layer, args, kwargs)
        own, grad = layer.__dict__, _grad_on()
        if grad and x.is_inference():
            return None
        if any(_HOOKS(own)) or context_reason() is not None:
            return None
        path = self._paths.of(type(layer))
        if path.why is not None or not own.keys().isdisjoint(path.names):
            return None
        modules, parameters = own["_modules"], own["_parameters"]
        if "aggr_module" not in modules:
            return None
        of_aggregation = modules["aggr_module"].__dict__
        if (any(MODULE_HOOKS(of_aggregation))
            or not of_aggregation.keys().isdisjoint(REDUCING)):
            return None
        # objects stay where ``__class__``, ``.data`` or `Module.to` change what they are
        weights: list = [type(modules["aggr_module"])]
        for name in parameters:
            weight = parameters[name]
            kind = type(weight)
            if kind is Parameter or kind is Tensor:
                weights += weight.dtype, weight.shape
            elif kind not in ORDINARY:
                return None
        for name in self._watched:
            if modules.get(name) is not None:
                inside = plain_linears(map(modules.get, self._watched))
                if inside is None:
                    return None
                weights += inside
                break
        for buffer in own["_buffers"].values():
            if buffer is not None:
                weights += buffer.dtype, buffer.shape
        device = x.device
        return (x.shape[:1], self._values(own), x.shape[1:], x.dtype, device, x.layout, weights,
                _autocast_dtype(device.type) if _autocast_on(device.type) else None, grad,
                _deterministic(), *map(id, modules.values()), *map(id, parameters.values()),
                *map(_of_linear, map(modules.get, self._linear)))


def signature(contract: Contract, paths: Paths,
              passes_messages: bool) -> Callable[..., tuple | None]:
    """The function that gives the signatures of a layer class; ``passes_messages``: it is a
    MessagePassing."""
    if contract.FIELDS is None:
        return none
    if contract.WATCHED is not None:
        return PlainSignature(contract, paths)
    if contract.again is None:
        return none
    return (Signature(contract, paths, SETTINGS, _HOOKS).whole
            if passes_messages else Signature(contract, paths).whole)


def _of_linear(module: Any) -> tuple | None:
    """Parameters of a linear map that a bound call makes, by identity; None if it is more than
    that."""
    if not plain_linear(module):
        return None
    weight = module._parameters.get("weight")
    return (*map(id, module._parameters.values()),
            weight.shape if type(weight) is Parameter else None)
