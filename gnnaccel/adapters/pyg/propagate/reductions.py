"""Which reductions a layer's aggregation is: one of the host's modules, or its own class's."""
from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gnnaccel.adapters.guards import MODULE_HOOKS
from gnnaccel.adapters.own import Path
from gnnaccel.adapters.pyg import guards
from gnnaccel.dispatch.ops.aggregation import Reduce
from gnnaccel.dispatch.ops.aggregation_means import PowerMean, Softmax

if TYPE_CHECKING:
    from gnnaccel.adapters.pyg.propagate.reading import Known

BY_NAME = {"SumAggregation": "sum", "MeanAggregation": "mean", "MaxAggregation": "max",
            "MinAggregation": "min"}
_OF_HOST, _SEVERAL = "torch_geometric.nn.aggr.", "MultiAggregation"
#: aggregations with settings, or modules, of their own: looked at in each call
_MOMENTS = {"VarAggregation": "var", "StdAggregation": "std"}


def of(layer: Any, known: Known) -> tuple[Reduce, ...]:
    """The layer's reductions, as `Aggregation.by` takes them."""
    return (of_module(layer.aggr_module)
            if known.aggregate is None else known.aggregate.reduces(layer))


def of_module(module: Any) -> tuple[Reduce, ...]:
    """Reductions of an aggregation of the host's: one, or those of a MultiAggregation; () for
    others, or with hooks."""
    name = type(module).__name__
    if not type(module).__module__.startswith(_OF_HOST):
        return ()
    if guards.reducing_reason(module) is not None:
        return ()
    if name == _SEVERAL:
        if guards.several_reason(module) is not None:
            return ()
        inside = tuple(of_module(inner) for inner in module.aggrs)
        return tuple(one[0] for one in inside) if all(len(one) == 1 for one in inside) else ()
    if name in BY_NAME:
        return (BY_NAME[name],)
    if name in _MOMENTS:
        return (_MOMENTS[name],) if guards.moments_reason(module) is None else ()
    return (mean_of(module),) if name in ("SoftmaxAggregation", "PowerMeanAggregation") else ()


def settled(module: Any) -> bool:
    """Whether an aggregation is what its class and its own hooks say, beside numbers."""
    return module._modules.get("aggrs") is None and type(module).__name__ not in _MOMENTS


def paths(module: Any) -> tuple[Path, ...]:
    """The functions that an aggregation runs, and of several those of each."""
    classes = dict.fromkeys(map(type, module.modules() if type(module).__name__ == _SEVERAL
                                else (module,)))
    return tuple([guards.aggregation_path(cls) for cls in classes
                  if cls.__module__.startswith(_OF_HOST) or cls is type(module)])


class Looked:
    """An aggregation made of others, as it and those in it were: what they hold, and no hooks."""

    __slots__ = ("modules",)

    def __init__(self, module: Any):
        self.modules = [(one.__dict__, [*one.__dict__], [*one.__dict__.values()],
                         [*one._modules.values()]) for one in module.modules()]

    def same(self) -> bool:
        """Whether all is as it was. The functions of their classes are looked at elsewhere."""
        for own, names, values, inside in self.modules:
            members = own["_modules"].values()
            if ([*own] != names or len(members) != len(inside) or any(MODULE_HOOKS(own))
                or not all(map(is_, own.values(), values))
                or not all(map(is_, members, inside))):
                return False
        return True


def mean_of(module: Any) -> Softmax | PowerMean:
    """A softmax or power mean of the host's as it is now: users may set its numbers."""
    number = module.t if type(module).__name__ == "SoftmaxAggregation" else module.p
    if isinstance(number, Tensor) and module.channels != 1:
        number = number.view(-1, module.channels)
    if type(module).__name__ == "SoftmaxAggregation":
        return Softmax(number,  # type: ignore[call-arg]  # `name` is no field
                       module.learn or not module.semi_grad)
    low, high = getattr(module, "min_value", 0), getattr(module, "max_value", 100)  # PyG 2.6: none
    return PowerMean(number, low, high)  # type: ignore[call-arg]
