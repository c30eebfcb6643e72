"""The families of attention kernels behind one interface: forward and backward of the attention
that a Program names.

A family's functions take the inputs of its `NAMES` in order, None where the Program has none.
``forward`` gives the output and the tensors that backward needs; ``backward`` the gradient of each
input, None where there is none. Nothing here knows autograd.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor

from gnnaccel.cuda.attention import additive, additive_backward, pairwise
from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.traverse import aggregate, head_dot
from gnnaccel.cuda.traverse.column_sum import column_sum
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.ir.attention_programs import Attention

if TYPE_CHECKING:
    from gnnaccel.dispatch.run.attention import Call

Inputs = tuple  # of Tensor or None
Result = tuple[Tensor, tuple]


class Family(NamedTuple):
    """``forward(call, inputs, train)`` -> (output, saved); ``backward(call, inputs, saved, grad,
    wanted)`` -> gradients; ``wanted``: of which inputs. ``grad`` is contiguous; ``saved`` is a
    list, from which backward may drop tensors that it no longer needs."""

    names: tuple[str, ...]
    forward: Any
    backward: Any


def of(found: Attention) -> Family:
    """The family that runs this kind of attention."""
    return _BY_SCORE.get(found.score, PAIRWISE)


def present(names: tuple[str, ...], inputs: Inputs) -> dict[str, Tensor]:
    """The inputs of these names that there are."""
    return {name: t for name, t in zip(names, inputs) if t is not None}


# --- tensors as kernels take them -----------------------------------------------------------------

def dense_in(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """Tensors in ``dtype``, contiguous, aligned for the widest load; None stays None. Kernels see
    memory, not shapes."""
    return [t if t is None or (t.dtype is dtype and t.is_contiguous() and not t.data_ptr() % 16)
            else dense(t.to(dtype)) for t in tensors]


@overload
def like(grad: Tensor, tensor: Tensor) -> Tensor: ...
@overload
def like(grad: Tensor | None, tensor: Tensor | None) -> Tensor | None: ...
def like(grad: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """A gradient in its tensor's shape and dtype; None stays None."""
    if grad is None or tensor is None:
        return None
    if grad.shape != tensor.shape:
        grad = grad.view(tensor.shape)
    return grad if grad.dtype is tensor.dtype else grad.to(tensor.dtype)


def bias_grad(grad: Tensor, bias: Tensor) -> Tensor:
    """Gradient of a bias that was added to every row of [N, ...], shaped as ``bias``."""
    rows = grad.shape[0]
    return like(column_sum(grad.view(rows, -1)), bias) if rows else torch.zeros_like(bias)


def read(call: Call, x: Tensor) -> Tensor:
    """The rows ``x`` [N, heads, width], with zeros for those that no edge reads."""
    return x if call.unread is None else x.masked_fill(call.unread.view(-1, 1, 1), 0.0)


# --- additive -------------------------------------------------------------------------------------

def _additive_variant(call: Call, x: Tensor, train: bool) -> additive.Variant:
    return additive.variant(call.heads, call.width, x.dtype, call.out_dtype, call.attention.edge,
                            call.dropout.on, train, call.graph.wide)


class AsTheyCome:
    """Format in which additive attention gathers values and gradients: unchanged."""

    variant = staticmethod(_additive_variant)

    def values(self, x: Tensor) -> Any:
        return x

    def gradient(self, grad: Tensor) -> Any:
        return grad

    def packed(self, values: Any) -> tuple[Tensor | None, Tensor | None]:
        """The tensors of ``values`` that backward needs besides the rows that they were made of."""
        return None, None

    def unpacked(self, x: Tensor, first: Tensor | None, second: Tensor | None) -> Any:
        """The values, from their rows and the tensors of `packed`."""
        return x


_AS_THEY_COME = AsTheyCome()


def additive_forward(call: Call, inputs: Inputs, train: bool,
                     form: AsTheyCome = _AS_THEY_COME) -> Result:
    """``forward`` of `ADDITIVE`, values and gradients in ``form``."""
    att_dst: Any
    x, x_dst, att_src, att_dst, a_edge, bias = inputs
    x, x_dst = dense(x), None if x_dst is None else dense(x_dst)
    x = x if form is _AS_THEY_COME else read(call, x)  # a row's numbers share a scale
    att_src, att_dst, a_edge, bias = dense_in(torch.float32, att_src, att_dst, a_edge, bias)
    same = att_dst is not None and x_dst is None
    a_src, a_dst = head_dot.dot(x, att_src, att_dst if same else None)
    if x_dst is not None:
        a_dst, _ = head_dot.dot(x_dst, att_dst)
    graph, values = call.graph.csc(places=call.attention.places), form.values(x)
    out, saved = additive.forward(form.variant(call, x, train), graph, a_src, a_dst, values,
                                  call.attention.slope, a_edge, call.dropout,
                                  call.pmf and values is x, bias)
    if not train:
        return out, ()
    return out, (x, x_dst, att_src, att_dst, a_edge, a_src, a_dst, *form.packed(values),
                 saved.small, saved.parts)  # type: ignore[union-attr]


def additive_backward_of(call: Call, inputs: Inputs, saved: tuple, grad: Tensor, wanted: tuple,
                         form: AsTheyCome = _AS_THEY_COME) -> tuple:
    """``backward`` of `ADDITIVE`."""
    x, x_dst, att_src, att_dst, a_edge, a_src, a_dst, first, second, *result = saved
    x = read(call, x)  # here alone: forward reads rows by edges
    same = att_dst is not None and x_dst is None
    places = call.attention.places
    by_dst, by_src = call.graph.csc(places), call.graph.csr(places)
    g = additive_backward.backward(
        form.variant(call, x, True), by_dst, by_src, additive.Saved(*result),
        form.gradient(grad), a_src, a_dst,
        form.unpacked(x, first, second), att_src, att_dst if same else None, call.attention.slope,
        a_edge, wanted[4], call.dropout)
    d_att_src = d_att_dst = d_x_dst = None
    if wanted[2] or wanted[3] or x_dst is not None:
        d_att_src, d_att_dst = head_dot.dot_grad(x, g.a_src, g.a_dst if same else None).unbind(0)
        if x_dst is not None:
            d_att_dst = head_dot.dot_grad(x_dst, g.a_dst)[0]
            d_x_dst = (g.a_dst.unsqueeze(-1) * att_dst.view(call.heads, call.width)).to(x_dst.dtype)
    return (like(g.values, inputs[0]), d_x_dst, like(d_att_src, inputs[2]),
            like(d_att_dst, inputs[3]), like(g.a_edge, inputs[4]),
            bias_grad(grad, inputs[5]) if wanted[5] else None)


ADDITIVE = Family(("x", "x_dst", "att_src", "att_dst", "a_edge", "bias"), additive_forward,
                  additive_backward_of)


# --- additive, with terms from elsewhere ----------------------------------------------------------

def _terms_forward(call: Call, inputs: Inputs, train: bool) -> Result:
    x = dense(inputs[0])
    a_src, a_dst, a_edge, att, bias = dense_in(torch.float32, *inputs[1:])
    if att is not None:
        a_src, _ = head_dot.dot(x, att)
    out, saved = additive.forward(_additive_variant(call, x, train),
                                  call.graph.csc(places=call.attention.places), a_src, a_dst, x,
                                  call.attention.slope, a_edge, call.dropout, call.pmf, bias)
    return out, (x, a_src, a_dst, a_edge, att,
                 saved.small, saved.parts) if train else ()  # type: ignore[union-attr]


def _terms_backward(call: Call, inputs: Inputs, saved: tuple, grad: Tensor, wanted: tuple) -> tuple:
    x, a_src, a_dst, a_edge, att, *result = saved
    places = call.attention.places
    by_dst, by_src = call.graph.csc(places), call.graph.csr(places)
    # zeros: the terms were not made from x
    vector = (torch.zeros(call.heads, call.width, dtype=torch.float32, device=x.device)
              if att is None else att)
    g = additive_backward.backward(_additive_variant(call, x, True), by_dst, by_src,
                                   additive.Saved(*result), grad, a_src, a_dst, x, vector, None,
                                   call.attention.slope, a_edge, wanted[3], call.dropout)
    d_att = None if att is None or not wanted[4] else head_dot.dot_grad(x, g.a_src)[0]
    return *(like(d, t)
             for d, t in zip((g.values, g.a_src, g.a_dst, g.a_edge, d_att), inputs)), None


#: additive attention over terms that the caller made. Instead of ``a_src`` there may be ``att``
#: [H, D], with which rows are multiplied; the gradient of a bias is the caller's
TERMS = Family(("x", "a_src", "a_dst", "a_edge", "att", "bias"), _terms_forward, _terms_backward)


# --- pairwise -------------------------------------------------------------------------------------

def _pairwise_variant(call: Call, keys: Tensor, train: bool) -> pairwise.Variant:
    return pairwise.variant(call.heads, call.width, keys.dtype, call.out_dtype, call.attention.edge,
                            call.dropout.on, train, call.graph.wide, call.attention.score,
                            not keys.is_contiguous(), call.attention.vectors)


def side_by_side(left: Tensor, right: Tensor | None) -> bool:
    """Whether two tensors [N, ..] are ``both[:, 0]`` and ``both[:, 1]`` of an aligned tensor [N, 2,
    ..], N at least 2."""
    if (right is None or left.shape != right.shape or left.dtype is not right.dtype
        or left.shape[0] < 2):
        return False
    row, size = left.numel() // left.shape[0], left.element_size()
    # the strides first: where they differ, as mostly, no row is looked at
    return (left.stride(0) == right.stride(0) == 2 * row and left[0].is_contiguous()
            and right[0].is_contiguous()
            and right.data_ptr() - left.data_ptr() == row * size
            and left.data_ptr() % 16 == row * size % 16 == 0)


def _operands(call: Call, inputs: Inputs) -> pairwise.Operands:
    keys, queries, values, edges, att, c_src, c_dst, _, of_src, of_dst = inputs
    # rows are [-1, heads, width] in memory, whatever the shape
    if values is not None and side_by_side(keys, values):
        queries, edges = dense_in(keys.dtype, queries, edges)
    else:
        keys, values, queries, edges = dense_in(keys.dtype, keys, values, queries, edges)
    if att is not None or c_src is not None or c_dst is not None:
        att, c_src, c_dst = dense_in(torch.float32, att, c_src, c_dst)
    return pairwise.Operands(
        keys, queries, values, edges, att, c_src, c_dst, call.attention.scale, call.attention.slope,
        None if of_src is None else dense(of_src), None if of_dst is None else dense(of_dst))


def _pairwise_forward(call: Call, inputs: Inputs, train: bool) -> Result:
    operands, bias = _operands(call, inputs), inputs[7]
    if bias is not None:
        (bias,) = dense_in(torch.float32, bias)
    variant = _pairwise_variant(call, operands.keys, train)
    out, *saved = pairwise.forward(variant, call.graph.csc(places=call.attention.places), operands,
                                   call.dropout, bias, keep=call.exposed)
    return out, tuple(saved) if train else ()


#: limit of the gradients of scores that backward may keep, with their places: 1 / 4 of the rows
#: that it holds anyway
_KEPT_SHARE = 4
# bytes of a head's row, below which a gather of one number per head saves next to nothing
_LEAST_ROW = 32


def keeps_scores(found: Attention, graph: GraphView, heads: int, width: int, size: int) -> bool:
    """Whether backward keeps the gradients of the scores from its first pass over the edges to its
    second, which then gathers half of the rows. ``size``: bytes of an element of the rows. Only
    where nodes, not edges, decide how much memory is held, and on large graphs, whose rows lie
    beyond the L2 cache."""
    if found.score != "dot" or found.edge or not graph.large or width * size < _LEAST_ROW:
        return False
    rows = (2 * graph.num_src + 3 * graph.num_dst) * heads * width * size
    places = 8 if graph.wide else 4
    return _KEPT_SHARE * graph.num_edges * (4 * heads + places) <= rows


def _pairwise_backward(call: Call, inputs: Inputs, saved: list, grad: Tensor,
                       wanted: tuple) -> tuple:
    operands = _operands(call, inputs)
    variant = _pairwise_variant(call, operands.keys, True)
    places = call.attention.places
    keep = keeps_scores(call.attention, call.graph, call.heads, call.width, operands.keys.itemsize)
    by_dst, by_src = call.graph.csc(places), call.graph.csr(places, keep)
    packed = pairwise.prepare(variant, by_dst, operands, *saved, grad)  # type: ignore[call-arg]
    saved.clear()  # the output is as large as the queries' gradient
    g = pairwise.backward(variant, by_dst, by_src, operands, packed, grad, wanted[3], call.dropout,
                          keep)
    att = g.att
    if call.attention.vectors:  # summed over the destinations of each vector
        att = (_by_vector(call.graph, att, operands)  # type: ignore[arg-type]
               if wanted[4] else None)
    grads = (g.keys, g.queries, g.values, g.edges, att, g.c_src, g.c_dst)
    return (*[d if d is None else like(d, t) for d, t in zip(grads, inputs)],
            bias_grad(grad, inputs[7]) if wanted[7] else None, None, None)


def vector_sums(heads: int, width: int) -> aggregate.Variant:
    """The kernels that add up the gradients of attention vectors."""
    return aggregate.variant(heads, width, torch.float32, torch.float32, "none", "place", False,
                             False, False)


def _by_vector(graph: GraphView, rows: Tensor, operands: pairwise.Operands) -> Tensor:
    """The gradients of the vectors, [vectors, H, D], from those of each destination's: a sum over
    the graph that leads from each destination to its vector."""
    of: Tensor
    of, count = operands.of_dst, operands.att.numel() // (  # type: ignore[assignment, union-attr]
        rows.shape[1] * rows.shape[2])

    def make() -> tuple:
        ends = torch.stack([torch.arange(of.shape[0], dtype=torch.int32, device=of.device), of])
        return of, GraphView(ends, of.shape[0], count, own=True)

    members = graph.derived(("of vectors", id(of), of._version, count), make)[1]
    return aggregate.forward(vector_sums(*rows.shape[1:]), members.csc(places=False), rows, None,
                             None, None)


PAIRWISE = Family(("keys", "queries", "values", "edges", "att", "c_src", "c_dst", "bias", "of_src",
                   "of_dst"),
                  _pairwise_forward, _pairwise_backward)

_BY_SCORE = {"additive": ADDITIVE, "terms": TERMS}
