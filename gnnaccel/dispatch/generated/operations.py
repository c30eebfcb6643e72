"""Generated messages as operations of autograd: sums, means, attention, maxima and minima, and
values at the edges."""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel.cuda.messages import generated, generated_attention
from gnnaccel.cuda.messages.expression import Expression
from gnnaccel.cuda.messages.message_text import reach
from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.run.autograd import Operation

if TYPE_CHECKING:
    from gnnaccel.dispatch.generated.messages import Generated


def _shaped(out: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Messages or sums of this ``shape``. The result is no view: users may change it in place."""
    return out if len(shape) == 1 else out.view(-1, *shape).detach()


class Reduced(Operation):
    """[num_dst, *shape] of the inputs of a generated message. Attributes are those of `Generated`,
    without its tensors, which autograd keeps."""

    __slots__ = ("apart", "graph", "reduce", "expression", "numbers", "pieces", "shape", "seen")
    keeps_inputs = True

    def __init__(self, graph: OpGraph, reduce: str, more: Generated):
        self.graph, self.reduce, self.expression = graph, reduce, more.expression
        self.numbers, self.shape, self.seen = more.numbers, more.shape, more.seen
        self.apart, self.pieces = id(more.expression), more.pieces

    def _gradients(self, needs: tuple[bool, ...], inputs: tuple[Tensor, ...],
                   of_results: Sequence[Tensor],
                   expression: Expression | None = None) -> list[Tensor | None]:
        """Gradients of the inputs. ``of_results``: as of the kernels; ``expression``: the one with
        the messages that have a gradient, where these are not all."""
        view, features = self.graph.built or self.graph.view(), math.prod(self.shape)
        flat = [dense(t if t.dim() == 2 else t.reshape(t.shape[0], features)) for t in of_results]
        grads = generated.gradients(view.csc(), view.csr_by_id, expression or self.expression,
                                    self.seen, inputs, self.numbers, flat, needs, self.reduce,
                                    self.pieces)
        return self._of_inputs(grads, inputs)

    def _of_inputs(self, found: dict[int, Tensor],
                   inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the kernels in the shapes of the inputs."""
        grads: list[Tensor | None] = []
        for k, t in enumerate(inputs):
            grad = found.get(k)
            whole = grad is None or grad.shape == t.shape and self.expression.inputs[k].end != "p"
            grads.append(grad if whole else self._whole(k, found[k], t))
        return grads

    def _whole(self, k: int, grad: Tensor, of: Tensor) -> Tensor:
        """Gradient in the shape of the input, with all of its parts added up."""
        if self.expression.inputs[k].mode == "one" and grad.shape[1] > 1:
            grad = grad.sum(1, keepdim=True)
        if self.expression.inputs[k].end == "p":
            grad = generated.total(grad).unsqueeze(0)
        return grad if grad.shape == of.shape else grad.view(of.shape)

    def _again(self, inputs: tuple[Tensor, ...]) -> Generated:
        """The messages of these inputs."""
        from gnnaccel.dispatch.generated.messages import Generated  # which needs this module

        return Generated(self.expression, inputs, self.numbers, self.shape, self.seen)

    def reference(self, *inputs):
        from gnnaccel.dispatch.ops import aggregation

        call = aggregation.Aggregation(self.reduce, inputs[0], None, self.shape,
                                       self._again(inputs))
        return aggregation.plain(self.graph, call)


class GeneratedSum(Reduced):
    """Sums and means."""

    __slots__ = ()

    def forward(self, needs, *inputs):
        view = self.graph.built or self.graph.view()
        (out,) = generated.forward(view.csc(), self.expression, self.seen, inputs, self.numbers,
                                   self.reduce == "mean")
        return out if len(self.shape) == 1 else _shaped(out, self.shape), inputs

    def backward(self, needs, saved, grad):
        return self._gradients(needs, saved, (grad,))


@functools.lru_cache(maxsize=512)
def _of_used(expression: Expression, used: tuple[int, ...],
             needs: tuple[bool, ...]) -> tuple[Expression, tuple[bool, ...]]:
    """The expression with the messages ``used`` alone, and the inputs of ``needs`` that these are
    made of: others have no gradient."""
    alone = expression.only(used)
    return alone, tuple([need and any(reach(alone, (k,))) for k, need in enumerate(needs)])


class GeneratedSums(Reduced):
    """Sums or means of several messages, a result for each."""

    __slots__ = ()

    def forward(self, needs, *inputs):
        view = self.graph.built or self.graph.view()
        outs = generated.forward(view.csc(), self.expression, self.seen, inputs, self.numbers,
                                 self.reduce == "mean")
        return tuple([_shaped(out, self.shape) for out in outs]), inputs

    def without_grad(self, needs, results):
        made = reach(self.expression, tuple([k for k, need in enumerate(needs) if need]))
        return [out for out, reached in zip(results, made) if not reached]

    def backward(self, needs, saved, *grads):
        used = tuple([at for at, grad in enumerate(grads) if grad is not None])
        if len(used) == len(grads):
            return self._gradients(needs, saved, grads)
        expression, needs = _of_used(self.expression, used, needs)
        return self._gradients(needs, saved, [grads[at] for at in used], expression)

    def reference(self, *inputs):
        from gnnaccel.dispatch.ops import aggregation

        whole = self._again(inputs)
        return tuple([aggregation.plain(self.graph, aggregation.Aggregation(
            self.reduce, inputs[0], None, self.shape, whole.only(at)))
            for at in range(len(self.expression.outs))])


class GeneratedAttention(Reduced):
    """Sums of messages that a softmax over neighbours weights, in one pass."""

    __slots__ = ()

    def forward(self, needs, *inputs):
        out, state = generated_attention.forward(
            self.graph.view().csc(), self.expression, self.seen, inputs, self.numbers, any(needs))
        return out.view(-1, *self.shape).detach(), (*inputs, *(state or ()))

    def backward(self, needs, saved, grad):
        view = self.graph.view()
        inputs, state = saved[:-3], generated_attention.Kept(*saved[-3:])
        grad = dense(grad.reshape(grad.shape[0], math.prod(self.shape)))
        gradients = generated_attention.gradients(
            view.csc(), view.csr_by_id, self.expression, self.seen, inputs, self.numbers, grad,
            state, needs, self.pieces)
        return self._of_inputs(gradients, inputs)


class GeneratedExtremum(Reduced):
    """Maxima and minima. Equal messages share the gradient evenly, as PyG's do."""

    __slots__ = ()

    def forward(self, needs, *inputs):
        out, counts = generated.extremum(
            self.graph.view().csc(), self.expression, self.seen, inputs, self.numbers, self.reduce,
            any(needs))
        # backward reads the result, so users may not change it in place before, as the host's
        return out.view(-1, *self.shape).detach(), (*inputs, out, counts)

    def backward(self, needs, saved, grad):
        *inputs, out, counts = saved
        share = grad.reshape(out.shape) / counts
        return self._gradients(needs, tuple(inputs), (share, out))


class GeneratedAtEdges(Reduced):
    """Values of each edge: "rows", or the sums of their "heads"."""

    __slots__ = ()

    def forward(self, needs, *inputs):
        summed = self.reduce == "heads"
        out = generated.at_edges(self.graph.view().csc(), self.expression, self.seen, inputs,
                                 self.numbers, summed)
        return out if summed else _shaped(out, self.shape), inputs

    def backward(self, needs, saved, grad):
        return self._gradients(needs, saved, (grad.reshape(grad.shape[0], -1),))

    def reference(self, *inputs):
        from gnnaccel.dispatch.generated.messages import made

        message = made(self.graph, self._again(inputs))
        return message.view(-1, *self.seen).sum(-1) if self.reduce == "heads" else message


class Pieces(Operation):
    """Parts of rows [rows, numbers]: those at ``places``, each the first number and the one behind
    the last. Gradients of all parts that lie side by side in memory, as kernels write them, are the
    gradient of the rows as they are."""

    __slots__ = ("places", "shape")
    shape: tuple[int, int]

    def __init__(self, places: tuple[tuple[int, int], ...]):
        self.places = places

    def forward(self, needs, rows):
        self.shape = tuple(rows.shape)
        # no views for autograd: users may write to the rows before backward
        return tuple([rows[:, begin:end] for begin, end in self.places]), ()

    def backward(self, needs, saved, *grads):
        whole = self._side_by_side(grads)
        return self.recorded(needs, saved, *grads) if whole is None else (whole,)

    def recorded(self, needs, saved, *grads):
        rows, numbers = self.shape
        like = next(grad for grad in grads if grad is not None)
        if [end for _, end in self.places] == [*[begin for begin, _ in self.places[1:]], numbers] \
                and self.places[0][0] == 0:
            return torch.cat([like.new_zeros(rows, end - begin) if grad is None else grad
                              for grad, (begin, end) in zip(grads, self.places)], 1),
        padded = [F.pad(grad, (begin, numbers - end))
                  for grad, (begin, end) in zip(grads, self.places) if grad is not None]
        return functools.reduce(torch.add, padded),

    def _side_by_side(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The gradients' memory as one tensor, if it is that."""
        first, (rows, numbers) = grads[0], self.shape
        if first is None or self.places[0][0] or self.places[-1][1] != numbers:
            return None
        storage, start, reached = first.untyped_storage().data_ptr(), first.storage_offset(), 0
        for grad, (begin, end) in zip(grads, self.places):
            if (grad is None or begin != reached or grad.stride() != (numbers, 1)
                or grad.storage_offset() != start + begin or grad.dtype is not first.dtype
                or grad.untyped_storage().data_ptr() != storage):
                return None
            reached = end
        return first.as_strided((rows, numbers), (numbers, 1))
