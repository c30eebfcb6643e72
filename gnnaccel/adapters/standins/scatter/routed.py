"""Sums and means of rows behind the router for operations, as PyG's own ``scatter`` is: on a GPU,
with gnnaccel enabled, by kernels where these gain."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gnnaccel.adapters.guards import context_reason
from gnnaccel.cuda import driver
from gnnaccel.dispatch.observe.records import listening
from gnnaccel.dispatch.ops import by_index, route
from gnnaccel.dispatch.policy.config import Config, current

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
