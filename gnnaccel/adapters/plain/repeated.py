"""A call of a plain module by kernels over some edges, kept for the calls that repeat it."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.plain.arguments import Given
from gnnaccel.adapters.pyg.propagate import completing, reading
from gnnaccel.adapters.pyg.propagate.described import Arguments, described
from gnnaccel.adapters.tracing.expressed import CallArguments
from gnnaccel.dispatch.graph.tensor_ref import TensorRef
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.ops.aggregation_route import Decision
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.run.autograd import saved_tensor_hooks


class Repeated:
    """Such a call. Holds the edges and their structure weakly; all as of
    `repeated_calls.Repeated`. ``cls``: the module's class."""

    __slots__ = ("epoch", "cls", "arguments", "edges", "modes", "form", "found", "reduce", "source",
                 "sizes", "view", "decision", "older")
    native = False
    older: Any

    def __init__(self, cls: type, given: Given, call: reading.Read, decision: Decision,
                 config: Config):
        self.epoch, self.cls, self.arguments = config.epoch, cls, described(given.values)
        self.edges, self.modes = TensorRef(given.edge_index), _modes(given.edge_index)
        self.form, self.source = call.form, call.form.source
        self.found: Any = call.known
        self.reduce, self.decision = call.given.reduce, decision
        self.sizes = call.graph.num_src, call.graph.num_dst, call.graph.flipped
        # there, as the call ran by it
        self.view: Any = weakref.ref(call.graph.built)

    def like(self, other: Repeated) -> bool:
        """Whether a call is kept in the place of the ``other``."""
        return self.arguments == other.arguments

    def run(self, module: Any, edge_index: Tensor, values: dict, arguments: Arguments,
            config: Config) -> Any:
        """The result of a call like this one; None of others, or where the structure is gone."""
        view = self.view()
        if (view is None or self.epoch != config.epoch or type(module) is not self.cls
            or not self.edges.unmoved(edge_index) or self.arguments != arguments
            or self.modes != _modes(edge_index)):  # `understood` has looked at the context
            return None
        view.touched = True
        graph = OpGraph(edge_index, *self.sizes, view)
        first: Any = reading.aggregation.prepare(self.reduce, values[self.source], None,
                                                 edge_index.shape[1])
        given = CallArguments(values, graph, module)
        if type(first) is not Reason:
            first = completing.completed(module, self.form, graph, first, given, True)
        if type(first) is Reason:
            return None
        counters.count(type(module).__name__, self.decision.plan.route)
        out = self.decision.run(graph, first)  # type: ignore[misc]  # not native
        return self.found.result(out, given)


def _modes(edge_index: Tensor) -> tuple:
    """What holds outside a call."""
    return (torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
            saved_tensor_hooks(True) is None, torch.get_default_dtype(),
            torch.is_autocast_enabled(edge_index.device.type))
