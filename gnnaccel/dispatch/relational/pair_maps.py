"""HGT's keys and values straight from the features, by the CUDA kernels as one node of autograd.

Where all sources of a relation are of one type, the maps by node type and by relation are one
matrix per relation: a pair's key and value come from one product with [K, 2 C], lie side by side,
and so do their gradients. The node's rows are read once per pair; no key or value of a node is ever
made.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda.segment.segment_gemm_grad import weight_grad_and_sums
from gnnaccel.cuda.traverse.aggregate import total
from gnnaccel.dispatch.ir.program import PAIR_SRC, SRC
from gnnaccel.dispatch.policy.config import passes_on
from gnnaccel.dispatch.relational import torch_maps
from gnnaccel.dispatch.relational.cuda_maps import dense, gradients, product
from gnnaccel.dispatch.relational.gather import Gather
from gnnaccel.dispatch.relational.view import RelationView
from gnnaccel.dispatch.run import autograd
from gnnaccel.dispatch.run.attention_families import side_by_side
from gnnaccel.dispatch.run.autograd import Operation
from gnnaccel.dispatch.run.skinny_matmul import precision

#: pairs from which on the products count; below, the launches that fold the small matrices do
WORTH_FROM = 1 << 17
# elements of a matrix; a wider one makes the products of pairs dearer than those by type and head
_MOST = 64 * 64
_PAIRS = 6  # for each node, beyond which the folded maps read and compute more than they save


def worth(view: RelationView, dtype: torch.dtype, k: int, c: int) -> bool:
    """Whether keys and values of ``c`` channels are cheaper made from features of ``k`` for each
    pair. It is a reordering."""
    if dtype is not torch.float32 or k * c > _MOST or "reordering" not in passes_on():
        return False
    statistics = view.statistics()
    return WORTH_FROM <= statistics.pairs_src <= _PAIRS * statistics.num_src


def fold(sources: tuple[int, ...], weight: Tensor, bias: Tensor | None, keys: Tensor,
         values: Tensor, prior: Tensor) -> tuple[Tensor, Tensor | None]:
    """The matrices [relations, K, 2 C] and biases [relations, 2 C] of `pair_maps`.

    ``sources``: each relation's source type. weight [types, 3, C, K], bias [types, 3, C]: the maps
    of types to keys, queries and values; ``keys``, ``values`` [relations, heads, D, D]: those of
    relations after them, head by head; prior [relations, heads]: a factor of the former.
    """
    return _Fold(sources).apply(weight, bias, keys, values, prior)


def _folded(sources: tuple[int, ...], weight: Tensor, bias: Tensor | None, keys: Tensor,
            values: Tensor, prior: Tensor) -> tuple[Tensor, Tensor | None]:
    maps = torch.stack([keys * prior[:, :, None, None], values], 1)
    relations, _, heads, _, _ = maps.shape
    first = _of_sources(sources, weight).unflatten(2, (heads, -1))
    matrix = torch.matmul(first.transpose(3, 4),
                          maps).permute(0, 3, 1, 2, 4).reshape(relations, weight.shape[3], -1)
    if bias is None:
        return matrix, None
    first = _of_sources(sources, bias).view(relations, 2, heads, 1, -1)
    return matrix, torch.matmul(first, maps).view(relations, -1)


def _of_sources(sources: tuple[int, ...], t: Tensor) -> Tensor:
    """The maps ``t`` of keys and values, for each relation. Their gradients are added up in one
    order, as those of an index are not."""
    of_type = t[:, ::2].unbind(0)
    return torch.stack([of_type[source] for source in sources])


class _Fold(Operation):
    """`fold` as one node, whose small steps are recorded in backward only: before the first product
    the GPU waits for them."""

    __slots__ = ("sources",)

    def __init__(self, sources: tuple[int, ...]):
        self.sources = sources

    def forward(self, needs, *inputs):
        return self.reference(*inputs), inputs

    def backward(self, needs, saved, *grads):
        return autograd.gradients(self.reference, saved, needs, grads, create_graph=False)

    def reference(self, *inputs):
        return _folded(self.sources, *inputs)


def pair_maps(view: RelationView, rows: Tensor, weight: Tensor,
              bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``rows`` [num_src, K], and the keys and values [pairs, C] of the source pairs, side by side
    in memory.

    weight [relations, K, 2 C]; bias [relations, 2 C]. The first result is for `by_type.finish`
    alone, as that of `by_type.project`.
    """
    return _PairMaps(view).apply(rows, weight, bias)


def _together(left: Tensor | None, right: Tensor | None) -> Tensor:
    """[pairs, 2 C]"""
    left = torch.zeros_like(right) if left is None else left  # type: ignore[arg-type]
    right = torch.zeros_like(left) if right is None else right
    if side_by_side(left, right):
        return left.as_strided((left.shape[0], left.stride(0)), (left.stride(0), 1))
    return torch.cat([left, right], 1)


class _PairMaps(Operation):
    __slots__ = ("view",)

    def __init__(self, view: RelationView):
        self.view = view

    def forward(self, needs, rows, weight, bias):
        segments, index = self.view.pairs(PAIR_SRC).segments, self.view.index(SRC, PAIR_SRC)
        both = product(segments, rows, weight, False, index, bias)
        keys, values = (part.data for part in both.chunk(2, 1))
        return (rows.view_as(rows), keys, values), (rows, weight, bias)

    def backward(self, needs, saved, d_rows, *grads):
        if all(g is None for g in grads):
            return d_rows, None, None
        return _backward(self.view, saved, needs, d_rows, _together(*grads))

    def reference(self, rows, weight, bias):
        gather, pairs = Gather(self.view, SRC, PAIR_SRC), self.view.pairs(PAIR_SRC)
        maps = weight.unsqueeze(1)
        both = torch_maps.multiply(pairs, rows.unsqueeze(1), maps, False, gather, bias)
        return rows, *both.squeeze(1).chunk(2, 1)


def _backward(view: RelationView, inputs: tuple, needs: tuple[bool, ...], d_rows: Tensor | None,
              grad: Tensor) -> tuple:
    (rows, weight,
     bias), segments, index = inputs, view.pairs(PAIR_SRC).segments, view.index(SRC, PAIR_SRC)
    by_pair = d_weight = d_bias = sums = None
    if needs[0] and (needs[1] or needs[2]):
        by_pair, d_weight, sums = gradients(segments, rows, grad, weight, False, index,
                                            sums=needs[2] and bias is not None)
    elif needs[0]:
        by_pair = product(segments, grad, weight, True, None)
    else:
        gradient, sums = weight_grad_and_sums(segments, dense(rows), grad, index=index,
                                              precision=precision())
        d_weight = gradient[:, 0]
    d_weight = d_weight.to(weight.dtype) if needs[1] else None  # type: ignore[union-attr]
    d_bias = (sums.to(bias.dtype)  # type: ignore[union-attr]
              if needs[2] and bias is not None else None)
    if by_pair is None:
        return None, d_weight, d_bias
    members = view.members(SRC, PAIR_SRC)
    into = (d_rows if d_rows is not None and d_rows.dtype is by_pair.dtype
            and d_rows.is_contiguous() else None)
    gradient = total(members.csc(places=False), by_pair, into=into)
    return (gradient if into is not None or d_rows is None else gradient + d_rows), d_weight, d_bias
