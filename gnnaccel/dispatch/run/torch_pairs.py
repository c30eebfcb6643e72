"""GATv2's score on the CPU, by blocks of destinations whose rows stay in the cache."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.dispatch.run.autograd import Operation

if TYPE_CHECKING:
    from gnnaccel.dispatch.run.torch_backend import Edges

#: bytes of lifted rows per block, so that the few blocks alive stay in L2 and L3; measured, see
#: docs/notes/cpu.md
BLOCK_BYTES = 2 << 20


def pair_scores(edges, keys: Tensor, queries: Tensor, att: Tensor, slope: float) -> Tensor:
    """[E, heads] in CSC order: <att, leaky_relu(keys of the source + queries of the destination)>
    per head.

    keys [num_src, heads, width], queries [num_dst, heads, width], att [1, heads, width].
    """
    return _PairScores(edges, slope).apply(keys, queries, att)


def plain(edges, slope: float, keys: Tensor, queries: Tensor, att: Tensor) -> Tensor:
    """The scores by plain operations, all edges at once."""
    z = keys.index_select(0, edges.src) + queries.index_select(0, edges.dst)
    return (F.leaky_relu(z, slope) * att).sum(-1)


class _PairScores(Operation):
    __slots__ = ("edges", "slope")

    def __init__(self, edges: Edges, slope: float):
        self.edges, self.slope = edges, slope

    def forward(self, needs, keys, queries, att):
        out = keys.new_empty(self.edges.src.shape[0], keys.shape[1])
        for src, dst, part in _blocks(self.edges, keys):
            z = F.leaky_relu_(_lifted(keys, queries, src, dst), self.slope)
            torch.sum(z.mul_(att), -1, out=out[part])
        return out, (keys, queries, att)

    def backward(self, needs, saved, grad):
        keys, queries, att = saved
        d_keys, d_queries, d_att = torch.zeros_like(keys), torch.zeros_like(
            queries), torch.zeros_like(att)
        for src, dst, part in _blocks(self.edges, keys):
            z = _lifted(keys, queries, src, dst)
            # contiguous, as all operands below: several times as fast
            up = grad[part].contiguous().unsqueeze(-1)
            d_z = torch.ops.aten.leaky_relu_backward(up * att, z, self.slope, False)
            d_att += F.leaky_relu_(z, self.slope).mul_(up).sum(0)
            d_keys.index_add_(0, src, d_z)
            d_queries.index_add_(0, dst, d_z)
        return d_keys, d_queries, d_att

    def reference(self, keys, queries, att):
        return plain(self.edges, self.slope, keys, queries, att)


def _lifted(keys: Tensor, queries: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    return keys.index_select(0, src).add_(queries.index_select(0, dst))


def _blocks(edges, keys: Tensor):
    """(src, dst, slice) of runs of edges."""
    step = max(256, BLOCK_BYTES // max(1, keys[0].numel() * keys.element_size()))
    for start in range(0, edges.src.shape[0], step):
        part = slice(start, start + step)
        yield edges.src[part], edges.dst[part], part
