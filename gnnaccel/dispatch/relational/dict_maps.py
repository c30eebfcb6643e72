"""Linear maps by type of rows that come in an array per type (PyG's HeteroDictLinear), as one product by segment.

The rows are laid side by side by one copy, and the results are parts of one array: launches do not grow with the types. A type
whose result nobody used gets no gradients, as where each map is called by itself. Where backward is itself recorded it runs on
torch operations.
"""
from __future__ import annotations

from itertools import compress

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.dispatch.relational.by_type import leave_alone, product, weight_grad, whole
from gnnaccel.dispatch.relational.cuda_maps import by_torch, dense
from gnnaccel.dispatch.relational.pairs import Blocks


def maps(blocks: Blocks, sizes: tuple[int, ...], row: torch.dtype, x: list[Tensor], weights: list[Tensor],
         biases: list[Tensor]) -> tuple[Tensor, ...]:
    """[n, N] of ``row`` for each ``x`` [n, K], n as in ``sizes``: times its weight [N, K], plus its bias [N] if there are any.

    The results are no views: each may be changed in place.
    """
    return _Maps.apply(blocks, sizes, row, *x, *weights, *biases)


def maps_by_torch(row: torch.dtype, x: list[Tensor], weights: list[Tensor], biases: list[Tensor]) -> tuple[Tensor, ...]:
    """The same on torch operations, one map after the other."""
    return tuple(F.linear(a.to(row), w.to(row), None if b is None else b.to(row))
                 for a, w, b in zip(x, weights, biases or [None] * len(x)))


class _Maps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, blocks, sizes, row, *tensors):
        ctx.set_materialize_grads(False)
        x, weights, biases = _parted(tensors, len(sizes))
        rows, weight = torch.cat(x).to(row), torch.stack(weights).to(row)
        ctx.how = blocks, sizes, row
        ctx.save_for_backward(rows, weight, *tensors)
        found = product(blocks, rows, weight, True, torch.stack(biases).to(row) if biases else None)
        parts = tuple(part.data for part in found.split(sizes))
        leave_alone(ctx, parts, ctx.needs_input_grad[3:])
        return parts

    @staticmethod
    def backward(ctx, *grads):
        rows, weight, *tensors = ctx.saved_tensors
        used = [g is not None for g in grads]
        if not any(used):
            return (None,) * len(ctx.needs_input_grad)
        needs = [need and used[i % len(used)] for i, need in enumerate(ctx.needs_input_grad[3:])]
        given = tuple(compress(grads, used))
        if torch.is_grad_enabled():
            def again(*inputs: Tensor) -> tuple[Tensor, ...]:
                return tuple(compress(maps_by_torch(ctx.how[2], *_parted(inputs, len(used))), used))

            return None, None, None, *by_torch(again, tuple(tensors), tuple(needs), given)
        return None, None, None, *_gradients(ctx.how, rows, weight, tensors, grads, needs)


def _gradients(how: tuple, rows: Tensor, weight: Tensor, tensors: list[Tensor], grads: tuple, needs: list[bool]) -> list:
    blocks, sizes, row = how
    count, found = len(sizes), []
    grad = dense(whole(grads, sizes).to(row))
    if any(needs[:count]):
        found += product(blocks, grad, weight, False).split(sizes)
    else:
        found += [None] * count
    if any(needs[count:]):
        by_weight, by_bias = weight_grad(blocks, rows, grad, True)
        found += [*by_weight.unbind(0), *by_bias.unbind(0)]
    else:
        found += [None] * 2 * count
    return [g.to(t.dtype) if need else None for g, t, need in zip(found, tensors, needs)]


def _parted(tensors, count: int) -> tuple:
    """Rows, weights, and biases if there are any."""
    return tensors[:count], tensors[count:2 * count], tensors[2 * count:]
