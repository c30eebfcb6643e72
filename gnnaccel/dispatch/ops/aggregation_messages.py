"""Aggregations of the messages of `messages` by CUDA kernels.

Sums and means leave nothing of the size of the edges times the features but the gradient of features of edges. Of other
reductions the messages are made, as the host makes them. A backward that is itself recorded runs on torch operations.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel.cuda import gated_sum, rectified
from gnnaccel.dispatch.ops import aggregation, messages
from gnnaccel.dispatch.ops.aggregation import Aggregation
from gnnaccel.dispatch.ops.call import Kernel
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.messages import Gated, Rectified, Shifted
from gnnaccel.dispatch.reasons import Reason, reason
from gnnaccel.dispatch.relational.cuda_maps import by_torch, dense


def kernel(graph: OpGraph, given: Aggregation) -> Kernel | Reason:
    """The way by kernels, or why there is none."""
    found = _PARTS[type(given.more)].kernel(graph, given)
    return found._replace(run=lambda: run(graph, given)) if type(found) is Kernel else found


def run(graph: OpGraph, given: Aggregation) -> Tensor:
    """`aggregation.plain` by kernels."""
    return _PARTS[type(given.more)].run(graph, given)


class _Split:
    """A sum of the neighbours' rows, and one of the weights."""

    @staticmethod
    def kernel(graph: OpGraph, given: Aggregation) -> Kernel | Reason:
        from gnnaccel.dispatch.ops import aggregation_cuda

        if given.reduce not in ("sum", "mean"):
            return reason("GA208", f"{aggregation.named(given.reduce)} of messages that both ends of an edge go into")
        parts = [aggregation_cuda.kernel(graph, one) for one in (given._replace(more=None), messages.weights_alone(given))]
        for part in parts:
            if type(part) is Reason:
                return part

        def compile_() -> None:
            for part in parts:
                part.compile()

        return Kernel(f"{parts[0].name}, shifted", ("shifted", *(part.key for part in parts)), compile_, parts[0].run)

    @staticmethod
    def run(graph: OpGraph, given: Aggregation) -> Tensor:
        from gnnaccel.dispatch.ops import aggregation_cuda

        return messages.split(aggregation_cuda.run, graph, given)


class _Rectified:
    """relu(x_j + e)."""

    @staticmethod
    def kernel(graph: OpGraph, given: Aggregation) -> Kernel | Reason:
        if given.reduce not in ("sum", "mean"):
            return _of_made(graph, given)
        form = math.prod(given.shape), given.x.dtype, False
        return Kernel(f"rectified: {given.reduce}", ("rectified", *form), _compiler(rectified.ENTRIES, rectified.kernels, form),
                      lambda: _Rectified.run(graph, given))

    @staticmethod
    def run(graph: OpGraph, given: Aggregation) -> Tensor:
        if given.reduce not in ("sum", "mean"):
            return _of_made(graph, given).run()
        return _RectifiedSum.apply(graph, given.reduce, given.more.constant, given.x, given.more.edge)


class _Gated:
    """sigmoid(q_j + k_i + e) * (x_j + f)."""

    @staticmethod
    def kernel(graph: OpGraph, given: Aggregation) -> Kernel | Reason:
        if given.reduce not in ("sum", "mean"):
            return _of_made(graph, given)
        form = math.prod(given.shape), given.x.dtype, sum(t is not None for t in given.more[2:]), False
        return Kernel(f"gated: {given.reduce}", ("gated", *form), _compiler(gated_sum.ENTRIES, gated_sum.kernels, form),
                      lambda: _Gated.run(graph, given))

    @staticmethod
    def run(graph: OpGraph, given: Aggregation) -> Tensor:
        if given.reduce not in ("sum", "mean"):
            return _of_made(graph, given).run()
        return _GatedSum.apply(graph, given.reduce, given.x, *given.more)


_PARTS = {Shifted: _Split, Rectified: _Rectified, Gated: _Gated}


def _compiler(entries: tuple[str, ...], kernels: Callable, form: tuple) -> Callable[[], None]:
    def compile_() -> None:
        for entry in entries:
            kernels(*form)(entry)

    return compile_


def _of_made(graph: OpGraph, given: Aggregation) -> Kernel | Reason:
    """Messages made edge by edge and reduced; the gradients of nodes' rows are sums in a fixed order."""
    from gnnaccel.dispatch.ops import cuda_functions, multi_reduce, torch_ops

    if given.reduce not in aggregation.REDUCES:
        return reason("GA208", f"{aggregation.named(given.reduce)} of messages that are more than neighbours' rows")

    def run() -> Tensor:
        take = cuda_functions.take if graph.num_edges else torch_ops.take
        made = messages.made(graph, given.x, None, given.more, take)
        return multi_reduce.multi_reduce(graph, made, (given.reduce,), of_edges=True).kernel.run().view(-1, *given.shape)

    stand_in = given.x.new_empty(()).expand(graph.num_edges, *given.shape)
    found = multi_reduce.multi_reduce(graph, stand_in, (given.reduce,), of_edges=True).kernel
    if type(found) is not Kernel:
        return found

    def compile_() -> None:
        found.compile()
        sums = cuda_functions.sum_variant(math.prod(given.shape), given.x.dtype).kernels
        for entry in ("forward", "merge"):
            sums(entry)

    return found._replace(key=("made", found.key), compile=compile_, run=run)


# --- sums and means ----------------------------------------------------------------------------------------------------

def _flat(t: Tensor | None) -> Tensor | None:
    return None if t is None else dense(t.flatten(1))


def _shared(graph: OpGraph, reduce: str, grad: Tensor) -> Tensor:
    """The gradient of each message's part in a sum."""
    grad = _flat(grad)
    if reduce == "mean":
        grad = (grad * graph.view().inverse_degree().unsqueeze(1)).to(grad.dtype)
    return grad


class _RectifiedSum(torch.autograd.Function):
    """[num_dst, *features] of x [num_src, *features] and features of edges [E, *features]."""

    @staticmethod
    def forward(ctx, graph, reduce, constant, x, edge):
        ctx.graph, ctx.reduce, ctx.constant = graph, reduce, constant
        ctx.save_for_backward(x, edge)
        out = rectified.forward(graph.view().csc(), _flat(x), _flat(edge), constant, reduce == "mean")
        return out.view(-1, *x.shape[1:]).detach()

    @staticmethod
    def backward(ctx, grad):
        (x, edge), graph, reduce, needs = ctx.saved_tensors, ctx.graph, ctx.reduce, ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            def again(x: Tensor, edge: Tensor) -> Tensor:
                return aggregation.plain(graph, Aggregation(reduce, x, None, tuple(x.shape[1:]), Rectified(edge, ctx.constant)))

            return None, None, None, *by_torch(again, (x, edge), needs, grad)
        d_x, d_edge = rectified.backward(graph.view().csr_by_id(), _flat(x), _flat(edge), _shared(graph, reduce, grad), needs[1])
        return None, None, None, d_x.view(x.shape), None if d_edge is None else d_edge.view(edge.shape)


class _GatedSum(torch.autograd.Function):
    """[num_dst, *features] of values [num_src, *features] and what else `messages.Gated` has."""

    @staticmethod
    def forward(ctx, graph, reduce, values, left, right, edge, beside):
        ctx.graph, ctx.reduce = graph, reduce
        ctx.save_for_backward(values, left, right, edge, beside)
        given = gated_sum.Operands(*map(_flat, (left, right, values, edge, beside)))
        return gated_sum.forward(graph.view().csc(), given, reduce == "mean").view(-1, *values.shape[1:]).detach()

    @staticmethod
    def backward(ctx, grad):
        (values, left, right, edge, beside), graph, reduce = ctx.saved_tensors, ctx.graph, ctx.reduce
        needs, shape = ctx.needs_input_grad[2:], values.shape[1:]
        if torch.is_grad_enabled():
            def again(values: Tensor, *more: Tensor | None) -> Tensor:
                return aggregation.plain(graph, Aggregation(reduce, values, None, tuple(shape), Gated(*more)))

            return None, None, *by_torch(again, (values, left, right, edge, beside), needs, grad)
        given, grad = gated_sum.Operands(*map(_flat, (left, right, values, edge, beside))), _shared(graph, reduce, grad)
        d_values = d_left = d_right = d_edge = d_beside = None
        if any(needs[2:]):
            d_right, d_edge, d_beside = gated_sum.by_row(graph.view().csc(), given, grad, *needs[3:])
        if any(needs[:2]):
            d_left, d_values = gated_sum.by_other(graph.view().csr_by_id(), given, grad)
        found = (d_values, d_left, d_right, d_edge, d_beside)
        return None, None, *(t.view(-1, *shape) if t is not None and need else None for t, need in zip(found, needs))
