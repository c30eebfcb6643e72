"""Methods of `SparseTensor` beside those about its arrays: operators, devices, dtypes.

Most are functions of torch_sparse as well; those do the work.
"""
from __future__ import annotations

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
    """Operators. What each does is said by the function that it calls."""

    def t(self):
        return selecting.t(self)

    def select(self, dim, idx):
        return selecting.select(self, dim, idx)

    def narrow(self, dim, start, length):
        return selecting.narrow(self, dim, start, length)

    def __narrow_diag__(self, start, length):
        return selecting.__narrow_diag__(self, start, length)

    def index_select(self, dim, idx):
        return selecting.index_select(self, dim, idx)

    def index_select_nnz(self, idx, layout=None):
        return selecting.index_select_nnz(self, idx, layout)

    def masked_select(self, dim, mask):
        return selecting.masked_select(self, dim, mask)

    def masked_select_nnz(self, mask, layout=None):
        return selecting.masked_select_nnz(self, mask, layout)

    def permute(self, perm):
        return selecting.permute(self, perm)

    def __getitem__(self, index):
        return selecting.get_item(self, index)

    def is_symmetric(self):
        return diagonal.is_symmetric(self)

    def to_symmetric(self, reduce="sum"):
        return diagonal.to_symmetric(self, reduce)

    def remove_diag(self, k=0):
        return diagonal.remove_diag(self, k)

    def set_diag(self, values=None, k=0):
        return diagonal.set_diag(self, values, k)

    def fill_diag(self, fill_value, k=0):
        return diagonal.fill_diag(self, fill_value, k)

    def get_diag(self):
        return diagonal.get_diag(self)

    def add(self, other):
        return arithmetic.add(self, other)

    def add_(self, other):
        return arithmetic.add_(self, other)

    def add_nnz(self, other, layout=None):
        return arithmetic.add_nnz(self, other, layout)

    def add_nnz_(self, other, layout=None):
        return arithmetic.add_nnz_(self, other, layout)

    def mul(self, other):
        return arithmetic.mul(self, other)

    def mul_(self, other):
        return arithmetic.mul_(self, other)

    def mul_nnz(self, other, layout=None):
        return arithmetic.mul_nnz(self, other, layout)

    def mul_nnz_(self, other, layout=None):
        return arithmetic.mul_nnz_(self, other, layout)

    __add__ = __radd__ = add
    __iadd__ = add_
    __mul__ = __rmul__ = mul
    __imul__ = mul_

    def matmul(self, other, reduce="sum"):
        return product.matmul(self, other, reduce)

    def spmm(self, other, reduce="sum"):
        return product.spmm(self, other, reduce)

    def spspmm(self, other, reduce="sum"):
        return product.spspmm(self, other, reduce)

    def __matmul__(self, other):
        return product.matmul(self, other)

    def random_walk(self, start, walk_length):
        return sampling.random_walk(self, start, walk_length)

    def sample(self, num_neighbors, subset=None):
        return sampling.sample(self, num_neighbors, subset)

    def sample_adj(self, subset, num_neighbors, replace=False):
        return sampling.sample_adj(self, subset, num_neighbors, replace)

    def saint_subgraph(self, node_idx):
        return sampling.saint_subgraph(self, node_idx)

    def reverse_cuthill_mckee(self, is_symmetric=None):
        return sampling.reverse_cuthill_mckee(self, is_symmetric)

    def sum(self, dim=None):
        return totals.sum(self, dim)

    def mean(self, dim=None):
        return totals.mean(self, dim)

    def min(self, dim=None):
        return totals.min(self, dim)

    def max(self, dim=None):
        return totals.max(self, dim)


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
        """To a device, a dtype, or those of a tensor, as `torch.Tensor.to`."""
        device, dtype, non_blocking = torch._C._nn._parse_to(*args, **kwargs)[:3]
        moved = self if dtype is None else self.type(dtype, non_blocking)
        return moved if device is None else moved.to_device(device, non_blocking)

    def cpu(self):
        return self.to_device("cpu")

    def cuda(self, device=None, non_blocking=False):
        return self.to_device("cuda" if device is None else torch.device("cuda", device)
                              if type(device) is int else device, non_blocking)

    def dtype(self):
        """That of the values; float32 where there are none."""
        return self.storage.value().dtype if self.storage.has_value() else torch.float32

    def is_floating_point(self):
        return self.dtype().is_floating_point

    def type(self, dtype, non_blocking=False):
        """With values of another dtype. A matrix without values stays as it is."""
        return self._over(self.storage.type(dtype, non_blocking))

    def type_as(self, tensor, non_blocking=False):
        return self.type(tensor.dtype, non_blocking)

    def bfloat16(self):
        return self.type(torch.bfloat16)

    def bool(self):
        return self.type(torch.bool)

    def byte(self):
        return self.type(torch.uint8)

    def char(self):
        return self.type(torch.int8)

    def half(self):
        return self.type(torch.float16)

    def float(self):
        return self.type(torch.float32)

    def double(self):
        return self.type(torch.float64)

    def short(self):
        return self.type(torch.int16)

    def int(self):
        return self.type(torch.int32)

    def long(self):
        return self.type(torch.int64)

    def requires_grad(self):
        return self.storage.has_value() and self.storage.value().requires_grad

    def requires_grad_(self, requires_grad=True, dtype=None):
        """Whether gradients of the values are wanted; ones are filled in where there are none."""
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
