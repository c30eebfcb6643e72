"""Additive attention (GAT) whose values, and the gradient of whose result, are gathered in fewer
bytes.

Edge weights are computed in fp32: the inner products with the attention vectors, the scores, the
softmax. With values x' = read(store(x)) and the result's gradient g' =
read(store(g)), every gradient is that of attention over x' for g', passed straight through the
rounding of x. By kernels or by torch operations, which compute the same; a backward that is itself
recorded is that of fp32.
"""
from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.attention import additive
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.attention_programs import attention as pattern
from gnnaccel.dispatch.ops.call import Kernel, compile_reason
from gnnaccel.dispatch.plan.planner import Plan
from gnnaccel.dispatch.plan.request import CallSpec
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import cost, measure, rows
from gnnaccel.dispatch.quantized.cost import Sizes
from gnnaccel.dispatch.quantized.rows import Storage, Stored
from gnnaccel.dispatch.quantized.settings import Entry
from gnnaccel.dispatch.quantized.use import Counted, Guarded, Use, decide
from gnnaccel.dispatch.run import attention, attention_maps, torch_backend
from gnnaccel.dispatch.run.attention import Call
from gnnaccel.dispatch.run.attention_families import (ADDITIVE, AsTheyCome, Family,
                                                      additive_backward_of, additive_forward, like)
from gnnaccel.dispatch.run.attention_folded import Folded
from gnnaccel.dispatch.run.autograd import Operation, gradients


def reason_for(spec: Any) -> Reason | None:
    """Why a call of this form cannot be quantized."""
    attention = pattern(spec.program) if type(spec) is CallSpec else None
    if attention is None or attention.score != "additive":
        return reason("GA603", f"no kernel of {spec.native} takes rows in fewer bytes")
    return None


def chosen(layer: Any, entry: Entry, config: Config, spec: Any, plan: Plan) -> Use | Reason:
    """The storage of a call of ``layer`` that is planned to run so; or why it runs in fp32."""
    why = reason_for(spec)
    sizes = (Sizes(1, 1, 1, 1, 4, False) if why else Sizes(
        spec.num_src, spec.num_dst, spec.num_edges + spec.loops,
        spec.heads * spec.width, spec.row.itemsize,
        torch.is_grad_enabled()))
    native = plan.rejected[0][1] if plan.route == "native" and plan.rejected else None
    use = decide(layer, entry, config, plan.route, native,
                 spec.row if type(spec) is CallSpec else torch.float32, sizes, why)
    if type(use) is Use and use.kernels:
        use = compile_reason(_kernel(spec, use)) or use
    if type(use) is Use:
        entry.storage, entry.gain = (use.storage,
                                     cost.gain(sizes, use.storage) if use.kernels else None)
    return use


def runner(entry: Entry, use: Use | Reason, plain: Any) -> Any:
    """The function that runs the call instead of ``plain``."""
    return Counted(entry, use, plain) if type(use) is Reason else Run(use, plain)


def _kernel(spec: CallSpec, use: Use) -> Kernel:
    h, d, edge, dropout = (spec.heads, spec.width,
                           pattern(spec.program).edge, pattern(  # type: ignore[union-attr]
                               spec.program).dropout > 0)

    def compile_() -> None:
        rows.prepare(use.storage, h * d, spec.row, spec.out)
        for train in (False, True):
            variant = _variant(use.storage, h, d, spec.out, edge, dropout, train, False)
            for entry in ("forward", "merge"):
                variant.forward_kernels(entry)
        for entry in ("prepare", "sources", "merge"):
            (variant.edge_grad_kernels if edge else variant.backward_kernels)(entry)

    return Kernel("additive", ("quantized attention", h, d, spec.out, edge, dropout, use.storage),
                  compile_, lambda: None)


class Run(Guarded):
    """Stands in for `attention.run_cuda` or `attention.run_torch` (``plain``)."""

    def __init__(self, use: Use, plain: Any):
        super().__init__(use)
        self.plain, self.storage = plain, use.text

    def __call__(self, call: Call, tensors: Any) -> Tensor:
        return self.guarded(call.graph.device, partial(self._run, call, tensors),
                            partial(self.plain, call, tensors),
                            partial(_sampled, self.use, call, tensors), not call.attention.dropout,
                            reason("GA603") if type(tensors) is Folded else None)

    def _run(self, call: Call, tensors: dict) -> Tensor:
        flags = self.use.entry.watch.flags(call.graph.device)
        if self.use.kernels:
            return attention.run_cuda(call, tensors, _family(self.use, flags))
        tensors = attention.shaped(call, attention_maps.made(call, tensors))
        return _ByTorch(call, self.use, flags).apply(*map(tensors.get, ADDITIVE.names))


def _sampled(use: Use, call: Call, tensors: dict, count: int, turn: int) -> Tensor:
    """`measure.error` of the attention over the edges in the sample."""
    t, h, d = attention_maps.made(call, tensors), call.heads, call.width
    x = t["x"].detach().view(-1, h, d)
    stored = rows.store(x, use.storage.format, False, use.kernels)

    def term(of: Tensor, name: str, index: Tensor) -> Tensor:
        return (of[index].float() * t[name].detach().float().view(h, d)).sum(-1)

    def weights(src: Tensor, dst: Tensor, edge: Tensor, real: Tensor) -> Tensor:
        z = term(x, "att_src", src)
        if "att_dst" in t:
            z = z + term(t["x_dst"].detach().view(-1, h, d) if "x_dst" in t else x, "att_dst", dst)
        if "a_edge" in t:
            z = z + t["a_edge"].detach().float()[edge]
        z = torch.nn.functional.leaky_relu(z,
                                           call.attention.slope).masked_fill(~real.unsqueeze(-1),
                                                                             -torch.inf)
        return torch.nan_to_num(z.softmax(1)).unsqueeze(-1)

    return measure.error(call.graph, "a_edge" in t, x, stored, weights, count, turn)


# --- by kernels -----------------------------------------------------------------------------------

def _variant(storage: Storage, heads: int, width: int, out: torch.dtype, edge: bool, dropout: bool,
             train: bool, wide: bool) -> additive.Variant:
    grad = None if storage.backward == "fp32" else storage.grad
    return additive.variant(heads, width, storage.row, out, edge, dropout, train, wide, grad)


class _Stored(AsTheyCome):
    """Values and gradients as ``use`` stores them."""

    def __init__(self, use: Use, flags: Tensor | None):
        self._storage = use.storage
        self._flags = (None, None) if flags is None else (flags[:1], flags[1:])

    def variant(self, call: Call, x: Tensor, train: bool) -> additive.Variant:
        return _variant(self._storage, call.heads, call.width, call.out_dtype, call.attention.edge,
                        call.dropout.on, train, call.graph.wide)

    def values(self, x: Tensor) -> Stored:
        return rows.store(x, self._storage.format, False, True, self._flags[0])

    def gradient(self, grad: Tensor) -> Stored:
        return rows.store(grad, self._storage.backward, rows.stochastic(), True, self._flags[1])

    def packed(self, values: Stored) -> tuple[Tensor, Tensor | None]:
        return rows.packed(values)

    def unpacked(self, x: Tensor, first: Any, second: Tensor | None) -> Stored:
        return rows.unpacked(first, second, x.shape[1:].numel())


def _family(use: Use, flags: Tensor | None) -> Family:
    """`attention_families.ADDITIVE` with stored values and gradients."""
    form = _Stored(use, flags)
    return Family(ADDITIVE.names, partial(additive_forward, form=form),
                  partial(additive_backward_of, form=form))


# --- by torch operations --------------------------------------------------------------------------

class _ByTorch(Operation):
    """[num_dst, heads, width] of the inputs of `ADDITIVE`, bias [heads, width]."""

    __slots__ = ("call", "flags", "use")

    def __init__(self, call: Call, use: Use, flags: Tensor | None):
        self.call, self.use, self.flags = call, use, flags

    def forward(self, needs, *inputs):
        x, call, flag = inputs[0], self.call, None if self.flags is None else self.flags[:1]
        values = rows.store(x, self.use.storage.format, False, False, flag)
        keep = None
        if call.attention.dropout > 0:
            edges = call.graph.edges(call.attention.places)
            ones = x.new_ones(edges.src.shape[0], call.heads)
            keep = torch.nn.functional.dropout(ones, call.attention.dropout)
        out = _attend(call, rows.read(values, x.shape), inputs, keep)
        return _biased(call, out, inputs[5]), (*inputs, *rows.packed(values), keep)

    def backward(self, needs, saved, grad):
        (*inputs, data, scale, keep), call, storage = saved, self.call, self.use.storage
        flag = None if self.flags is None else self.flags[1:]
        stored = rows.store(grad, storage.backward, rows.stochastic(), False, flag)
        rounded = rows.read(stored, grad.shape)
        x = inputs[0]
        with torch.enable_grad():
            values = rows.read(rows.unpacked(data, scale, call.heads * call.width),
                               x.shape).requires_grad_()
            leaves = [None if t is None else t.detach().float().requires_grad_() for t in inputs]
            out = _attend(call, values, leaves, keep)
        differentiable = [i for i, t in enumerate(leaves) if t is not None and i != 5]
        gradients = torch.autograd.grad(out, [values, *(leaves[i] for i in differentiable)],
                                        rounded, allow_unused=True)
        grads = [None] * len(inputs)
        for i, g in zip(differentiable, gradients[1:]):
            grads[i] = g
        grads[0] = gradients[0] + grads[0]
        if storage.format == "bf16":
            grads[0] = grads[0].to(torch.bfloat16)  # as the kernels give it
        grads[5] = grad.float().sum(0) if inputs[5] is not None else None
        return [like(g, t) if n else None for g, t, n in zip(grads, inputs, needs)]

    def recorded(self, needs, saved, grad):
        """Gradients of fp32."""
        *inputs, _, _, keep = saved

        def reference(*inputs: Any) -> Tensor:
            return _biased(self.call, _attend(self.call, inputs[0], inputs, keep), inputs[5])

        return gradients(reference, inputs, needs, (grad,))


def _biased(call: Call, out: Tensor, bias: Tensor | None) -> Tensor:
    return (out if bias is None else out + bias).to(call.out_dtype)


def _attend(call: Call, values: Tensor, inputs: list | tuple, keep: Tensor | None) -> Tensor:
    """Attention over ``values`` with scores made of the fp32 ``inputs``."""
    x, x_dst, att_src, att_dst, a_edge, _ = inputs
    h, d, attention = call.heads, call.width, call.attention
    tensors = {"x": values.view(-1, h, d),
               "a_src": (x.float().view(-1, h, d) * att_src.float().view(h, d)).sum(-1)}
    if att_dst is not None:
        of = x if x_dst is None else x_dst
        tensors["a_dst"] = (of.float().view(-1, h, d) * att_dst.float().view(h, d)).sum(-1)
    if a_edge is not None:
        tensors["a_edge"] = a_edge.float().view(-1, h)
    program = programs.additive_terms(attention.slope, attention.dropout, att_dst is not None,
                                      a_edge is not None)
    return torch_backend.run(program, call.graph.edges(call.attention.places), tensors,
                             None if keep is None else keep.float())
