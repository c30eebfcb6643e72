"""Inner products of rows with the attention vectors of several relations, head by head: the terms
of HAN's scores (Wang et al. 2019, arXiv:1903.07293; PyG's HANConv makes each relation's by itself),
in one pass over the rows; and the terms of GAT's scores, where each relation maps the rows.

Where backward is itself recorded it runs on torch operations.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import and_

import torch
from torch import Tensor

from gnnaccel.dispatch.run.autograd import Operation, wants_grad


def inner_products(x: Tensor, vectors: Tensor) -> Tensor:
    """[relations, N, heads] of x [N, heads, C] and vectors [relations, heads, C], both of one
    dtype, on any device."""
    if wants_grad(x, vectors):
        return _InnerProducts().apply(x, vectors)
    return _plain(x, vectors)


def _plain(x: Tensor, vectors: Tensor) -> Tensor:
    """A product for each head, as `torch.einsum` makes it of these in five times as many steps."""
    return torch.bmm(x.transpose(0, 1), vectors.permute(1, 2, 0)).permute(2, 1, 0)


class _InnerProducts(Operation):
    """The vectors' gradient is added up one by one: as a product of few columns over all nodes, a
    GPU makes it in one block for each head."""

    __slots__ = ()

    def forward(self, needs, x, vectors):
        return _plain(x, vectors), (x, vectors)

    def backward(self, needs, saved, grad):
        x, vectors = saved
        d_x = (torch.bmm(grad.permute(2, 1, 0), vectors.transpose(0, 1)).transpose(0, 1)
               if needs[0] else None)
        if not needs[1]:
            return d_x, None
        if not grad.is_cuda:
            by_head = torch.bmm(grad.permute(2, 0, 1), x.transpose(0, 1))
            return d_x, by_head.transpose(0, 1).contiguous()
        return d_x, torch.stack([(x * one.unsqueeze(2)).sum(0) for one in grad.unbind(0)])

    def reference(self, x, vectors):
        return _plain(x, vectors)


def mapped_products(x: list[Tensor], weights: list[Tensor], vectors: list[Tensor],
                    used: Callable[[], Sequence[bool]] | None = None) -> Tensor:
    """[sum of relations * N, heads] of several types of nodes, type after type: the inner products
    of ``vectors`` [relations, heads, C] with x [N, K] mapped by ``weights`` [relations, heads * C,
    K]. The mapped rows are not made: vectors go through the maps first. All of one dtype, on any
    device. ``used``: asked in backward, for which types there are to be gradients."""
    tensors = *x, *weights, *vectors
    return _MappedProducts(used).apply(*tensors) if wants_grad(*tensors) else _mapped(*tensors)[0]


def _mapped(*given: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The products; and of each type the vectors through the maps, [relations * heads, K]."""
    types, products, folded = len(given) // 3, [], []
    for x, weight, vector in zip(given, given[types:], given[2 * types:]):
        relations, heads, c = vector.shape
        each = relations * heads, c, weight.shape[2]
        folded.append(torch.bmm(vector.reshape(each[0], 1, c), weight.view(each)).squeeze(1))
        scores = torch.mm(folded[-1], x.t()).view(relations, heads, x.shape[0])
        products.append(scores.transpose(1, 2).flatten(0, 1))
    return torch.cat(products) if types > 1 else products[0], folded


class _MappedProducts(Operation):
    """`mapped_products` as one node of autograd, instead of eight for each type of nodes."""

    __slots__ = ("used",)

    def __init__(self, used: Callable[[], Sequence[bool]] | None):
        self.used = used

    def forward(self, needs, *given):
        out, folded = _mapped(*given)
        return out, (*given, *folded)

    def backward(self, needs, saved, grad):
        types, needs = len(needs) // 3, self._of_used(needs)
        x, weights, vectors, folded = (saved[at:at + types] for at in range(0, 4 * types, types))
        sizes = [len(vector) * len(rows) for vector, rows in zip(vectors, x)]
        kinds = zip(*(needs[at:at + types] for at in range(0, 3 * types, types)))
        each = map(_mapped_backward, grad.split(sizes), x, weights, vectors, folded, kinds)
        return [d for of_kind in zip(*each) for d in of_kind]

    def recorded(self, needs, saved, *grads):
        return super().recorded(self._of_used(needs), saved, *grads)

    def reference(self, *given):
        return _mapped(*given)[0]

    def _of_used(self, needs: tuple[bool, ...]) -> tuple[bool, ...]:
        return needs if self.used is None else tuple(map(and_, needs, 3 * tuple(self.used())))


def _mapped_backward(grad: Tensor, x: Tensor, weight: Tensor, vectors: Tensor, folded: Tensor,
                     needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of one type's x, weight and vectors."""
    if not any(needs):
        return None, None, None
    (relations, heads, c), nodes = vectors.shape, x.shape[0]
    each = relations * heads, c, x.shape[1]
    by_head = grad.reshape(relations, nodes, heads).transpose(1, 2).reshape(each[0], nodes)
    d_x = torch.mm(by_head.t(), folded) if needs[0] else None
    if not (needs[1] or needs[2]):
        return d_x, None, None
    d_folded, d_weight, d_vectors = torch.mm(by_head, x), None, None
    if needs[1]:
        d_weight = (vectors.reshape(each[0], c, 1) * d_folded.unsqueeze(1)).view(weight.shape)
    if needs[2]:
        d_vectors = torch.bmm(weight.view(each), d_folded.unsqueeze(2)).view(vectors.shape)
    return d_x, d_weight, d_vectors
