"""Methods of `SparseTensor` beside those about its arrays: operators, devices, dtypes.

Most methods are functions of torch_sparse as well, which do the work.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.adapters.standins.sparse import (
    arithmetic,
    diagonal,
    product,
    sampling,
    selecting,
    totals,
)


class Operations:
    """Operators: the functions themselves, which take the matrix first."""

    t, select, narrow = selecting.t, selecting.select, selecting.narrow
    __narrow_diag__, __getitem__ = selecting.__narrow_diag__, selecting.get_item
    index_select, index_select_nnz = selecting.index_select, selecting.index_select_nnz
    masked_select, masked_select_nnz = selecting.masked_select, selecting.masked_select_nnz
    permute = selecting.permute

    is_symmetric, to_symmetric = diagonal.is_symmetric, diagonal.to_symmetric
    remove_diag, set_diag = diagonal.remove_diag, diagonal.set_diag
    fill_diag, get_diag = diagonal.fill_diag, diagonal.get_diag

    add = __add__ = __radd__ = arithmetic.add
    add_ = __iadd__ = arithmetic.add_
    add_nnz, add_nnz_ = arithmetic.add_nnz, arithmetic.add_nnz_
    mul = __mul__ = __rmul__ = arithmetic.mul
    mul_ = __imul__ = arithmetic.mul_
    mul_nnz, mul_nnz_ = arithmetic.mul_nnz, arithmetic.mul_nnz_

    matmul = __matmul__ = product.matmul
    spmm, spspmm = product.spmm, product.spspmm

    random_walk, sample, sample_adj = sampling.random_walk, sampling.sample, sampling.sample_adj
    saint_subgraph = sampling.saint_subgraph
    reverse_cuthill_mckee = sampling.reverse_cuthill_mckee

    sum, mean, min, max = totals.sum, totals.mean, totals.min, totals.max


def _cast(dtype: torch.dtype) -> Callable:
    """The method that casts to ``dtype``."""
    return lambda self: self.type(dtype)


class Casts:
    """Devices, dtypes, gradients and memory."""

    storage: Any

    def device(self):
        return self.storage.col().device

    def is_cuda(self):
        return self.storage.col().is_cuda

    def to_device(self, device, non_blocking=False):
        return self._over(self.storage.to_device(device, non_blocking))

    def device_as(self, tensor, non_blocking=False):
        return self.to_device(tensor.device, non_blocking)

    def to(self, *args, **kwargs):
        """The matrix on a device, in a dtype, or in those of a tensor, as `torch.Tensor.to`."""
        device, dtype, non_blocking = torch._C._nn._parse_to(*args, **kwargs)[:3]
        moved = self if dtype is None else self.type(dtype, non_blocking)
        return moved if device is None else moved.to_device(device, non_blocking)

    def cpu(self):
        return self.to_device("cpu")

    def cuda(self, device=None, non_blocking=False):
        return self.to_device("cuda" if device is None else torch.device("cuda", device)
                              if type(device) is int else device, non_blocking)

    def dtype(self):
        """The dtype of the values; float32 where there are none."""
        return self.storage.value().dtype if self.storage.has_value() else torch.float32

    def is_floating_point(self):
        return self.dtype().is_floating_point

    def type(self, dtype, non_blocking=False):
        """The matrix with values of another dtype; without values it stays as it is."""
        return self._over(self.storage.type(dtype, non_blocking))

    def type_as(self, tensor, non_blocking=False):
        return self.type(tensor.dtype, non_blocking)

    bool, byte, char = _cast(torch.bool), _cast(torch.uint8), _cast(torch.int8)
    short, int, long = _cast(torch.int16), _cast(torch.int32), _cast(torch.int64)
    half, bfloat16 = _cast(torch.float16), _cast(torch.bfloat16)
    float, double = _cast(torch.float32), _cast(torch.float64)

    def requires_grad(self):
        return self.storage.has_value() and self.storage.value().requires_grad

    def requires_grad_(self, requires_grad=True, dtype=None):
        """Set whether values want gradients; ones are filled in where there are no values."""
        if requires_grad and not self.storage.has_value():
            self.fill_value_(1.0, dtype)
        if self.storage.has_value():
            self.storage.value().requires_grad_(requires_grad)
        return self

    def detach_(self):
        if self.storage.has_value():
            self.storage.value().detach_()
        return self

    def detach(self):
        return self._over(self.storage.mapped(lambda array: array, torch.Tensor.detach))

    def pin_memory(self):
        return self._over(self.storage.pin_memory())

    def is_pinned(self):
        return self.storage.is_pinned()

    def share_memory_(self):
        self.storage.share_memory_()
        return self

    def is_shared(self):
        return self.storage.is_shared()

    def _over(self, storage):
        return self.from_storage(storage)
