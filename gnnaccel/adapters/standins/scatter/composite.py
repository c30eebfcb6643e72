"""Statistics of groups that are made of several reductions, as in torch_scatter 2.1."""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.adapters.standins.scatter.reduce import (
    broadcast,
    group_sizes,
    scatter_max,
    scatter_sum,
)


def scatter_std(src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
                dim_size: int | None = None, unbiased: bool = True) -> Tensor:
    """The standard deviation of each group; 0 where there is nothing.

    ``unbiased``: the sum of squares is divided by one less than the number of values. 1e-6 is added
    to that number, as in torch_scatter.
    """
    if out is not None:
        dim_size = out.size(dim)
    wide = broadcast(index, src, dim)
    total = scatter_sum(src, wide, dim, dim_size=dim_size)
    count = broadcast(group_sizes(src, index, dim, total.size(dim)), total, dim)
    deviation = src - (total / count).gather(dim, wide)
    squares = scatter_sum(deviation * deviation, wide, dim, out, dim_size)
    if unbiased:
        count = (count - 1).clamp(min=1)
    return (squares / (count + 1e-6)).sqrt()


def scatter_logsumexp(src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
                      dim_size: int | None = None, eps: float = 1e-12) -> Tensor:
    """The logarithm of the sum of exponentials of each group; 0 where there is nothing.

    ``out``: logarithms that take part, written in place. ``eps`` is added before the logarithm is
    taken. Raises ValueError for integers.
    """
    _check_floating(src, "scatter_logsumexp")
    index = broadcast(index, src, dim)
    if out is not None:
        dim_size = out.size(dim)
    greatest, place = scatter_max(src.detach(), index, dim, dim_size=dim_size)
    greatest = greatest.masked_fill(place == src.size(dim), float("-inf"))
    shifted = src - greatest.gather(dim, index)
    exponentials = shifted.masked_fill(shifted.isnan(), float("-inf")).exp()
    base = None if out is None else (out - greatest).exp()
    total = scatter_sum(exponentials, index, dim, base, greatest.size(dim))
    value = ((total + eps).log() + greatest).nan_to_num(neginf=0.0)
    return value if out is None else out.copy_(value)


def scatter_softmax(src: Tensor, index: Tensor, dim: int = -1,
                    dim_size: int | None = None) -> Tensor:
    """The softmax within each group, in the shape of ``src``. Raises ValueError for integers."""
    _check_floating(src, "scatter_softmax")
    index = broadcast(index, src, dim)
    exponentials = _centred(src, index, dim, dim_size).exp()
    total = scatter_sum(exponentials, index, dim, dim_size=dim_size)
    return exponentials / total.gather(dim, index)


def scatter_log_softmax(src: Tensor, index: Tensor, dim: int = -1, eps: float = 1e-12,
                        dim_size: int | None = None) -> Tensor:
    """The logarithm of `scatter_softmax`. ``eps`` is added to each group's sum of exponentials.
    Raises ValueError for integers."""
    _check_floating(src, "scatter_log_softmax")
    index = broadcast(index, src, dim)
    centred = _centred(src, index, dim, dim_size)
    total = scatter_sum(centred.exp(), index, dim, dim_size=dim_size)
    return centred - (total + eps).log().gather(dim, index)


def _centred(src: Tensor, index: Tensor, dim: int, dim_size: int | None) -> Tensor:
    """``src`` less the greatest value of each group."""
    return src - scatter_max(src.detach(), index, dim, dim_size=dim_size)[0].gather(dim, index)


def _check_floating(src: Tensor, name: str) -> None:
    if not torch.is_floating_point(src):
        raise ValueError(f"{name} needs floating point numbers and got {src.dtype}; convert src "
                         "first, for instance with src.float()")
