"""Launchers for kernels that are written for one message (`message_text`)."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.messages import message_text
from gnnaccel.cuda.messages.expression import Expression, Input, Step
from gnnaccel.cuda.messages.message_writer import strided
from gnnaccel.cuda.runtime import sources
from gnnaccel.cuda.runtime.launch import (THREADS, WARPS, Kernels, Layout, factored, grid,
                                          layout_for, over_rows, pointer)
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse.column_sum import column_sum

Numbers = tuple[float, ...]
EXTREMA, WRITTEN = ("max", "min"), message_text.WRITTEN
_MOST_APART = 2**31  # numbers from a row to the next, a kernel argument of 32 bits


def seen_as(features: int) -> tuple[int, int]:
    """(heads, width) in which the kernels see messages that have no numbers for each head."""
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

    The other arguments are those of `forward`.
    """
    heads, width = seen
    args, _copies = arguments(graph, expression, seen, inputs, numbers)
    layout, launch = layout_for(heads, width), graph.launch()
    compiled = kernels(expression, heads, width, graph.wide, of="heads" if summed else "rows")
    out = torch.empty((graph.other.shape[0], heads if summed else heads * width),
                      dtype=torch.float32, device=graph.indptr.device)
    compiled("at_edges")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                         launch.graph + launch.split + args + (out.data_ptr(),))
    return out


def forward(graph: Rows, expression: Expression, seen: tuple[int, int],
            inputs: tuple[Tensor, ...], numbers: Numbers, mean: bool) -> tuple[Tensor, ...]:
    """fp32 [rows, heads * width] for each message of the expression: for each row the sum of its
    edges' messages, or their mean; 0 without edges.

    graph: by destination, ``place`` the number of an edge. seen: `seen_as` of the messages. inputs:
    fp32, each [nodes or edges or nothing, numbers of its mode]; copied where kernels cannot read
    them as they lie. Sums are in a fixed order. ValueError for a tensor that does not fit.
    """
    heads, width = seen
    args, _copies = arguments(graph, expression, seen, inputs, numbers)
    layout, compiled = layout_for(heads, width), kernels(expression, heads, width, graph.wide)
    device, launch = graph.indptr.device, graph.launch()
    features = heads * width
    out = torch.empty((graph.rows, features), dtype=torch.float32, device=device)
    parts = (torch.empty((1 + len(expression.others), launch.chunks, features), dtype=torch.float32,
                         device=device) if launch.chunks else None)
    at = 0 if parts is None else parts.data_ptr()
    outs: tuple[Tensor, ...] = (out,)
    ends: tuple[int, ...] = out.data_ptr(), at
    for _ in expression.others:
        at += 4 * launch.chunks * features
        outs = (*outs, torch.empty_like(out))
        ends = (*ends, outs[-1].data_ptr(), at)
    mean_ = np.int32(mean)
    compiled("forward")((-(-(launch.slots + graph.rows) // WARPS), layout.tiles), THREADS, 0,
                        (*launch.graph, *launch.split, *args, mean_, *ends))
    if launch.heavy:
        compiled("merge")((-(-launch.heavy // WARPS), layout.tiles), THREADS, 0,
                          (*launch.merge, graph.indptr.data_ptr(), mean_, *ends))
    return outs


def extremum(graph: Rows, expression: Expression, seen: tuple[int, int],
             inputs: tuple[Tensor, ...], numbers: Numbers, reduce: str,
             train: bool) -> tuple[Tensor, Tensor | None]:
    """fp32 [rows, heads * width]: for each row and channel the largest ("max") or smallest ("min")
    of its edges' messages, NaN if one is NaN; 0 without edges. And, with ``train``, among how many
    its gradient is shared, as torch's ``scatter_reduce`` into zeros shares it: the equal messages,
    and the result itself where it is 0; NaN where it is NaN.

    The other arguments are those of `forward`.
    """
    heads, width = seen
    args, _copies = arguments(graph, expression, seen, inputs, numbers)
    out = torch.empty((graph.rows, heads * width), dtype=torch.float32, device=graph.indptr.device)
    counts = torch.empty_like(out) if train else None
    results = out.data_ptr(), pointer(counts)
    over_rows(graph, layout_for(heads, width), kernels(expression, heads, width, graph.wide,
                                                       of=reduce),
              "forward", args + results, (2 * heads * width,), "merge", results)
    return out, counts


def gradients(by_dst: Rows, by_src: Callable[[], Rows], expression: Expression,
              seen: tuple[int, int], inputs: tuple[Tensor, ...], numbers: Numbers,
              of_results: Sequence[Tensor], needs: tuple[bool, ...],
              of: str = "sum", pieces: Sequence[int] = ()) -> dict[int, Tensor]:
    """The gradients by number of the input. That of a parameter comes as a row for each
    destination, still to be added up, and that of one number for all channels as [rows, tiles],
    likewise.

    by_dst: as of `forward`; by_src: gives the graph by source, ``place`` the number of an edge.
    of_results: [destinations, heads * width], contiguous, the gradient of each message's result;
    of an extremum each equal message's share, and the result; of values written for each edge,
    theirs. needs: which inputs want a gradient; ``of``: as of `kernels`, or "mean". ``pieces``:
    inputs that are pieces of the rows of others.
    """
    heads, width = seen
    layout, grads = layout_for(heads, width), {}
    args, _copies = arguments(by_dst, expression, seen, inputs, numbers)
    incoming = [t.data_ptr() for t in of_results]
    twins, alone = without_twins(expression, needs)
    for by_row, wanted in passes(expression, alone):
        graph = by_dst if by_row else by_src()
        compiled = kernels(expression, heads, width, graph.wide, alone, by_row, of)
        memory = Gradients(graph, expression, layout, wanted, inputs, pieces)
        launch = memory.launch
        offsets = () if by_row or of != "mean" else (by_dst.indptr.data_ptr(),)
        compiled("gradients")((-(-(launch.slots + graph.rows) // WARPS), layout.tiles), THREADS, 0,
                              (*launch.graph, *launch.split, *args, *offsets, *incoming,
                               *memory.pointers))
        if launch.heavy and memory.merged:
            memory.merge(compiled)
        grads.update(memory.results)
    for k, twin, negated in twins:
        (grads[k],) = forward(by_src(), COPIES[negated], seen, (grads[twin],), (), False)
    return grads


#: messages that are rows of the edges, as they are and with the other sign
COPIES = (Expression((Input("e", "row"),), 0, (), 0),
          Expression((Input("e", "row"),), 0, (Step("neg", (0,)),), 1))
_SIGNS = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}


@functools.lru_cache(maxsize=512)
def without_twins(expression: Expression, needs: tuple[bool, ...]) -> tuple[
        tuple[tuple[int, int, bool], ...], tuple[bool, ...]]:
    """Inputs at the source that are terms of one sum with rows of the edges, as in ``relu(x_j +
    e)``: an edge has the same gradient for both, so that the source's is the sum of the edges',
    which reads less than computing each again. Gives (input, the edges' input, whether the sign is
    the other one) for each; and ``needs`` without them."""
    uses: dict[int, list[tuple[int, int]]] = {}
    for at, step in enumerate(expression.steps):
        for place, value in enumerate(step.args):
            uses.setdefault(value, []).append((at, place))

    def sum_of(value: int) -> tuple[int, int]:
        """The sum that a value is a term of and of nothing else, and its sign in it."""
        sign = 1
        while value not in (*expression.outs, expression.score) and len(uses.get(value, ())) == 1:
            at, place = uses[value][0]
            if expression.steps[at].op not in _SIGNS:
                break
            sign *= _SIGNS[expression.steps[at].op][place]
            value = expression.first + at
        return value, sign

    rows = [k for k, one in enumerate(expression.inputs) if one.mode == "row" and needs[k]]
    of_edges = {sum_of(k): k for k in rows if expression.inputs[k].end == "e"}
    twins = []
    for k in rows:
        value, sign = sum_of(k)
        for negated in (False, True):
            twin = of_edges.get((value, -sign if negated else sign))
            if twin is not None and expression.inputs[k].end == "j" and (
                twin in message_text.read_by_gradients(expression, k)):
                twins.append((k, twin, negated))
                break
    alone = {k for k, _, _ in twins}
    return tuple(twins), tuple([need and k not in alone for k, need in enumerate(needs)])


class Gradients:
    """Memory for the gradients ``wanted`` of one pass over ``graph``: ``results`` by number of the
    input, and for those that are sums a part for each chunk; ``pointers``: arguments that say where
    all of them are; ``merged``: those of each sum's parts and its result. ``pieces``: inputs that
    are pieces of rows. Those of one tensor have gradients that are pieces of one tensor, in the
    same places; all other gradients are contiguous, as users may see them."""

    __slots__ = ("launch", "layout", "results", "pointers", "merged", "_parts")
    results: dict[int, Tensor]

    def __init__(self, graph: Rows, expression: Expression, layout: Layout, wanted: Sequence[int],
                 inputs: tuple[Tensor, ...], pieces: Sequence[int] = ()):
        self.launch = launch = graph.launch()
        self.layout = layout
        device, kinds = graph.indptr.device, _kinds(expression, layout)
        self.results = results = (
            _of_pieces(graph, kinds, [k for k in pieces if k in wanted], inputs)
            if len(pieces) > 1 else {})
        pointers: list[Any] = []
        summed, room = [], 0
        for k in wanted:
            end, _, size, step, dense = kinds[k]
            if k in results:
                place: tuple = results[k].data_ptr(), np.int32(results[k].stride(0))
            else:
                rows = inputs[k].shape[0] if end == "e" else graph.rows
                results[k] = torch.empty((rows, size), dtype=torch.float32, device=device)
                place = (results[k].data_ptr(), dense) if step else (results[k].data_ptr(),)
            pointers += place
            if end != "e":
                summed.append((room, place))
                room += (launch.chunks * size + 3) // 4 * 4  # each is as aligned as the first
        self._parts = torch.empty(room, dtype=torch.float32, device=device) if room else None
        parts = 0 if self._parts is None else self._parts.data_ptr()
        self.merged = [(parts + 4 * offset, *place) for offset, place in summed]
        self.pointers = (*pointers, *[one[0] for one in self.merged])

    def merge(self, compiled: Kernels) -> None:
        """Adds up the parts of split rows."""
        launch = self.launch
        compiled("merge")(grid(launch.heavy, self.layout), THREADS, 0,
                          launch.merge + tuple([part for one in self.merged for part in one]))


def _of_pieces(graph: Rows, kinds: tuple, wanted: Sequence[int],
               inputs: tuple[Tensor, ...]) -> dict[int, Tensor]:
    """Memory for gradients of inputs that are, together, all of the rows of one tensor."""
    groups: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for k in wanted:
        end, size, _, step, _ = kinds[k]
        t = inputs[k]
        if step and t.stride(0) > size and t.stride(1) == 1:
            rows = t.shape[0] if end == "e" else graph.rows
            place = t.untyped_storage().data_ptr(), t.stride(0), rows
            groups.setdefault(place, []).append((t.data_ptr(), k))
    results = {}
    for (_, stride, rows), group in groups.items():
        group.sort()
        begins = [(at - group[0][0]) // 4 for at, _ in group]
        sizes = [kinds[k][1] for _, k in group]
        if [*begins[1:], stride] == [begin + size for begin, size in zip(begins, sizes)] and not (
                any(begin % kinds[k][3] for begin, (_, k) in zip(begins, group))
                or stride % kinds[group[0][1]][3]):
            whole = torch.empty((rows, stride), dtype=torch.float32, device=graph.indptr.device)
            results.update({k: whole[:, begin:begin + size]
                            for begin, size, (_, k) in zip(begins, sizes, group)})
    return results


@functools.lru_cache(maxsize=512)
def passes(expression: Expression, needs: tuple[bool, ...]) -> tuple[tuple[bool, list[int]], ...]:
    """The passes of `gradients`, by destination (True) or by source, with the inputs whose
    gradients each has."""
    by_pass = [(by_row, message_text.wanted(expression, needs, by_row)) for by_row in (True, False)]
    return tuple([pair for pair in by_pass if pair[1]])


def entries(expression: Expression, needs: tuple[bool, ...], by_row: bool) -> tuple[str, ...]:
    """The kernels that one pass of `gradients` launches."""
    inputs = message_text.wanted(expression, needs, by_row)
    if not inputs:
        return ()
    summed = any([expression.inputs[k].end != "e" for k in inputs])
    return ("gradients", "merge") if summed else ("gradients",)


def total(rows: Tensor) -> Tensor:
    """The sum over rows, of which there may be none."""
    return column_sum(rows) if rows.shape[0] else rows.new_zeros(rows.shape[1])


@functools.lru_cache(maxsize=1024)
def _kinds(expression: Expression,
           layout: Layout) -> tuple[tuple[str, int, int, int, np.int32], ...]:
    """For each input: the end; numbers of a row; numbers of a row of its gradient; and the divisor
    of the distance between rows, 0 where they have to lie one after the other; and that distance in
    memory that is dense."""
    heads, features = layout.heads, layout.heads * layout.width
    sizes = {"row": (features, features), "head": (heads, heads), "one": (1, layout.tiles)}
    return tuple([(source.end, *sizes[source.mode], layout.vec if strided(source) else 0,
                   np.int32(features)) for source in expression.inputs])


def arguments(graph: Rows, expression: Expression, seen: tuple[int, int],
              inputs: tuple[Tensor, ...], numbers: Numbers) -> tuple[tuple, list[Tensor]]:
    """Kernel arguments for the inputs, and copies of some that have to live until the launch.
    ValueError for an input that does not fit."""
    edges, device, fp32 = graph.other.shape[0], graph.indptr.device, torch.float32
    args: list[Any] = []
    copies = []
    for k, (end, columns, _, step, _) in enumerate(_kinds(expression, layout_for(*seen))):
        t = inputs[k]
        shape = t.shape
        if (len(shape) != 2 or shape[1] != columns or t.dtype is not fp32 or t.device != device
            or (end != "j" and shape[0] != (graph.rows if end == "i" else edges if end == "e"
                                            else 1))):
            raise _misfit(graph, expression, k, t, columns)
        distance, address = columns, t.data_ptr()
        if not t.is_contiguous() and step:
            distance, inner = t.stride()
            if inner != 1 or distance % step or distance >= _MOST_APART:
                distance = -1
        if address % 16 or distance < 0 or not (step or t.is_contiguous()):
            t, distance = t.clone(memory_format=torch.contiguous_format), columns
            copies.append(t)
            address = t.data_ptr()
        args.append(address)
        if step:
            args.append(np.int32(distance))
    if graph.place.shape[0] != edges:
        raise ValueError(f"the graph has {graph.place.shape[0]} places for {edges} edges: build it "
                         "with places=True")
    return (*args, *map(np.float32, numbers)), copies


def _misfit(graph: Rows, expression: Expression, k: int, t: Tensor, columns: int) -> ValueError:
    rows = {"i": graph.rows, "e": graph.other.shape[0], "p": 1}
    return ValueError(
        f"{expression.names[k]} is {list(t.shape)}, {t.dtype}, on {t.device}; needed is "
        f"[{rows.get(expression.inputs[k].end, 'any')}, {columns}], torch.float32, on "
        f"{graph.indptr.device}")
