"""Gradients that can be differentiated again, of a call that was replayed: by the module's own
code, over the numbers that the replay read."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnaccel.adapters.captured import values

if TYPE_CHECKING:
    from gnnaccel.adapters.captured.graphs import Captured

_LEAVE_OUT = "; leave it out of the capture with gnnaccel.enable(capture=False)"


class _Instead(torch.autograd.Function):
    """Copies of ``held`` in the place of ``x``, which gets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return held.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad, None


def gradients(captured: Captured, tensors: list[Tensor], grads: list[Tensor | None],
              changed: Iterable[int]) -> list:
    """The gradients of the call's parameters and arguments ``tensors``. ``changed``: the places in
    `Captured.versions` of what was written since the call."""
    work = captured.work
    _check(captured, changed)
    # one of these may be another one, or made from it: each has its own gradient
    others = {t: t.view_as(t) for t in work.parameters}
    others |= {t: were.clone() for t, were in zip(captured.moving, captured.were)}
    given = {id(t): _as_it_was(t, held, others) for t, held in zip(tensors, captured.copies)}
    leaves = [*[others[t] for t in work.parameters], *[given[id(tensors[i])] for i in work.inputs]]
    parts: list[Tensor] = []
    values.apart(work.aside([given[id(t)] for t in tensors], others), parts)
    pairs = [(o, g) for o, g in zip((o for o in parts if o.requires_grad), grads) if g is not None]
    outs, out_grads = [o for o, _ in pairs], [g for _, g in pairs]
    return list(torch.autograd.grad(outs, leaves, out_grads, create_graph=True, allow_unused=True))


def _as_it_was(t: Tensor, held: Tensor | None, others: dict[Tensor, Tensor]) -> Tensor:
    """An argument as the replay read it: ``held`` if it was copied there."""
    if held is not None:
        return _Instead.apply(t, held)
    return t.view_as(t) if t.requires_grad else others.get(t, t)


def _check(captured: Captured, changed: Iterable[int]) -> None:
    what = "gradients of gradients were asked for (create_graph=True) of a module that "
    if captured.random:
        raise RuntimeError(f"{what}draws random numbers and runs as a CUDA graph{_LEAVE_OUT}")
    moved = {id(t) for t in captured.moving}
    if any(id(p) in moved for p in captured.work.parameters):
        raise RuntimeError(f"{what}writes to its parameters and runs as a CUDA graph{_LEAVE_OUT}")
    if any(id(captured.work.kept_and_buffers[at]) not in moved for at in changed
           if at < len(captured.work.kept_and_buffers)):
        raise RuntimeError(f"{what}runs as a CUDA graph, and whose parameters or buffers were "
                           f"changed since its forward{_LEAVE_OUT}")
