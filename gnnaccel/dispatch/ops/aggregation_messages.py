"""Aggregations of the messages of `messages` by CUDA kernels.

Sums, means and extrema of generated messages allocate nothing of the size of the edges times the
features but the gradient of features of edges. Other reductions write the messages, as the host
does. A backward that is itself recorded runs on torch operations.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, overload

from torch import Tensor

from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.traverse import gated_sum, rectified
from gnnaccel.dispatch.generated import messages as generated
from gnnaccel.dispatch.generated.messages import Generated
from gnnaccel.dispatch.ops import aggregation, messages
from gnnaccel.dispatch.ops.aggregation import Aggregation, Reduce
from gnnaccel.dispatch.ops.call import Kernel
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.messages import Gated, Rectified, Shifted
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import Operation, wants_grad

if TYPE_CHECKING:
    class _Part(Protocol):
        """The way of one kind of messages, for aggregations of these."""

        @staticmethod
        def kernel(graph: OpGraph, given: Any) -> Kernel | Reason: ...

        @staticmethod
        def run(graph: OpGraph, given: Any) -> Tensor: ...

    class _OfRectified(Aggregation):
        more: Rectified

    class _OfGated(Aggregation):
        more: Gated

    class _OfGenerated(Aggregation):
        more: Generated


def kernel(graph: OpGraph, aggregation: Aggregation) -> Kernel | Reason:
    """The way by kernels, or why there is none."""
    way = _PARTS[type(aggregation.more)].kernel(graph, aggregation)
    return way._replace(run=lambda: run(graph, aggregation)) if type(way) is Kernel else way


def run(graph: OpGraph, aggregation: Aggregation) -> Tensor:
    """`aggregation.plain` by kernels."""
    return _PARTS[type(aggregation.more)].run(graph, aggregation)


def only_summed(reduce: Reduce) -> Reason:
    """Why there are no kernels for this reduction of messages that are split for a sum."""
    return reason("GA208", f"{aggregation.named(reduce)} of messages that both ends of an edge go "
                  "into")


class _Split:
    """A sum of the neighbours' rows, and one of the weights."""

    @staticmethod
    def kernel(graph: OpGraph, aggregation: Aggregation) -> Kernel | Reason:
        from gnnaccel.dispatch.ops import aggregation_cuda

        if aggregation.reduce not in ("sum", "mean"):
            return only_summed(aggregation.reduce)
        parts: list[Any] = [aggregation_cuda.kernel(graph, call) for call
                            in (aggregation._replace(more=None),
                                messages.weights_alone(aggregation))]
        for part in parts:
            if type(part) is Reason:
                return part

        def compile_() -> None:
            for part in parts:
                part.compile()

        return Kernel(f"{parts[0].name} of messages from both ends",
                      ("shifted", *(part.key for part in parts)), compile_, parts[0].run)

    @staticmethod
    def run(graph: OpGraph, aggregation: Aggregation) -> Tensor:
        from gnnaccel.dispatch.ops import aggregation_cuda

        return messages.split(aggregation_cuda.run, graph, aggregation)


class _Rectified:
    """relu(x_j + e)."""

    @staticmethod
    def kernel(graph: OpGraph, given: _OfRectified) -> Kernel | Reason:
        if given.reduce not in ("sum", "mean"):
            return _of_made(graph, given)
        form = math.prod(given.shape), given.x.dtype, False
        return Kernel(f"fused {given.reduce} of relu messages", ("rectified", *form),
                      _compiler(rectified.ENTRIES, rectified.kernels, form),
                      lambda: _Rectified.run(graph, given))

    @staticmethod
    def run(graph: OpGraph, given: _OfRectified) -> Tensor:
        if given.reduce not in ("sum", "mean"):
            return _of_made(graph, given).run()  # type: ignore[union-attr]
        operation = _RectifiedSum(graph, given.reduce, given.more.constant)
        return operation.apply(given.x, given.more.edge)


class _Gated:
    """sigmoid(q_j + k_i + e) * (x_j + f)."""

    @staticmethod
    def kernel(graph: OpGraph, given: _OfGated) -> Kernel | Reason:
        if given.reduce not in ("sum", "mean"):
            return _of_made(graph, given)
        form = math.prod(given.shape), given.x.dtype, sum(t is not None
                                                          for t in given.more[2:]), False
        return Kernel(f"fused {given.reduce} of gated messages", ("gated", *form),
                      _compiler(gated_sum.ENTRIES, gated_sum.kernels, form),
                      lambda: _Gated.run(graph, given))

    @staticmethod
    def run(graph: OpGraph, given: _OfGated) -> Tensor:
        if given.reduce not in ("sum", "mean"):
            return _of_made(graph, given).run()  # type: ignore[union-attr]
        return _GatedSum(graph, given.reduce).apply(given.x, *given.more)


class _Generated:
    """An expression, by kernels that are written for it."""

    @staticmethod
    def kernel(graph: OpGraph, given: _OfGenerated) -> Kernel | Reason:
        reduce, more = given.reduce, given.more
        if type(reduce) is str and reduce in generated.MOMENTS:
            return _moment(graph, given)
        if type(reduce) is not str or reduce not in generated.REDUCES:
            return reason("GA208", f"{aggregation.named(reduce)} of generated messages")
        if more.expression.score is not None and reduce != "sum":
            return reason("GA208", f"{reduce} of messages that a softmax weights")
        if more.weight is not None and reduce in generated.EXTREMA:
            return reason("GA208", f"{reduce} of generated messages that end in a linear map")
        grad = wants_grad(*more.all_inputs)
        return Kernel(f"generated message kernel ({reduce} of {more})",
                      generated.key(more, reduce),
                      lambda: generated.prepare(more, reduce, grad),
                      lambda: _Generated.run(graph, given))

    @staticmethod
    def run(graph: OpGraph, given: _OfGenerated) -> Tensor:
        return generated.run(graph, given.reduce, given.more)  # type: ignore[arg-type]  # named


def _moment(graph: OpGraph, given: _OfGenerated) -> Kernel | Reason:
    """Kernel of a variance, or a deviation, of generated messages: these are written for each edge
    by one, and reduced by another."""
    from gnnaccel.dispatch.ops import multi_reduce

    more, reduce = given.more, given.reduce
    if more.expression.score is not None or more.expression.others:
        return reason("GA208", f"{aggregation.named(reduce)} of messages that a softmax weights")
    grad = wants_grad(*more.all_inputs)
    stand_in = given.x.new_empty(()).expand(graph.num_edges, *more.out)
    way = multi_reduce.multi_reduce(graph, stand_in, (reduce,),  # type: ignore[arg-type]  # named
                                    of_edges=True).kernel
    if type(way) is not Kernel:
        return way

    def compile_() -> None:
        generated.prepare(more, "rows", grad)
        way.compile()

    return Kernel(f"generated message kernel ({reduce} of {more})",
                  (generated.key(more, "rows"), way.key), compile_,
                  lambda: _Generated.run(graph, given))


_PARTS: dict[type, type[_Part]] = {Shifted: _Split, Rectified: _Rectified, Gated: _Gated,
                                   Generated: _Generated}


def _compiler(entries: tuple[str, ...], kernels: Callable, form: tuple) -> Callable[[], None]:
    def compile_() -> None:
        for entry in entries:
            kernels(*form)(entry)

    return compile_


def _of_made(graph: OpGraph, given: Aggregation) -> Kernel | Reason:
    """Kernel of messages that are written edge by edge and reduced; gradients of nodes' rows are
    sums in a fixed order."""
    from gnnaccel.dispatch.ops import cuda_functions, multi_reduce, torch_ops

    if given.reduce not in aggregation.REDUCES:
        return reason("GA208",
                      f"{aggregation.named(given.reduce)} of messages that are more than "
                      "neighbours' rows")

    def run() -> Tensor:
        take = cuda_functions.take if graph.num_edges else torch_ops.take
        message = messages.made(graph, given.x, None, given.more, take)
        return multi_reduce.multi_reduce(
            graph, message, (given.reduce,),  # type: ignore[arg-type, union-attr]
            of_edges=True).kernel.run().view(-1, *given.shape)

    stand_in = given.x.new_empty(()).expand(graph.num_edges, *given.shape)
    way = multi_reduce.multi_reduce(graph, stand_in, (given.reduce,), of_edges=True).kernel
    if type(way) is not Kernel:
        return way

    def compile_() -> None:
        way.compile()
        sums = cuda_functions.sum_variant(math.prod(given.shape), given.x.dtype).kernels
        for entry in ("forward", "merge"):
            sums(entry)

    return way._replace(key=("made", way.key), compile=compile_, run=run)


# --- sums and means -------------------------------------------------------------------------------

@overload
def _flat(t: Tensor) -> Tensor: ...


@overload
def _flat(t: None) -> None: ...


def _flat(t: Tensor | None) -> Tensor | None:
    return None if t is None else dense(t.flatten(1))


def _shared(graph: OpGraph, reduce: str, grad: Tensor) -> Tensor:
    """The gradient of each message's part in a sum."""
    grad = _flat(grad)
    if reduce == "mean":
        grad = (grad * graph.view().inverse_degree().unsqueeze(1)).to(grad.dtype)
    return grad


class _RectifiedSum(Operation):
    """[num_dst, *features] of x [num_src, *features] and features of edges [E, *features]."""

    __slots__ = ("constant", "graph", "reduce")
    keeps_inputs = True

    def __init__(self, graph: OpGraph, reduce: str, constant: float):
        self.graph, self.reduce, self.constant = graph, reduce, constant

    def forward(self, needs, x, edge):
        by_dst, mean = self.graph.view().csc(), self.reduce == "mean"
        out = rectified.forward(by_dst, _flat(x), _flat(edge), self.constant, mean)
        return out.view(-1, *x.shape[1:]).detach(), (x, edge)

    def backward(self, needs, saved, grad):
        (x, edge), graph = saved, self.graph
        grad, by_src = _shared(graph, self.reduce, grad), graph.view().csr_by_id()
        d_x, d_edge = rectified.backward(by_src, _flat(x), _flat(edge), grad, needs[1])
        return d_x.view(x.shape), None if d_edge is None else d_edge.view(edge.shape)

    def reference(self, x, edge):
        more = Rectified(edge, self.constant)
        call = Aggregation(self.reduce, x, None, tuple(x.shape[1:]), more)
        return aggregation.plain(self.graph, call)


class _GatedSum(Operation):
    """[num_dst, *features] of values [num_src, *features] and the tensors of `messages.Gated`."""

    __slots__ = ("graph", "reduce")
    keeps_inputs = True

    def __init__(self, graph: OpGraph, reduce: str):
        self.graph, self.reduce = graph, reduce

    def forward(self, needs, values, left, right, edge, beside):
        operands = gated_sum.Operands(*map(_flat, (left, right, values, edge, beside)))
        out = gated_sum.forward(self.graph.view().csc(), operands, self.reduce == "mean")
        return out.view(-1, *values.shape[1:]).detach(), (values, left, right, edge, beside)

    def backward(self, needs, saved, grad):
        (values, left, right, edge, beside), graph = saved, self.graph
        operands = gated_sum.Operands(*map(_flat, (left, right, values, edge, beside)))
        grad, shape = _shared(graph, self.reduce, grad), values.shape[1:]
        d_values = d_left = d_right = d_edge = d_beside = None
        if any(needs[2:]):
            d_right, d_edge, d_beside = gated_sum.by_row(graph.view().csc(), operands, grad,
                                                         *needs[3:])
        if any(needs[:2]):
            d_left, d_values = gated_sum.by_other(graph.view().csr_by_id(), operands, grad)
        grads = (d_values, d_left, d_right, d_edge, d_beside)
        return [t.view(-1, *shape) if t is not None and need else None
                for t, need in zip(grads, needs)]

    def reference(self, values, *more):
        call = Aggregation(self.reduce, values, None, tuple(values.shape[1:]), Gated(*more))
        return aggregation.plain(self.graph, call)
