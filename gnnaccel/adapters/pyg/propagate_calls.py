"""One call of ``propagate``: read as an aggregation, decided, and remembered for the calls that repeat it."""
from __future__ import annotations

import functools
import time
import weakref
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from gnnaccel.adapters.pyg import edges, guards, message
from gnnaccel.cuda import driver
from gnnaccel.dispatch import counters, records, rules
from gnnaccel.dispatch.config import Config
from gnnaccel.dispatch.names import IdentityMap
from gnnaccel.dispatch.ops import aggregation, aggregation_cost, aggregation_route
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_route import Decision
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.quantized import aggregation as quantized
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.reasons import Reason, reason

_REDUCES = {"SumAggregation": "sum", "MeanAggregation": "mean", "MaxAggregation": "max", "MinAggregation": "min"}
_FUNCTIONS = ("message", "aggregate", "update", "message_and_aggregate")
_LAYERS_GRAPHS = 4  # calls over so many graphs are remembered for each layer
_FEW, _FEW_AT_FIRST = 1000, 20000  # edges below which a call is not looked at, and not at the first time
_SETTINGS = itemgetter("_explain", "_decomposed_layers", "flow", "node_dim")
_HOOKS = itemgetter(*guards.HOOKS)
_MODULE_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OVERRIDES = frozenset((*guards.METHODS, "propagate"))
_TENSORS = (Tensor, Parameter)


class _Class:
    """What is known of a class's functions, as long as they stay the same."""

    def __init__(self, cls: type):
        self.functions = tuple(getattr(cls, name) for name in _FUNCTIONS)
        self.forms: dict[tuple, message.Form | Reason] = {}
        self.own = cls.__module__.startswith("torch_geometric.")
        self.why, self.update = _functions_reason(cls), _update_arguments(cls)

    def form(self, kwargs: dict) -> message.Form | Reason:
        if self.why is not None:
            return self.why
        kinds = {name: _kind(value) for name, value in kwargs.items() if name != "size"}
        key = tuple(kinds.items())
        if key not in self.forms:
            found = message.form(self.functions[0], kinds)
            self.forms[key] = found or reason(*(("GA208", "its message is not the neighbours' features, weighted or not")
                                                if self.own else ("GA211", "message does more than to weigh features")))
        return self.forms[key]


_classes: IdentityMap[_Class] = IdentityMap()


def _class(cls: type) -> _Class:
    found = _classes.get(cls)
    if found is None or any(getattr(cls, name) is not known for name, known in zip(_FUNCTIONS, found.functions)):
        found = _Class(cls)
        _classes.set(cls, found)
    return found


@functools.cache
def _base() -> type:
    from torch_geometric.nn import MessagePassing

    return MessagePassing


def _functions_reason(cls: type) -> Reason | None:
    if cls.aggregate is not _base().aggregate:
        own = cls.aggregate.__module__.startswith("torch_geometric.")
        return reason("GA208", f"{cls.__name__} aggregates in its own way") if own else reason("GA211", "aggregate is the user's own")
    if _update_arguments(cls) is None:
        return reason("GA211", "update takes what belongs to edges, or to one of their ends")
    return None


def _update_arguments(cls: type) -> tuple[str, ...] | None:
    """The arguments of ``propagate`` that the class's ``update`` takes; None where it takes others, () where it does nothing."""
    import inspect

    if cls.update is _base().update:
        return ()
    found = []
    for parameter in list(inspect.signature(cls.update).parameters.values())[2:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return None
        if parameter.name[-2:] in ("_i", "_j") or parameter.name in (*_base().special_args, "self"):
            return None
        found.append(parameter.name)
    return tuple(found)


def _kind(value: Any) -> str:
    if value is None:
        return "none"
    return "tensor" if isinstance(value, (Tensor, tuple, list)) else "other"


def storable(layer: Any) -> Reason | bool:
    """As `gnnaccel.adapters.storable`, of what is known without a call."""
    why = _class(type(layer)).why
    if why is None and _REDUCES.get(type(layer.aggr_module).__name__) not in ("sum", "mean"):
        why = reason("GA603", f"the aggregation is {type(layer.aggr_module).__name__}, not a sum or a mean")
    return True if why is None else reason("GA603", why.text)


# --- reading a call ----------------------------------------------------------------------------------------------------

class Read(NamedTuple):
    """A call, understood. ``updated``: the class's own ``update`` follows."""

    graph: OpGraph
    given: Aggregation
    form: message.Form
    known: _Class


def read(layer: Any, edge_index: Any, kwargs: dict) -> Read | Reason:
    """The call as an aggregation, or why it is none. Computes nothing but weights."""
    known = _class(type(layer))
    form = known.form(kwargs)
    why = form if type(form) is Reason else guards.context_reason() or _layer_reason(layer) or _update_reason(known, kwargs)
    if why is not None:
        return why
    x = kwargs[form.source]
    sizes = _sizes(layer, edge_index, kwargs.get("size"), x)
    if type(sizes) is Reason:
        return sizes
    x, num_src, num_dst = sizes
    plain = _edges(layer, known, edge_index, num_src, num_dst, x.device)
    if type(plain) is Reason:
        return plain
    weight = None if form.weight is None else form.weight(kwargs)
    given = aggregation.prepare(_REDUCES[type(layer.aggr_module).__name__], x, weight, plain.shape[1])
    if type(given) is Reason:
        return given
    return Read(OpGraph(plain, num_src, num_dst, layer.flow != "source_to_target"), given, form, known)


def _layer_reason(layer: Any) -> Reason | None:
    own = layer.__dict__
    if any(_HOOKS(own)):
        return reason("GA501", "message-passing hooks are registered")
    explain, decomposed, _, _ = _SETTINGS(own)
    if explain:
        return reason("GA502")
    if decomposed != 1:
        return reason("GA503", f"decomposed_layers={decomposed}")
    if not own.keys().isdisjoint(_OVERRIDES):
        return reason("GA205", "a method is replaced on the layer object")
    module = own["_modules"].get("aggr_module")
    if type(module).__name__ not in _REDUCES or not type(module).__module__.startswith("torch_geometric.nn.aggr."):
        return reason("GA201", f"the aggregation is {type(module).__name__}")
    if "forward" in module.__dict__ or any(_MODULE_HOOKS(module.__dict__)) or guards._any_global_hook():
        return reason("GA501", "the aggregation module has hooks")
    return None


def _update_reason(known: _Class, kwargs: dict) -> Reason | None:
    missing = [name for name in known.update if name not in kwargs]
    return reason("GA211", f"update takes {', '.join(missing)}, which propagate was not given") if missing else None


def _sizes(layer: Any, edge_index: Any, size: Any, x: Any) -> tuple[Tensor, int, int] | Reason:
    """The features gathered, and the numbers of nodes at both ends, as the host finds them."""
    forward, node_dim = layer.flow == "source_to_target", layer.node_dim
    if type(edge_index).__name__ == "EdgeIndex":
        size = edge_index.sparse_size()
    size = [None, None] if size is None else list(size)
    pair = isinstance(x, (tuple, list))
    if pair and (len(x) != 2 or not forward):
        return reason("GA202" if not forward else "GA206", "pairs of features against the flow" if not forward else "x is no pair")
    for side, features in enumerate(x if pair else (x,)):
        if features is None and side:
            continue
        if type(features) not in _TENSORS or node_dim not in (0, -features.dim()):
            return reason("GA206", f"features are a {type(features).__name__}, node_dim={node_dim}")
        at = side if pair else 0 if forward else 1
        if size[at] is not None and size[at] != features.shape[0]:
            return reason("GA206", f"{features.shape[0]} rows of features where {size[at]} nodes are")
        size[at] = features.shape[0]
    src, dst = size if forward else size[::-1]
    return (x[0] if pair else x), src, src if dst is None else dst


def _edges(layer: Any, known: _Class, edge_index: Any, num_src: int, num_dst: int, device: torch.device) -> Tensor | Reason:
    special = type(edge_index) is not Tensor
    if special and layer.fuse and not known.functions[3].__module__.startswith("torch_geometric."):
        return reason("GA211", "message_and_aggregate is the user's own")
    if layer.flow != "source_to_target":
        return reason("GA204", "an EdgeIndex against the flow") if special else edges.plain(edge_index, num_dst, num_src, device)
    return edges.plain(edge_index, num_src, num_dst, device)


# --- deciding ----------------------------------------------------------------------------------------------------------

def decide(layer: Any, native: Any, edge_index: Any, kwargs: dict, config: Config) -> Any:
    """The long way of a call."""
    start = time.perf_counter_ns() if records.listening() else 0
    verdict = rules.verdict(layer, config)
    found: Read | Reason | None = read(layer, edge_index, kwargs) if verdict.inside else verdict.reason
    if type(found) is Reason:
        decision, parts = aggregation_route.native(found), None
        settings.note_native(layer, config, found)
    else:
        parts = found.graph, found.given
        decision = quantized.narrowed(layer, *parts, config, aggregation_route.decide(*parts, config))

    def finish(out: Tensor) -> Any:
        return _updated(layer, found.known, out, kwargs)

    out = aggregation_route.run(layer, "pyg", parts, decision, config, finish, lambda: native(layer, edge_index, **kwargs), start)
    if parts is not None and not decision.again and type(edge_index) is Tensor and not edge_index.is_inference():
        _remember(layer, edge_index, kwargs, found, decision, config)
    return out


def _updated(layer: Any, known: _Class, out: Tensor, kwargs: dict) -> Any:
    return layer.update(out, **{name: kwargs[name] for name in known.update}) if known.functions[2] is not _base().update else out


# --- calls that repeat -------------------------------------------------------------------------------------------------

_last: IdentityMap[dict[int, "Last"]] = IdentityMap()


def last(layer: Any, edge_index: Any) -> "Last | None":
    """This layer's last call over this object."""
    entry = _last.entries.get(id(layer))  # IdentityMap.get, inlined
    if entry is None or entry[0]() is not layer:
        return None
    return entry[1].get(id(edge_index))


def _signature(kwargs: dict) -> tuple:
    """Of the arguments, all that a route depends on. Holds no tensor; what is not understood equals nothing, itself included."""
    found = []
    for name, value in kwargs.items():
        if type(value) in _TENSORS:
            found.append((name, value.shape, value.dtype, value.device, value.requires_grad))
        elif value is None:
            found.append(name)
        elif type(value) is tuple and len(value) == 2:
            found.append((name, *map(_of_pair, value)))
        else:
            found.append(float("nan"))
    return tuple(found)


def _of_pair(value: Any) -> Any:
    if type(value) in _TENSORS:
        return value.shape, value.dtype, value.device, value.requires_grad
    return value if value is None or type(value) is int else float("nan")  # a new object: equal to nothing


def _modes() -> tuple:
    """What holds outside the call and matters to it."""
    return torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), aggregation_route.checkpointed()


def too_small(layer: Any, edge_index: Any, config: Config) -> bool:
    """Whether a call may go native without being read: over so few edges nothing gains on a CPU, and a graph not seen before, of not
    many more, does not pay for its structure at once. Marks it as seen."""
    if type(edge_index) is not Tensor or config.when != "profitable" or config.on_fallback != "native":
        return False
    if settings.asked(layer, config) is not None:  # whose calls are counted
        return False
    edges = edge_index.shape[-1]
    if edges >= _FEW_AT_FIRST or aggregation_route.checkpointed():
        return False
    if edges < _FEW and edge_index.is_cpu and not driver.placed():
        return True
    return not edge_index.is_inference() and aggregation_cost.first_seen(edge_index)


class Last:
    """A layer's last call over some edges and where it went. Holds the edges and their structure weakly."""

    __slots__ = ("epoch", "edge_index", "version", "pointer", "signature", "modes", "settings", "known", "module", "source",
                 "weight", "reduce", "sizes", "view", "route", "decision", "name", "missed", "rows", "gain", "patience", "code")

    def _same_edges(self, edge_index: Tensor, config: Config) -> bool:
        return self.epoch == config.epoch and self.edge_index() is edge_index and self.version == edge_index._version

    def still_native(self, edge_index: Tensor, kwargs: dict, config: Config) -> bool:
        """Whether the call may go native without a further look; counts it then. Native code is never wrong, so it is enough that
        nothing has changed that could make another route pay."""
        if self.epoch != config.epoch or self.edge_index() is not edge_index or self.version != edge_index._version:
            return False
        x = kwargs.get(self.source)
        x = x[0] if type(x) is tuple else x
        if type(x) not in _TENSORS or (x.shape, x.dtype, x.requires_grad) != self.rows or torch.is_grad_enabled() is not self.modes[0]:
            return False
        missed = self.missed
        if missed is not None:
            if missed.seconds > self.patience or aggregation_route.checkpointed():
                return False
            missed.seconds += self.gain
        counters.count(self.name, "native", self.code)
        return True

    def fits(self, layer: Any, edge_index: Tensor, kwargs: dict, config: Config) -> bool:
        """Whether the decision holds for this call."""
        own = layer.__dict__
        module = own["_modules"].get("aggr_module")
        return (self._same_edges(edge_index, config) and self.pointer == edge_index.data_ptr() and self.modes == _modes()
                and self.signature == _signature(kwargs) and self.settings == _SETTINGS(own) and not any(_HOOKS(own))
                and module is self.module() and not any(_MODULE_HOOKS(module.__dict__)) and own.keys().isdisjoint(_OVERRIDES)
                and _class(type(layer)) is self.known and guards.context_reason() is None and not guards._any_global_hook())

    def run(self, layer: Any, edge_index: Tensor, kwargs: dict) -> Any:
        """The call's result; None where the structure is gone, or the tensors are not what they were."""
        view = self.view()
        if view is None:
            return None
        view.touched = True
        num_src, num_dst, flipped = self.sizes
        x = kwargs[self.source]
        x = x[0] if type(x) is tuple else x
        weight = None if self.weight is None else self.weight(kwargs)
        given = aggregation.prepare(self.reduce, x, weight, edge_index.shape[1])
        if type(given) is Reason:
            return None
        counters.count(self.name, self.route)
        out = self.decision.run(OpGraph(edge_index, num_src, num_dst, flipped, view), given)
        return _updated(layer, self.known, out, kwargs)


def _remember(layer: Any, edge_index: Tensor, kwargs: dict, found: Read, decision: Decision, config: Config) -> None:
    graph, given = found.graph, found.given
    kept = Last()
    kept.epoch, kept.edge_index, kept.version = config.epoch, weakref.ref(edge_index), edge_index._version
    kept.modes, kept.source, kept.route, kept.name = _modes(), found.form.source, decision.route, type(layer).__name__
    if decision.run is None:
        if config.on_fallback != "native":
            return
        x = kwargs[kept.source]
        x = x[0] if type(x) is tuple else x
        kept.rows, kept.code, kept.missed = (x.shape, x.dtype, x.requires_grad), decision.code, None
        if decision.estimate is not None:
            kept.missed, kept.gain = aggregation_cost.missed(edge_index), decision.estimate.gain
            kept.patience = aggregation_cost.patience(decision.estimate)
    elif graph._view is None:  # ran without a structure
        return
    else:
        kept.pointer, kept.signature, kept.decision = edge_index.data_ptr(), _signature(kwargs), decision
        kept.settings, kept.known, kept.module = _SETTINGS(layer.__dict__), found.known, weakref.ref(layer.aggr_module)
        kept.weight, kept.reduce, kept.view = found.form.weight, given.reduce, weakref.ref(graph._view)
        kept.sizes = graph.num_src, graph.num_dst, graph.flipped
    entries = _last.get(layer)
    if entries is None or len(entries) >= _LAYERS_GRAPHS:
        entries = {}
        _last.set(layer, entries)
    entries[id(edge_index)] = kept
