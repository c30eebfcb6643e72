"""The last call of ``propagate`` over some edges, kept for the calls that repeat it."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.pyg.propagate import completing, new_graphs_native, reading
from gnnaccel.dispatch.graph import ledger
from gnnaccel.dispatch.graph.tensor_ref import TensorRef
from gnnaccel.dispatch.memory import layer_memory
from gnnaccel.dispatch.memory.checkpoints import checkpointed, saved_tensor_hooks
from gnnaccel.dispatch.observe import counters
from gnnaccel.dispatch.ops import aggregation_cost, aggregation_cuda
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_route import Decision
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.plan.compiling import PENDING
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason

if TYPE_CHECKING:
    from gnnaccel.adapters.own import Path
    from gnnaccel.adapters.pyg.propagate.adjacency import KeptMatrix
    from gnnaccel.adapters.pyg.propagate.message import Form
    from gnnaccel.dispatch.graph.view import GraphView

_grad, _deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled
_PLAIN = frozenset((int, float, bool, str))
_LAYERS_GRAPHS = 4  # calls over so many graphs are remembered for each layer
_FORMS = 4  # and so many over each of these


def _signature(kwargs: dict) -> tuple:
    """Of the arguments, all that a route depends on. Holds no tensor; what is not understood equals
    nothing, itself included."""
    found: list[Any] = []
    grad = _grad()
    for name, value in kwargs.items():
        found.append(name)
        for one in value if type(value) is tuple and len(value) == 2 else (value,):
            if type(one) in reading.TENSORS and not (grad and one.is_inference()):
                found.append((one.shape, one.dtype, one.device, one.layout,
                              grad and one.requires_grad))
            elif one is None or type(one) in _PLAIN:
                found.append((type(one), one))
            else:
                found.append(float("nan"))  # a new object: equal to nothing
    return tuple(found)


class Last:
    """A layer's last call over some edges and where it went. Holds the edges and their structure
    weakly.

    ``modes``: what holds outside the call; ``module``, ``module_class``, ``module_path``: the
    aggregation, its class, and what it runs; ``shape``, ``layout``: as of `Aggregation`, where
    nothing is done before it or after it, else ``shape`` is None; ``reduces``: of an aggregation
    that is made of others, which is looked at in each call; ``matrix``: of edges that are a sparse
    matrix, which lies nowhere itself; ``older``: the one that was kept before over the same edges,
    of a call of another form, as some layers propagate several times.
    """

    __slots__ = ("epoch", "edge_index", "signature", "modes", "settings", "known", "cls", "module",
                 "module_class", "module_path", "shape", "layout", "source", "form", "stamp",
                 "reduce", "reduces", "sizes", "view", "route", "decision", "name", "missed",
                 "rows", "gain", "patience", "code", "fell_back", "weighs", "matrix", "older")

    epoch: int
    edge_index: TensorRef
    signature: tuple
    modes: tuple
    settings: Any
    known: reading.Known
    cls: type
    module: weakref.ref
    module_class: type
    module_path: Path
    shape: tuple[int, ...] | None
    layout: tuple[int, int, str] | None
    source: str
    form: Form
    stamp: tuple | None
    reduce: str | None
    reduces: tuple[reading.Reduce, ...] | None
    sizes: tuple[int, int, bool]
    view: weakref.ref[GraphView]
    route: str
    decision: Decision
    name: str
    missed: ledger.GraphLedger | None
    rows: tuple
    gain: float
    patience: float
    code: str | None
    fell_back: Callable[[], None] | None
    weighs: bool
    matrix: KeptMatrix | None
    older: Last | None

    def still_native(self, edge_index: Tensor, kwargs: dict, config: Config) -> bool:
        """Whether the call may go native without a further look; counts it then. Native code is
        never wrong, so it is enough that nothing has changed that could make another route pay."""
        edges = self.edge_index
        if (self.epoch != config.epoch or edges() is not edge_index
                or edges.version != edge_index._version):
            return False
        x: Any = kwargs.get(self.source)
        x = x[0] if type(x) is tuple else x
        if type(x) not in reading.TENSORS or (x.shape, x.dtype, x.requires_grad) != self.rows:
            return False
        if torch.is_grad_enabled() is not self.modes[0]:
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

    def fits(self, layer: Any, edge_index: Tensor, kwargs: dict, config: Config) -> bool:
        """Whether the decision holds for this call."""
        own = layer.__dict__
        module = own["_modules"].get("aggr_module")
        edges = self.edge_index  # `TensorRef.unmoved`, without its call
        if (self.epoch != config.epoch or edges() is not edge_index
            or edges.version != edge_index._version):
            return False
        if (edges.pointer != edge_index.data_ptr() if self.matrix is None
            else not self.matrix.still(edge_index)):
            return False
        if self.modes != (_grad(), _deterministic(), saved_tensor_hooks(True) is None):
            return False
        if self.stamp is not None and self.stamp != self.known.stamp(layer):
            return False
        if (self.signature != _signature(kwargs) or self.settings != reading.SETTINGS(own)
            or any(reading.HOOKS(own))):
            return False
        if module is not self.module() or type(module) is not self.module_class:
            return False
        within = module.__dict__
        if any(reading.MODULE_HOOKS(within)) or not guards.REDUCING.isdisjoint(within):
            return False
        if self.reduces is not None and self.reduces != reading.reductions(layer, self.known):
            return False
        return (reading.OVERRIDES.isdisjoint(own) and type(layer) is self.cls
                and self.known.path.same(self.module_path) and guards.context_reason() is None)

    def run(self, layer: Any, edge_index: Tensor, kwargs: dict) -> Any:
        """The call's result; None where the structure is gone, or the tensors are not what they
        were."""
        view = self.view()
        if view is None:
            return None
        view.touched = True
        num_src, num_dst, flipped = self.sizes
        if self.matrix is not None:
            kwargs = self.matrix.arguments(edge_index, kwargs)
            edge_index = self.matrix.edges()  # type: ignore[assignment]  # there, as it fits
        x: Any = kwargs[self.source]
        if type(x) is tuple or type(x) is list:
            x = x[0]
        form = self.form
        weight = None if form.weight is None else form.weight(kwargs)
        graph = OpGraph(edge_index, num_src, num_dst, flipped, view)
        if (self.shape is not None and not x.is_neg()
            and (weight is None or (weight.dtype is x.dtype and not weight.is_neg()))):
            counters.count(self.name, self.route)
            # what `reading.prepared` and `reading.finished` would give
            return self.decision.run(graph,  # type: ignore[misc]  # not native
                                     Aggregation(self.reduce,  # type: ignore[arg-type]  # named, too
                                                 x, weight, self.shape, None, self.layout))
        reduce = self.reduce or reading.mean_of(layer.aggr_module)
        given = reading.prepared(reduce, layer, x, weight, edge_index.shape[1])
        if form.unfinished or form.more is not None:
            given = completing.completed(layer, form, graph, given, kwargs, True)
        if type(given) is Reason:
            return None
        counters.count(self.name, self.route)
        out = self.decision.run(graph, given)  # type: ignore[misc]  # not native
        return reading.finished(layer, self.known, reading.moved(layer, form, kwargs), out, kwargs)


def remember(layer: Any, edge_index: Tensor, kwargs: dict, found: reading.Read, decision: Decision,
             config: Config, memory: layer_memory.LayerMemory | None) -> None:
    """Keep this call for those over the same edges. ``memory``: the layer's, if it is at hand."""
    graph, settled, memory = found.graph, True, memory or layer_memory.of(layer)
    if decision.run is not None:  # not where it ran without a structure or will not be repeated
        if graph.built is None or found.known.traced or not memory.keeps(graph.built):
            return
        settled = reading.settled(layer.aggr_module) and len(found.reduces) == 1
        if not settled and any(type(one) is not str for one in found.reduces):
            return  # numbers inside may change
    kept = Last()
    kept.epoch = config.epoch
    kept.matrix = None if found.matrix is None else found.matrix.kept()
    kept.edge_index = TensorRef(edge_index, pointer=decision.run is not None and not found.matrix)
    kept.modes = _grad(), _deterministic(), saved_tensor_hooks(True) is None
    kept.source, kept.name = found.form.source, type(layer).__name__
    kept.route = decision.plan.route
    if decision.run is not None:
        _by_kernels(kept, layer, kwargs, found, decision, settled)
    elif config.on_fallback == "native":
        _natively(kept, kwargs, found, decision)
        new_graphs_native.remember(layer, edge_index, kwargs, found, decision, config)
    else:
        return
    over = memory.over[layer_memory.mode_of(layer)]
    if len(over) >= _LAYERS_GRAPHS:
        over.clear()
    last = over.get(id(edge_index))
    kept.older = None if last is None else _others(last, kept)
    over[id(edge_index)] = kept


def _natively(kept: Last, kwargs: dict, found: reading.Read, decision: Decision) -> None:
    """Complete ``kept``, of a native call."""
    x = reading.source(kwargs, kept.source)
    kept.fell_back, kept.weighs = decision.fell_back, found.form.weight is not None
    kept.rows, kept.missed = (x.shape, x.dtype, x.requires_grad), None
    kept.code = decision.plan.code
    if decision.estimate is not None:
        kept.missed, kept.gain = ledger.of(found.graph.edge_index), decision.estimate.gain
        kept.patience = aggregation_cost.patience(decision.estimate)


def _by_kernels(kept: Last, layer: Any, kwargs: dict, found: reading.Read, decision: Decision,
                settled: bool) -> None:
    """Complete ``kept``, of a call by kernels. ``settled``: of an aggregation not made of others."""
    graph, given = found.graph, found.given
    kept.signature, kept.decision = _signature(kwargs), decision
    module, kept.cls = layer.aggr_module, type(layer)
    kept.settings, kept.known = reading.SETTINGS(layer.__dict__), found.known
    kept.module, kept.module_class = weakref.ref(module), type(module)
    kept.module_path = guards.aggregation_path(type(module))
    kept.reduces = None if settled else found.reduces
    kept.form, kept.stamp = found.form, found.known.stamp(layer)
    kept.view = weakref.ref(graph.built)  # type: ignore[arg-type]  # there, as the call ran by it
    # its numbers may be others at the next call
    kept.reduce = given.reduce if type(given.reduce) is str else None
    kept.sizes = graph.num_src, graph.num_dst, graph.flipped
    plain = (len(found.reduces) == 1 and kept.reduce is not None and given.more is None
             and not found.form.unfinished and given.x is reading.source(kwargs, kept.source)
             and found.known.aggregate is None and not found.known.updates)
    kept.shape, kept.layout = given.shape if plain else None, None
    if plain and given.weight is not None:
        kept.layout = aggregation_cuda.layout_of(given)


def _others(last: Last | None, new: Last) -> Last | None:
    """Of the calls kept over some edges the first few of other forms than the ``new`` one."""
    found: list[Last] = []
    while last is not None and len(found) < _FORMS - 1:
        if last.epoch == new.epoch and last.edge_index() is new.edge_index() and not (
                last.route == new.route
                and (last.rows == new.rows if new.route == "native"
                     else last.signature == new.signature)):
            found.append(last)
        last = last.older
    for one, after in zip(found, [*found[1:], None]):
        one.older = after
    return found[0] if found else None
