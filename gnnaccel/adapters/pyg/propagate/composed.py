"""Functions of torch that a ``message`` may call and that are made of other operations on rows."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel.adapters.pyg.propagate import channels, products
from gnnaccel.adapters.pyg.propagate.pointwise import Rows
from gnnaccel.adapters.pyg.propagate.standins import Unseen


def glu(input: Any, dim: int = -1) -> Any:
    """torch's gate: one half of the channels by the sigmoid of the other."""
    left, right = input.chunk(2, dim)
    return left * right.sigmoid()


def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """`torch.nn.functional.cosine_similarity`, of channels."""
    if dim not in (-1, x1.meta.dim() - 1) or x1.meta.dim() != x2.meta.dim():
        raise Unseen
    return (F.normalize(x1, dim=-1, eps=eps) * F.normalize(x2, dim=-1, eps=eps)).sum(-1)


def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6,
                      keepdim: bool = False) -> Any:
    """`torch.nn.functional.pairwise_distance`, of channels."""
    return (x1 - x2 + eps).norm(p=p, dim=-1, keepdim=keepdim)


def one_hot(input: Any, num_classes: Any = -1) -> Rows:
    """`torch.nn.functional.one_hot` with a given number of classes."""
    if not isinstance(input, Rows) or type(num_classes) is not int or num_classes < 1 or (
        input.meta.dtype != torch.int64):
        raise Unseen
    return channels.by_torch(input, _one_hot, (input, num_classes), {})


def _one_hot(kinds: Tensor, count: int) -> Tensor:
    return kinds.new_empty((*kinds.shape, count)) if kinds.is_meta else F.one_hot(kinds, count)


def gather(input: Any, dim: Any = None, index: Any = None) -> Rows:
    """`torch.gather`, along the channels."""
    if not isinstance(input, Rows) or not isinstance(index, Rows) or (
        input.meta.dim() != 2 or dim not in (1, -1) or index.meta.dtype != torch.int64):
        raise Unseen
    return products.product(lambda rows, at: torch.gather(rows, 1, at), (input, index))
