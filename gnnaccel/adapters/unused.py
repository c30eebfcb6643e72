"""No gradients for what nobody's result was made of, where one call makes the results of many layers.

Layers that are called one by one leave the parameters and features of those whose results are not used without a gradient, which
optimizers pass over; one call for all would give zeros, which weight decay and momentum do not pass over. So the node of autograd
at the call's end writes down which results have a gradient, and the one at its beginning gives none to what only others read.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.relational.by_type import whole


class Group(NamedTuple):
    """Tensors that become one by ``how``, torch.stack or torch.cat, or a single one as it is (None). ``readers``: by tensor, the
    numbers of the results that it goes into."""

    how: Callable | None
    tensors: Sequence[Tensor]
    readers: Sequence[tuple[int, ...]]

    def joined(self) -> Tensor:
        return self.tensors[0] if self.how is None else self.how(self.tensors)


class Results:
    """What the last backward pass through a call has found: ``used``, whether each result has a gradient, None for all of them.

    Once a pass has been recorded, later ones may reach the beginning by another way than the end, and all results count as used.
    """

    __slots__ = ("used", "recorded")

    def __init__(self) -> None:
        self.used: tuple[bool, ...] | None = None
        self.recorded = False

    def note(self, used: tuple[bool, ...]) -> None:
        self.recorded = self.recorded or torch.is_grad_enabled()
        self.used = None if self.recorded or all(used) else used


def results(count: int) -> Results | None:
    """Of a call with so many results; None where none can be unused alone, or there will be no backward."""
    return Results() if count > 1 and torch.is_grad_enabled() else None


def gather(of: Results | None, *groups: Group | None) -> list[Tensor | None]:
    """Each group as one tensor."""
    live = [of is not None and group is not None and any(t.requires_grad for t in group.tensors) for group in groups]
    given = [group for group, alive in zip(groups, live) if alive]
    made = iter(_Gather.apply(of, given, *chain.from_iterable(group.tensors for group in given)) if given else ())
    return [next(made) if alive else None if group is None else group.joined() for group, alive in zip(groups, live)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, of, groups, *tensors):
        ctx.set_materialize_grads(False)
        ctx.of = of
        ctx.groups = [(group.how, group.readers, [t.shape[0] for t in group.tensors] if group.how is torch.cat else None)
                      for group in groups]
        return tuple(group.tensors[0].detach() if group.how is None else group.how(group.tensors) for group in groups)

    @staticmethod
    def backward(ctx, *grads):
        used, found = ctx.of.used, []
        for grad, (how, readers, sizes) in zip(grads, ctx.groups):
            if grad is None:
                found += (None,) * len(readers)
                continue
            parts = (grad,) if how is None else grad.unbind(0) if sizes is None else grad.split(sizes)
            if used is not None:
                parts = [part if any(used[at] for at in own) else None for part, own in zip(parts, readers)]
            found += parts
        return None, None, *found


def apart(of: Results | None, out: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows of each result as a tensor of its own: no view, as its neighbour in memory may be changed in place."""
    if len(sizes) == 1:
        return (out,)
    return _Apart.apply(of, out, sizes) if out.requires_grad else tuple(part.data for part in out.split(sizes))


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, of, out, sizes):
        ctx.set_materialize_grads(False)
        ctx.of, ctx.sizes, ctx.like = of, sizes, (out.shape, out.dtype, out.device)
        return tuple(part.data for part in out.split(sizes))

    @staticmethod
    def backward(ctx, *grads):
        used = tuple(grad is not None for grad in grads)
        if ctx.of is not None:
            ctx.of.note(used)
        if any(used):
            return None, whole(grads, ctx.sizes), None
        shape, dtype, device = ctx.like
        return None, torch.zeros(shape, dtype=dtype, device=device), None
