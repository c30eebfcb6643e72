"""Functions of torch that a ``message`` may call and that are made of other operations on rows."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel.adapters.tracing.attention.traced import Param, Value
from gnnaccel.adapters.tracing.expressed import Effect
from gnnaccel.adapters.tracing.layer import conditions, devices
from gnnaccel.adapters.tracing.rows import channels, products
from gnnaccel.adapters.tracing.rows.pointwise import Rows, made_rows
from gnnaccel.adapters.tracing.rows.standins import NUMBERS, Unseen
from gnnaccel.dispatch.generated.tree import Number


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


def full_like(input: Any, fill_value: Any, **options: Any) -> Rows:
    """`torch.full_like`: rows that are one number."""
    _check_like(input, options)
    if type(fill_value) not in NUMBERS:
        raise Unseen
    dtype = input.meta.dtype
    try:  # of whole numbers and truth values it is another one
        number = torch.full((), fill_value, dtype=dtype, device="cpu").item()
    except RuntimeError:
        raise Unseen from None
    return Rows(Number(float(number)), input.meta)


def zeros_like(input: Any, **options: Any) -> Rows:
    """`torch.zeros_like`."""
    return full_like(input, 0.0, **options)


def ones_like(input: Any, **options: Any) -> Rows:
    """`torch.ones_like`."""
    return full_like(input, 1.0, **options)


def empty_like(input: Any, **options: Any) -> Rows:
    """`torch.empty_like`, of which nothing tells what is in it: zeros. Where torch is asked to be
    deterministic it is NaN, or the largest whole number."""
    conditions.noted(_undefined, True)
    return full_like(input, 0.0, **options)


def _undefined(given: Any) -> Tensor:
    """Whether memory may have anything in it that nothing was written to."""
    filled = torch.are_deterministic_algorithms_enabled() and getattr(
        torch.utils.deterministic, "fill_uninitialized_memory", True)
    return given.graph.edge_index.new_full((), not filled, dtype=torch.bool)


def rand_like(input: Any, **options: Any) -> Rows:
    """`torch.rand_like`: drawn for each edge, in the order of edges, as for the host."""
    return _drawn(torch.rand, input, options)


def randn_like(input: Any, **options: Any) -> Rows:
    """`torch.randn_like`, likewise."""
    return _drawn(torch.randn, input, options)


def _drawn(function: Any, input: Any, options: dict) -> Rows:
    _check_like(input, options)
    meta = input.meta
    if not meta.is_floating_point() or not torch.empty_like(meta).is_contiguous():
        raise Unseen
    dtype, tail = meta.dtype, tuple(meta.shape[1:])

    def make(given: Any) -> Tensor:
        device = given.graph.edge_index.device
        return function((given.graph.num_edges, *tail), dtype=dtype, device=device)

    def like(given: Any) -> Tensor:
        return given.graph.edge_index.new_empty((), dtype=dtype)

    effect = Effect(make)
    return made_rows("e", effect, meta, frozenset((effect,)), (like,))


def _check_like(input: Any, options: dict) -> None:
    """Unseen for another dtype or device than that of the rows, and for options of others."""
    dtype, device = options.pop("dtype", None), options.pop("device", None)
    if not isinstance(input, Rows) or options or dtype not in (None, input.meta.dtype) or not (
        device is None or devices.named(device)):
        raise Unseen


def addmm(input: Any, mat1: Any, mat2: Any) -> Any:
    """`torch.addmm` without factors."""
    return torch.mm(mat1, mat2) + input


def baddbmm(input: Any, batch1: Any, batch2: Any) -> Any:
    """`torch.baddbmm` without factors."""
    return torch.bmm(batch1, batch2) + input


def inner(input: Any, other: Any) -> Any:
    """`torch.inner` with a matrix that the layer holds, or a vector."""
    if not isinstance(other, Param):
        raise Unseen
    return F.linear(input, other)  # type: ignore[arg-type]  # stand-ins


def vecdot(x: Any, y: Any, *, dim: int = -1) -> Any:
    """`torch.linalg.vecdot` of real numbers."""
    return (x * y).sum(dim)


def tile(input: Any, *dims: Any) -> Any:
    """`torch.tile`, as ``repeat``."""
    return input.repeat(*dims)


def max(input: Any, *other: Any, **options: Any) -> Any:
    """`torch.max`, of two or along channels."""
    return _extremum(torch.max, torch.maximum, input, other, options)


def min(input: Any, *other: Any, **options: Any) -> Any:
    """`torch.min`, likewise."""
    return _extremum(torch.min, torch.minimum, input, other, options)


def _extremum(function: Any, of_two: Any, input: Any, other: tuple, options: dict) -> Any:
    if other and isinstance(other[0], Value):
        return of_two(input, *other, **options)
    return products.along(function, (input, *other), options, 1, None)


def gather(input: Any, dim: Any = None, index: Any = None) -> Rows:
    """`torch.gather`, along the channels."""
    if not isinstance(input, Rows) or not isinstance(index, Rows) or (
        input.meta.dim() != 2 or dim not in (1, -1) or index.meta.dtype != torch.int64):
        raise Unseen
    return products.product(lambda rows, at: torch.gather(rows, 1, at), (input, index))
