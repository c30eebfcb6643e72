"""Calls of ``propagate`` over graphs that have not been seen before, such as sampled batches, by a
layer that sums their lists of edges as they are. What was read of the layer and its arguments for
one batch holds for the next."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.pyg.propagate import completing, reading
from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.memory.checkpoints import checkpointed
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.ops import aggregation_cost, aggregation_once
from gnnaccel.dispatch.ops.aggregation_route import Decision
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason

# times more or fewer edges for which the decision holds: between few edges, launches are compared,
# and from there on the bytes that either side moves, which grow alike
_NEAR = 16


class Summed:
    """A layer's last call that was decided to sum its list of edges. ``least``, ``most``: for how
    many edges that holds; ``gain``, ``patience``: per edge, as `aggregation_cost` has them."""

    __slots__ = ("epoch", "settings", "known", "stamp", "module", "form", "reduce", "name",
                 "given", "edges", "least", "most", "gain", "patience")

    def __init__(self, layer: Any, edge_index: Tensor, kwargs: dict, found: reading.Read,
                 decision: Decision, config: Config):
        count, estimate = edge_index.shape[1], decision.estimate
        assert estimate is not None
        self.epoch, self.settings = config.epoch, reading.SETTINGS(layer.__dict__)
        self.known, self.stamp, self.module = found.known, found.known.stamp(layer), weakref.ref(
            layer.aggr_module)
        self.form, self.reduce = found.form, found.given.reduce
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
        if (module is not self.module() or not reading.reduces_as_ever(module)
            or guards._any_global_hook()):
            return False
        if (self.settings != reading.SETTINGS(own) or any(reading.HOOKS(own))
            or not own.keys().isdisjoint(reading.OVERRIDES)):
            return False
        if torch.are_deterministic_algorithms_enabled() or checkpointed():
            return False
        if (reading.known_class(type(layer)) is not self.known
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
        sizes = reading.sizes(layer, edge_index, kwargs, ((form.source, "j"), *form.ends))
        if type(sizes) is Reason:
            return None
        graph = OpGraph(edge_index, *sizes, self.settings[2] != "source_to_target")
        weight = None if form.weight is None else form.weight(kwargs)
        given = reading.prepared(self.reduce, layer, reading.source(kwargs, form.source), weight,
                                 edges)
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
        and not reading.stacked(layer, found.given.x)):
        layer_memory.of(layer).summed_once[torch.is_grad_enabled()] = Summed(
            layer, edge_index, kwargs, found, decision, config)


def _described(kwargs: dict) -> tuple:
    """All of the arguments but how many rows they have. What is not understood equals nothing,
    itself included."""
    return tuple([(name, _of(value[0]), _of(value[1])) if type(value) is tuple
                  and len(value) == 2 else (name, _of(value))
                  for name, value in kwargs.items()])


def _of(value: Any) -> Any:
    if type(value) in reading.TENSORS:
        return value.shape[1:], value.dtype, value.device, value.layout, value.requires_grad
    # a new object: equal to nothing
    return value if value is None or type(value) is int else float("nan")
