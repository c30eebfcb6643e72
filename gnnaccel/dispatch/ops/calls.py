"""Makes an `OpCall` of a call of an operation that an adapter understood."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.ops import cuda_ops, products, torch_ops
from gnnaccel.dispatch.ops.call import Kernel, OpCall
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.ops.operands import Operands
from gnnaccel.dispatch.policy.reasons import Reason, reason


class Part(NamedTuple):
    """One relation's share of an operation over several; ``target``: the type of nodes that it ends
    in."""

    graph: OpGraph
    given: Operands
    target: int


def gspmm(graph: OpGraph, operands: Operands, reduce: str) -> OpCall:
    """`torch_ops.gspmm` over one relation."""
    return OpCall(operands.first.device, operands.first.dtype,
                  lambda: operands.result(torch_ops.gspmm(graph, operands, reduce)),
                  cuda_ops.gspmm(graph, operands, reduce), graph)


def gsddmm(graph: OpGraph, operands: Operands, targets: tuple[str, str]) -> OpCall:
    """`torch_ops.gsddmm` over one relation."""
    return OpCall(operands.first.device, operands.first.dtype,
                  lambda: operands.result(torch_ops.gsddmm(graph, operands, *targets)),
                  cuda_ops.gsddmm(graph, operands, targets), graph)


def edge_softmax(graph: OpGraph, logits: Tensor, by: str) -> OpCall:
    """`torch_ops.edge_softmax` over one relation."""
    return OpCall(logits.device, logits.dtype, lambda: torch_ops.edge_softmax(graph, logits, by),
                  cuda_ops.edge_softmax(graph, logits, by), graph)


# --- several relations ----------------------------------------------------------------------------

class _Tied(torch.autograd.Function):
    """Results of one operation: when any of them is used in a loss, the inputs of all get
    gradients, zeros if need be.

    Each result is a tensor of its own and no view, so that callers may change it in place, as the
    host's.
    """

    @staticmethod
    def forward(ctx, *results):
        ctx.set_materialize_grads(False)
        ctx.shapes, ctx.kinds = [t.shape for t in results], [t.new_empty(0) for t in results]
        return tuple(t.detach() for t in results)

    @staticmethod
    def backward(ctx, *grads):
        return tuple(like.new_zeros(shape) if grad is None and needed else grad
                     for grad, needed, shape, like in zip(grads, ctx.needs_input_grad, ctx.shapes,
                                                          ctx.kinds))


def _tied(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return _Tied.apply(*results) if any(t.requires_grad for t in results) else results


def gspmm_hetero(parts: list[Part], types: int, reduce: str) -> OpCall:
    """``reduce`` by type of nodes, over the edges of all relations that end there; an empty tensor
    where none does."""
    by_target = {t: [p for p in parts if p.target == t] for t in range(types)}

    def gathered(reduced: Callable[[list[Part]], Tensor]) -> tuple[Tensor, ...]:
        empty = torch.tensor([], device=torch.get_default_device())  # where the host makes it
        return _tied(tuple(reduced(group) if group else empty for group in by_target.values()))

    kernel: Kernel | Reason = reason("GA208",
                                     f"{reduce} over several relations that end in one type of "
                                     "nodes")
    if reduce == "sum" or all(len(group) < 2 for group in by_target.values()):
        kernel = _together([_kernel_or_nothing(cuda_ops.gspmm(p.graph, p.given, reduce),
                                               lambda p=p: _reduced([p], reduce))
                            for p in parts])
    if type(kernel) is Kernel:
        def run(run_all: Any = kernel.run) -> tuple[Tensor, ...]:
            outs = dict(zip(map(id, parts), run_all()))
            return gathered(lambda group: sum((outs[id(p)] for p in group[1:]),
                                              start=outs[id(group[0])]))

        kernel = kernel._replace(run=run)
    first = parts[0].given.first
    return OpCall(first.device, first.dtype,
                  lambda: gathered(lambda group: _reduced(group, reduce)), kernel)


def _reduced(parts: list[Part], reduce: str) -> Tensor:
    """``reduce`` over the edges of all these relations, which end in one type of nodes."""
    graph, operands = parts[0].graph, parts[0].given
    if len(parts) == 1:
        return operands.result(torch_ops.gspmm(graph, operands, reduce))
    messages = torch.cat([torch_ops.gsddmm(p.graph, p.given, "u", "e") for p in parts])
    index = torch.cat([p.graph.index("v") for p in parts])
    return operands.result(torch_ops.reduced(messages, index, graph.num_dst, reduce))


def gsddmm_hetero(parts: list[Part], targets: tuple[str, str]) -> OpCall:
    """`torch_ops.gsddmm` by relation."""
    def one(p: Part) -> Tensor:
        return p.given.result(torch_ops.gsddmm(p.graph, p.given, *targets))

    first = parts[0].given.first
    kernel = _together([_kernel_or_nothing(cuda_ops.gsddmm(p.graph, p.given, targets),
                                           lambda p=p: one(p)) for p in parts])
    if type(kernel) is Kernel:
        kernel = kernel._replace(
            run=lambda run_all=kernel.run: _tied(tuple(run_all())))  # type: ignore[misc]
    return OpCall(first.device, first.dtype, lambda: _tied(tuple(map(one, parts))), kernel)


def _kernel_or_nothing(kernel: Kernel | Reason,
                       otherwise: Callable[..., Tensor]) -> Kernel | Reason:
    """``kernel``, but a relation without edges needs none."""
    if type(kernel) is Reason and kernel.code == "GA303":
        return Kernel("", (), lambda: None, otherwise)
    return kernel


def _together(kernels: list[Kernel | Reason]) -> Kernel | Reason:
    """The kernels of all relations as one, which gives their results in a list."""
    for kernel in kernels:
        if type(kernel) is Reason:
            return kernel
    names = " + ".join(dict.fromkeys(
        k.name for k in kernels if k.name)) or "nothing: no edges"  # type: ignore[union-attr]
    return Kernel(names, tuple(k.key for k in kernels),  # type: ignore[union-attr]
                  lambda: [k.compile() for k in kernels]  # type: ignore[arg-type, union-attr]
                  and None, lambda: [k.run() for k in kernels])  # type: ignore[union-attr]


def edge_softmax_joined(graph: OpGraph, logits: list[Tensor], by: str) -> OpCall:
    """`edge_softmax` by relation, over all relations, joined in ``graph``; logits [E of each,
    *features], all alike."""
    joined, sizes = torch.cat(logits), [t.shape[0] for t in logits]
    call = edge_softmax(graph, joined, by)

    def split(run: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: _tied(run().split(sizes))

    kernel = (call.kernel._replace(run=split(call.kernel.run))
              if type(call.kernel) is Kernel else call.kernel)
    return OpCall(call.device, call.dtype, split(call.plain), kernel, graph)


# --- by segment -----------------------------------------------------------------------------------

def segment_reduce(x: Tensor, offsets: Tensor, reduce: str) -> OpCall:
    """`torch_ops.segment_reduce`."""
    return OpCall(x.device, x.dtype, lambda: torch_ops.segment_reduce(x, offsets, reduce),
                  cuda_ops.segment_reduce(x, offsets, reduce))


def scatter_add(x: Tensor, index: Tensor, rows: int) -> OpCall:
    """`torch_ops.scatter_add`."""
    return OpCall(x.device, x.dtype, lambda: torch_ops.scatter_add(x, index, rows))


def segment_mm(a: Tensor, b: Tensor, lengths: Tensor) -> OpCall:
    """`products.segment_mm`."""
    return OpCall(a.device, a.dtype, lambda: products.segment_mm(a, b, lengths, False),
                  products.kernel("segment_mm", a, b,
                                  lambda: products.segment_mm(a, b, lengths, True)))


def gather_mm(a: Tensor, b: Tensor, index_a: Tensor | None, index_b: Tensor | None) -> OpCall:
    """`products.gather_mm`."""
    return OpCall(a.device, a.dtype, lambda: products.gather_mm(a, b, index_a, index_b, False),
                  products.kernel("gather_mm", a, b,
                                  lambda: products.gather_mm(a, b, index_a, index_b, True)))
