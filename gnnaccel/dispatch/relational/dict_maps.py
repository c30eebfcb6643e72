"""Linear maps by type of rows that come in an array per type (PyG's HeteroDictLinear), as one
product by segment.

The rows are laid side by side by one copy, and the results are parts of one array: launches do not
grow with the types. A type whose result nobody used gets no gradients, as where each map is called
by itself. Where backward is itself recorded it runs on torch operations.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.dispatch.relational.by_type import (made_of_frozen, of_used, product, weight_grad,
                                                  whole)
from gnnaccel.dispatch.relational.cuda_maps import dense
from gnnaccel.dispatch.relational.pairs import Blocks
from gnnaccel.dispatch.run.autograd import Operation


def maps(blocks: Blocks, sizes: tuple[int, ...], row: torch.dtype, x: list[Tensor],
         weights: list[Tensor], biases: list[Tensor]) -> tuple[Tensor, ...]:
    """[n, N] of ``row`` for each ``x`` [n, K], n as in ``sizes``: times its weight [N, K], plus its
    bias [N] if there are any.

    The results are no views: each may be changed in place.
    """
    return _Maps(blocks, sizes, row).apply(*x, *weights, *biases)


def maps_by_torch(row: torch.dtype, x: list[Tensor], weights: list[Tensor],
                  biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The maps on torch operations, one after the other."""
    return tuple(F.linear(a.to(row), w.to(row), None if b is None else b.to(row))
                 for a, w, b in zip(x, weights, biases or [None] * len(x)))


class _Maps(Operation):
    __slots__ = ("blocks", "row", "sizes")

    def __init__(self, blocks: Blocks, sizes: tuple[int, ...], row: torch.dtype):
        self.blocks, self.sizes, self.row = blocks, sizes, row

    def forward(self, needs, *tensors):
        (x, weights, biases), row = _parted(tensors, len(self.sizes)), self.row
        rows, weight = torch.cat(x).to(row), torch.stack(weights).to(row)
        bias = torch.stack(biases).to(row) if biases else None
        out = product(self.blocks, rows, weight, True, bias)
        return tuple(part.data for part in out.split(self.sizes)), (*tensors, rows, weight)

    def without_grad(self, needs, parts):
        return made_of_frozen(parts, needs)

    def backward(self, needs, saved, *grads):
        *tensors, rows, weight = saved
        how = self.blocks, self.sizes, self.row
        return _gradients(how, rows, weight, tensors, grads, of_used(needs, grads))

    def reference(self, *tensors):
        return maps_by_torch(self.row, *_parted(tensors, len(self.sizes)))

    def recorded(self, needs, saved, *grads):
        return super().recorded(of_used(needs, grads), saved, *grads)


def _gradients(how: tuple, rows: Tensor, weight: Tensor, tensors: list[Tensor], grads: tuple,
               needs: list[bool]) -> list:
    blocks, sizes, row = how
    count, by_input = len(sizes), []
    grad = dense(whole(grads, sizes).to(row))
    if any(needs[:count]):
        by_input += product(blocks, grad, weight, False).split(sizes)
    else:
        by_input += [None] * count
    if any(needs[count:]):
        by_weight, by_bias = weight_grad(blocks, rows, grad, True)
        by_input += [*by_weight.unbind(0), *by_bias.unbind(0)]
    else:
        by_input += [None] * 2 * count
    return [g.to(t.dtype) if need else None for g, t, need in zip(by_input, tensors, needs)]


def _parted(tensors, count: int) -> tuple:
    """Rows, weights, and biases if there are any."""
    return tensors[:count], tensors[count:2 * count], tensors[2 * count:]
