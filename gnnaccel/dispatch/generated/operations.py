"""Generated messages as operations of autograd: sums, means, attention, maxima and minima, and
what is written for each edge."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from gnnaccel.cuda import generated, generated_attention
from gnnaccel.cuda.launch import dense
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.run.autograd import Operation

if TYPE_CHECKING:
    from gnnaccel.dispatch.generated.messages import Generated


def _shaped(out: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Messages or sums of this ``shape``. They are no view: users may change them in place."""
    return out if len(shape) == 1 else out.view(-1, *shape).detach()


class Reduced(Operation):
    """[num_dst, *shape] of the inputs of a generated message."""

    __slots__ = ("graph", "more", "reduce")

    def __init__(self, graph: OpGraph, reduce: str, more: Generated):
        # without its tensors, which autograd keeps
        self.graph, self.reduce = graph, reduce
        self.more = more._replace(inputs=(), weight=None, bias=None)

    def _gradients(self, needs: tuple[bool, ...], inputs: tuple[Tensor, ...], grad: Tensor,
                   best: Tensor | None = None) -> list[Tensor | None]:
        """Those of the inputs. ``grad`` [num_dst, channels], ``best``: as of the kernels."""
        more, view, found = self.more, self.graph.view(), {}
        of = "sum" if self.reduce == "mean" else self.reduce
        given, grad = tuple(map(dense, inputs)), dense(grad)
        for by_row in (True, False):
            if generated.entries(more.expression, needs, by_row):
                rows = view.csc() if by_row else view.csr_by_id()
                found.update(generated.gradients(rows, more.expression, more.seen, given,
                                                 more.numbers, grad, needs, by_row, of, best))
        return self._of_inputs(found, inputs)

    def _of_inputs(self, found: dict[int, Tensor],
                   inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """What the kernels found, as the inputs are."""
        return [self._whole(k, found[k], t) if k in found else None for k, t in enumerate(inputs)]

    def _whole(self, k: int, grad: Tensor, of: Tensor) -> Tensor:
        """With all of its parts added up."""
        if self.more.expression.inputs[k].mode == "one" and grad.shape[1] > 1:
            grad = grad.sum(1, keepdim=True)
        if self.more.expression.inputs[k].end == "p":
            grad = generated.total(grad).unsqueeze(0)
        return grad if grad.shape == of.shape else grad.view(of.shape)

    def reference(self, *inputs):
        from gnnaccel.dispatch.ops import aggregation

        given = aggregation.Aggregation(self.reduce, inputs[0], None, self.more.shape,
                                        self.more._replace(inputs=inputs))
        return aggregation.plain(self.graph, given)


class GeneratedSum(Reduced):
    """Sums and means."""

    __slots__ = ()

    def forward(self, needs, *inputs):
        more = self.more
        out = generated.forward(self.graph.view().csc(), more.expression, more.seen,
                                tuple(map(dense, inputs)), more.numbers, self.reduce == "mean")
        return _shaped(out, more.shape), inputs

    def backward(self, needs, saved, grad):
        if grad.dim() != 2:
            grad = grad.reshape(grad.shape[0], math.prod(self.more.shape))
        if self.reduce == "mean":
            grad = grad * self.graph.view().inverse_degree().unsqueeze(1)
        return self._gradients(needs, saved, grad)


class GeneratedAttention(Reduced):
    """Sums of messages that a softmax over neighbours weights, in one pass."""

    __slots__ = ()

    def forward(self, needs, *inputs):
        more = self.more
        out, kept = generated_attention.forward(
            self.graph.view().csc(), more.expression, more.seen, tuple(map(dense, inputs)),
            more.numbers, any(needs))
        return out.view(-1, *more.shape).detach(), (*inputs, *(kept or ()))

    def backward(self, needs, saved, grad):
        more, view = self.more, self.graph.view()
        inputs, kept = saved[:-3], generated_attention.Kept(*saved[-3:])
        grad = dense(grad.reshape(grad.shape[0], math.prod(more.shape)))
        found = generated_attention.gradients(
            view.csc(), view.csr_by_id, more.expression, more.seen, tuple(map(dense, inputs)),
            more.numbers, grad, kept, needs)
        return self._of_inputs(found, inputs)


class GeneratedExtremum(Reduced):
    """Maxima and minima. Equal messages share the gradient evenly, as PyG's do."""

    __slots__ = ()

    def forward(self, needs, *inputs):
        more = self.more
        out, counts = generated.extremum(
            self.graph.view().csc(), more.expression, more.seen, tuple(map(dense, inputs)),
            more.numbers, self.reduce, any(needs))
        # backward reads the result, which is not to be changed in place before, as the host's
        return out.view(-1, *more.shape).detach(), (*inputs, out, counts)

    def backward(self, needs, saved, grad):
        *inputs, out, counts = saved
        share = grad.reshape(out.shape) / counts
        return self._gradients(needs, tuple(inputs), share, out)


class GeneratedAtEdges(Reduced):
    """What is written for each edge: "rows", or the sums of their "heads"."""

    __slots__ = ()

    def forward(self, needs, *inputs):
        more, summed = self.more, self.reduce == "heads"
        out = generated.at_edges(self.graph.view().csc(), more.expression, more.seen,
                                 tuple(map(dense, inputs)), more.numbers, summed)
        return out if summed else _shaped(out, more.shape), inputs

    def backward(self, needs, saved, grad):
        return self._gradients(needs, saved, grad.reshape(grad.shape[0], -1))

    def reference(self, *inputs):
        from gnnaccel.dispatch.generated.messages import made

        found = made(self.graph, self.more._replace(inputs=inputs))
        return found.view(-1, *self.more.seen).sum(-1) if self.reduce == "heads" else found
