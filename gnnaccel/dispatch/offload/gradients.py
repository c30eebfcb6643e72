"""Backward of a call in bands: each stage runs again, with gradients, the last one first."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnaccel.dispatch.offload import pipeline
from gnnaccel.dispatch.offload.memory import Where
from gnnaccel.dispatch.offload.plan import Band
from gnnaccel.dispatch.offload.session import Key
from gnnaccel.errors import OffloadError

if TYPE_CHECKING:
    from gnnaccel.dispatch.offload.calls import Answers, Call, Held


#: dtypes in which bands' shares of a weight's gradient are added up
_WIDER = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}


def in_bands(call: Call, inputs: list[Tensor], whole: list[Tensor]) -> Tensor:
    """``call.forward``, differentiable once. Nothing is saved but its arguments, and the rows that
    were collected between stages."""
    return _InBands.apply(call, len(inputs), *inputs, *whole)


class _InBands(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, inputs: int, *tensors: Tensor) -> Tensor:
        ctx.call, ctx.inputs = call, inputs
        ctx.set_materialize_grads(False)
        device = call.memory.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.save_for_backward(*tensors)
        return call.forward(list(tensors[:inputs]), list(tensors[inputs:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors, needs = list(ctx.saved_tensors), list(ctx.needs_input_grad[2:])
        with ctx.call.around():
            backward = _Backward(ctx.call, tensors[:ctx.inputs], tensors[ctx.inputs:], needs,
                                 ctx.autocast)
            return None, None, *backward.run(grad.resolve_neg().contiguous())


class _Backward:
    """The gradients of one call, summed band by band. ``needs``: for which of ``inputs`` and
    ``whole`` they are wanted."""

    def __init__(self, call: Call, inputs: list[Tensor], whole: list[Tensor], needs: list[bool],
                 autocast: tuple[str, torch.dtype, bool]):
        self._call, self._memory, self._autocast = call, call.memory, autocast
        self._inputs, self._far_whole, self._needs = inputs, whole, needs
        self._whole = [t.detach().to(self._memory.device) for t in whole]
        self._sums: dict[Key | int, Tensor] = {}
        self._shares: list[Tensor | None] = [None] * len(whole)

    def run(self, grad: Tensor) -> list[Tensor | None]:
        """The gradients, each where its tensor is; None where nothing reaches it."""
        call, answers = self._call, self._call.answers
        stages = [key for key, answer in answers.items() if isinstance(answer, Tensor)]
        self._stage(None, grad, answers)
        while stages:
            goal = stages.pop()
            gradient = self._sums.pop(goal, None)
            if gradient is not None:
                self._stage(goal, gradient, {key: answer for key, answer in answers.items()
                                             if key in stages or isinstance(answer, int)})
        call.near.forget()
        return [*(self._far(self._sums.get(at)) for at in range(len(self._inputs))),
                *(None if share is None else share.to(far.device, far.dtype)
                  for share, far in zip(self._shares, self._far_whole))]

    def _stage(self, goal: Key | None, gradient: Tensor, answers: Answers) -> None:
        """Run all bands up to ``goal``, whose gradient is ``gradient``, and back."""
        call = self._call
        kind = call.kind(goal)
        pipeline.run(self._memory.device, call.bands.bands,
                     lambda band: call.load(band, self._inputs, answers, gradient, kind),
                     lambda band, held: self._pull(band, held, goal), lambda band, result: None,
                     lambda held: () if held is None else held.tensors())

    def _pull(self, band: Band, held: Held, goal: Key | None) -> None:
        """Add a band's gradients to the sums."""
        inputs = [t.detach().requires_grad_(need) for t, need in zip(held.inputs, self._needs)]
        whole = [t.detach().requires_grad_(need)
                 for t, need in zip(self._whole, self._needs[len(inputs):])]
        with torch.enable_grad(), torch.autocast(*self._autocast):
            result, session = self._call.run(band, held, self._inputs, inputs, whole, goal)
        leaves = {} if session is None else session.taken_leaves()
        if not result.rows.requires_grad:
            return
        wanted = self._wanted(band, inputs, whole, leaves)
        if band is self._call.bands.bands[0]:
            self._check(result.rows, [leaf for _, _, leaf in wanted])
        grads = torch.autograd.grad(result.rows, [leaf for _, _, leaf in wanted], held.share,
                                    allow_unused=True)
        for (at, where, leaf), grad in zip(wanted, grads):
            if grad is None:
                continue
            if where is not None:
                self._memory.add(grad, where, self._sum(at, leaf))
            else:
                share, grad = self._shares[at], grad.to(_WIDER.get(grad.dtype, grad.dtype))
                self._shares[at] = grad if share is None else share + grad

    def _check(self, rows: Tensor, leaves: list[Tensor]) -> None:
        """OffloadError where a function is differentiated by something that it was not given."""
        allowed, pending, visited = set(map(id, leaves)), [rows.grad_fn], set()
        while pending:
            node = pending.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            pending += [after for after, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in allowed:
                raise OffloadError(
                    f"{self._call.name} uses a tensor {list(leaf.shape)} with a gradient that is "
                    "none of its arguments and weights. Pass it as an argument of propagate, or "
                    "detach it")

    def _wanted(self, band: Band, inputs: list[Tensor], whole: list[Tensor],
                leaves: dict[Key, Tensor]) -> list[tuple[Any, Where | None, Tensor]]:
        """Tensors whose gradients are wanted: (key of the sum, rows in it, the tensor); for
        ``whole``, (its place, None, the tensor)."""
        wanted: list[tuple[Any, Where | None, Tensor]] = [
            (at, band.rows(kind), leaf)
            for at, (kind, leaf) in enumerate(zip(self._call.kinds, inputs)) if leaf.requires_grad]
        for key, leaf in leaves.items():
            answer = self._call.answers[key]
            wanted.append((answer if isinstance(answer, int) else key, band.halo, leaf))
        wanted += [(at, None, leaf) for at, leaf in enumerate(whole) if leaf.requires_grad]
        return wanted

    def _sum(self, at: Key | int, leaf: Tensor) -> Tensor:
        """The sum of gradients of an input, or of rows that were asked for, all rows of it."""
        if at not in self._sums:
            bands = self._call.bands
            rows = len(self._inputs[at]) if isinstance(at, int) else bands.sizes[bands.source]
            self._sums[at] = self._call.near.empty((rows, *leaf.shape[1:]), leaf.dtype).zero_()
        return self._sums[at]

    def _far(self, rows: Tensor | None) -> Tensor | None:
        """``rows`` in the host's memory; None stays None."""
        return rows if rows is None or rows.device.type == "cpu" else self._memory.keep(rows)
