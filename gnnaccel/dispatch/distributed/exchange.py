"""Rows of nodes that other parts need: one ``all_to_all_single``, and its way back."""
from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnnaccel.dispatch.distributed.part import Rows
from gnnaccel.dispatch.observe import exchanges
from gnnaccel.dispatch.observe.exchanges import Exchange
from gnnaccel.dispatch.quantized.rows import by_torch
from gnnaccel.errors import PartitionError

#: backends of torch.distributed that have all_to_all_single with unequal shares
_ALL_TO_ALL = ("nccl", "gloo", "mpi", "ucc", "xccl")
EXCHANGES = ("fp32", "bf16", "int8")


def backend(device: torch.device, group: Any) -> str:
    """The backend of the group for tensors on the device. PartitionError where it has none."""
    entries = dist.get_backend_config(group).split(",")
    by_device = {kind: name for kind, _, name in (entry.partition(":") for entry in entries)}
    if device.type not in by_device:
        raise PartitionError(f"the process group has no backend for tensors on {device.type}; it "
                             f"has {dist.get_backend_config(group)}. Call init_process_group with "
                             "'nccl' for GPUs, 'gloo' for CPUs")
    return by_device[device.type]


def all_to_all(out: Tensor, rows: Tensor, receive: list[int], send: list[int], group: Any) -> None:
    """Send rows to all parts and receive from all, by part. ``rows`` [sum(send), F], ``out``
    [sum(receive), F], contiguous; F may not be 0."""
    name = backend(rows.device, group)
    if rows.dtype not in (torch.float32, torch.float64, torch.int64, torch.int32):
        # as bytes: not every backend knows every dtype
        rows, out = rows.view(torch.uint8), out.view(torch.uint8)
    if name == "gloo" and rows.device.type != "cpu":  # gloo reaches memory of the host only
        landed = torch.empty_like(out, device="cpu")
        dist.all_to_all_single(landed, rows.cpu(), receive, send, group=group)
        out.copy_(landed)
    elif name in _ALL_TO_ALL:
        dist.all_to_all_single(out, rows, receive, send, group=group)
    else:
        _pairwise(out, rows, receive, send, group)


def _pairwise(out: Tensor, rows: Tensor, receive: list[int], send: list[int], group: Any) -> None:
    """`all_to_all` by messages between two, for backends without all_to_all_single."""
    here = dist.get_rank(group)
    into, out_of = out.split(receive), rows.split(send)
    into[here].copy_(out_of[here])
    calls = []
    for rank in range(len(send)):
        peer = rank if group is None else dist.get_global_rank(group, rank)
        if rank != here and len(out_of[rank]):
            calls.append(dist.P2POp(dist.isend, out_of[rank], peer, group))
        if rank != here and len(into[rank]):
            calls.append(dist.P2POp(dist.irecv, into[rank], peer, group))
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()


class Link:
    """The exchange of rows of one node type. ``exchange``: "fp32" sends rows in their own dtype,
    "bf16" rows of wider dtypes in bfloat16, "int8" rows as integers of 8 bits with one fp32 scale a
    row, where that is fewer bytes. Counts ``calls`` and ``bytes`` that were sent to other parts."""

    def __init__(self, rows: Rows, rank: int, group: Any, exchange: str):
        self.rows, self._rank, self._group = rows, rank, group
        self._exchange = exchange
        self.calls = self.bytes = 0

    def extend(self, x: Tensor, layer: Any = "", backward: bool = False) -> Tensor:
        """[own, ...] -> [own + halo, ...]: the halo's rows come from their owners. ``layer``: for
        which, a weak reference or a name; ``backward``: as part of a backward."""
        rows = self.rows
        flat = x.reshape(len(x), -1) if x.numel() else x.reshape(len(x), _width(x))
        out = flat.new_empty((rows.extended, flat.shape[1]))
        self._swap(flat.index_select(0, rows.send_rows), rows.receive, rows.send, layer, backward,
                   out[len(flat):])
        out[:len(flat)] = flat
        return out.reshape(rows.extended, *x.shape[1:])

    def home(self, grad: Tensor, layer: Any = "") -> Tensor:
        """[own + halo, ...] -> [own, ...]: the halo's gradients go to their owners, who add them to
        those of their own rows: part by part, by rank. No part sends a row twice, so no two
        additions meet, and the order is the same in every run."""
        rows = self.rows
        own = len(rows.own)
        flat = grad.reshape(len(grad), -1) if grad.numel() else grad.reshape(len(grad),
                                                                            _width(grad))
        total = flat[:own].clone()
        received = self._swap(flat[own:], rows.send, rows.receive, layer, True)
        for at, grads in zip(rows.send_rows.split(rows.send), received.split(rows.send)):
            if len(at):
                total.index_add_(0, at, grads)
        return total.reshape(own, *grad.shape[1:])

    def _swap(self, rows: Tensor, receive: list[int], send: list[int], layer: Any,
              backward: bool, into: Tensor | None = None) -> Tensor:
        """The rows that the others send for ``rows``, by part; written to ``into`` if given."""
        dtype, width = rows.dtype, rows.shape[1]
        narrow = self._exchange if dtype.is_floating_point else "fp32"
        as_int8 = narrow == "int8" and width + 4 < width * dtype.itemsize
        if as_int8:
            rows = _packed(rows)
        elif narrow == "bf16" and dtype.itemsize > 2:
            rows = rows.to(torch.bfloat16)
        out = (into if into is not None and rows.dtype == dtype
               else rows.new_empty((sum(receive), rows.shape[1])))
        count = rows.shape[1] * rows.element_size() * (sum(send) - send[self._rank])
        with exchanges.around(Exchange(alive(layer), backward, count, rows.device)):
            all_to_all(out, rows.resolve_neg().contiguous(), receive, send, self._group)
        self.calls += 1
        self.bytes += count
        result = (_unpacked(out) if as_int8 else out).to(dtype)
        return result if into is None or result is into else into.copy_(result)


def alive(layer: Any) -> Any:
    """A layer by its weak reference (None: it is gone); a name as it is."""
    return layer() if isinstance(layer, weakref.ref) else layer


def _packed(rows: Tensor) -> Tensor:
    """[N, F] -> uint8 [N, F + 4]: each row as int8, rounded to nearest, and its fp32 scale, the
    largest magnitude over 127. A row with a number that is not finite gets scale NaN."""
    stored = by_torch(rows)
    return torch.cat([stored.data[:, :stored.width].contiguous().view(torch.uint8),
                      stored.scale.unsqueeze(1).view(torch.uint8)], 1)


def _unpacked(rows: Tensor) -> Tensor:
    """The rows that `_packed` packed, fp32 [N, F]."""
    values, scale = rows[:, :-4], rows[:, -4:].contiguous().view(torch.float32)
    return values.contiguous().view(torch.int8).float() * scale


def _width(x: Tensor) -> int:
    """How many numbers a row has."""
    return int(torch.Size(x.shape[1:]).numel())


class _HaloRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, layer: Any, backward: bool) -> Tensor:
        ctx.set_materialize_grads(True)  # zeros where there is none: all processes exchange
        ctx.link, ctx.layer = link, layer
        return link.extend(x, layer, backward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _HomeRows.apply(grad, ctx.link, ctx.layer), None, None, None


class _HomeRows(torch.autograd.Function):
    """The backward of `_HaloRows`, whose own backward is the exchange again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, link: Link, layer: Any) -> Tensor:
        ctx.set_materialize_grads(True)
        ctx.link, ctx.layer = link, layer
        return link.home(grad, layer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _HaloRows.apply(grad, ctx.link, ctx.layer, True), None, None


def halo_rows(x: Tensor, link: Link, layer: Any = "") -> Tensor:
    """``x`` [own, ...] with the halo's rows behind, [own + halo, ...]; differentiable, of any
    order. ``layer``: for which, a weak reference or a name, for measuring.

    All processes of the group have to call it in the same order. Rows of integers pass too.
    PartitionError where ``x`` has not one row for each own node.
    """
    own = len(link.rows.own)
    if x.dim() == 0 or len(x) != own:
        raise PartitionError(
            f"a tensor of shape {list(x.shape)} is to be exchanged; this part has {own} own nodes, "
            "so the first dimension has to be that. Use the rows of the part's own data")
    if not _width(x):
        return x.new_empty((link.rows.extended, *x.shape[1:]))
    return _HaloRows.apply(x, link, layer, False)


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: int, group: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        both = torch.full((2,), float(count), dtype=torch.float64, device=total.device)
        both[0] = total  # by a kernel: a copy from the host would wait for the device
        dist.all_reduce(both, group=group)
        # on the device, so that nobody has to wait for it
        ctx.scale = (dist.get_world_size(group) / both[1].clamp(min=1)).to(total.dtype)
        return (both[0] / both[1]).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return None if grad is None else grad * ctx.scale, None, None


def global_mean(losses: Tensor, group: Any) -> Tensor:
    """The mean over all parts' elements. Its gradient is the number of parts times that of the own
    share, so that gradients averaged over the parts, as DDP does, are those of the mean."""
    return _GlobalMean.apply(losses.sum(), losses.numel(), group)
