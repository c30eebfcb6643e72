"""HGT's maps by node type on CUDA: one node of autograd before its attention, and one after it.

A map by type is a product by segment: all types' rows lie in one array, type after type, or the
segments' rows are read and written where they lie (`Typed`). Where backward is itself recorded it
runs on torch operations.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.cuda.attention.blend_grad import blend_grad
from gnnaccel.cuda.segment import segment_backward
from gnnaccel.cuda.segment.segment_gemm_grad import weight_grad_and_sums
from gnnaccel.dispatch.relational import cuda_maps
from gnnaccel.dispatch.relational.cuda_maps import dense, matrices
from gnnaccel.dispatch.relational.pairs import Blocks
from gnnaccel.dispatch.run.autograd import Operation, gradients
from gnnaccel.dispatch.run.skinny_matmul import precision


def together(x: list[Tensor]) -> Tensor | None:
    """The rows of ``x`` in one array, for `project`: begun while there is nothing yet to multiply
    with. None for a single one."""
    return torch.cat([t.detach() for t in x]) if len(x) > 1 else None


def with_leading(x: list[Tensor], counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The rows of ``x``, one after the other in one array [nodes, K], and the first so many of each
    in another.

    Each result is for one node alone, `project` or `pair_maps`, whose gradient of it this adds to.
    """
    return _Leading(tuple([part.shape[0] for part in x]), counts).apply(*x)


def project(blocks: Blocks, weight: Tensor, transposed: bool, bias: Tensor | None, x: list[Tensor],
            rows: Tensor | None = None) -> tuple[Tensor, ...]:
    """The rows of ``x``, one after the other in one array [nodes, K], and maps of them by type,
    each [nodes, C].

    weight [types, maps, K, C], or [types, maps, C, K] if ``transposed``; bias [types, maps, C]. The
    first result is for `finish` alone, whose gradient of it this adds to; of a single ``x`` it is
    that. ``rows``: `together` of ``x``.
    """
    operation = _Project(blocks, tuple([part.shape[0] for part in x]), transposed)
    return operation.apply(together(x) if rows is None else rows, weight, bias, *x)


def product(blocks: Blocks, rows: Tensor, weight: Tensor, transposed: bool,
            bias: Tensor | None = None, into: Tensor | None = None,
            blend: tuple[Tensor, Tensor] | None = None, gelu_grad: Tensor | None = None) -> Tensor:
    """[nodes, C]: rows times their type's matrix [C, K] (``transposed``) or [K, C], plus its bias;
    added to ``into``, or with ``blend`` and ``gelu_grad`` as in `segment_gemm.multiply`."""
    out = into
    if blocks.order is not None and out is None:
        out = rows.new_empty(rows.shape[0], weight.shape[1 if transposed else 2])
    return cuda_maps.product(blocks.segments, rows, weight, transposed, blocks.order, bias,
                             out_index=blocks.order, out=out, accumulate=into is not None,
                             distinct=True, blend=blend, gelu_grad=gelu_grad)


def _gradients(blocks: Blocks, rows: Tensor, grad: Tensor, weight: Tensor, transposed: bool,
               into: Tensor | None = None,
               gelu_grad: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of ``product(blocks, rows, weight, transposed, bias)``: of the rows, added to
    ``into`` or as `product` with ``gelu_grad``, and of the matrices and biases. One reading of
    ``grad`` where `weight_grad` and `product` take two."""
    out = into
    if blocks.order is not None and out is None:
        out = grad.new_empty(grad.shape[0], rows.shape[1])
    d_rows, by_weight, by_bias = segment_backward.gradients(
        blocks.segments, dense(rows), dense(grad), matrices(weight), index=blocks.order,
        dy_index=blocks.order,
        transposed=transposed, sums=True, out=out, out_index=blocks.order,
        accumulate=into is not None, gelu_grad=gelu_grad,
        precision=precision())
    return d_rows, by_weight[:, 0], by_bias


def weight_grad(blocks: Blocks, rows: Tensor, grad: Tensor,
                transposed: bool) -> tuple[Tensor, Tensor]:
    """The gradients of the types' matrices, and of their biases [types, C]."""
    d_weight, sums = weight_grad_and_sums(blocks.segments, dense(rows), grad, index=blocks.order,
                                          dy_index=blocks.order, precision=precision())
    d_weight = d_weight[:, 0]
    return d_weight.transpose(1, 2).contiguous() if transposed else d_weight, sums


def _by_torch(blocks: Blocks, rows: Tensor, weight: Tensor, transposed: bool,
              bias: Tensor | None) -> Tensor:
    """`product` on torch operations, which can be differentiated any number of times."""
    rows = rows if blocks.order is None else rows[blocks.order]
    mapped = rows.new_empty(0, weight.shape[1 if transposed else 2])
    parts = [F.linear(rows[a:b], weight[t] if transposed else weight[t].t(),
                      None if bias is None else bias[t])
             for t, a, b in blocks.bounds]
    mapped = torch.cat(parts) if parts else mapped
    return (mapped
            if blocks.order is None
            else torch.empty_like(mapped).index_copy(0, blocks.order.long(), mapped))


# --- before the attention -------------------------------------------------------------------------

class _Leading(Operation):
    __slots__ = ("counts", "sizes")

    def __init__(self, sizes: tuple[int, ...], counts: tuple[int, ...]):
        self.sizes, self.counts = sizes, counts

    def forward(self, needs, *x):
        return self.reference(*x), x

    def backward(self, needs, saved, d_rows, d_first):
        d_rows = d_first.new_zeros(sum(self.sizes), d_first.shape[1]) if d_rows is None else d_rows
        parts = d_rows.split(self.sizes)
        if d_first is not None:
            torch._foreach_add_([part[:count] for part, count in zip(parts, self.counts)],
                                d_first.split(self.counts))
        return tuple(part if need else None for part, need in zip(parts, needs))

    def reference(self, *x):
        first = [part[:count] for part, count in zip(x, self.counts)]
        return (torch.cat(x), torch.cat(first)) if len(x) > 1 else (x[0].view_as(x[0]), first[0])


class _Project(Operation):
    """`project`. The inputs are ``rows``, weight, bias and ``x``."""

    __slots__ = ("blocks", "sizes", "transposed")

    def __init__(self, blocks: Blocks, sizes: tuple[int, ...], transposed: bool):
        self.blocks, self.sizes, self.transposed = blocks, sizes, transposed

    def forward(self, needs, rows, weight, bias, *x):
        rows = x[0].view_as(x[0]) if rows is None else rows.data
        biases = [None] * weight.shape[1] if bias is None else bias.unbind(1)
        maps = [product(self.blocks, rows, w, self.transposed, b)
                for w, b in zip(weight.unbind(1), biases)]
        return (rows, *maps), (None, weight, bias, *x, rows)

    def backward(self, needs, saved, d_rows, *grads):
        _, weight, bias, *_, rows = saved
        grads = [None if g is None else dense(g) for g in grads]
        return None, *_project_backward(self, weight, bias, rows, needs[1:], d_rows, grads)

    def reference(self, rows, weight, bias, *x):
        rows = torch.cat(x)
        biases = [None] * weight.shape[1] if bias is None else bias.unbind(1)
        maps = (_by_torch(self.blocks, rows, w, self.transposed, b)
                for w, b in zip(weight.unbind(1), biases))
        return rows, *maps


def _project_backward(of: _Project, weight: Tensor, bias: Tensor | None, rows: Tensor,
                      needs: tuple[bool, ...], d_rows: Tensor | None,
                      grads: list[Tensor | None]) -> tuple:
    blocks, transposed = of.blocks, of.transposed
    d_weight = d_bias = None
    d_x: Sequence[Tensor | None]
    by_map: list[Sequence[Any]]
    sums: Sequence[Tensor | None]
    d_x, by_map = [None] * len(of.sizes), []
    for grad, matrix in zip(grads, weight.unbind(1)):
        if grad is None:
            sums = torch.zeros_like(matrix), matrix.new_zeros(matrix.shape[0],
                                                              matrix.shape[1 if transposed else 2])
        else:
            d_rows, *sums = _map_backward(blocks, rows, grad, matrix, transposed, d_rows,
                                          any(needs[2:]), needs[0] or needs[1])
        by_map.append(sums)
    if needs[0] or needs[1]:
        d_weight = torch.stack([w for w, _ in by_map], 1).to(weight.dtype) if needs[0] else None
        d_bias = (torch.stack([b for _, b in by_map], 1).to(bias.dtype) if needs[1]
                  and bias is not None else None)
    if any(needs[2:]):
        d_x = d_x if d_rows is None else d_rows.split(of.sizes)
    return d_weight, d_bias, *(d if need else None for d, need in zip(d_x, needs[2:]))


def _map_backward(blocks: Blocks, rows: Tensor, grad: Tensor, matrix: Tensor, transposed: bool,
                  d_rows: Tensor | None, by_rows: bool,
                  by_weight: bool) -> tuple[Tensor | None, ...]:
    """Gradients of one map: of the rows, which join ``d_rows``, of its matrices and of its biases,
    where they are asked for."""
    if not by_rows:
        return d_rows, *(weight_grad(blocks, rows, grad, transposed) if by_weight else (None, None))
    # memory for the kernels to add to
    into = (d_rows if d_rows is not None and d_rows.dtype is torch.float32
            and d_rows.is_contiguous() else None)
    if by_weight:
        map_d_rows, *sums = _gradients(blocks, rows, grad, matrix, transposed, into)
    else:
        map_d_rows, *sums = product(blocks, grad, matrix, not transposed, into=into), None, None
    return map_d_rows if d_rows is None or into is not None else d_rows + map_d_rows, *sums


# --- after the attention --------------------------------------------------------------------------

def finish(blocks: Blocks, sizes: tuple[int, ...], out: Tensor, weight: Tensor, transposed: bool,
           bias: Tensor | None, alpha: Tensor | None, rows: Tensor | None,
           gelu: bool = True) -> tuple[Tensor, ...]:
    """``out``, after GELU if asked for, mapped by type, in parts of ``sizes``; with ``alpha``
    [types], that share of it and the rest of ``rows``. weight [types, ., .], as for `project`.

    The results are no views: each may be changed in place. The gradient of ``rows`` is memory of
    its own, to be added to.
    """
    operation = _Finish(blocks, sizes, transposed, gelu)
    return operation.apply(out, weight, bias, alpha, None if alpha is None else rows)


def finish_types(blocks: Blocks, sizes: tuple[int, ...], out: Tensor, weights: list[Tensor],
                 biases: list[Tensor], gates: list[Tensor],
                 rows: Tensor | None) -> tuple[Tensor, ...]:
    """`finish`, after GELU, with parameters of their own for each type: a weight [C, C], a bias [C]
    and a gate [1], whose sigmoid is the share; of biases and gates all or none.

    A type whose result nobody used gives its parameters no gradients, as where each map is called
    by itself.
    """
    operation = _FinishTypes(blocks, sizes)
    return operation.apply(out, rows if gates else None, *weights, *biases, *gates)


def _finish_by_torch(blocks: Blocks, sizes: tuple[int, ...], transposed: bool, gelu: bool,
                     out: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor | None,
                     rows: Tensor | None) -> tuple[Tensor, ...]:
    mapped = _by_torch(blocks, F.gelu(out) if gelu else out, weight, transposed, bias)
    if alpha is not None:
        mapped = torch.lerp(rows, mapped,  # type: ignore[arg-type]
                            alpha.index_select(0, blocks.relation).unsqueeze(1))
    return tuple(part.clone() for part in mapped.split(sizes))


def _finished(blocks: Blocks, grown: Tensor, weight: Tensor, transposed: bool, bias: Tensor | None,
              alpha: Tensor | None, rows: Tensor | None) -> Tensor:
    blend = None if alpha is None else (alpha.float().contiguous(),
                                        dense(rows))  # type: ignore[arg-type]
    return product(blocks, grown, weight, transposed, bias, blend=blend)


class _Finish(Operation):
    """`finish`. ``how``: its arguments that are no tensors."""

    __slots__ = ("how",)

    def __init__(self, *how: Any):
        self.how = how

    def forward(self, needs, out, weight, bias, alpha, rows):
        blocks, sizes, transposed, gelu = self.how
        grown = F.gelu(out) if gelu else out
        mapped = _finished(blocks, grown, weight, transposed, bias, alpha, rows)
        parts = tuple([part.data for part in mapped.split(sizes)])
        return parts, (out, weight, bias, alpha, rows, grown if needs[1] else None)

    def backward(self, needs, saved, *grads):
        *inputs, grown = saved
        return _finish_backward(self.how, inputs, grown, needs, dense(whole(grads, self.how[1])))

    def reference(self, *inputs):
        return _finish_by_torch(*self.how, *inputs)


def _finish_backward(how: tuple, inputs: list, grown: Tensor | None, needs: tuple[bool, ...],
                     grad: Tensor) -> tuple:
    """Gradients of y = gelu(out) W + b, alpha y + (1 - alpha) rows. The sum of <grad, y> over
    a type's rows, which the gradient of alpha takes, follows from the sums that those of W and b
    take: <W, sum of gelu(out)^T grad> + <b, sum of grad>."""
    (blocks, _, transposed, gelu), (out, weight, bias, alpha, rows) = how, inputs
    by_weight = by_bias = d_alpha = d_rows = d_out = None
    share: Any = None if alpha is None else alpha.view(-1, 1)
    scaled, gelu_at = (weight if alpha is None else weight * share.unsqueeze(2),
                       dense(out) if gelu else None)
    if needs[1] or needs[2] or needs[3]:
        grown = grown if grown is not None else F.gelu(out) if gelu else out
        if needs[0]:
            d_out, by_weight, by_bias = _gradients(blocks, grown, grad, scaled, transposed,
                                                   gelu_grad=gelu_at)
        else:
            by_weight, by_bias = weight_grad(blocks, grown, grad, transposed)
    elif needs[0]:
        d_out = product(blocks, grad, scaled, not transposed, gelu_grad=gelu_at)
    if alpha is not None and (needs[3] or needs[4]):
        d_rows = torch.empty_like(grad) if needs[4] else None
        by_rows = blend_grad(blocks.segments, grad, dense(rows), alpha.float().contiguous(),
                             blocks.order, d_rows)
    if alpha is not None and needs[3]:
        d_alpha = (weight * by_weight).sum((1, 2)) - by_rows
        d_alpha = (d_alpha if bias is None else d_alpha + (bias * by_bias).sum(1)).to(alpha.dtype)
    if alpha is not None and by_weight is not None:
        by_weight, by_bias = by_weight * share.unsqueeze(2), by_bias * share
    return d_out, _like(by_weight, inputs[1],
                        needs[1]), _like(by_bias, bias, needs[2]), d_alpha, d_rows


def _like(grad: Tensor | None, t: Tensor | None, need: bool) -> Tensor | None:
    return grad.to(t.dtype) if need and t is not None else None  # type: ignore[union-attr]


# --- the same with parameters of each type --------------------------------------------------------

class _FinishTypes(Operation):
    """`finish_types`. Parameters are not saved for backward, as the host does not save all of them
    either: they may be changed before it."""

    __slots__ = ("how", "parameters")

    def __init__(self, blocks: Blocks, sizes: tuple[int, ...]):
        self.how = blocks, sizes, True, True

    def forward(self, needs, out, rows, *parameters):
        blocks, sizes, *_ = self.how
        weight, bias, gate = _stacked(len(sizes), rows is not None, parameters)
        alpha, grown = None if gate is None else gate.sigmoid(), F.gelu(out)
        mapped = _finished(blocks, grown, weight, True, bias, alpha, rows)
        self.parameters = parameters
        saved = grown if any(needs[2:2 + len(sizes)]) else None
        parts = tuple([part.data for part in mapped.split(sizes)])
        return parts, (out, weight, bias, alpha, rows, gate, saved)

    def without_grad(self, needs, parts):
        return () if any(needs[:2]) else made_of_frozen(parts, needs[2:])

    def backward(self, needs, saved, *grads):
        *inputs, gate, grown = saved
        ends, needs = needs[:2], of_used(needs[2:], grads)
        kinds, grad = _kinds(len(grads), gate is not None, needs), dense(whole(grads, self.how[1]))
        wanted = ends[0], *map(any, kinds), ends[1]
        d_out, *by_kinds, d_rows = _finish_backward(self.how, inputs, grown, wanted, grad)
        if by_kinds[2] is not None:
            by_kinds[2] = torch.ops.aten.sigmoid_backward(by_kinds[2], inputs[3]).view(-1, 1)
        parts = []
        for by_kind, kind in zip(by_kinds, kinds):
            parts += (None,) * len(kind) if by_kind is None else by_kind.unbind(0)
        if not all(needs):
            parts = [part if need else None for part, need in zip(parts, needs)]
        return d_out, d_rows, *parts

    def recorded(self, needs, saved, *grads):
        """Gradients at the values that the parameters had, differentiable by the parameters."""
        out, weight, bias, _, rows, gate, _ = saved

        def reference(out: Tensor, rows: Tensor | None, *parameters: Tensor) -> tuple[Tensor, ...]:
            parameters = tuple(t if grads[at % len(grads)] is not None else t.detach()
                               for at, t in enumerate(parameters))
            w: Any
            stacked: tuple[Any, ...] = _stacked(len(grads), rows is not None, parameters)
            w, b, g = (None if value is None else value + (t - t.detach())
                       for value, t in zip((weight, bias, gate), stacked))
            alpha = None if g is None else g.sigmoid()
            return _finish_by_torch(*self.how, out, w, b, alpha, rows)

        needs = (*needs[:2], *of_used(needs[2:], grads))
        return gradients(reference, (out, rows, *self.parameters), needs, grads)


def made_of_frozen(parts: tuple[Tensor, ...], needs: tuple[bool, ...]) -> list[Tensor]:
    """The results of ``parts``, one a type, that are made of no input which wants a gradient.
    ``needs``: whether each input does: kind by kind, and in each kind type by type."""
    return [part for at, part in enumerate(parts) if not any(needs[at::len(parts)])]


def of_used(needs: tuple[bool, ...], grads: tuple[Tensor | None, ...]) -> tuple[bool, ...]:
    """``needs`` of inputs as for `made_of_frozen`, False where their result has no gradient."""
    return tuple([need and grads[at % len(grads)] is not None for at, need in enumerate(needs)])


def whole(grads: tuple[Any, ...] | list[Tensor], sizes: tuple[int, ...]) -> Tensor:
    """[nodes, ..]: the gradients of parts of ``sizes``, of which at least one is there; zeros for
    the others."""
    if len(grads) == 1:
        return grads[0]
    missing = [size for size, grad in zip(sizes, grads) if grad is None]
    if missing:
        present = next(grad for grad in grads if grad is not None)
        zeros = present.new_zeros(max(missing), *present.shape[1:])
        grads = [zeros[:size] if grad is None else grad for size, grad in zip(sizes, grads)]
    return torch.cat(grads)


def _kinds(count: int, gated: bool, of_parameters) -> tuple:
    """Entries of ``of_parameters`` for the weights, for the biases and for the gates."""
    weights, rest = of_parameters[:count], of_parameters[count:]
    biases = len(rest) - count * gated
    return weights, rest[:biases], rest[biases:]


def _stacked(count: int, gated: bool,
             parameters: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    weights, biases, gates = _kinds(count, gated, parameters)
    return (torch.stack(weights), torch.stack(biases) if biases else None,
            torch.cat(gates) if gates else None)
