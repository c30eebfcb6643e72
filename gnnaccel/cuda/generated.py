"""Launchers for kernels that are written for one message (`message_text`)."""
from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda import message_text, sources
from gnnaccel.cuda.aggregate import factored
from gnnaccel.cuda.column_sum import column_sum
from gnnaccel.cuda.expression import Expression
from gnnaccel.cuda.launch import THREADS, Kernels, grid, pointer, workspace
from gnnaccel.cuda.layout import Layout, layout_for
from gnnaccel.cuda.structure import Rows

Numbers = tuple[float, ...]
EXTREMA, WRITTEN = ("max", "min"), message_text.WRITTEN


def seen_as(features: int) -> tuple[int, int]:
    """(heads, width) in which the kernels see messages that have nothing for each head."""
    return factored(features)


@functools.lru_cache(maxsize=1024)
def kernels(expression: Expression, heads: int, width: int, wide: bool,
            needs: tuple[bool, ...] | None = None, by_row: bool = True,
            of: str = "sum") -> Kernels:
    """The kernels for messages of ``heads`` x ``width`` fp32 numbers over a graph with int64
    offsets if ``wide``: those of forward, or of one pass of backward if it is said which inputs
    ``needs`` gradients. They sum, find the "max" or "min", or write for each edge the "rows", or
    the sums of their "heads", as ``of`` says. ValueError for a width that none covers."""
    if needs is not None:
        text = message_text.backward(expression, needs, by_row, of)
    elif of in WRITTEN:
        text = message_text.at_edges(expression, of == "heads")
    elif of in EXTREMA:
        text = message_text.extremum(expression, of == "max")
    else:
        text = message_text.forward(expression)
    defines = layout_for(heads, width).defines() + (
        ("ROW_T", "float"), ("OFF_T", "i64" if wide else "int"), ("DROPOUT", "0"))
    return Kernels(sources.write(text, "message"),
                   defines + message_text.EXACT if of in EXTREMA else defines)


def at_edges(graph: Rows, expression: Expression, seen: tuple[int, int],
             inputs: tuple[Tensor, ...], numbers: Numbers, summed: bool) -> Tensor:
    """fp32 [edges, heads * width]: the value of each edge, or if they are ``summed``, [edges,
    heads] of each head's channels; in the order of ``place``.

    All else as of `forward`.
    """
    heads, width = seen
    check(graph, expression, seen, inputs)
    layout = layout_for(heads, width)
    compiled = kernels(expression, heads, width, graph.wide, of="heads" if summed else "rows")
    launch = graph.launch()
    out = torch.empty((graph.other.shape[0], heads if summed else heads * width),
                      dtype=torch.float32, device=graph.indptr.device)
    compiled("at_edges")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                         launch.graph + launch.split + arguments(inputs, numbers)
                         + (out.data_ptr(),))
    return out


def forward(graph: Rows, expression: Expression, seen: tuple[int, int],
            inputs: tuple[Tensor, ...], numbers: Numbers, mean: bool) -> Tensor:
    """fp32 [rows, heads * width]: for each row the sum of its edges' messages, or their mean; 0
    without edges.

    graph: by destination, ``place`` the number of an edge. seen: `seen_as` of the messages. inputs:
    fp32, contiguous, 16-byte aligned, each [nodes or edges or nothing, numbers of its mode]. Sums
    are in a fixed order. ValueError for a tensor that does not fit.
    """
    heads, width = seen
    check(graph, expression, seen, inputs)
    layout, compiled = layout_for(heads, width), kernels(expression, heads, width, graph.wide)
    device, launch = graph.indptr.device, graph.launch()
    out = torch.empty((graph.rows, heads * width), dtype=torch.float32, device=device)
    part = (torch.empty((launch.chunks, heads * width), dtype=torch.float32, device=device)
            if launch.chunks else None)
    at, mean_ = 0 if part is None else part.data_ptr(), np.int32(mean)
    compiled("forward")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                        launch.graph + launch.split + arguments(inputs, numbers)
                        + (mean_, out.data_ptr(), at))
    if launch.heavy:
        compiled("merge")(grid(launch.heavy, layout), THREADS, 0, launch.merge + (
            graph.indptr.data_ptr(), at, mean_, out.data_ptr()))
    return out


def extremum(graph: Rows, expression: Expression, seen: tuple[int, int],
             inputs: tuple[Tensor, ...], numbers: Numbers, reduce: str,
             train: bool) -> tuple[Tensor, Tensor | None]:
    """fp32 [rows, heads * width]: for each row and channel the largest ("max") or smallest ("min")
    of its edges' messages, NaN if one is NaN; 0 without edges. And, with ``train``, among how many
    its gradient is shared, as torch's ``scatter_reduce`` into zeros shares it: the equal messages,
    and the result itself where it is 0; NaN where it is NaN.

    All else as of `forward`.
    """
    heads, width = seen
    check(graph, expression, seen, inputs)
    layout = layout_for(heads, width)
    compiled = kernels(expression, heads, width, graph.wide, of=reduce)
    device, launch = graph.indptr.device, graph.launch()
    out = torch.empty((graph.rows, heads * width), dtype=torch.float32, device=device)
    counts = torch.empty_like(out) if train else None
    memory, (part, _, _) = workspace(launch.chunks, (2 * heads * width, 0, 0), device)
    compiled("forward")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                        launch.graph + launch.split + arguments(inputs, numbers)
                        + (out.data_ptr(), pointer(counts), part))
    if launch.heavy:
        compiled("merge")(grid(launch.heavy, layout), THREADS, 0,
                          launch.merge + (part, out.data_ptr(), pointer(counts)))
    return out, counts


def gradients(graph: Rows, expression: Expression, seen: tuple[int, int],
              inputs: tuple[Tensor, ...], numbers: Numbers, grad: Tensor, needs: tuple[bool, ...],
              by_row: bool, of: str = "sum", best: Tensor | None = None) -> dict[int, Tensor]:
    """The gradients of one pass, by number of the input: by destination those of inputs there, at
    edges, and of parameters; by source those of inputs at the source.

    graph: by that end, ``place`` the number of an edge. grad: [destinations, heads * width], of the
    sums; needs: which inputs want a gradient; all else as in `forward`. The gradient of a parameter
    comes as a row for each destination, still to be added up, and that of one number for all
    channels as [rows, tiles], likewise. ``of``: as of `kernels`. Of an extremum, ``best`` is its
    result, and grad each equal message's share; of what was written for each edge, grad is of that.
    """
    heads, width = seen
    found = message_text.wanted(expression, needs, by_row)
    if not found:
        return {}
    layout, launch = layout_for(heads, width), graph.launch()
    compiled = kernels(expression, heads, width, graph.wide, needs, by_row, of)
    memory = Gradients(graph, expression, layout, found, inputs)
    compiled("gradients")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                          launch.graph + launch.split + arguments(inputs, numbers)
                          + (grad.data_ptr(), *(() if best is None else (best.data_ptr(),)),
                             *memory.pointers))
    memory.merge(compiled)
    return memory.results


class Gradients:
    """Memory for the gradients ``found`` of one pass over ``graph``: ``results`` by number of the
    input, for those that are sums a part for each chunk, and the addresses of all of them."""

    def __init__(self, graph: Rows, expression: Expression, layout: Layout, found: Sequence[int],
                 inputs: tuple[Tensor, ...]):
        sizes = {"row": layout.heads * layout.width, "head": layout.heads, "one": layout.tiles}
        self.launch, self.layout, device = graph.launch(), layout, graph.indptr.device
        self.results: dict[int, Tensor] = {}
        self.parts: dict[int, Tensor] = {}
        for k in found:
            end, mode = expression.inputs[k]
            rows = inputs[k].shape[0] if end == "e" else graph.rows
            self.results[k] = torch.empty((rows, sizes[mode]), dtype=torch.float32, device=device)
            if end != "e":
                self.parts[k] = torch.empty((self.launch.chunks, sizes[mode]), dtype=torch.float32,
                                            device=device)

    @property
    def pointers(self) -> tuple[int, ...]:
        return tuple([t.data_ptr() for those in (self.results, self.parts)
                      for t in those.values()])

    def merge(self, compiled: Kernels) -> None:
        """Adds up the parts of split rows."""
        launch = self.launch
        if launch.heavy and self.parts:
            pairs = [p for k, part in self.parts.items()
                     for p in (part.data_ptr(), self.results[k].data_ptr())]
            compiled("merge")(grid(launch.heavy, self.layout), THREADS, 0,
                              launch.merge + tuple(pairs))


@functools.lru_cache(maxsize=512)
def entries(expression: Expression, needs: tuple[bool, ...], by_row: bool) -> tuple[str, ...]:
    """The kernels that `gradients` launches."""
    found = message_text.wanted(expression, needs, by_row)
    if not found:
        return ()
    summed = any([expression.inputs[k].end != "e" for k in found])
    return ("gradients", "merge") if summed else ("gradients",)


def total(rows: Tensor) -> Tensor:
    """The sum over rows, of which there may be none."""
    return column_sum(rows) if rows.shape[0] else rows.new_zeros(rows.shape[1])


def arguments(inputs: tuple[Tensor, ...], numbers: Numbers) -> tuple:
    return (*[t.data_ptr() for t in inputs], *map(np.float32, numbers))


def check(graph: Rows, expression: Expression, seen: tuple[int, int],
           inputs: tuple[Tensor, ...]) -> None:
    sizes = {"row": seen[0] * seen[1], "head": seen[0], "one": 1}
    edges, device, fp32 = graph.other.shape[0], graph.indptr.device, torch.float32
    rows = {"i": graph.rows, "e": edges, "p": 1}
    for at, (end, mode) in enumerate(expression.inputs):
        t = inputs[at]
        shape = t.shape
        if (len(shape) != 2 or shape[1] != sizes[mode] or (end != "j" and shape[0] != rows[end])
            or t.dtype is not fp32 or t.device != device or not t.is_contiguous()
            or t.data_ptr() % 16):
            raise ValueError(f"{expression.names[at]} is {list(shape)}, {t.dtype}, on {t.device}; "
                             f"needed is [{rows.get(end, 'any')}, {sizes[mode]}], torch.float32, "
                             f"contiguous, aligned, on {device}")
    if graph.place.shape[0] != edges:
        raise ValueError(f"the graph has {graph.place.shape[0]} places for {edges} edges: build it "
                         "with places=True")
