"""Attention over rows that a linear map makes of the features, map and attention in one node of
autograd.

One node instead of up to seven, which are most of the cost of a small graph; gradients that meet at
the features are accumulated by the products themselves (GEMM, beta = 1) instead of being added up
afterwards; and the gradients of biases are column sums by a kernel made for tall matrices.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.dispatch.run import skinny_matmul
from gnnaccel.dispatch.run.attention_families import Family, bias_grad, present
from gnnaccel.dispatch.run.autograd import Operation

if TYPE_CHECKING:
    from gnnaccel.dispatch.run.attention import Call


@final
class Mapped(NamedTuple):
    """Rows ``x @ weight.T + bias``, yet to be made: x [N, F], weight [heads * width, F], bias
    [heads * width] or None, all of one dtype. Two inputs side by side that are the same object are
    one set of rows. A call has maps of two features at most."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


#: Origin of each of a family's inputs, in order. First the number of its features, -1 where it is
#: passed in as rows; second the number of the input whose rows it shares (the one before it), its
#: own where it shares none.
Plan = tuple[list[int], list[int]]


def made(call: Call, tensors: dict[str, Tensor | Mapped], product=F.linear) -> dict[str, Tensor]:
    """``tensors`` with every `Mapped` made, by ``product`` as `torch.nn.functional.linear`."""
    done: dict[str, Tensor]
    last: Mapped | None
    rows: Tensor
    done, last, rows = {}, None, None  # type: ignore[assignment]
    for name, t in tensors.items():
        if type(t) is Mapped:
            if t is not last:
                last, rows = t, product(*t).view(-1, call.heads, call.width)
            t = rows
        done[name] = t
    return done


def run(call: Call, family: Family, tensors: dict[str, Tensor | Mapped], recompute) -> Tensor:
    """`attention.run_cuda` with `Mapped` inputs. ``recompute(call, tensors)``: attention by
    differentiable operations, with the same dropout."""
    if torch.is_grad_enabled():
        plan, flat = _flattened(tuple(map(tensors.get, family.names)))
        for t in flat:
            if t is not None and t.requires_grad:
                return _MappedAttention(call, family, plan, recompute).apply(*flat)
    done = made(call, tensors, skinny_matmul.linear)
    return family.forward(call, tuple(map(done.get, family.names)), False)[0]


def _flattened(inputs: tuple) -> tuple[Plan, tuple]:
    """The plan, and the tensors: two features (the second may be None), then weights or given
    inputs, then biases."""
    features: list[Tensor | None] = [None, None]
    biases: list[Tensor | None]
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


def _rows(call: Call, plan: Plan, flat: tuple, product=skinny_matmul.linear) -> tuple:
    """The family's inputs; ``product`` as `torch.nn.functional.linear`."""
    heads, width, count = call.heads, call.width, len(plan[0])
    inputs = list(flat[2:2 + count])
    for i, (source, first) in enumerate(zip(*plan)):
        if source >= 0:
            inputs[i] = (inputs[first] if first < i else
                         product(flat[source], inputs[i],
                                 flat[2 + count + i]).view(-1, heads, width))
    return tuple(inputs)


class _MappedAttention(Operation):
    """Attention over the rows that `_rows` makes of its inputs, as `_flattened` lays those out."""

    __slots__ = ("call", "family", "plan", "recompute")

    def __init__(self, call: Call, family: Family, plan: Plan,
                 recompute: Callable[[Call, dict[str, Tensor]], Tensor]):
        self.call, self.family, self.plan, self.recompute = call, family, plan, recompute

    def forward(self, needs, *flat):
        inputs = _rows(self.call, self.plan, flat)
        out, saved = self.family.forward(self.call, inputs, True)
        return out, (*flat, *inputs, *saved)

    def backward(self, needs, saved, grad):
        count, total = len(self.plan[0]), len(needs)
        flat, inputs = saved[:total], tuple(saved[total:total + count])
        del saved[:total + count]
        grads = self.family.backward(self.call, inputs, saved, dense(grad), needs[2:2 + count])
        return _through_maps(self.plan, flat, grads, needs)

    def reference(self, *flat):
        inputs = _rows(self.call, self.plan, flat, F.linear)
        return self.recompute(self.call, present(self.family.names, inputs))


def _through_maps(plan: Plan, flat: tuple, grads: tuple, wanted: tuple) -> list:
    """Gradients of all of ``flat`` from those of the family's inputs."""
    count = len(plan[0])
    d_flat: list = [None] * len(flat)
    for i, (source, first) in enumerate(zip(*plan)):
        if source < 0 or first != i:
            d_flat[2 + i] = grads[i] if source < 0 else None
            continue
        x, weight, bias = flat[source], flat[2 + i], flat[2 + count + i]
        rows = _shared(plan, grads, i) if i in plan[1][i + 1:] else grads[i]
        if rows is None:
            continue
        rows = rows.view(x.shape[0], -1)
        if wanted[source]:
            d_flat[source] = (skinny_matmul.matmul(rows, weight)
                              if d_flat[source] is None else d_flat[source].addmm_(rows, weight))
        if wanted[2 + i]:
            d_flat[2 + i] = rows.t() @ x
        if bias is not None and wanted[2 + count + i]:
            d_flat[2 + count + i] = bias_grad(rows, bias)
    return d_flat


def _shared(plan: Plan, grads: tuple, i: int) -> Tensor | None:
    """The gradient of input ``i``'s rows, with that of the inputs which share them."""
    total = grads[i]
    for k in range(i + 1, len(grads)):
        if plan[1][k] == i and plan[0][k] >= 0 and grads[k] is not None:
            total = grads[k] if total is None else total + grads[k]
    return total
