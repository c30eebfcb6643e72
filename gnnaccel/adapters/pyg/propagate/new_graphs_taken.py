"""Calls of ``propagate`` over graphs that have not been seen before, such as sampled batches, by a
layer that runs them by kernels. What was read of the layer and its arguments for one batch holds
for the next."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.propagate import (completing, node_counts, reading, reductions,
                                              repeated_calls)
from gnnaccel.adapters.pyg.propagate.described import Arguments, Described, understood, width
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.ops import aggregation_cost, aggregation_cuda, aggregation_once
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_route import Decision
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.run.autograd import saved_tensor_hooks

# factors of the number of edges within which a decision holds: to sum the list, as launches are
# compared for few edges, and for more the bytes that either side moves, which grow alike; and to
# build a structure, whose price does not
_NEAR, _NEARER = 16, 2


class Taken(Described):
    """A layer's last call by kernels, for calls alike over graphs of other sizes: these are read as
    it was. ``least``, ``most``: for how many edges there is a ``decision`` too, ``most`` 0 for
    none; ``fresh``: also without a structure; ``shares``: as of `aggregation_cuda`."""

    __slots__ = ("edges", "widths", "least", "most", "fresh", "shares", "decision")
    summed = False  # whether lists of edges are summed as they are

    def __init__(self, layer: Any, edge_index: Tensor, kwargs: dict, call: reading.Read,
                 config: Config):
        super().__init__(layer, kwargs, call, config)
        self.edges = edge_index.dtype, edge_index.device
        self.widths = list(map(width, self.arguments[1]))
        self.least = self.most = 0
        self.fresh = self.shares = False

    def decided(self, call: reading.Read, decision: Decision, fresh: bool) -> None:
        """Notes the ``decision`` for kernels for ``call``, over a graph with a structure or a
        ``fresh`` one."""
        shares = aggregation_cuda.shares(call.graph, call.given)
        if shares is not None:
            self.least, self.most = _around(call.graph.num_edges, _NEARER)
            self.shares, self.fresh, self.decision = shares, fresh, decision

    def run(self, layer: Any, edge_index: Tensor, kwargs: dict, config: Config,
            memory: layer_memory.LayerMemory) -> Any:
        """The result of a call that fits; None where it is to be decided anew, or something does
        not fit. ``memory``: the layer's."""
        if not self.least <= edge_index.shape[1] <= self.most or capture.capturing():
            return None
        graph, form = self._graph(layer, edge_index, kwargs), self.form
        if graph is None or saved_tensor_hooks(True) is not None:
            return None
        if not (self.fresh or graph.found()):
            return None
        if form.alike is not None and not form.alike(layer, kwargs, graph, False):
            return None
        arguments = completing.arguments(form, layer, graph, kwargs, self.known.traced)
        aggregation: Any = self.stated(layer, kwargs, edge_index.shape[1])
        aggregation = completing.completed(layer, form, graph, aggregation, arguments, True)
        shares = (None if type(aggregation) is Reason
                  else aggregation_cuda.shares(graph, aggregation))
        if shares is None or shares and not self.shares:  # whose kernels may not be compiled
            return None
        counters.count(self.cls.__name__, "cuda")
        out = aggregation_cuda.run(graph, aggregation)
        call = reading.Read(graph, aggregation, form, self.known, (aggregation.reduce,))
        repeated_calls.remember(layer, edge_index, kwargs, call, self.decision, config, memory)
        return out if self.bare else reading.finished(layer, self.known, False, out, arguments,
                                                      edge_index)

    def fits(self, layer: Any, edge_index: Any, arguments: Arguments, config: Config) -> bool:
        """Whether what was read holds, whatever the graph's sizes."""
        if (type(edge_index) is not Tensor or edge_index.layout is not torch.strided
            or edge_index.dim() != 2 or edge_index.shape[0] != 2):
            return False
        if (edge_index.dtype, edge_index.device) != self.edges or edge_index.is_inference():
            return False
        kinds, _, values = self.arguments
        return (kinds == arguments[0] and values == arguments[2]
                and self.widths == list(map(width, arguments[1])) and self.holds(layer, config))

    def read(self, layer: Any, edge_index: Tensor, kwargs: dict) -> reading.Read | None:
        """The call as `reading.read` would give it; None where something else is to be read."""
        graph, form = self._graph(layer, edge_index, kwargs), self.form
        if graph is None:
            return None
        if form.alike is not None and not form.alike(layer, kwargs, graph, True):
            return None
        aggregation: Any = self.stated(layer, kwargs, edge_index.shape[1])
        if type(aggregation) is Aggregation and form.more is not None:
            aggregation = completing.with_more(layer, form, graph, aggregation, kwargs, form.costly)
        if type(aggregation) is not Aggregation:
            return None
        reduces = (reductions.of(layer, self.known) if self.known.traced
                   else (aggregation.reduce,))
        return reading.Read(graph, aggregation, form, self.known, reduces)

    def _graph(self, layer: Any, edge_index: Tensor, kwargs: dict) -> OpGraph | None:
        form = self.form
        sizes = (node_counts.of_edges(layer, edge_index, kwargs, form.ends) if form.of_edges
                 else node_counts.sizes(layer, edge_index, kwargs,
                                        ((form.source, "j"), *form.ends)))
        return (None if type(sizes) is Reason
                else OpGraph(edge_index, *sizes, self.settings[2] != "source_to_target"))


class Summed(Taken):
    """A `Taken` that was decided to sum its list of edges. ``gain``, ``patience``: per edge, as
    `aggregation_cost` has them."""

    __slots__ = ("gain", "patience")
    summed = True

    def __init__(self, layer: Any, edge_index: Tensor, kwargs: dict, call: reading.Read,
                 decision: Decision, config: Config):
        super().__init__(layer, edge_index, kwargs, call, config)
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
        if not self.least <= edges <= self.most or saved_tensor_hooks(True) is not None:
            return None
        if torch.are_deterministic_algorithms_enabled():
            return None
        record = ledger.of(edge_index)
        if record.seconds > self.patience * edges:
            return None
        form = self.form
        sizes = node_counts.sizes(layer, edge_index, kwargs, ((form.source, "j"), *form.ends))
        if type(sizes) is Reason:
            return None
        graph = OpGraph(edge_index, *sizes, self.settings[2] != "source_to_target")
        if form.alike is not None and not form.alike(layer, kwargs, graph, True):
            return None
        arguments = (completing.arguments(form, layer, graph, kwargs, True) if self.known.traced
                     else kwargs)
        aggregation: Any = self.stated(layer, kwargs, edges)
        if form.unfinished:
            aggregation = completing.completed(layer, form, graph, aggregation, kwargs)
        if type(aggregation) is Reason:
            return None
        record.seconds += self.gain * edges
        counters.count(self.cls.__name__, "cuda")
        out = aggregation_once.run(graph, aggregation)
        return out if self.bare else reading.finished(layer, self.known, False, out, arguments,
                                                      edge_index)


def remember(layer: Any, edge_index: Tensor, kwargs: dict, call: reading.Read, decision: Decision,
             config: Config, fresh: bool | None) -> None:
    """Remember what was read of one call by kernels, for those alike. ``fresh``: whether the
    graph had no structure; None where the decision is not to be kept."""
    traced = call.known.traced
    if (call.matrix is not None or call.form.stacked
            or (not traced and (call.known.aggregate is not None
                                or not reductions.settled(layer.aggr_module)))
            or reading.stacked(layer, reading.source(kwargs, call.form.source))):
        return
    if decision.run is aggregation_once.run:
        one: Taken = Summed(layer, edge_index, kwargs, call, decision, config)
    elif decision.plan.route == "cuda" and not decision.again:
        one = Taken(layer, edge_index, kwargs, call, config)
        if fresh is not None and len(call.reduces) == 1:
            one.decided(call, decision, fresh)
    else:
        return
    if understood(one.arguments):
        memory, grad = layer_memory.of(layer), torch.is_grad_enabled()
        memory.taken_once[grad], memory.going[grad] = one, None


def _around(count: int, times: int) -> tuple[int, int]:
    """The fewest and most edges, a factor of ``times`` from ``count``: at least 1, and no more
    than int32 counts."""
    return max(1, count // times), min(count * times, 2**31 - 1)
