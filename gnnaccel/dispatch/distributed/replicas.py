"""Exchange between rows that every process holds and rows of its own nodes.

Each way is the transpose of the other, as in tensor parallel layers (Shoeybi et al., 2019):
gradients of tensors that all processes hold are those of one process, on each of them.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnaccel.dispatch.distributed.exchange import alive, all_to_all
from gnnaccel.dispatch.observe import exchanges
from gnnaccel.dispatch.observe.exchanges import Exchange


def gather(rows: Tensor, counts: list[int], group: Any, layer: Any = "",
           backward: bool = False) -> Tensor:
    """[own, ...] -> [sum(counts), ...]: the rows of all processes, by rank. ``counts``: how many
    rows each has; ``layer``, ``backward``: for measuring, as of `exchange.halo_rows`.
    Collective."""
    if not rows.shape[1:].numel():
        return rows.new_empty((sum(counts), *rows.shape[1:]))
    flat = rows.reshape(len(rows), -1).contiguous()
    out = flat.new_empty((sum(counts), flat.shape[1]))
    sent = (len(counts) - 1) * flat.numel() * flat.element_size()
    with exchanges.around(Exchange(alive(layer), backward, sent, flat.device)):
        all_to_all(out, flat.repeat(len(counts), 1), counts, [len(rows)] * len(counts), group)
    return out.reshape(len(out), *rows.shape[1:])


def enter(tensors: list[Tensor], takes: list[Any], group: Any, layer: Any = "") -> list[Tensor]:
    """The rows that this process takes of tensors that all processes hold alike; differentiable,
    once.

    ``takes``: for each tensor None, the whole is used; or an object whose ``rows`` are a slice of
    own nodes, with ``counts`` of every process, or own edges' numbers, int64, with no ``counts``.
    In backward, which is collective, each tensor gets the gradient of all processes' uses: own rows
    are put together, all else is added up. A weight that no process used gets None.
    """
    return list(_Enter.apply(takes, group, layer, *tensors)) if tensors else []


def leave(rows: Tensor, own: slice, counts: list[int], group: Any, layer: Any = "") -> Tensor:
    """The rows of all processes, [sum(counts), ...], of which the own are at ``own``. In backward
    each process takes the gradients of its own rows: all hold the same. Collective;
    differentiable, once."""
    return _Leave.apply(rows, own, counts, group, layer)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, takes: list[Any], group: Any, layer: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.takes, ctx.group, ctx.layer = takes, group, layer
        ctx.meta = [(t.shape, t.dtype, t.device) for t in tensors]
        return tuple(t.view_as(t) if take is None else t[take.rows]
                     for t, take in zip(tensors, takes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        # in the order of the arguments, whatever order the layer's own backward had
        results: list[Any] = [None] * len(grads)
        summed = []
        for at, (grad, take) in enumerate(zip(grads, ctx.takes)):
            shape, dtype, device = ctx.meta[at]
            if take is None:
                summed.append(at)
            elif take.counts:
                own = take.counts[dist.get_rank(ctx.group)]
                results[at] = gather(grad if grad is not None else torch.zeros(
                    (own, *shape[1:]), dtype=dtype, device=device), take.counts, ctx.group,
                    ctx.layer, True)
            else:
                results[at] = torch.zeros(shape, dtype=dtype, device=device)
                if grad is not None:
                    results[at][take.rows] = grad
                dist.all_reduce(results[at], group=ctx.group)
        _add_up(results, grads, summed, ctx)
        return None, None, None, *results


def _add_up(found: list[Any], grads: Any, summed: list[int], ctx: Any) -> None:
    """Sums of whole tensors' gradients, by one message for each dtype."""
    kinds = dict.fromkeys(ctx.meta[at][1:] for at in summed)
    for dtype, device in kinds:
        these = [at for at in summed if ctx.meta[at][1:] == (dtype, device)]
        used = torch.tensor([float(grads[at] is not None) for at in these], dtype=dtype,
                            device="cpu")
        flat = torch.cat([used.to(device), *(
            torch.zeros(ctx.meta[at][0].numel(), dtype=dtype, device=device)
            if grads[at] is None else grads[at].reshape(-1).to(dtype) for at in these)])
        dist.all_reduce(flat, group=ctx.group)
        shares = flat[len(these):].split([ctx.meta[at][0].numel() for at in these])
        anywhere = ([True] * len(these) if all(grads[at] is not None for at in these)
                    else (flat[:len(these)] > 0).tolist())
        for at, share, is_used in zip(these, shares, anywhere):
            found[at] = share.reshape(ctx.meta[at][0]) if is_used else None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, own: slice, counts: list[int], group: Any,
                layer: Any) -> Tensor:
        ctx.set_materialize_grads(False)  # its only result: without a gradient it is not asked
        ctx.own = own
        return gather(rows, counts, group, layer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[ctx.own], None, None, None, None
