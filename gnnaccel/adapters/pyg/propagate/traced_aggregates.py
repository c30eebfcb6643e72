"""Tracing a user's ``aggregate`` after the ``message`` whose result it gets: which rows it reduces,
and what it makes of the results (`node_values`).

It reduces by ``scatter`` of torch_geometric.utils or of torch_scatter, or by the layer's own
aggregation, and may hand on what message passing passes by itself to these alone.
"""
from __future__ import annotations

import builtins
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gnnaccel.adapters import own
from gnnaccel.adapters.pyg.propagate import generated, naming, pointwise, reading, tracing
from gnnaccel.adapters.pyg.propagate.message import _named, codes
from gnnaccel.adapters.pyg.propagate.node_values import NAMES as OF_NODES
from gnnaccel.adapters.pyg.propagate.node_values import Given, NodeCount, NodeValue, Steps
from gnnaccel.adapters.pyg.propagate.standins import Unseen
from gnnaccel.adapters.pyg.propagate.traced import Make
from gnnaccel.adapters.pyg.propagate.tracing import Layer, Special

_REDUCES = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "min": "min", "amax": "max",
            "amin": "min"}
#: functions of torch_scatter, with the reduction that is in their names
_OF_TORCH_SCATTER = {"scatter": None, "scatter_add": "sum", "scatter_sum": "sum",
                     "scatter_mean": "mean"}
_NAMES = generated.NAMES | OF_NODES | _OF_TORCH_SCATTER.keys() | {"utils", "aggregate"}
_BUILTINS = (tuple, list, zip, enumerate, sum, int, float, len)
_INSIDE = ("<genexpr>", "<listcomp>")  # functions that may be defined in it
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


def aggregated(sent: Any, message_layer: Layer, kwargs: dict, ends: list[tuple[str, str]],
               edges: list[str]) -> tuple[Any, Any, Traced]:
    """What ``aggregate`` gives for messages ``sent``; the messages, and what was done. Adds to
    ``ends`` the arguments that are features of nodes; Unseen where it is not followed."""
    traced = Traced(message_layer)
    function = type(traced.layer).aggregate
    ready = traced.prepared(function)
    given: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[2:]:
        if parameter.name == "aggr":  # the host does not give it
            raise Unseen
        one, end = tracing.stand_in(parameter, kwargs, _OF_AGGREGATE)
        given[parameter.name] = one
        if end in ("i", "j"):
            traced.ends.append((parameter.name[:-2], end))
    ends += traced.ends
    out = ready(traced.proxy, sent, **given)
    del traced.layer, traced.proxy  # what is kept by layer must not hold it
    return out, sent, traced


def _rows(end: str, make: Make, meta: Tensor, name: str) -> pointwise.Rows:
    made = pointwise.rows(end, make, meta, name)
    return Given(made, make, name) if end == "e" else made


_OF_AGGREGATE = tracing.Manner(_NAMES, lambda function: None, _rows, lambda out, layer: None)


class _Layer(Layer):
    """Stands for the layer in ``aggregate``: has its aggregation, too. What is read is noted with
    what the message read."""

    def __init__(self, message_layer: Any, traced: Traced):
        super().__init__(message_layer._traced_layer, _OF_AGGREGATE)
        object.__setattr__(self, "_traced_read", message_layer._traced_read)
        object.__setattr__(self, "_traced_watched", message_layer._traced_watched)
        object.__setattr__(self, "_traced_kept", message_layer._traced_kept)  # and set before
        object.__setattr__(self, "_traced_steps", traced)

    def __getattr__(self, name: str) -> Any:
        if name != "aggr_module":
            return super().__getattr__(name)
        module = self._traced_layer.aggr_module
        self._traced_read[name,] = tracing.Look(module, tracing.looks(module))
        reduces = reading._reduces(module)
        if reduces not in (("sum",), ("mean",), ("max",), ("min",)) or (
            type(module).__name__ == "MultiAggregation"):  # others are in it, which may change
            raise Unseen
        return functools.partial(self._traced_steps.by_module, reduces[0])


class Traced(Steps):
    """The `Steps` of one ``aggregate``. ``ends``: of its arguments, as of `tracing.Trace`;
    ``sizes``: the arguments of ``propagate`` that say how many rows results have; ``sized``:
    whether each reduction is told how many."""

    def __init__(self, message_layer: Any):
        super().__init__()
        self.layer, self.watched = message_layer._traced_layer, message_layer._traced_watched
        self.proxy = _Layer(message_layer, self)
        self.ends: list[tuple[str, str]] = []
        self.sizes: set[str] = set()
        self.sized = True

    # --- what reduces -----------------------------------------------------------------------------

    def scatter(self, src: Any, index: Any, dim: Any = 0, dim_size: Any = None,
                reduce: Any = "sum") -> NodeValue:
        """PyG's ``scatter``."""
        from torch_geometric.typing import WITH_TORCH_SCATTER

        if not isinstance(src, pointwise.Rows) or type(index) is not Special:
            raise Unseen
        if index.name not in ("index", "edge_index_i"):
            raise Unseen
        if type(dim) is not int or dim not in (0, -src.meta.dim()):
            raise Unseen
        if type(reduce) is not str or reduce not in _REDUCES:
            raise Unseen
        # on a GPU torch_scatter gives the gradient of equal numbers to one of them
        if WITH_TORCH_SCATTER and _REDUCES[reduce] in ("max", "min"):
            raise Unseen
        if dim_size is None:
            self.sized = False
        elif type(dim_size) is NodeCount and type(dim_size.of) is str:
            self.sizes.add(dim_size.of)
        elif type(dim_size) is not Special or dim_size.name not in ("dim_size", "size_i"):
            raise Unseen
        return self.reduced(src, _REDUCES[reduce])

    def by_torch_scatter(self, named: str | None, src: Any, index: Any, dim: Any = -1,
                         out: Any = None, dim_size: Any = None, reduce: Any = "sum") -> NodeValue:
        """torch_scatter's functions; ``named``: the reduction in the name."""
        if named is not None and reduce != "sum":
            raise Unseen  # they have no such argument
        reduce = named or reduce
        if out is not None or reduce not in ("sum", "add", "mean"):
            raise Unseen
        return self.scatter(src, index, dim, dim_size, reduce)

    def by_module(self, reduce: str, x: Any, index: Any = None, ptr: Any = None,
                  dim_size: Any = None, dim: Any = -2) -> NodeValue:
        """The layer's own aggregation."""
        if ptr is not None and (type(ptr) is not Special or ptr.name != "ptr"):
            raise Unseen
        return self.scatter(x, index, dim, dim_size, reduce)

    # --- what it names ----------------------------------------------------------------------------

    def prepared(self, function: Any) -> types.FunctionType:
        """``function`` with stand-ins for what it names; Unseen where it may do more than
        compute."""
        if type(function) is not types.FunctionType or (
            function.__code__.co_flags & naming.NOT_PLAIN_CODE
            or not {"__class__"}.issuperset(function.__code__.co_freevars)):
            raise Unseen
        more: dict[str, Any] = {}
        for code in codes(function.__code__):
            if code is not function.__code__ and code.co_name not in _INSIDE:
                raise Unseen
            if naming.catches(code) or not naming.special_as_arguments(code):
                raise Unseen
            if not naming.names_known(code, self.layer, _NAMES):
                raise Unseen
            for kind, name in _named(code):
                if kind == "LOAD_GLOBAL":
                    value = function.__globals__.get(name, getattr(builtins, name, None))
                    more[name] = (self._super(function) if value is super
                                  else self.instead(value))
                elif kind not in _ATTRIBUTES:
                    raise Unseen
        return naming.with_globals(function, more)

    def instead(self, value: Any) -> Any:
        """What stands for a global value: itself, where it is a number or torch's; Unseen for what
        is not known."""
        import torch_geometric

        if any(value is one for one in (*naming.MODULES, *_BUILTINS)) or (
            generated.may_be_read(value)):
            return value
        package = sys.modules.get("torch_scatter")
        if isinstance(value, types.ModuleType):
            if not any(value is one for one in (torch_geometric, torch_geometric.utils, package)):
                raise Unseen
            return _Module(value, self)
        scatter, name = torch_geometric.utils.scatter, getattr(value, "__name__", "")
        if own.original(value) is own.original(scatter):
            if own.is_function(value, "torch_geometric", "scatter"):
                return self.scatter
        elif name in _OF_TORCH_SCATTER and getattr(package, name, None) is value:
            if own.home(value) in ("torch_scatter", "gnnaccel"):
                return functools.partial(self.by_torch_scatter, _OF_TORCH_SCATTER[name])
        elif callable(value) and naming.is_torchs(value, _NAMES):
            return value
        raise Unseen

    def _super(self, function: types.FunctionType) -> Callable[[], Any]:
        """What stands for ``super``, where the next ``aggregate`` is the host's."""
        base, order = reading.base(), type(self.layer).__mro__
        cls = function.__closure__[0].cell_contents if function.__closure__ else None
        if cls not in order:
            raise Unseen
        between = order[order.index(cls) + 1:order.index(base)]
        if any("aggregate" in vars(one) for one in between) or not own.is_method(
            base.aggregate, base, "aggregate", "torch_geometric"):
            raise Unseen
        self.watched += [(vars(one), "aggregate", Unseen) for one in between]
        self.watched.append((vars(base), "aggregate", base.aggregate))

        def aggregate(inputs: Any, index: Any, ptr: Any = None, dim_size: Any = None) -> NodeValue:
            return self.proxy.aggr_module(inputs, index, ptr=ptr, dim_size=dim_size,
                                          dim=self.proxy.node_dim)

        return lambda: types.SimpleNamespace(aggregate=aggregate)


class _Module:
    """Stands for a module with ``scatter`` functions."""

    def __init__(self, module: Any, traced: Traced):
        self._module, self._traced = module, traced

    def __getattr__(self, name: str) -> Any:
        value = vars(self._module).get(name)
        self._traced.watched.append((vars(self._module), name, value))
        return self._traced.instead(value)
