"""Calls of ``propagate`` over graphs that have not been seen before, such as sampled batches, by a
layer that runs them by kernels. What was read of the layer and its arguments for one batch holds
for the next."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.pyg.propagate import completing, node_counts, reading, repeated_calls
from gnnaccel.cuda import capture
from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.memory.checkpoints import checkpointed
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.ops import aggregation_cost, aggregation_cuda, aggregation_once
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_route import Decision
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason

# times more or fewer edges for which a decision holds: to sum the list, since between few edges
# launches are compared, and from there on the bytes that either side moves, which grow alike; and
# to build a structure, whose price does not
_NEAR, _NEARER = 16, 2
_PLAIN = (int, float, bool, str)


class Taken:
    """A layer's last call by kernels, for calls alike over graphs of other sizes: these are read as
    it was. ``given``, ``edges``: all of its arguments but how many rows they have; ``module``,
    ``module_class``, ``module_path``: the aggregation, its class, and what it runs; ``reduce``: as
    of `Aggregation`, None where its numbers may be others at the next call; ``shape``: as of
    `Aggregation` where messages are the rows of x as they are, else None. ``least``, ``most``: for
    how many edges there is a ``decision`` too, ``most`` 0 for none; ``fresh``: also without a
    structure; ``shares``: as of `aggregation_cuda`."""

    __slots__ = ("epoch", "settings", "known", "cls", "stamp", "module", "module_class",
                 "module_path", "form", "reduce", "shape", "given", "edges", "least", "most",
                 "fresh", "shares", "decision")
    summed = False  # whether lists of edges are summed as they are

    def __init__(self, layer: Any, edge_index: Tensor, kwargs: dict, found: reading.Read,
                 config: Config):
        self.epoch, self.settings = config.epoch, reading.SETTINGS(layer.__dict__)
        self.known, self.cls, self.stamp = found.known, type(layer), found.known.stamp(layer)
        module = layer.aggr_module
        self.module, self.module_class = weakref.ref(module), type(module)
        self.module_path = guards.aggregation_path(type(module))
        self.form, reduce = found.form, found.given.reduce
        self.reduce = reduce if type(reduce) is str else None
        plain = (type(reduce) is str and found.form.weight is None and found.form.more is None
                 and found.form.apply is None)
        self.shape = found.given.shape if plain else None
        self.given, self.edges = _described(kwargs), (edge_index.dtype, edge_index.device)
        self.least = self.most = 0
        self.fresh = self.shares = False

    def decided(self, found: reading.Read, decision: Decision, fresh: bool) -> None:
        """Notes the ``decision`` for kernels for ``found``, over a graph with a structure or a
        ``fresh`` one."""
        shares = aggregation_cuda.shares(found.graph, found.given)
        if shares is not None:
            self.least, self.most = _around(found.graph.num_edges, _NEARER)
            self.shares, self.fresh, self.decision = shares, fresh, decision

    def run(self, layer: Any, edge_index: Tensor, kwargs: dict, config: Config,
            memory: layer_memory.LayerMemory) -> Any:
        """The result of a call that fits; None where it is to be decided anew, or something does
        not fit. ``memory``: the layer's."""
        if not self.least <= edge_index.shape[1] <= self.most or capture.capturing():
            return None
        graph, form = self._graph(layer, edge_index, kwargs), self.form
        if graph is None or checkpointed():
            return None
        if not (self.fresh or graph.known()):
            return None
        if form.alike is not None and not form.alike(layer, kwargs, graph, False):
            return None
        seen = completing.arguments(form, layer, graph, kwargs)
        given: Any = completing.completed(layer, form, graph, self._given(layer, graph, kwargs),
                                          seen, True)
        shares = None if type(given) is Reason else aggregation_cuda.shares(graph, given)
        if shares is None or shares and not self.shares:  # whose kernels may not be compiled
            return None
        counters.count(self.cls.__name__, "cuda")
        out = aggregation_cuda.run(graph, given)
        found = reading.Read(graph, given, form, self.known, (given.reduce,))
        repeated_calls.remember(layer, edge_index, kwargs, found, self.decision, config, memory)
        return reading.finished(layer, self.known, False, out, seen)

    def fits(self, layer: Any, edge_index: Any, kwargs: dict, config: Config) -> bool:
        """Whether what was read holds, whatever the graph's sizes."""
        own = layer.__dict__
        module = own["_modules"].get("aggr_module")
        if (self.epoch != config.epoch or type(edge_index) is not Tensor
            or edge_index.layout is not torch.strided):
            return False
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
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
        if (type(layer) is not self.cls or not self.known.path.same(self.module_path)
            or guards.context_reason() is not None):
            return False
        return self.stamp is None or self.stamp == self.known.stamp(layer)

    def read(self, layer: Any, edge_index: Tensor, kwargs: dict) -> reading.Read | None:
        """The call as `reading.read` would give it; None where something else is to be read."""
        graph, form = self._graph(layer, edge_index, kwargs), self.form
        if graph is None:
            return None
        given: Any = self._given(layer, graph, kwargs)
        if type(given) is Aggregation and form.more is not None:
            if form.alike is not None and not form.alike(layer, kwargs, graph, True):
                return None
            given = completing.with_more(layer, form, graph, given, kwargs, form.costly)
        if type(given) is not Aggregation:
            return None
        return reading.Read(graph, given, form, self.known, (given.reduce,))

    def _graph(self, layer: Any, edge_index: Tensor, kwargs: dict) -> OpGraph | None:
        form = self.form
        found = (node_counts.of_edges(layer, edge_index, kwargs, form.ends) if form.of_edges
                 else node_counts.sizes(layer, edge_index, kwargs,
                                        ((form.source, "j"), *form.ends)))
        return (None if type(found) is Reason
                else OpGraph(edge_index, *found, self.settings[2] != "source_to_target"))

    def _given(self, layer: Any, graph: OpGraph, kwargs: dict) -> Aggregation | Reason:
        """What `reading.prepared` would give."""
        x: Any = kwargs[self.form.source]
        if type(x) is tuple or type(x) is list:
            x = x[0]
        if self.shape is not None and not x.is_neg():
            return Aggregation(self.reduce, x, None, self.shape)  # type: ignore[arg-type]  # named
        weight = None if self.form.weight is None else self.form.weight(kwargs)
        reduce = self.reduce or reading.mean_of(layer.aggr_module)
        return reading.prepared(reduce, layer, x, weight, graph.edge_index.shape[1])


class Summed(Taken):
    """One that was decided to sum its list of edges. ``gain``, ``patience``: per edge, as
    `aggregation_cost` has them."""

    __slots__ = ("gain", "patience")
    summed = True

    def __init__(self, layer: Any, edge_index: Tensor, kwargs: dict, found: reading.Read,
                 decision: Decision, config: Config):
        super().__init__(layer, edge_index, kwargs, found, config)
        count, estimate = edge_index.shape[1], decision.estimate
        assert estimate is not None
        self.least, self.most = _around(count, _NEAR)
        self.gain, self.patience = estimate.gain / count, aggregation_cost.patience(
            estimate) / count

    def run(self, layer: Any, edge_index: Tensor, kwargs: dict, config: Config,
            memory: layer_memory.LayerMemory) -> Any:
        """The result of a call that fits; None where the graph comes so often that a structure may
        pay, or something does not fit."""
        edges = edge_index.shape[1]
        if not self.least <= edges <= self.most or checkpointed():
            return None
        if torch.are_deterministic_algorithms_enabled():
            return None
        missed = ledger.of(edge_index)
        if missed.seconds > self.patience * edges:
            return None
        form = self.form
        sizes = node_counts.sizes(layer, edge_index, kwargs, ((form.source, "j"), *form.ends))
        if type(sizes) is Reason:
            return None
        graph = OpGraph(edge_index, *sizes, self.settings[2] != "source_to_target")
        x: Any = kwargs[form.source]
        given: Any
        if type(x) is tuple or type(x) is list:
            x = x[0]
        if self.shape is not None and not form.unfinished and not x.is_neg():
            given = Aggregation(self.reduce, x, None, self.shape)  # type: ignore[arg-type]  # named
        else:
            weight = None if form.weight is None else form.weight(kwargs)
            given = reading.prepared(self.reduce,  # type: ignore[arg-type]  # likewise
                                     layer, x, weight, edges)
            if form.unfinished:
                given = completing.completed(layer, form, graph, given, kwargs)
            if type(given) is Reason:
                return None
        missed.seconds += self.gain * edges
        counters.count(self.cls.__name__, "cuda")
        return reading.finished(layer, self.known, False, aggregation_once.run(graph, given),
                                kwargs)


def remember(layer: Any, edge_index: Tensor, kwargs: dict, found: reading.Read, decision: Decision,
             config: Config, fresh: bool | None) -> None:
    """Keep what was found out for one call by kernels, for those alike. ``fresh``: whether the
    graph had no structure; None where the decision is not to be kept."""
    if (found.matrix is not None or found.known.aggregate is not None or found.form.stacked
            or not reading.settled(layer.aggr_module)
            or reading.stacked(layer, reading.source(kwargs, found.form.source))):
        return
    taken = layer_memory.of(layer).taken_once
    if decision.run is aggregation_once.run:
        taken[torch.is_grad_enabled()] = Summed(layer, edge_index, kwargs, found, decision, config)
    elif decision.plan.route == "cuda" and not decision.again:
        taken[torch.is_grad_enabled()] = one = Taken(layer, edge_index, kwargs, found, config)
        if fresh is not None:
            one.decided(found, decision, fresh)


def _around(count: int, times: int) -> tuple[int, int]:
    """The fewest and most edges that are so many times fewer or more: some, as int32 counts
    them."""
    return max(1, count // times), min(count * times, 2**31 - 1)


def _described(kwargs: dict) -> tuple:
    """All of the arguments but how many rows they have. What is not understood equals nothing,
    itself included."""
    found: list[Any] = []
    grad = torch.is_grad_enabled()
    for name, value in kwargs.items():
        if value is None:
            found += name, None
            continue
        parts, several, shared = (value,), type(value) is tuple or type(value) is list, False
        if several:  # features of both ends are the same, as a rule
            shared = len(value) == 2 and value[0] is value[1] and name != "size"
            parts = value[:1] if shared else value
        found += name, several, shared
        for one in parts:
            if type(one) in reading.TENSORS and not (grad and one.is_inference()):
                found += ((one.shape[1:], one.dtype, one.device, one.layout, one.requires_grad),)
            elif name == "size":
                found += (one is None,)
            elif one is None or type(one) in _PLAIN:
                found += type(one), one
            else:
                found += (float("nan"),)  # a new object: equal to nothing
    return tuple(found)
