"""Launchers for kernels that are written for attention of users (`attention_text`)."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.messages import attention_text, message_text
from gnnaccel.cuda.messages.expression import Expression
from gnnaccel.cuda.messages.generated import Gradients, Numbers, arguments
from gnnaccel.cuda.runtime import sources
from gnnaccel.cuda.runtime.launch import THREADS, Kernels, grid, layout_for, over_rows, pointer
from gnnaccel.cuda.structures.structure import Rows


class Kept(NamedTuple):
    """Tensors of forward for backward. ``out`` [rows, heads * width]: the result; ``bases``,
    ``shares`` [rows, heads]: bases that scores are relative to, and 1 / sum of exponentials."""

    out: Tensor
    bases: Tensor
    shares: Tensor


@functools.lru_cache(maxsize=512)
def kernels(expression: Expression, heads: int, width: int, wide: bool,
            needs: tuple[bool, ...] | None = None, by_row: bool = True) -> Kernels:
    """Kernels of an expression with a score; arguments as of `generated.kernels`."""
    text = (attention_text.forward(expression) if needs is None
            else attention_text.backward(expression, needs, by_row))
    return Kernels(sources.write(text, "message"), layout_for(heads, width).defines() + (
        ("ROW_T", "float"), ("OFF_T", "i64" if wide else "int"), ("DROPOUT", "0")))


def forward(graph: Rows, expression: Expression, seen: tuple[int, int],
            inputs: tuple[Tensor, ...], numbers: Numbers,
            train: bool) -> tuple[Tensor, Kept | None]:
    """fp32 [rows, heads * width]: for each row the sum of its edges' messages, each times its
    softmax over the row's scores; 0 without edges, NaN where all scores are -inf. And with
    ``train`` the tensors for `gradients`.

    The other arguments are those of `generated.forward`.
    """
    heads, width = seen
    args, _copies = arguments(graph, expression, seen, inputs, numbers)
    device = graph.indptr.device
    out = torch.empty((graph.rows, heads * width), dtype=torch.float32, device=device)
    saved = (Kept(torch.empty_like(out), *torch.empty((2, graph.rows, heads), dtype=torch.float32,
                                                      device=device)) if train else None)
    ends = (out.data_ptr(), *map(pointer, saved or (None,) * 3))
    over_rows(graph, layout_for(heads, width), kernels(expression, heads, width, graph.wide),
              "forward", args + ends, (heads * width, heads, heads), "merge", ends)
    return out, saved


def gradients(by_dst: Rows, by_src: Callable[[], Rows], expression: Expression,
              seen: tuple[int, int], inputs: tuple[Tensor, ...], numbers: Numbers, grad: Tensor,
              kept: Kept, needs: tuple[bool, ...],
              pieces: Sequence[int] = ()) -> dict[int, Tensor]:
    """The gradients by number of the input, as `generated.gradients` gives those of each pass.

    by_dst: as of `forward`; by_src: gives the graph by source, ``place`` the number of an edge.
    grad: [rows, heads * width], contiguous, of the result; ``pieces``: as there.
    """
    heads, width = seen
    layout = layout_for(heads, width)
    args, _copies = arguments(by_dst, expression, seen, inputs, numbers)
    grads: dict[int, Tensor] = {}
    from_dst: tuple[Tensor, ...] = ()  # from the first pass to the second
    for by_row in entries(expression, needs):
        graph = by_dst if by_row else by_src()
        compiled = kernels(expression, heads, width, graph.wide, needs, by_row)
        wanted = message_text.wanted(expression, needs, by_row)
        memory = Gradients(graph, expression, layout, wanted, inputs, pieces)
        launch = memory.launch
        if by_row and message_text.wanted(expression, needs, False):
            count = 1 + len(attention_text.handed(expression, needs))
            from_dst = torch.empty((count, by_dst.other.shape[0], heads),
                                   dtype=torch.float32, device=grad.device).unbind(0)
        results = (grad, *(kept if by_row else ()))
        compiled("gradients")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                              launch.graph + launch.split + args
                              + tuple(t.data_ptr() for t in results) + memory.pointers
                              + tuple(t.data_ptr() for t in from_dst))
        if launch.heavy and memory.merged:
            memory.merge(compiled)
        grads.update(memory.results)
    return grads


def entries(expression: Expression, needs: tuple[bool, ...]) -> dict[bool, tuple[str, ...]]:
    """Kernels that `gradients` launches, by destination (True) and by source: the first writes
    values that the second reads."""
    inputs = {by_row: message_text.wanted(expression, needs, by_row) for by_row in (True, False)}
    passes = [by_row for by_row in inputs if inputs[False] or inputs[by_row]]
    return {by_row: ("gradients", "merge") if any(
        expression.inputs[k].end != "e" for k in inputs[by_row]) else ("gradients",)
        for by_row in passes}
