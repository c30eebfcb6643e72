"""Reductions over sorted groups, by a sorted index (``coo``) or by offsets (``csr``), and their
reverse, gathering.

The index or the offsets belong to the leading dimensions of ``src``, as in torch_scatter 2.1, and
their last dimension is the one that is reduced. Empty groups are 0, and the position of an extremum
there is the size of ``src`` in that dimension.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.adapters.standins.scatter import reduce as _reduce

REDUCES = ("sum", "add", "mean", "min", "max")


# --- by a sorted index ----------------------------------------------------------------------------

def segment_sum_coo(src: Tensor, index: Tensor, out: Tensor | None = None,
                    dim_size: int | None = None) -> Tensor:
    """The sum of each group. ``index``: int64, sorted along its last dimension, expanded to the
    leading dimensions of ``src``. ``out`` is added to, in place. ``dim_size``: how many groups
    there are; by default one more than the last index."""
    index = _leading(index, src)
    return _reduce.scatter_sum(src, _trailing(index, src), index.dim() - 1, out, dim_size)


def segment_add_coo(src: Tensor, index: Tensor, out: Tensor | None = None,
                    dim_size: int | None = None) -> Tensor:
    """Another name of `segment_sum_coo`."""
    return segment_sum_coo(src, index, out, dim_size)


def segment_mean_coo(src: Tensor, index: Tensor, out: Tensor | None = None,
                     dim_size: int | None = None) -> Tensor:
    """The mean of each group, rounded towards zero for integers; arguments as in
    `segment_sum_coo`."""
    index = _leading(index, src)
    dim = index.dim() - 1
    out = _reduce.scatter_sum(src, _trailing(index, src), dim, out, dim_size)
    counts = _reduce.group_sizes(src, index, dim, out.size(dim))
    return _reduce.divide_(out, _trailing(counts, out), "trunc")


def segment_min_coo(src: Tensor, index: Tensor, out: Tensor | None = None,
                    dim_size: int | None = None) -> tuple[Tensor, Tensor]:
    """(smallest value, its position) of each group; arguments as in `segment_sum_coo`."""
    return _extremum_coo(src, index, out, dim_size, greatest=False)


def segment_max_coo(src: Tensor, index: Tensor, out: Tensor | None = None,
                    dim_size: int | None = None) -> tuple[Tensor, Tensor]:
    """(greatest value, its position) of each group; arguments as in `segment_sum_coo`."""
    return _extremum_coo(src, index, out, dim_size, greatest=True)


def segment_coo(src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None,
                reduce: str = "sum") -> Tensor:
    """The reduction named by ``reduce``: "sum", "add", "mean", "min" or "max". Raises ValueError
    for another name."""
    if reduce in ("min", "max"):
        return _extremum_coo(src, index, out, dim_size, reduce == "max")[0]
    function = segment_mean_coo if reduce == "mean" else segment_sum_coo
    if reduce not in REDUCES:
        raise _reduce.unknown(reduce, REDUCES)
    return function(src, index, out, dim_size)


def gather_coo(src: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """The entries of ``src`` at ``index``, along the last dimension of ``index``; written to
    ``out`` if given."""
    dim = index.dim() - 1
    index = index.expand(*src.shape[:dim], -1)
    sizes = (*index.shape, *src.shape[dim + 1:])
    values = src.gather(dim, _widened(index, src.dim()).expand(sizes))
    return values if out is None else out.copy_(values)


def _extremum_coo(src: Tensor, index: Tensor, out: Tensor | None, dim_size: int | None,
                  greatest: bool) -> tuple[Tensor, Tensor]:
    index = _leading(index, src)
    return _reduce.extremum(src, _trailing(index, src), index.dim() - 1, out, dim_size, greatest)


# --- by offsets -----------------------------------------------------------------------------------

def segment_sum_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum of each segment ``indptr[i]:indptr[i + 1]``. ``indptr``: int64, not descending,
    expanded to the leading dimensions of ``src``. ``out`` is overwritten and returned."""
    return _written(_segments(src, indptr, segment_sum_coo), out)


def segment_add_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Another name of `segment_sum_csr`."""
    return segment_sum_csr(src, indptr, out)


def segment_mean_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """The mean of each segment, rounded towards zero for integers; arguments as in
    `segment_sum_csr`."""
    return _written(_segments(src, indptr, segment_mean_coo), out)


def segment_min_csr(src: Tensor, indptr: Tensor,
                    out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(smallest value, its position) of each segment; arguments as in `segment_sum_csr`."""
    value, place = _segments(src, indptr, segment_min_coo)
    return _written(value, out), place


def segment_max_csr(src: Tensor, indptr: Tensor,
                    out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(greatest value, its position) of each segment; arguments as in `segment_sum_csr`."""
    value, place = _segments(src, indptr, segment_max_coo)
    return _written(value, out), place


def segment_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None,
                reduce: str = "sum") -> Tensor:
    """The reduction named by ``reduce``: "sum", "add", "mean", "min" or "max". Raises ValueError
    for another name."""
    if reduce in ("min", "max"):
        return (segment_min_csr if reduce == "min" else segment_max_csr)(src, indptr, out)[0]
    if reduce not in REDUCES:
        raise _reduce.unknown(reduce, REDUCES)
    return (segment_mean_csr if reduce == "mean" else segment_sum_csr)(src, indptr, out)


def gather_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Entry i of ``src`` repeated ``indptr[i + 1] - indptr[i]`` times, along the last dimension of
    ``indptr``; written to ``out`` if given."""
    dim = indptr.dim() - 1
    if indptr.size(-1) != src.size(dim) + 1:
        raise ValueError(f"indptr has {indptr.size(-1)} offsets for {src.size(dim)} entries; it "
                         "needs one more than there are entries")
    if out is not None:
        count = out.size(dim)
    else:
        count = int(indptr.flatten()[-1]) if src.size(dim) else 0
    index = _segment_of(indptr.expand(*src.shape[:dim], -1), count) - 1
    return gather_coo(src, index, out)


def _segments(src, indptr, function):
    """``function``, one of those by index, over segments. Values outside of all segments go into
    one group before them and one behind, which are cut off."""
    dim = indptr.dim() - 1
    indptr = indptr.expand(*src.shape[:dim], -1)
    groups = indptr.size(-1) - 1
    result = function(src, _segment_of(indptr, src.size(dim)), None, groups + 2)
    if isinstance(result, tuple):
        return tuple(each.narrow(dim, 1, groups) for each in result)
    return result.narrow(dim, 1, groups)


def _segment_of(indptr: Tensor, count: int) -> Tensor:
    """Number of each position's segment, counted from 1; 0 before the first segment."""
    positions = torch.arange(count, device=indptr.device)
    return torch.searchsorted(indptr.contiguous(),
                              positions.expand(*indptr.shape[:-1], -1).contiguous(), right=True)


def _written(value: Tensor, out: Tensor | None) -> Tensor:
    return value if out is None else out.copy_(value)


# --- shapes ---------------------------------------------------------------------------------------

def _leading(index: Tensor, src: Tensor) -> Tensor:
    """``index`` expanded to the leading dimensions of ``src``."""
    if index.dim() > src.dim():
        raise ValueError(f"index has {index.dim()} dimensions and src only {src.dim()}; index must "
                         "not have more than src")
    return index.expand(src.shape[:index.dim()])


def _trailing(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with the trailing dimensions of ``like``, in which it is constant."""
    return _widened(tensor, like.dim()).expand(*tensor.shape, *like.shape[tensor.dim():])


def _widened(tensor: Tensor, dims: int) -> Tensor:
    return tensor[(...,) + (None,) * (dims - tensor.dim())]
