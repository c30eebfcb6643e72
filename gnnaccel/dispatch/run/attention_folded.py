"""One-head dot-product attention whose linear maps are moved off the edges, with a skip connection
(TransformerConv).

    <W_q x_i + b_q, W_k x_j + b_k>  =  <M x_i + c, x_j> + (what is the same for all j),    M = W_k^T
    W_q,  c = W_k^T b_q
    sum_j alpha_ij (W_v x_j + b_v)  =  W_v (sum_j alpha_ij x_j) + b_v

so edges only ever see x, of the three maps of nodes one is left before the softmax and one after,
and that accumulates into the skip connection. Softmax weights sum to one where a node has an edge
at all: elsewhere b_v does not count. The bias of the keys adds the same to all scores of a
destination, so its gradient is zero.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.dispatch.run import attention_families as families, skinny_matmul
from gnnaccel.dispatch.run.attention_families import bias_grad
from gnnaccel.dispatch.run.autograd import Operation, wants_grad

if TYPE_CHECKING:
    from gnnaccel.dispatch.run.attention import Call


@final
class Folded(NamedTuple):
    """The layer's tensors: features [N, F] of sources and destinations, weights [C, F] with their
    biases [C] or None. ``skip`` None: there is no skip connection."""

    x_src: Tensor
    x_dst: Tensor
    query: Tensor
    query_bias: Tensor | None
    key: Tensor
    key_bias: Tensor | None
    value: Tensor
    value_bias: Tensor | None
    skip: Tensor | None = None
    skip_bias: Tensor | None = None


_gradients: Callable[..., Folded] = Folded  # its tensors' gradients, None where there is none


def run(call: Call, given: Folded, attend) -> Tensor:
    """[num_dst, C] by the kernels. ``attend(call, tensors)``: attention by differentiable
    operations, with the call's dropout."""
    if wants_grad(*given):
        return _FoldedAttention(call, attend).apply(*given)
    return _forward(call, given, False)[0]


def composed(call: Call, given: Folded, attend) -> Tensor:
    """The folded attention by differentiable operations."""
    matrix, shift = _query_map(given)
    queries = F.linear(given.x_dst, matrix, shift)
    if given.key_bias is not None and given.key_bias.requires_grad and torch.is_grad_enabled():
        # The gradient of the sum is one number seen C times, which cannot be written to. That of
        # the product is a tensor.
        queries = queries + (0.0 * given.key_bias).sum()
    sums = attend(call,
                  {"keys": given.x_src.unsqueeze(1), "queries": queries.unsqueeze(1)}).flatten(1)
    out = F.linear(sums, given.value)
    if given.value_bias is not None:
        out = torch.addcmul(out, call.graph.covered(out.dtype), given.value_bias)
    return out if given.skip is None else out + F.linear(given.x_dst, given.skip, given.skip_bias)


def _query_map(given: Folded) -> tuple[Tensor, Tensor | None]:
    shift = given.query_bias
    return given.key.t() @ given.query, None if shift is None else shift @ given.key


def _inputs(keys: Tensor, queries: Tensor) -> tuple:
    """The inputs of the family's kernels: keys and queries, and nothing else."""
    tensors = {"keys": keys, "queries": queries}
    return tuple(map(tensors.get, families.PAIRWISE.names))


def _forward(call: Call, given: Folded, train: bool) -> tuple[Tensor, tuple]:
    """(output, (M, queries, sums, *what attention saves))"""
    matrix, shift = _query_map(given)
    queries = skinny_matmul.linear(given.x_dst, matrix, shift)
    inputs = _inputs(given.x_src, queries)
    sums, saved = families.PAIRWISE.forward(call, inputs, train)
    sums = sums.view(-1, call.width)
    everywhere, bias = call.graph.all_covered(), given.value_bias
    if given.skip is None:
        out = skinny_matmul.linear(sums, given.value, bias if everywhere else None)
    else:
        shared = given.skip_bias
        if bias is not None and everywhere:
            shared = bias if shared is None else bias + shared
        out = skinny_matmul.linear(given.x_dst, given.skip, shared).addmm_(sums, given.value.t())
    if bias is not None and not everywhere:
        out.addcmul_(call.graph.covered(out.dtype), bias)
    return out, (matrix, queries, sums, *saved) if train else ()


class _FoldedAttention(Operation):
    __slots__ = ("call", "attend")

    def __init__(self, call: Call, attend: Callable[[Call, dict[str, Tensor]], Tensor]):
        self.call, self.attend = call, attend

    def forward(self, needs, *given):
        out, saved = _forward(self.call, Folded(*given), True)
        return out, (*given, *saved)

    def backward(self, needs, saved, grad):
        folded, intermediates = Folded(*saved[:len(needs)]), saved[len(needs):]
        return _backward(self.call, folded, intermediates, dense(grad), Folded(*needs))

    def reference(self, *given):
        return composed(self.call, Folded(*given), self.attend)


def _backward(call: Call, given: Folded, saved: tuple, grad: Tensor, wanted: Folded) -> Folded:
    matrix, queries, sums, *attended = saved
    inputs = _inputs(given.x_src, queries)
    d_sums = skinny_matmul.matmul(grad, given.value).unsqueeze(1)
    d_keys, d_queries, *_ = families.PAIRWISE.backward(call, inputs, attended, d_sums,
                                                       (False,) * len(inputs))
    d_queries = d_queries.view(-1, call.width)
    d_dst = None
    if wanted.x_dst:
        same = given.x_src is given.x_dst and wanted.x_src
        d_dst = (d_keys.addmm_(d_queries, matrix) if same
                 else skinny_matmul.matmul(d_queries, matrix))
        if given.skip is not None:
            d_dst.addmm_(grad, given.skip)
        if same:
            d_keys = None  # all of it is in d_dst
    columns = None
    if wanted.skip_bias or wanted.value_bias:
        columns = bias_grad(
            grad,
            given.skip_bias if wanted.skip_bias else given.value_bias)  # type: ignore[arg-type]
    d_query, d_query_bias, d_key = _query_and_key(call, given, d_queries, wanted)
    return _gradients(
        d_keys if wanted.x_src else None, d_dst, d_query, d_query_bias, d_key,
        torch.zeros_like(given.key_bias) if wanted.key_bias else None,  # type: ignore[arg-type]
        grad.t() @ sums if wanted.value else None,
        _value_bias(call, grad, columns) if wanted.value_bias else None,  # type: ignore[arg-type]
        grad.t() @ given.x_dst if wanted.skip else None, columns if wanted.skip_bias else None)


def _value_bias(call: Call, grad: Tensor, columns: Tensor) -> Tensor:
    """The sum of the rows of ``grad`` [N, C] that have edges; ``columns``: of all rows."""
    if call.graph.all_covered():
        return columns.clone()
    return (call.graph.covered(grad.dtype).t() @ grad).view(-1)


def _query_and_key(call: Call, given: Folded, d_queries: Tensor,
                   wanted: Folded) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the queries' weight and bias and of the keys' weight, through M and c."""
    if not (wanted.query or wanted.key or wanted.query_bias):
        return None, None, None
    d_matrix = d_queries.t() @ given.x_dst
    d_shift = None
    if given.query_bias is not None and (wanted.query_bias or wanted.key):
        d_shift = bias_grad(d_queries, d_queries.new_empty(call.width))
    d_key = given.query @ d_matrix.t() if wanted.key else None
    if d_key is not None and d_shift is not None:
        d_key.addr_(given.query_bias, d_shift)  # type: ignore[arg-type]
    return (given.key @ d_matrix if wanted.query else None,
            given.key @ d_shift if wanted.query_bias else None,  # type: ignore[operator]
            d_key)
