"""Sums over neighbours whose rows are stored in fewer bytes, with a backward that gathers stored
gradients.

    forward    out_i = sum_e w_e x'_j,           x' = read(store(x)), to nearest
    backward   dx_j  = sum_e w_e g'_i,           g' = read(store(g)), stochastically
               dw_e  = <g'_i, x'_j>              the rows of both sums once more; <g_i, x'_j> unless
               both are int8

for an edge e from j to i: the gradient of a sum of x', passed straight through the rounding of x.
Every gradient is linear in g', so rounding without bias leaves it without bias. Means divide after
the sum, and g before or, by its scales, after the rounding. Kernels and torch operations compute
the same. A backward that is itself recorded takes g as it is.
"""
from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.int8 import quantize
from gnnaccel.cuda.runtime.launch import MAX_WIDTH, fp32
from gnnaccel.cuda.traverse import aggregate as sums
from gnnaccel.dispatch.ops import aggregation, aggregation_cpu, aggregation_once
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.aggregation_route import Decision, Run
from gnnaccel.dispatch.ops.call import Kernel, compile_reason
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import cost, measure, reuse, rows, settings
from gnnaccel.dispatch.quantized.cost import Sizes
from gnnaccel.dispatch.quantized.rows import Stored
from gnnaccel.dispatch.quantized.settings import Entry
from gnnaccel.dispatch.quantized.use import Counted, Guarded, Use, decide
from gnnaccel.dispatch.run.autograd import Operation, gradients, stand_in


def narrowed(layer: Any, entry: Entry, graph: OpGraph, aggregation: Aggregation, config: Config,
             decision: Decision, several: bool = False) -> Decision:
    """``decision`` of one call of ``layer`` with rows in the format that ``entry`` asks for.
    ``several``: it is about several reductions of the same messages."""
    grad = torch.is_grad_enabled() and aggregation.x.requires_grad
    sizes = Sizes(graph.num_src, graph.num_dst, graph.num_edges, math.prod(aggregation.shape),
                  aggregation.x.element_size(), grad)
    plan = decision.plan
    why = plan.rejected[0][1] if decision.run is None and plan.rejected else None
    against = (reason("GA603", "several reductions of the same messages")
               if several else unfit(graph, aggregation))
    if decision.run is aggregation_once.run:
        against = (against
                   or reason("GA604", "the graph was not used often enough yet to be prepared"))
    use = decide(layer, entry, config, plan.route, why, aggregation.x.dtype, sizes, against)
    if type(use) is Use and use.kernels:
        use = compile_reason(_kernel(aggregation, use)) or use
    if type(use) is Reason:
        return _in_fp32(decision, entry, use)
    assert decision.run is not None
    entry.storage, entry.gain = use.storage, cost.gain(sizes, use.storage) if use.kernels else None
    plan = plan._replace(kernel=f"{plan.kernel}, {use.text} rows", storage=use.text)
    return decision._replace(plan=plan, run=_Run(use, decision.run))


def unfit(graph: OpGraph, given: Aggregation) -> Reason | None:
    """Why a call of this form cannot be quantized."""
    if given.more is not None:
        return reason("GA603", "messages are more than the neighbours' rows")
    if given.reduce not in ("sum", "mean"):
        return reason("GA603",
                      f"the reduction is a {aggregation.named(given.reduce)}, not a sum or a mean")
    if given.kind == "channel" or (given.kind == "head" and given.shape[-1] > MAX_WIDTH):
        assert given.weight is not None
        return reason("GA603",
                      f"weights of shape {list(given.weight.shape)}: one for each "
                      f"channel, or heads above {MAX_WIDTH}")
    return None if graph.num_edges and all(given.shape) else reason("GA303")


def _in_fp32(decision: Decision, entry: Entry, why: Reason) -> Decision:
    """``decision``, whose calls are counted. Nothing is remembered while the order of layers is
    being learnt."""
    if decision.run is None:
        entry.fell_back(why)
        return decision._replace(again=settings.learning(why),
                                 fell_back=partial(entry.fell_back, why))
    rejected = (*decision.plan.rejected, ("rows in fewer bytes", why))
    return decision._replace(plan=decision.plan._replace(rejected=rejected),
                             run=Counted(entry, why, decision.run), again=settings.learning(why))


class _Run(Guarded):
    """``plain``: the same in fp32."""

    __slots__ = ("plain",)

    def __init__(self, use: Use, plain: Run):
        super().__init__(use)
        self.plain = plain

    def __call__(self, graph: OpGraph, aggregation: Aggregation) -> Tensor:
        call = graph, aggregation
        return self.guarded(aggregation.x.device, partial(run, self.use, *call),
                            partial(self.plain, *call), partial(_sampled, self.use, *call))


def _sampled(use: Use, graph: OpGraph, aggregation: Aggregation, count: int, turn: int) -> Tensor:
    x = aggregation.x.detach()
    stored = rows.store(x, use.storage.format, False, use.kernels)
    stored = (stored if type(stored) is quantize.Int8Rows
              else stored.view(x.shape))  # type: ignore[union-attr]

    def weights(src: Tensor, dst: Tensor, edge: Tensor, real: Tensor) -> Tensor:
        assert aggregation.weight is not None
        return aggregation.weight.detach()[edge]

    return measure.error(graph.view(), aggregation.weight is not None, x, stored,
                         None if aggregation.weight is None else weights, count, turn)


# --- the run --------------------------------------------------------------------------------------

def run(use: Use, graph: OpGraph, aggregation: Aggregation) -> Tensor:
    """`aggregation.plain` of an aggregation that is not `unfit`, with rows in ``use.storage``."""
    heads, width = _layout(aggregation)
    weight = aggregation.weight
    if weight is not None:
        weight = weight.reshape(-1) if aggregation.kind == "edge" else weight.reshape(-1, heads)
    source = (weakref.ref(aggregation.x) if use.entry.maps and use.storage.format == "int8"
              and aggregation.x.dim() == 2 else None)
    call = _Call(use, graph, aggregation.reduce == "mean", heads, width, aggregation.x.dtype,
                 use.entry.watch.flags(aggregation.x.device), source)
    out = _Aggregate(call).apply(aggregation.x.reshape(-1, heads, width), weight)
    return out.view(-1, *aggregation.shape)


def _layout(aggregation: Aggregation) -> tuple[int, int]:
    """Heads and width of a row as the kernels see it."""
    features, last = math.prod(aggregation.shape), aggregation.shape[-1]
    return (features // last, last) if aggregation.kind == "head" else sums.factored(features)


def _kernel(aggregation: Aggregation, use: Use) -> Kernel:
    heads, width = _layout(aggregation)
    kind, storage, dtype = aggregation.kind, use.storage, aggregation.x.dtype
    mean = aggregation.reduce == "mean"

    def compile_() -> None:
        rows.prepare(storage, heads * width, dtype, dtype)
        forward = _variant(heads, width, storage.row, dtype, kind, mean).kernels
        backward = _variant(heads, width, dtype if storage.backward == "fp32" else storage.grad,
                            dtype, kind, False).kernels
        for kernels in (forward, backward):
            kernels("forward")
            kernels("merge")

    return Kernel("aggregate", ("quantized aggregation", heads, width, kind, storage, dtype, mean),
                  compile_, lambda: None)


def _variant(heads: int, width: int, row: torch.dtype, out: torch.dtype, kind: str,
             mean: bool) -> sums.Variant:
    return sums.variant(heads, width, row, out, kind, "place", False, mean, False)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call; ``dtype``: of the features and the result; ``flags``: of the guard; ``source``: the
    features as the layer has them, where a linear map of it may use the stored rows."""

    use: Use
    graph: OpGraph
    mean: bool
    heads: int
    width: int
    dtype: torch.dtype
    flags: Tensor | None
    source: weakref.ref | None = None

    def store(self, x: Tensor, form: str, draw: bool, side: int) -> Stored:
        flag = None if self.flags is None else self.flags[side:side + 1]
        return rows.store(x, form, draw, self.use.kernels, flag)

    def features(self, x: Tensor) -> Stored:
        """``x`` stored: by the linear map that made it, or now, and then offered to a map that
        comes next."""
        source = None if self.source is None else self.source()
        rows_or_entry = None if source is None else reuse.take(source)
        if type(rows_or_entry) is quantize.Int8Rows:
            return rows_or_entry
        stored = self.store(x, self.use.storage.format, False, 0)
        if type(rows_or_entry) is Entry:
            rows_or_entry.feeds = True  # the next time it gives rows
        elif source is not None:
            reuse.offer(source, stored)  # type: ignore[arg-type]  # int8 where there is a source
        return stored

    def sum(self, stored: Stored, weight: Tensor | None) -> Tensor:
        """[num_dst, H, D] in ``dtype``."""
        if not self.use.kernels:
            return self.by_torch(rows.read(stored, (-1, self.heads, self.width)), weight,
                                 self.mean).to(self.dtype)
        variant = _variant(self.heads, self.width, self.use.storage.row, self.dtype, _kind(weight),
                           self.mean)
        return sums.forward(variant, self.graph.view().csc(places=weight is not None), stored,
                            fp32(weight))

    def by_torch(self, x: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
        weight = None if weight is None else weight.to(x.dtype).view(weight.shape[0], -1, 1)
        call = Aggregation("mean" if mean else "sum", x, weight, tuple(x.shape[1:]))
        way = (aggregation_cpu.run if x.is_cpu
               and aggregation_cpu.unfit(self.graph, call) is None else aggregation.plain)
        return way(self.graph, call)

    def gradient(self, grad: Tensor) -> tuple[Stored, Tensor]:
        """Gradient of a sum's result, stored and as it is; of a mean, divided by the degrees."""
        form, draw = self.use.storage.backward, rows.stochastic()
        inverse = self.graph.view().inverse_degree() if self.mean else None
        plain = grad if inverse is None else (grad * inverse.view(-1, 1, 1)).to(grad.dtype)
        if form != "int8":
            return self.store(plain, form, draw, 1), plain
        stored = self.store(grad, form, draw, 1)
        return stored if inverse is None else rows.scaled(stored, inverse), plain


class _Aggregate(Operation):
    """[num_dst, H, D] of x [num_src, H, D] and weights [E], [E, H] or None."""

    __slots__ = ("call",)

    def __init__(self, call: _Call):
        self.call = call

    def forward(self, needs, x, weight):
        stored, keep = self.call.features(x), needs[1]  # the weights' gradient has the rows in it
        saved = (x, weight, *rows.packed(stored)) if keep else (None, weight, None, None)
        return self.call.sum(stored, weight), saved

    def backward(self, needs, saved, grad):
        (_, weight, data, scale), call = saved, self.call
        stored = None if data is None else rows.unpacked(data, scale, call.heads * call.width)
        stored_grad, plain = call.gradient(grad.contiguous())
        way = _by_kernels if call.use.kernels else _by_torch
        return way(call, stored_grad, plain, stored, weight, needs)

    def recorded(self, needs, saved, grad):
        x, weight, *_ = saved
        x = stand_in(grad, self.call.graph.num_src) if x is None else x
        return gradients(self.reference, (x, weight), needs, (grad,))

    def reference(self, x, weight):
        return self.call.by_torch(x, weight, self.call.mean)


def _by_kernels(call: _Call, given: Stored, plain: Tensor, stored: Any, weight: Any,
                needs: tuple) -> tuple:
    view, kind, d_x, d_weight = call.graph.view(), _kind(weight), None, None
    if needs[0]:
        row = (torch.int8 if type(given) is quantize.Int8Rows
               else given.dtype)  # type: ignore[union-attr]
        by_src = view.csr(places=False) if weight is None else view.csr_by_id()
        d_x = sums.forward(_variant(call.heads, call.width, row, call.dtype, kind, False), by_src,
                           given, fp32(weight))
    if needs[1]:
        variant = _variant(call.heads, call.width, call.use.storage.row, call.dtype, kind, False)
        d_weight = sums.edge_dot(variant, view.csc(), _left(given, plain, stored), stored)
        d_weight = (d_weight.sum(1)
                    if weight.dim() == 1 else d_weight)[:weight.shape[0]].to(weight.dtype)
    return d_x, d_weight


def _by_torch(call: _Call, given: Stored, plain: Tensor, stored: Stored | None,
              weight: Tensor | None, needs: tuple) -> tuple:
    """The gradients on torch operations: of `_Call.by_torch`, which is linear in each input."""
    shape = (-1, call.heads, call.width)
    rounded = rows.read(given, shape)
    with torch.enable_grad():
        x = (rounded.new_zeros(call.graph.num_src, *shape[1:])
             if stored is None else rows.read(stored, shape))
        x, w = (x.detach().requires_grad_(),
                None if weight is None else weight.detach().float().requires_grad_())
        out = call.by_torch(x, w, False)
    d_x = (torch.autograd.grad(out, x, rounded, retain_graph=True)[0].to(call.dtype)
           if needs[0] else None)
    if not needs[1]:
        return d_x, None
    factor = _left(given, plain, stored)
    factor = rows.read(factor, shape) if factor is given else plain.float()
    return d_x, torch.autograd.grad(
        out, w, factor)[0].to(weight.dtype)  # type: ignore[arg-type, union-attr]


def _left(given: Stored, plain: Tensor, stored: Stored | None) -> Stored:
    """Factor of the stored rows in the weights' gradient: the stored gradient where both are
    int8."""
    both = type(given) is type(stored) is quantize.Int8Rows
    return given if both else plain


def _kind(weight: Tensor | None) -> str:
    return "none" if weight is None else "edge" if weight.dim() == 1 else "head"
