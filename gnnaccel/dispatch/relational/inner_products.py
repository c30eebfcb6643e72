"""Inner products of rows with the attention vectors of several relations, head by head: the terms
of HAN's scores (Wang et al. 2019, arXiv:1903.07293; PyG's HANConv makes each relation's by itself),
in one pass over the rows.

Where backward is itself recorded it runs on torch operations.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.dispatch.run.autograd import Operation


def inner_products(x: Tensor, vectors: Tensor) -> Tensor:
    """[relations, N, heads] of x [N, heads, C] and vectors [relations, heads, C], both of one
    dtype, on any device."""
    return _InnerProducts().apply(x, vectors)


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
            return d_x, torch.bmm(grad.permute(2, 0, 1), x.transpose(0, 1)).transpose(0, 1)
        return d_x, torch.stack([(x * one.unsqueeze(2)).sum(0) for one in grad.unbind(0)])

    def reference(self, x, vectors):
        return _plain(x, vectors)
