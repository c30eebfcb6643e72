"""Aggregations that are read as users' own: subclasses of PyG's, those of PyG's that have modules
of the user's, and PyG's softmax, of messages that its own kernels do not know. What stands for
one while an ``aggregate`` is traced that hands messages to it."""
from __future__ import annotations

from typing import Any

from gnnaccel.adapters.own import home, is_method
from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.tracing.layer.traced_layer import Inside
from gnnaccel.adapters.tracing.rows.standins import Unseen


def is_aggregation(value: Any) -> bool:
    from torch_geometric.nn.aggr import Aggregation

    return isinstance(value, Aggregation)


def is_users(module: Any) -> bool:
    """Whether a layer's aggregation is read as one of the user's own, whose call is its ``forward``
    after what PyG does in each."""
    from torch_geometric.nn import aggr

    cls = type(module)
    return (isinstance(module, aggr.Aggregation) and guards.reducing_reason(module) is None
            and (cls in (aggr.AttentionalAggregation, aggr.DeepSetsAggregation)
                 or home(cls.forward) not in ("torch", "torch_geometric"))
            and is_method(cls.__call__, aggr.Aggregation, "__call__", "torch_geometric"))


def is_softmax(module: Any) -> bool:
    """Whether it is PyG's softmax, which multiplies messages with their own softmax and reduces
    them."""
    from torch_geometric.nn import aggr

    return (type(module) is aggr.SoftmaxAggregation and guards.reducing_reason(module) is None
            and is_method(type(module).__call__, aggr.Aggregation, "__call__", "torch_geometric"))


class Within(Inside):
    """Stands for such a module: PyG's ``reduce`` of it reduces."""

    def __getattr__(self, name: str) -> Any:
        from torch_geometric.nn.aggr import Aggregation

        if name != "reduce":
            return super().__getattr__(name)
        cls = type(self._traced_layer)
        if not is_method(cls.reduce, Aggregation, name, "torch_geometric"):
            raise Unseen
        self._traced_watched.extend([(vars(one), name, vars(one).get(name, Unseen))
                                     for one in cls.__mro__])
        return self._traced_reduced

    def _traced_reduced(self, x: Any, index: Any = None, ptr: Any = None, dim_size: Any = None,
                        dim: Any = -2, reduce: Any = "sum") -> Any:
        return self._traced_functions.by_module(reduce, x, index, ptr, dim_size, dim)
