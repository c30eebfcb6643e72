"""Gradients only for tensors that a used result was made of, where one call makes the results of
many layers.

Layers that are called one by one leave the parameters and features of those whose results are not
used without a gradient, which optimizers pass over; one call for all would give zeros, which weight
decay and momentum do not pass over. So the node of autograd at the call's end writes down which
results have a gradient, and where tensors were put together for many results, those get none that
only others read. What comes before such a place needs no more: autograd hands on that there is no
gradient.

Nor does a result ask for a gradient where none of its own tensors wants one, whatever other results
are made of.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import not_
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.relational.by_type import whole


class Results:
    """State of one call's results. ``wanting``: whether each result is made of something that wants
    a gradient, None for all of them.

    ``used``, by backward passes through the call: whether each result has a gradient, None for all
    of them.

    Once a pass was recorded, later ones may come by its gradients rather than by the call's end,
    and so to what was made into the results that it used: ``recorded``. What the call's end tells
    then holds for the pass that came by it, ``task``.
    """

    __slots__ = ("wanting", "used", "recorded", "task")

    def __init__(self, wanting: Sequence[bool]) -> None:
        self.wanting = None if all(wanting) else wanting
        self.used: tuple[bool, ...] | None = None
        self.recorded: tuple[bool, ...] | None = None
        self.task = -1

    def note(self, used: tuple[bool, ...]) -> None:
        recorded = torch.is_grad_enabled()
        if recorded or self.recorded is not None:
            used, self.task = _either(used, self.recorded), torch._C._current_graph_task_id()
        if recorded:
            self.recorded = used
        self.used = None if all(used) else used

    def in_this_pass(self) -> tuple[bool, ...] | None:
        """``used``, as far as this pass can tell."""
        if self.recorded is None or self.task == torch._C._current_graph_task_id():
            return self.used
        return None if all(self.recorded) else self.recorded


def _either(a: tuple[bool, ...], b: tuple[bool, ...] | None) -> tuple[bool, ...]:
    return a if b is None else tuple([one or other for one, other in zip(a, b)])


def results(count: int, made_of: Iterable[Iterable[Tensor | None]]) -> Results | None:
    """The `Results` of a call with so many results; None where none can be unused alone, or there
    will be no backward. ``made_of``: all tensors that each of them is made of."""
    if count < 2 or not torch.is_grad_enabled():
        return None
    return Results([any(t is not None and t.requires_grad for t in tensors) for tensors in made_of])


def watch(of: Results | None, made: Tensor, readers: Sequence[tuple[int, ...]]) -> Tensor:
    """``made``, just made by torch.stack or torch.cat; ``readers``: of each tensor in it, the
    numbers of the results that it goes into. Of one tensor it may be anything: then the results
    that are used read it, or there is a wider place behind."""
    if of is not None and len(readers) > 1 and made.grad_fn is not None:
        made.grad_fn.register_hook(functools.partial(_read, of, readers))
    return made


def _read(of: Results, readers: Sequence[tuple[int, ...]], grads: tuple, _: tuple) -> tuple | None:
    used = of.in_this_pass()
    if used is None:
        return None
    return tuple([grad if any([used[at] for at in own]) else None
                  for grad, own in zip(grads, readers)])


def reads(of: Results | None, readers: Sequence[tuple[int, ...]]) -> Callable | None:
    """`watch` for a node that looks itself: a function that says in backward which tensors some
    used result read."""
    return functools.partial(_reads, of, readers) if of is not None and len(readers) > 1 else None


def _reads(of: Results, readers: Sequence[tuple[int, ...]]) -> list[bool]:
    used = of.in_this_pass()
    return [used is None or any([used[at] for at in own]) for own in readers]


class Readers(NamedTuple):
    """The results that a source type's features go into, a destination type's, and a relation's
    parameters."""

    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    relations: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=256)
def readers(of_source: tuple[tuple[int, ...], ...], of_target: tuple[tuple[int, ...], ...],
            rooted: bool = False) -> Readers:
    """Readers where results are those of destination types; ``of_source``, ``of_target``: the
    relations that leave and enter each type. ``rooted``: sources and destinations are the same, and
    go into their own results too."""
    entered = {at: target for target, members in enumerate(of_target) for at in members}
    sources = tuple(tuple({*(entered[at] for at in members), *((t,) if rooted else ())})
                    for t, members in enumerate(of_source))
    return Readers(sources, tuple((t,) for t in range(len(of_target))),
                   tuple((entered[at],) for at in range(len(entered))))


def apart(of: Results | None, out: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows of each result as a tensor of its own: no view, as its neighbour in memory may be
    changed in place."""
    if len(sizes) == 1:
        return (out,)
    return (_Apart.apply(of, out, sizes)
            if out.requires_grad else tuple([part.data for part in out.split(sizes)]))


def split(of: Results | None, out: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """`apart` for callers that make something else of the results: views."""
    parts = out.split(sizes)
    if of is None or not out.requires_grad:
        return parts
    parts[0].grad_fn.register_prehook(functools.partial(_note, of))
    return (parts
            if of.wanting is None
            else tuple([part if wants else part.detach()
                        for part, wants in zip(parts, of.wanting)]))


def _note(of: Results, grads: tuple) -> None:
    of.note(tuple([grad is not None for grad in grads]))


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, of, out, sizes):
        ctx.set_materialize_grads(False)
        ctx.of, ctx.sizes = of, sizes
        parts = tuple(part.data for part in out.split(sizes))
        if of is not None and of.wanting is not None:
            ctx.mark_non_differentiable(*compress(parts, map(not_, of.wanting)))
        return parts

    @staticmethod
    def backward(ctx, *grads):
        used = tuple([grad is not None for grad in grads])
        if ctx.of is not None:
            ctx.of.note(used)
        return None, whole(grads, ctx.sizes) if any(used) else None, None
