"""Calls of ``propagate`` over graphs that have not been seen before, such as sampled batches, by a
layer that sums their lists of edges as they are. What was read of the layer and its arguments for
one batch holds for the next."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.pyg.propagate import completing, node_counts, reading
from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.memory.checkpoints import checkpointed
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.ops import aggregation_cost, aggregation_once
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_route import Decision
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason

# times more or fewer edges for which the decision holds: between few edges, launches are compared,
# and from there on the bytes that either side moves, which grow alike
_NEAR = 16


class Summed:
    """A layer's last call that was decided to sum its list of edges. ``least``, ``most``: for how
    many edges that holds; ``gain``, ``patience``: per edge, as `aggregation_cost` has them;
    ``module``, ``module_class``, ``module_path``: the aggregation, its class, and what it runs;
    ``shape``: as of `Aggregation` where messages are the rows of x as they are, else None."""

    __slots__ = ("epoch", "settings", "known", "cls", "stamp", "module", "module_class",
                 "module_path", "form", "reduce", "shape", "name", "given", "edges", "least",
                 "most", "gain", "patience")

    def __init__(self, layer: Any, edge_index: Tensor, kwargs: dict, found: reading.Read,
                 decision: Decision, config: Config):
        count, estimate = edge_index.shape[1], decision.estimate
        assert estimate is not None
        self.epoch, self.settings = config.epoch, reading.SETTINGS(layer.__dict__)
        self.known, self.cls, self.stamp = found.known, type(layer), found.known.stamp(layer)
        module = layer.aggr_module
        self.module, self.module_class = weakref.ref(module), type(module)
        self.module_path = guards.aggregation_path(type(module))
        self.form, self.reduce = found.form, found.given.reduce
        plain = found.form.weight is None and not found.form.unfinished
        self.shape = found.given.shape if plain else None
        self.name, self.given, self.edges = type(layer).__name__, _described(kwargs), (
            edge_index.dtype, edge_index.device)
        self.least, self.most = count // _NEAR, count * _NEAR
        self.gain, self.patience = estimate.gain / count, aggregation_cost.patience(
            estimate) / count

    def fits(self, layer: Any, edge_index: Any, kwargs: dict, config: Config) -> bool:
        """Whether the decision holds, whatever the graph's sizes."""
        own = layer.__dict__
        module = own["_modules"].get("aggr_module")
        if (self.epoch != config.epoch or type(edge_index) is not Tensor
            or edge_index.layout is not torch.strided):
            return False
        if (edge_index.dim() != 2 or edge_index.shape[0] != 2
            or not self.least <= edge_index.shape[1] <= self.most):
            return False
        if ((edge_index.dtype, edge_index.device) != self.edges or edge_index.is_inference()
            or self.given != _described(kwargs)):
            return False
        if module is not self.module() or type(module) is not self.module_class:
            return False
        within = module.__dict__
        if any(reading.MODULE_HOOKS(within)) or not within.keys().isdisjoint(guards.REDUCING):
            return False
        if (self.settings != reading.SETTINGS(own) or any(reading.HOOKS(own))
            or not own.keys().isdisjoint(reading.OVERRIDES)):
            return False
        if torch.are_deterministic_algorithms_enabled() or checkpointed():
            return False
        if (type(layer) is not self.cls or not self.known.path.same(self.module_path)
            or guards.context_reason() is not None):
            return False
        return self.stamp is None or self.stamp == self.known.stamp(layer)

    def run(self, layer: Any, edge_index: Tensor, kwargs: dict) -> Any:
        """The call's result; None where the graph comes so often that a structure may pay, or
        something does not fit."""
        edges = edge_index.shape[1]
        missed = ledger.of(edge_index)
        if missed.seconds > self.patience * edges:
            return None
        form = self.form
        sizes = node_counts.sizes(layer, edge_index, kwargs, ((form.source, "j"), *form.ends))
        if type(sizes) is Reason:
            return None
        graph = OpGraph(edge_index, *sizes, self.settings[2] != "source_to_target")
        x: Any = kwargs[form.source]
        if type(x) is tuple or type(x) is list:
            x = x[0]
        given: Any
        if self.shape is not None and not x.is_neg():  # what `reading.prepared` would give
            given = Aggregation(self.reduce, x, None, self.shape)
        else:
            weight = None if form.weight is None else form.weight(kwargs)
            given = reading.prepared(self.reduce, layer, x, weight, edges)
            if form.unfinished:
                given = completing.completed(layer, form, graph, given, kwargs)
            if type(given) is Reason:
                return None
        missed.seconds += self.gain * edges
        counters.count(self.name, "cuda")
        return reading.finished(layer, self.known, False, aggregation_once.run(graph, given),
                                kwargs)


def remember(layer: Any, edge_index: Tensor, kwargs: dict, found: reading.Read, decision: Decision,
             config: Config) -> None:
    """Keep what was found out for one call, for those alike."""
    if (decision.run is aggregation_once.run and len(found.reduces) == 1
        and not found.known.traced and not reading.stacked(layer, found.given.x)):
        layer_memory.of(layer).summed_once[torch.is_grad_enabled()] = Summed(
            layer, edge_index, kwargs, found, decision, config)


def _described(kwargs: dict) -> tuple:
    """All of the arguments but how many rows they have. What is not understood equals nothing,
    itself included."""
    found: tuple = ()
    for name, value in kwargs.items():
        if type(value) is tuple and len(value) == 2:
            first, second = value
            one = _of(first)
            # both ends share their features, as a rule
            found += name, one, one if second is first else _of(second)
        else:
            found += name, None if value is None else _of(value)
    return found


def _of(value: Any) -> Any:
    if type(value) in reading.TENSORS:
        return value.shape[1:], value.dtype, value.device, value.layout, value.requires_grad
    # a new object: equal to nothing
    return value if value is None or type(value) is int else float("nan")
