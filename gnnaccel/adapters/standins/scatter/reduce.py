"""``scatter`` and its kinds: values of ``src`` meet where ``index`` is equal.

The interface and the conventions are those of torch_scatter 2.1. A group that nothing falls into is
0, or 1 under "mul". Where ``out`` is given, it takes part in the reduction and is written in place.
Extrema come with the position of the winner along ``dim``: the first one on ties,
``src.size(dim)`` where there is none, which then gets no gradient. NaN never wins an extremum, nor
does a number that is no greater than the smallest finite one (no smaller than the greatest).

Sums and means of rows behind the router for operations, as PyG's own ``scatter`` is: on a GPU,
with gnnaccel enabled, by kernels where these gain.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gnnaccel.adapters.guards import context_reason
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.observe.records import listening
from gnnaccel.dispatch.ops import by_index, route
from gnnaccel.dispatch.policy.config import Config, current

REDUCES = ("sum", "add", "mul", "mean", "min", "max")


def broadcast(src: Tensor, other: Tensor, dim: int) -> Tensor:
    """``src`` in the shape of ``other``: one dimension is laid along ``dim``; several begin with
    the first dimension of ``other``. Missing ones are appended and all are expanded."""
    if src.dim() == 1:
        src = src[(None,) * (dim if dim >= 0 else dim + other.dim())]
    return src[(...,) + (None,) * (other.dim() - src.dim())].expand(other.shape)


def scatter_sum(src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
                dim_size: int | None = None) -> Tensor:
    """The sum of the values of each group. ``index``: int64, in a shape that `broadcast` takes.

    ``dim_size``: how many groups there are; ``index.max() + 1`` if neither it nor ``out`` is given.
    """
    if out is None:
        return reduced(src, index, dim, dim_size, "sum",
                              lambda size: _sum(src, index, dim, None, size))
    return added(out, src, index, dim, lambda out: _sum(src, index, dim, out, None))


def _sum(src: Tensor, index: Tensor, dim: int, out: Tensor | None,
         dim_size: int | None) -> Tensor:
    index = broadcast(index, src, dim)
    if out is None:
        out = src.new_zeros(_sizes(src, index, dim, dim_size))
    return out.scatter_add_(dim, index, src)


def scatter_add(src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
                dim_size: int | None = None) -> Tensor:
    """Another name of `scatter_sum`."""
    return scatter_sum(src, index, dim, out, dim_size)


def scatter_mul(src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
                dim_size: int | None = None) -> Tensor:
    """The product of the values of each group; arguments as in `scatter_sum`."""
    index = broadcast(index, src, dim)
    if out is None:
        out = src.new_ones(_sizes(src, index, dim, dim_size))
    return out.scatter_reduce_(dim, index, src, "prod", include_self=True)


def scatter_mean(src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
                 dim_size: int | None = None) -> Tensor:
    """The mean of the values of each group, rounded down for integers; arguments as in
    `scatter_sum`. Numbers in ``out`` are added to the sum, before the division by the number of
    values."""
    if out is None:
        return reduced(src, index, dim, dim_size, "mean",
                              lambda size: _mean(src, index, dim, None, size))
    return _mean(src, index, dim, out, dim_size)


def _mean(src: Tensor, index: Tensor, dim: int, out: Tensor | None,
          dim_size: int | None) -> Tensor:
    out = (_sum(src, index, dim, None, dim_size) if out is None
           else scatter_sum(src, index, dim, out))
    counts = broadcast(group_sizes(src, index, dim, out.size(dim)), out, dim)
    return divide_(out, counts, "floor")


def scatter_min(src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
                dim_size: int | None = None) -> tuple[Tensor, Tensor]:
    """(the smallest value of each group, its position along ``dim``); arguments as in
    `scatter_sum`."""
    return extremum(src, broadcast(index, src, dim), dim, out, dim_size, greatest=False)


def scatter_max(src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
                dim_size: int | None = None) -> tuple[Tensor, Tensor]:
    """(the greatest value of each group, its position along ``dim``); arguments as in
    `scatter_sum`."""
    return extremum(src, broadcast(index, src, dim), dim, out, dim_size, greatest=True)


def scatter(src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
            dim_size: int | None = None, reduce: str = "sum") -> Tensor:
    """The reduction named by ``reduce``: "sum", "add", "mul", "mean", "min" or "max"; other
    arguments as in `scatter_sum`. Raises ValueError for another name."""
    if reduce in ("min", "max"):
        function = scatter_min if reduce == "min" else scatter_max
        return function(src, index, dim, out, dim_size)[0]
    functions = {"sum": scatter_sum, "add": scatter_sum, "mul": scatter_mul, "mean": scatter_mean}
    if reduce not in functions:
        raise unknown(reduce, REDUCES)
    return functions[reduce](src, index, dim, out, dim_size)


def unknown(reduce: str, known: tuple[str, ...]) -> ValueError:
    """The error for a reduction that is none of ``known``."""
    return ValueError(f"reduce={reduce!r} is not known; use one of {', '.join(known)}")


def group_sizes(src: Tensor, index: Tensor, dim: int, groups: int) -> Tensor:
    """How many values each group has, at least 1, in the dtype of ``src`` and the dimensions of
    ``index``."""
    along = min(dim if dim >= 0 else dim + src.dim(), index.dim() - 1)
    ones = torch.ones(index.shape, dtype=src.dtype, device=src.device)
    return _sum(ones, index, along, None, groups).clamp_(min=1)


def divide_(out: Tensor, counts: Tensor, rounding: str) -> Tensor:
    """``out`` divided in place; integers are rounded as ``rounding`` says."""
    if out.is_floating_point():
        return out.true_divide_(counts)
    return out.div_(counts, rounding_mode=rounding)


def extremum(src: Tensor, index: Tensor, dim: int, out: Tensor | None, dim_size: int | None,
             greatest: bool) -> tuple[Tensor, Tensor]:
    """(extremum, position) of each group. ``index`` has the shape of ``src``; other arguments as in
    `scatter_sum`."""
    count = src.size(dim)
    info = torch.finfo(src.dtype) if src.is_floating_point() else torch.iinfo(src.dtype)
    bound = info.min if greatest else info.max
    if out is None:
        start = src.new_full(_sizes(src, index, dim, dim_size), bound)
    else:
        start = out.detach()
    place = _winners(src.detach(), index, dim, start, bound, greatest)
    if count:
        value = src.gather(dim, place.clamp(max=count - 1))
    else:  # zeros that autograd knows to be made of src
        value = src.sum(dim, keepdim=True, dtype=src.dtype).expand_as(start)
    nothing = place == count
    if out is None:
        return value.masked_fill(nothing, 0), place
    return out.copy_(torch.where(nothing, out, value)), place


def _winners(src: Tensor, index: Tensor, dim: int, start: Tensor, bound: float,
             greatest: bool) -> Tensor:
    """Position of each group's extremum; the size of ``src`` along ``dim`` if nothing beats
    ``start``."""
    count = src.size(dim)
    beats = torch.gt if greatest else torch.lt
    keys = torch.where(beats(src, bound), src, bound)  # neither NaN nor an infinity
    best = start.scatter_reduce(dim, index, keys, "amax" if greatest else "amin")
    wins = (keys == best.gather(dim, index)) & beats(keys, start.gather(dim, index))
    positions = broadcast(torch.arange(count, device=src.device), src, dim)
    place = torch.full(start.shape, count, dtype=torch.int64, device=src.device)
    return place.scatter_reduce(dim, index, positions.masked_fill(~wins, count), "amin")


def _sizes(src: Tensor, index: Tensor, dim: int, dim_size: int | None) -> list[int]:
    """The shape of the result."""
    sizes = list(src.shape)
    if dim_size is None:
        dim_size = int(index.max()) + 1 if index.numel() else 0
    sizes[dim] = dim_size
    return sizes


_NAME = "torch_scatter.scatter"
_FEW = 1 << 20  # numbers; no reduction of fewer gains


def reduced(src: Tensor, index: Tensor, dim: int, dim_size: int | None, reduce: str,
            native: Callable[[int | None], Tensor]) -> Tensor:
    """The "sum" or "mean" of the rows of each group. ``native(groups)``: the result by torch's own
    operations, for the number of groups. Anything that the router cannot take runs by it."""
    config = None if is_compiling() else current()
    if config is None or not _stated(src, index, dim) or _too_few(src, config):
        return native(dim_size)
    groups = by_index.groups_in(index) if dim_size is None else dim_size
    call = context_reason() or by_index.reduce(by_index.IndexGraph(index, len(src), groups), src,
                                               reduce, config)
    return route.run(_NAME, call, lambda: native(groups), config)


def added(out: Tensor, src: Tensor, index: Tensor, dim: int,
          native: Callable[[Tensor], Tensor]) -> Tensor:
    """``out``, to which the rows of each group are added in place. ``native(out)``: the same by
    torch's own operations. Kernels give sums of their own, which are added afterwards: comparing
    routes runs several."""
    config = None if is_compiling() else current()
    if (config is None or not _stated(src, index, dim) or not _added_to(out, src)
        or _too_few(src, config)):
        return native(out)
    call = context_reason() or by_index.reduce(by_index.IndexGraph(index, len(src), len(out)), src,
                                               "sum", config)
    if not listening() and route.choose(call, True, config).route == "native":
        return route.run(_NAME, call, lambda: native(out), config)
    return out.add_(route.run(_NAME, call, lambda: native(torch.zeros_like(out)), config))


def _added_to(out: Tensor, src: Tensor) -> bool:
    """Whether sums of rows of ``src`` can be added to ``out``."""
    return (type(out) is Tensor and out.layout == torch.strided and out.dtype == src.dtype
            and out.device == src.device and out.shape[1:] == src.shape[1:] and len(out) > 0)


def _stated(src: Tensor, index: Tensor, dim: int) -> bool:
    """Whether it is a reduction of rows by an index of one dimension, on a device with kernels."""
    return ((src.is_cuda or src.is_cpu and driver.placed()) and src.is_floating_point()
            and type(index) is Tensor and index.dim() == 1 and index.dtype == torch.int64
            and index.device == src.device and dim in (0, -src.dim()) and src.numel() > 0
            and src.layout == torch.strided and not src.is_neg() and len(index) == len(src))


def _too_few(src: Tensor, config: Config) -> bool:
    return (src.numel() < _FEW and config.when == "profitable" and config.on_fallback == "native")
