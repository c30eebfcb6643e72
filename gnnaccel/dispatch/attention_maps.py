"""Attention over rows that a linear map makes of the features, map and attention in one `torch.autograd.Function`.

One node of autograd's graph instead of up to seven, which is most of what a small graph costs; gradients that meet at the
features are accumulated by the products themselves (GEMM, beta = 1) instead of being added up afterwards; and the gradients of
biases are column sums by a kernel made for tall matrices.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.dispatch import tall
from gnnaccel.dispatch.attention_families import Family, aligned_rows, bias_grad

if TYPE_CHECKING:
    from gnnaccel.dispatch.attention import Call


class Mapped(NamedTuple):
    """Rows ``x @ weight.T + bias``, yet to be made: x [N, F], weight [heads * width, F], bias [heads * width] or None, all of
    one dtype. Two inputs side by side that are the same object are one set of rows. A call has maps of two features at most."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


#: Where a family's inputs come from, of each in order. First the number of its features, -1 where it is given as it is; second
#: the number of the input whose rows it shares (the one before it), its own where it shares none.
Plan = tuple[list[int], list[int]]


def made(call: Call, tensors: dict[str, Tensor | Mapped], product=F.linear) -> dict[str, Tensor]:
    """``tensors`` with every `Mapped` made, by ``product`` as `torch.nn.functional.linear`."""
    done, last, rows = {}, None, None
    for name, t in tensors.items():
        if type(t) is Mapped:
            if t is not last:
                last, rows = t, product(*t).view(-1, call.heads, call.width)
            t = rows
        done[name] = t
    return done


def run(call: Call, family: Family, tensors: dict[str, Tensor | Mapped], recompute) -> Tensor:
    """As `attention.run_cuda`. ``recompute(call, tensors)``: the same by differentiable operations, with the same dropout."""
    inputs = tuple(map(tensors.get, family.names))
    if torch.is_grad_enabled():
        plan, flat = _flattened(inputs)
        for t in flat:
            if t is not None and t.requires_grad:
                return _MappedFunction.apply(call, family, plan, recompute, *flat)
    done = made(call, tensors, tall.linear)
    return family.forward(call, tuple(map(done.get, family.names)), False)[0]


def _flattened(inputs: tuple) -> tuple[Plan, tuple]:
    """The plan, and the tensors: two features (the second may be None), then weights or given inputs, then biases."""
    features: list[Tensor | None] = [None, None]
    source, first, direct, biases = [], [], [], []
    for i, t in enumerate(inputs):
        if type(t) is not Mapped:
            source.append(-1)
            first.append(i)
            direct.append(t)
            biases.append(None)
            continue
        x, weight, bias = t
        at = 0 if features[0] is None or features[0] is x else 1
        assert features[at] is None or features[at] is x, "maps of more than two features"
        features[at] = x
        source.append(at)
        first.append(i if i == 0 or t is not inputs[i - 1] else first[i - 1])
        direct.append(weight)
        biases.append(bias)
    return (source, first), (*features, *direct, *biases)


def _rows(call: Call, plan: Plan, flat: tuple, product=tall.linear) -> tuple:
    """The family's inputs; ``product`` as `torch.nn.functional.linear`."""
    heads, width, count = call.heads, call.width, len(plan[0])
    inputs = list(flat[2:2 + count])
    for i, (source, first) in enumerate(zip(*plan)):
        if source >= 0:
            inputs[i] = (inputs[first] if first < i else
                         product(flat[source], inputs[i], flat[2 + count + i]).view(-1, heads, width))
    return tuple(inputs)


class _MappedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, family, plan, recompute, *flat):
        inputs = _rows(call, plan, flat)
        out, saved = family.forward(call, inputs, True)
        ctx.call, ctx.family, ctx.plan, ctx.recompute = call, family, plan, recompute
        ctx.save_for_backward(*flat, *inputs, *saved)
        return out

    @staticmethod
    def backward(ctx, grad):
        family, plan, saved, wanted = ctx.family, ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[4:]
        count = len(plan[0])
        flat, inputs, rest = saved[:2 + 2 * count], saved[2 + 2 * count:2 + 3 * count], saved[2 + 3 * count:]
        if torch.is_grad_enabled():
            return None, None, None, None, *_recorded(ctx, flat, grad)
        grads = family.backward(ctx.call, inputs, list(rest), aligned_rows(grad), wanted[2:2 + count])
        return None, None, None, None, *_through_maps(plan, flat, grads, wanted)


def _recorded(ctx, flat: tuple, grad: Tensor) -> list:
    """Gradients that can be differentiated again. Aliases, since one input may be made from another: each gradient must be that
    of its own place only."""
    present = [None if t is None else t.view_as(t) for t in flat]
    inputs = _rows(ctx.call, ctx.plan, tuple(present), F.linear)
    out = ctx.recompute(ctx.call, {name: t for name, t in zip(ctx.family.names, inputs) if t is not None})
    asked = [i for i, t in enumerate(present) if t is not None and ctx.needs_input_grad[4 + i]]
    found = torch.autograd.grad(out, [present[i] for i in asked], grad, create_graph=True, allow_unused=True)
    grads: list = [None] * len(flat)
    for i, g in zip(asked, found):
        grads[i] = g
    return grads


def _through_maps(plan: Plan, flat: tuple, grads: tuple, wanted: tuple) -> list:
    """Gradients of all of ``flat`` from those of the family's inputs."""
    count = len(plan[0])
    found: list = [None] * len(flat)
    for i, (source, first) in enumerate(zip(*plan)):
        if source < 0 or first != i:
            found[2 + i] = grads[i] if source < 0 else None
            continue
        x, weight, bias = flat[source], flat[2 + i], flat[2 + count + i]
        rows = _shared(plan, grads, i)
        if rows is None:
            continue
        rows = rows.view(x.shape[0], -1)
        if wanted[source]:
            found[source] = tall.matmul(rows, weight) if found[source] is None else found[source].addmm_(rows, weight)
        if wanted[2 + i]:
            found[2 + i] = rows.t() @ x
        if bias is not None and wanted[2 + count + i]:
            found[2 + count + i] = bias_grad(rows, bias)
    return found


def _shared(plan: Plan, grads: tuple, i: int) -> Tensor | None:
    """The gradient of input ``i``'s rows, with that of the inputs which share them."""
    total = grads[i]
    for k in range(i + 1, len(grads)):
        if plan[1][k] == i and plan[0][k] >= 0 and grads[k] is not None:
            total = grads[k] if total is None else total + grads[k]
    return total
