"""The last calls of ``propagate`` over some edges, kept for the calls that repeat them."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.propagate import (completing, new_graphs_native, reading,
                                              reductions)
from gnnaccel.adapters.pyg.propagate.described import Alike, Arguments, Described, Unknown
from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.graph.tensor_ref import TensorRef
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.ops import aggregation_cost, aggregation_cuda
from gnnaccel.dispatch.ops.aggregation_route import Decision
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.plan.compiling import PENDING
from gnnaccel.dispatch.plan.request import CallSpec
from gnnaccel.dispatch.policy.config import Config, current
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.run.attention import Call, run_cuda
from gnnaccel.dispatch.run.autograd import checkpointed, saved_tensor_hooks

if TYPE_CHECKING:
    from gnnaccel.adapters.pyg.propagate.adjacency import KeptMatrix
    from gnnaccel.dispatch.graph.view import GraphView

_grad, _deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled
_LAYERS_GRAPHS = 32  # calls over so many graphs are remembered for each layer
_FORMS = 4  # and so many over each of these


class Repeated(Described):
    """A call by kernels over some edges. Holds the edges and their structure weakly.

    ``modes``: what holds outside the call; ``reduces``: of an aggregation that is made of others,
    which is looked at in each call; ``looked``: as it was, where its reductions have no numbers;
    ``matrix``: of edges that are a sparse matrix, which lies nowhere itself; ``older``: the one
    that was kept before over the same edges, of a call of another form, as some layers propagate
    several times.
    """

    __slots__ = ("edges", "modes", "reduces", "looked", "sizes", "view", "decision", "matrix",
                 "older")
    native = False
    view: weakref.ref[GraphView]
    matrix: KeptMatrix | None
    older: Any

    def __init__(self, layer: Any, edge_index: Tensor, kwargs: dict, call: reading.Read,
                 decision: Decision, config: Config, settled: bool):
        """``settled``: of an aggregation not made of others."""
        super().__init__(layer, kwargs, call, config)
        graph, aggregation = call.graph, call.given
        self.matrix = None if call.matrix is None else call.matrix.kept()
        self.edges = TensorRef(edge_index, pointer=self.matrix is None)
        self.modes = _grad(), _deterministic(), saved_tensor_hooks(True) is None
        self.reduces, self.looked = (None if settled else call.reduces), None
        if not settled and call.known.aggregate is None and all(
            type(one) is str for one in call.reduces):
            self.looked = reductions.Looked(layer.aggr_module)
        # there, as the call ran by it
        self.view = weakref.ref(graph.built)  # type: ignore[arg-type]
        self.sizes, self.decision = (graph.num_src, graph.num_dst, graph.flipped), decision
        if self.shape is not None and aggregation.weight is not None:
            self.layout = aggregation_cuda.layout_of(aggregation)

    def like(self, other: Repeated) -> bool:
        """Whether a call is kept in the place of the ``other``."""
        return self.arguments == other.arguments

    def run(self, layer: Any, edge_index: Tensor, kwargs: dict, arguments: Arguments,
            config: Config) -> Any:
        """The result of a call like this one; None of others, or where the structure is gone."""
        edges, view = self.edges, self.view()
        # `TensorRef.unmoved`, without its call
        if view is None or edges() is not edge_index or edges.version != edge_index._version:
            return None
        if self.arguments != arguments:
            return None
        if (edges.pointer != edge_index.data_ptr() if self.matrix is None
            else not self.matrix.still(edge_index)):
            return None
        if (self.modes != (_grad(), _deterministic(), saved_tensor_hooks(True) is None)
            or not self.holds(layer, config)):
            return None
        if self.reduces is not None and not (self.looked is not None and self.looked.same()) and (
            self.reduces != reductions.of(layer, self.known)):
            return None
        view.touched = True
        if self.matrix is not None:
            kwargs = self.matrix.arguments(edge_index, kwargs)
            edge_index = self.matrix.edges()  # type: ignore[assignment]  # there, as it fits
        form, (num_src, num_dst, flipped) = self.form, self.sizes
        graph = OpGraph(edge_index, num_src, num_dst, flipped, view)
        if self.known.traced:
            if not form.alike(layer, kwargs, graph, None):  # type: ignore[misc]  # it has one
                return None
            kwargs = completing.arguments(form, layer, graph, kwargs, True)
        aggregation = self.stated(layer, kwargs, edge_index.shape[1])
        if not self.bare and (form.unfinished or form.more is not None):
            aggregation = completing.completed(layer, form, graph, aggregation, kwargs, True)
        if type(aggregation) is Reason:
            return None
        counters.count(self.cls.__name__, self.decision.plan.route)
        out = self.decision.run(graph, aggregation)  # type: ignore[misc]  # not native
        if self.bare:
            return out
        return reading.finished(layer, self.known, reading.moved(layer, form, kwargs), out, kwargs,
                                edge_index)


class RepeatedAttention(Alike):
    """A call with attention by kernels, over edges that it holds weakly, as their structure
    ``view``. ``adapter``: with what was read of the message; ``stated``: the call; ``pmf``: as of
    its plan; ``calls``: the graph's ledger, which counts this call as well; ``dtype``: torch's
    default; ``bound``: an `attention_repeated.BoundMessage`, False where there is none, None before
    the first repetition; all else as of `Repeated`."""

    __slots__ = ("edges", "modes", "view", "adapter", "stated", "pmf", "calls", "dtype", "bound",
                 "older")
    native = False
    view: weakref.ref[GraphView]
    bound: Any
    older: Any

    def __init__(self, layer: Any, edge_index: Tensor, kwargs: dict, adapter: Any, spec: CallSpec,
                 call: Call, config: Config):
        super().__init__(layer, kwargs, adapter.known, config)
        self.edges, self.view = TensorRef(edge_index), weakref.ref(call.graph)
        self.modes = _grad(), _deterministic(), saved_tensor_hooks(True) is None
        self.adapter, self.stated, self.pmf = adapter, spec, call.pmf
        self.calls, self.dtype = ledger.of(edge_index), torch.get_default_dtype()
        self.bound = None

    def like(self, other: RepeatedAttention) -> bool:
        """Whether a call is kept in the place of the ``other``."""
        return self.arguments == other.arguments

    def run(self, layer: Any, edge_index: Tensor, kwargs: dict, arguments: Arguments,
            config: Config) -> Any:
        """The result of a call like this one; None of others, as `Repeated.run`."""
        edges, view, spec = self.edges, self.view(), self.stated
        if (view is None or edges() is not edge_index or edges.version != edge_index._version
            or self.arguments != arguments or edges.pointer != edge_index.data_ptr()):
            return None
        if (self.modes != (_grad(), _deterministic(), saved_tensor_hooks(True) is None)
            or torch.get_default_dtype() is not self.dtype or not self.holds(layer, config)
            or not self.adapter.still(layer, kwargs, spec)):
            return None
        view.touched = True
        self.calls.calls += 1
        counters.count(self.cls.__name__, "cuda")
        if self.bound is None:
            self.bound = self.modes[2] and self.adapter.bound(kwargs, self._call(view)) or False
        out = self.bound and self.bound(kwargs, view)
        out = (self.adapter.attended(layer, spec, edge_index, kwargs, self._call(view), edge_index)
               if out is None or out is False
               else reading.finished(layer, self.known, False, out, kwargs, edge_index))
        as_is = self.modes[0] or type(out) is not Tensor or not out._is_view()
        return out if as_is else out.detach()  # as the router does

    def _call(self, view: GraphView) -> Call:
        """The call to the kernels."""
        spec = self.stated
        pattern: Any = programs.attention(spec.program)  # attention, as it ran
        return Call(spec.program, pattern, view, spec.heads, spec.width, spec.out, True, self.pmf,
                    run=run_cuda)


class RepeatedNative:
    """A native call over some edges, which it holds weakly. ``source``, ``rows``: name and look of
    the features; ``missed``, ``gain``, ``patience``: as `aggregation_cost` has them, None where
    there is nothing to gain; ``weighs``: reading such a call makes weights; ``older``: as of
    `Repeated`."""

    __slots__ = ("epoch", "edges", "grad", "name", "source", "rows", "missed", "gain", "patience",
                 "code", "fell_back", "weighs", "older")
    native = True
    missed: ledger.GraphLedger | None
    fell_back: Callable[[], None] | None
    older: Any

    def __init__(self, layer: Any, edge_index: Tensor, kwargs: dict, call: reading.Read,
                 decision: Decision, config: Config):
        self.epoch, self.edges = config.epoch, TensorRef(edge_index, pointer=False)
        self.grad, self.name, self.source = _grad(), type(layer).__name__, call.form.source
        x = reading.source(kwargs, self.source)
        self.rows, self.weighs = (x.shape, x.dtype, x.requires_grad), call.form.weight is not None
        self.fell_back, self.code, self.missed = decision.fell_back, decision.plan.code, None
        if decision.estimate is not None:
            self.missed, self.gain = ledger.of(call.graph.edge_index), decision.estimate.gain
            self.patience = aggregation_cost.patience(decision.estimate)

    def like(self, other: RepeatedNative) -> bool:
        """Whether a call is kept in the place of the ``other``."""
        return self.rows == other.rows

    def fits(self, edge_index: Tensor, kwargs: dict, config: Config) -> bool:
        """Whether the call may go native without a further look; counts it then. Native code is
        never wrong, so it is enough that nothing has changed that could make another route pay."""
        edges = self.edges
        if (self.epoch != config.epoch or edges() is not edge_index
                or edges.version != edge_index._version):
            return False
        x: Any = kwargs.get(self.source)
        x = x[0] if type(x) is tuple else x
        if type(x) not in reading.TENSORS or (x.shape, x.dtype, x.requires_grad) != self.rows:
            return False
        if _grad() is not self.grad:
            return False
        # in a checkpoint: autograd saves the weights that reading a call makes; and the kernels may
        # be there when it repeats the call
        if (self.weighs or self.code == PENDING) and saved_tensor_hooks(True) is not None:
            return False
        missed = self.missed
        if missed is None:
            counters.again(self.name, self.code)
        elif missed.seconds > self.patience or checkpointed():
            return False
        else:
            missed.seconds += self.gain
            counters.count(self.name, "native", self.code)
        if self.fell_back is not None:
            self.fell_back()
        return True


def remember(layer: Any, edge_index: Tensor, kwargs: dict, call: reading.Read, decision: Decision,
             config: Config, memory: layer_memory.LayerMemory | None) -> None:
    """Keep this call for those over the same edges. ``memory``: the layer's, if it is at hand."""
    graph, memory = call.graph, memory or layer_memory.of(layer)
    entry: Repeated | RepeatedNative
    if decision.run is not None:  # not where it ran without a structure or will not be repeated
        if graph.built is None or not memory.keeps(graph.built):
            return
        settled = call.known.traced or (
            reductions.settled(layer.aggr_module) and len(call.reduces) == 1)
        if not settled and any(type(one) is not str for one in call.reduces):
            return  # numbers inside may change
        entry = Repeated(layer, edge_index, kwargs, call, decision, config, settled)
        if Unknown in map(type, entry.arguments[2]):  # `understood`, without its call
            return
    elif config.on_fallback == "native":
        entry = RepeatedNative(layer, edge_index, kwargs, call, decision, config)
        new_graphs_native.remember(layer, edge_index, kwargs, call, decision, config)
    else:
        return
    keep(layer, edge_index, entry, memory)


def remember_attention(layer: Any, edge_index: Tensor, kwargs: dict, adapter: Any, spec: CallSpec,
                       call: Call) -> None:
    """Keep a call of attention that ran by kernels. ``adapter``: an `attention.OwnAttention`."""
    config = current()
    if config is None or settings.asked(layer, config) is not None:  # rows may be stored otherwise
        return
    entry = RepeatedAttention(layer, edge_index, kwargs, adapter, spec, call, config)
    if Unknown not in map(type, entry.arguments[2]):
        keep(layer, edge_index, entry, layer_memory.of(layer))


def keep(layer: Any, edge_index: Tensor, kept: Any, memory: layer_memory.LayerMemory) -> None:
    """Make ``kept`` the last of the layer's calls over these edges."""
    # `layer_memory.mode_of`, without its call
    over = memory.over[_grad() + 2 * (layer.training is True)]
    if len(over) >= _LAYERS_GRAPHS:
        over.clear()
    last = over.get(id(edge_index))
    kept.older = None if last is None else _others(last, kept)
    over[id(edge_index)] = kept


def _others(last: Any, new: Any) -> Any:
    """The first few calls kept over some edges that have other forms than the ``new`` one."""
    calls: list[Any] = []
    while last is not None and len(calls) < _FORMS - 1:
        if (last.epoch == new.epoch and last.edges() is new.edges()
                and not (type(last) is type(new) and last.like(new))):
            calls.append(last)
        last = last.older
    for one, next_call in zip(calls, [*calls[1:], None]):
        one.older = next_call
    return calls[0] if calls else None
