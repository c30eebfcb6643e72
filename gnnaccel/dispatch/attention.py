"""Running an attention Program: fused kernels inside `torch.autograd.Function`s, or the torch backend.

Backward runs the plan its forward took. When it is itself recorded (``create_graph=True``) it recomputes with the torch
backend instead, with the same dropout mask, so that second derivatives are right.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnaccel.cuda import additive, additive_backward, head_dot, pairwise, pairwise_backward
from gnnaccel.cuda.dropout import OFF, Dropout, draw, factors
from gnnaccel.dispatch import torch_backend
from gnnaccel.dispatch.graph import GraphView
from gnnaccel.dispatch.patterns import Attention
from gnnaccel.dispatch.program import Program


@dataclass
class Call:
    """One attention call. ``exposed``: the caller hands the result on as it is, so a user may change it in place; where
    backward reads the output it must then be a copy. ``pmf``: long rows by PMF."""

    program: Program
    attention: Attention
    graph: GraphView
    heads: int
    width: int
    out_dtype: torch.dtype
    exposed: bool = False
    pmf: bool = False
    dropout: Dropout | None = None

    def needs_places(self) -> bool:
        """Whether kernels look up edge ids or CSC places: for edge features, and in backward for dropout."""
        return self.attention.edge or self.attention.dropout > 0


class Attend:
    """What an adapter gets to run its Program with, once its tensors are made; ``graph`` for what else it needs of it."""

    __slots__ = ("_call", "_run", "graph")

    def __init__(self, call: Call, run):
        self._call, self._run, self.graph = call, run, call.graph

    def __call__(self, tensors: dict[str, Tensor]) -> Tensor:
        return self._run(self._call, tensors)


def prepare(found: Attention, heads: int, width: int, row: torch.dtype, out: torch.dtype, grad: bool, wide: bool) -> None:
    """Compile what a call of this kind will launch, so that a kernel that does not compile is known before anything runs.

    Raises CompileError. Costs nothing where it has been done.
    """
    family = additive if found.family == "additive" else pairwise
    score = () if found.family == "additive" else (found.score,)
    kernels = family.variant(heads, width, row, out, found.edge, found.dropout > 0, grad, wide, *score)
    wanted = [(kernels.forward_kernels, ("forward", "merge"))]
    if found.family == "additive":
        if found.score == "additive":
            wanted.append((head_dot.kernels(heads, width, row), ("dot", "grad", "sum_blocks") if grad else ("dot",)))
        if grad:
            wanted.append((kernels.backward_kernels, ("prepare", "sources", "merge")))
    elif grad:
        wanted += [(kernels.backward_kernels(by_src), ("prepare", "backward", "merge")) for by_src in (True, False)]
    for compiled, entries in wanted:
        for entry in entries:
            compiled(entry)


def run_cuda(call: Call, tensors: dict[str, Tensor]) -> Tensor:
    """The Program's output [num_dst, heads, width] by the fused kernels. ``tensors`` by input name."""
    found = call.attention
    call.dropout = draw(found.dropout, call.graph.device) if found.dropout else OFF
    return _RUNS.get(found.score, _pairwise)(call, tensors)


def run_torch(call: Call, tensors: dict[str, Tensor]) -> Tensor:
    """The same by the torch backend, with torch's own dropout. Works in any floating dtype."""
    edges = call.graph.edges()
    keep = None
    if call.attention.dropout > 0:
        first = next(iter(tensors.values()))
        keep = torch.nn.functional.dropout(first.new_ones(edges.src.shape[0], call.heads), call.attention.dropout)
    return torch_backend.run(call.program, edges, _shaped(call, tensors), keep).to(call.out_dtype)


def _shaped(call: Call, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The bias as [heads, width]: kernels take it as the layer has it."""
    if "bias" not in tensors:
        return tensors
    return {**tensors, "bias": tensors["bias"].view(call.heads, call.width)}


def _wants_grad(tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _rows(t: Tensor | None) -> Tensor | None:
    """Contiguous, and aligned for the widest load."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _fp32(t: Tensor | None, *shape: int) -> Tensor | None:
    if t is None:
        return None
    if t.dtype is torch.float32 and t.is_contiguous() and t.data_ptr() % 16 == 0:
        return t  # kernels see memory, not shapes
    return _rows(t.reshape(shape).float())


def _recompute(ctx, call: Call, names: tuple[str, ...], inputs: tuple[Tensor | None, ...], grad: Tensor) -> tuple:
    """Gradients by differentiable torch operations; they can be differentiated again."""
    # Aliases, since one input may be another one, or made from it: each gradient must be that of its own place only.
    present = {name: t.view_as(t) for name, t in zip(names, inputs) if t is not None}
    operands = _shaped(call, present)
    wanted = [name for i, name in enumerate(names) if ctx.needs_input_grad[i + 1] and name in present]
    edges = call.graph.edges(call.needs_places())
    keep = None
    if call.attention.dropout > 0:
        keep = factors(call.dropout, edges.src.shape[0], call.heads, grad.device)
    out = torch_backend.run(call.program, edges, operands, keep).to(call.out_dtype)
    grads = torch.autograd.grad(out, [present[n] for n in wanted], grad, create_graph=True, allow_unused=True)
    found = dict(zip(wanted, grads))
    return (None, *(found.get(name) for name in names))


# --- additive ----------------------------------------------------------------------------------------------------------

_ADDITIVE = ("x", "x_dst", "att_src", "att_dst", "a_edge", "bias")


def _additive(call: Call, tensors: dict[str, Tensor]) -> Tensor:
    get = tensors.get
    inputs = get("x"), get("x_dst"), get("att_src"), get("att_dst"), get("a_edge"), get("bias")  # as in _ADDITIVE, written out: faster
    if _wants_grad(inputs):
        return _AdditiveFunction.apply(call, *inputs)
    return _additive_forward(call, inputs, train=False)[0]


def _additive_variant(call: Call, x: Tensor, train: bool) -> additive.Variant:
    return additive.variant(call.heads, call.width, x.dtype, call.out_dtype, call.attention.edge, call.dropout.on, train,
                            call.graph.wide)


def _additive_forward(call: Call, inputs: tuple, train: bool):
    x, x_dst, att_src, att_dst, a_edge, bias = inputs
    h, d = call.heads, call.width
    x, x_dst = _rows(x), _rows(x_dst)
    att_src, att_dst, a_edge = _fp32(att_src, h, d), _fp32(att_dst, h, d), _fp32(a_edge, -1, h)
    same = att_dst is not None and x_dst is None
    a_src, a_dst = head_dot.dot(x, att_src, att_dst if same else None)
    if x_dst is not None:
        a_dst, _ = head_dot.dot(x_dst, att_dst)
    graph = call.graph.csc(places=call.needs_places())
    out, saved = additive.forward(_additive_variant(call, x, train), graph, a_src, a_dst, x, call.attention.slope, a_edge,
                                  call.dropout, call.pmf, _fp32(bias, -1))
    return out, saved, (x, x_dst, att_src, att_dst, a_edge, a_src, a_dst)


class _AdditiveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, *inputs):
        out, saved, prepared = _additive_forward(call, inputs, train=True)
        ctx.call = call
        ctx.save_for_backward(*inputs, *prepared, saved.small, saved.parts)
        return out

    @staticmethod
    def backward(ctx, grad):
        call, saved = ctx.call, ctx.saved_tensors
        inputs, (x, x_dst, att_src, att_dst, a_edge, a_src, a_dst), result = saved[:6], saved[6:13], saved[13:]
        if torch.is_grad_enabled():
            return _recompute(ctx, call, _ADDITIVE, inputs, grad)
        same = att_dst is not None and x_dst is None
        places = call.needs_places()
        by_dst, by_src = call.graph.csc(places), call.graph.csr(places)
        g = additive_backward.backward(
            _additive_variant(call, x, True), by_src, by_dst.place, additive.Saved(*result), _rows(grad), a_src, a_dst, x,
            att_src, att_dst if same else None, call.attention.slope, a_edge, ctx.needs_input_grad[5], call.dropout)
        d_att_src = d_att_dst = d_x_dst = None
        if any(ctx.needs_input_grad[3:5]) or x_dst is not None:
            d_att_src, d_att_dst = head_dot.dot_grad(x, g.a_src, g.a_dst if same else None).unbind(0)
            if x_dst is not None:
                d_att_dst = head_dot.dot_grad(x_dst, g.a_dst)[0]
                d_x_dst = (g.a_dst.unsqueeze(-1) * att_dst.view(call.heads, call.width)).to(x_dst.dtype)
        return (None, g.values, d_x_dst, _like(d_att_src, inputs[2]), _like(d_att_dst, inputs[3]), _like(g.a_edge, inputs[4]),
                _bias_grad(ctx.needs_input_grad[6], grad, inputs[5]))


def _like(grad: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """A gradient in its tensor's shape and dtype; None stays None."""
    if grad is None or tensor is None:
        return None
    if grad.shape != tensor.shape:
        grad = grad.view(tensor.shape)
    return grad if grad.dtype is tensor.dtype else grad.to(tensor.dtype)


def _bias_grad(wanted: bool, grad: Tensor, bias: Tensor | None) -> Tensor | None:
    return _like(grad.sum(0), bias) if wanted and bias is not None else None


# --- additive, with terms from elsewhere --------------------------------------------------------------------------------

_TERMS = ("x", "a_src", "a_dst", "a_edge")


def _terms(call: Call, tensors: dict[str, Tensor]) -> Tensor:
    inputs = tuple(tensors.get(name) for name in _TERMS)
    if _wants_grad(inputs):
        return _TermsFunction.apply(call, *inputs)
    return _terms_forward(call, inputs, train=False)[0]


def _terms_forward(call: Call, inputs: tuple, train: bool):
    x, *terms = inputs
    x, (a_src, a_dst, a_edge) = _rows(x), (_fp32(t, -1, call.heads) for t in terms)
    out, saved = additive.forward(_additive_variant(call, x, train), call.graph.csc(places=call.needs_places()), a_src, a_dst, x,
                                  call.attention.slope, a_edge, call.dropout, call.pmf)
    return out, saved, (x, a_src, a_dst, a_edge)


class _TermsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, *inputs):
        out, saved, prepared = _terms_forward(call, inputs, train=True)
        ctx.call = call
        ctx.save_for_backward(*inputs, *prepared, saved.small, saved.parts)
        return out

    @staticmethod
    def backward(ctx, grad):
        call, saved = ctx.call, ctx.saved_tensors
        inputs, (x, a_src, a_dst, a_edge), result = saved[:4], saved[4:8], saved[8:]
        if torch.is_grad_enabled():
            return _recompute(ctx, call, _TERMS, inputs, grad)
        places = call.needs_places()
        by_dst, by_src = call.graph.csc(places), call.graph.csr(places)
        none = torch.zeros(call.heads, call.width, device=x.device)  # the terms were not made from x
        g = additive_backward.backward(_additive_variant(call, x, True), by_src, by_dst.place, additive.Saved(*result), _rows(grad),
                                       a_src, a_dst, x, none, None, call.attention.slope, a_edge, ctx.needs_input_grad[4],
                                       call.dropout)
        return (None, *(_like(d, t) for d, t in zip((g.values, g.a_src, g.a_dst, g.a_edge), inputs)))


# --- pairwise ----------------------------------------------------------------------------------------------------------

_PAIRWISE = ("keys", "queries", "values", "edges", "att", "c_src", "c_dst", "bias")


def _pairwise(call: Call, tensors: dict[str, Tensor]) -> Tensor:
    inputs = tuple(tensors.get(name) for name in _PAIRWISE)
    if _wants_grad(inputs):
        return _PairwiseFunction.apply(call, *inputs)
    return _pairwise_forward(call, inputs, train=False)[0]


def _pairwise_variant(call: Call, keys: Tensor, train: bool) -> pairwise.Variant:
    return pairwise.variant(call.heads, call.width, keys.dtype, call.out_dtype, call.attention.edge, call.dropout.on, train,
                            call.graph.wide, call.attention.score)


def _operands(call: Call, inputs: tuple) -> pairwise.Operands:
    keys, queries, values, edges, att, c_src, c_dst, _ = inputs
    h, d = call.heads, call.width

    def rows(t: Tensor | None) -> Tensor | None:  # [-1, h, d] in memory, whatever the shape
        if t is None:
            return None
        return _rows(t if t.dtype is keys.dtype else t.to(keys.dtype))

    return pairwise.Operands(rows(keys), rows(queries), rows(values), rows(edges), _fp32(att, h, d), _fp32(c_src, -1, h),
                             _fp32(c_dst, -1, h), call.attention.scale, call.attention.slope)


def _pairwise_forward(call: Call, inputs: tuple, train: bool):
    operands = _operands(call, inputs)
    variant = _pairwise_variant(call, operands.keys, train)
    return pairwise.forward(variant, call.graph.csc(places=call.needs_places()), operands, call.dropout,
                            _fp32(inputs[7], -1), keep=call.exposed)


class _PairwiseFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, *inputs):
        out, raw, lse = _pairwise_forward(call, inputs, train=True)
        ctx.call = call
        ctx.save_for_backward(*inputs, raw, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        call, saved = ctx.call, ctx.saved_tensors
        inputs, (raw, lse) = saved[:8], saved[8:]
        if torch.is_grad_enabled():
            return _recompute(ctx, call, _PAIRWISE, inputs, grad)
        operands = _operands(call, inputs)
        places = call.needs_places()
        by_dst, by_src = call.graph.csc(places), call.graph.csr(places)
        g = pairwise_backward.backward(_pairwise_variant(call, operands.keys, True), by_dst, by_src, operands, raw, lse,
                                       _rows(grad), ctx.needs_input_grad[4], call.dropout)
        grads = (g.keys, g.queries, g.values, g.edges, g.att, g.c_src, g.c_dst)
        return (None, *(_like(d, t) for d, t in zip(grads, inputs)), _bias_grad(ctx.needs_input_grad[8], grad, inputs[7]))


#: by kind of score; the others are pairwise
_RUNS = {"additive": _additive, "terms": _terms}
