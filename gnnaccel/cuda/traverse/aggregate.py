"""Launchers of ``src/aggregate.cu``: weighted sums of rows over edges; the weights' gradient."""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.int8.quantize import ALIGN, Int8Rows, addresses, stride
from gnnaccel.cuda.runtime.launch import (ROW_TYPES, THREADS, TYPES, Kernels, Layout, check_graph,
                                          dense, factored, grid, layout_for, pointer, workspace,
                                          wrong_weight)
from gnnaccel.cuda.structures import bands
from gnnaccel.cuda.structures.structure import Launch, Rows

WEIGHTS = {"none": 0, "edge": 1, "head": 2}
PLACES = {"position": 0, "place": 1}
_SHORT = 16  # edges of a row, on average
_NO, _YES = np.int32(0), np.int32(1)


@dataclass(frozen=True)
class Variant:
    """Key of a kernel of this family. ValueError for a value that none covers.

    ``heads`` x ``width`` of a row (`factored` splits wide rows); ``row``/``out``: dtypes of the
    gathered rows and of the result, ``row`` torch.int8 for `Int8Rows`, of heads x width channels,
    which without weights per head may be of any width; ``weight``: a key of `WEIGHTS`: none, one
    per edge, one per edge and head; ``weight_at``: the index of edge e in arrays over edges:
    "position" (at e of this graph's order) or "place" (at ``graph.place[e]``); ``identity``: x is
    such an array itself, by position; ``mean``: divide by the row's number of edges; ``wide``: the
    graph has int64 offsets; ``cut``: in bands of channels (`bands`), as `forward` decides.
    """

    heads: int
    width: int
    row: torch.dtype
    out: torch.dtype
    weight: str = "none"
    weight_at: str = "position"
    identity: bool = False
    mean: bool = False
    wide: bool = False
    cut: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (("row", self.row, ROW_TYPES), ("out", self.out, TYPES),
                                     ("weight", self.weight, WEIGHTS),
                                     ("weight_at", self.weight_at, PLACES)):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: the aggregate kernels know "
                                 f"{', '.join(map(str, allowed))}")
        self.layout  # noqa: B018 - refuses sizes

    @functools.cached_property
    def layout(self) -> Layout:
        """Layout. Int8 rows without weights per head are summed as they lie, padding and all."""
        if self.int8 and not self.per_head:
            return layout_for(*factored(stride(self.heads * self.width), True), True)
        if not self.cut:
            return layout_for(self.heads, self.width, self.int8)
        if self.per_head:
            return layout_for(self.heads, self.width,
                              most_heads=bands.heads(self.width, self.row.itemsize))
        band = bands.channels(self.heads * self.width, self.row.itemsize)
        return layout_for(self.heads * self.width // band, band, most_heads=1)

    @property
    def int8(self) -> bool:
        return self.row is torch.int8

    def banded(self, nodes: int, rows: int, edges: int, device: torch.device) -> Variant:
        """This variant in bands where those pay, else itself: rows of ``nodes`` nodes, gathered by
        ``edges`` edges of ``rows`` rows. Int8 rows are a quarter as long and go whole."""
        size = self.row.itemsize
        row = self.heads * self.width * size
        if nodes * row < bands.LEAST or self.int8 or self.identity:
            return self
        pay = bands.pay(nodes, row, rows, edges, device, size=size,
                        least=self.width * size if self.per_head else 0)
        return _in_bands(self) if pay else self

    @functools.cached_property
    def per_head(self) -> bool:
        """Whether heads have weights of their own; of one head those are the edge's."""
        return self.weight == "head" and self.heads > 1

    @functools.cached_property
    def kernels(self) -> Kernels:
        """``forward``, ``merge`` and ``edge_dot``."""
        return Kernels("aggregate", self._defines())

    @functools.cached_property
    def int8_dot(self) -> Kernels:
        """``edge_dot`` of int8 rows with int8 rows."""
        return Kernels("aggregate", self._defines(LEFT_INT8=1))

    def _defines(self, **more: int) -> tuple:
        weight = WEIGHTS["edge" if self.weight == "head" and not self.per_head else self.weight]
        flags = dict(ROW_T=ROW_TYPES[self.row], OUT_T=TYPES[self.out],
                     OFF_T="i64" if self.wide else "int", DROPOUT=0, WEIGHT=weight,
                     BY_PLACE=PLACES[self.weight_at], IDENTITY=int(self.identity),
                     MEAN=int(self.mean))
        if self.int8:
            channels = self.heads * self.width
            vec = next(v for v in (4, 2, 1) if channels % v == 0 and self.layout.vec % v == 0)
            flags.update(INT8=1, STRIDE=stride(channels), WIDTH=channels, OUT_VEC=vec, **more)
        return self.layout.defines() + tuple((k, str(v)) for k, v in flags.items())


#: `Variant`s by their fields in order, one object each, so that their kernels are made once
variant = functools.lru_cache(maxsize=512)(Variant)


@functools.lru_cache(maxsize=128)
def _in_bands(variant: Variant) -> Variant:
    """``variant`` in bands; itself where rows cannot be cut, or parts need a better alignment."""
    if not variant.per_head and not bands.channels(variant.heads * variant.width,
                                                   variant.row.itemsize):
        return variant
    banded = replace(variant, cut=True)
    return banded if banded.layout.vec <= variant.layout.vec else variant


def _check(name: str, t: Tensor, shape: tuple, dtype: torch.dtype, device: torch.device, align: int,
           least: int | None = None) -> None:
    """ValueError unless a kernel may read ``t`` as [*shape], or with ``least`` as [that many or
    more, *shape]."""
    fits = (t.shape == shape if least is None
            else t.dim() == len(shape) + 1 and t.shape[0] >= least and t.shape[1:] == shape)
    if (fits and t.dtype is dtype and t.device == device and t.is_contiguous()
        and t.data_ptr() % align == 0):
        return
    wanted = list(shape) if least is None else [f"at least {least}", *shape]
    raise ValueError(f"{name} is {list(t.shape)}, {t.dtype}, on {t.device}, strides "
                     f"{list(t.stride())}, address {t.data_ptr() % 16} mod 16; needed is "
                     f"[{', '.join(map(str, wanted))}], {dtype}, on {device}, contiguous, at a "
                     f"multiple of {align} bytes")


def _check_rows(variant: Variant, graph: Rows, name: str, x: Tensor | Int8Rows) -> None:
    """ValueError unless ``x`` are rows to gather: one per node of the other side, whose number the
    graph does not know, or under identity one per edge."""
    least = graph.other.shape[0] if variant.identity else 0
    if variant.int8 or isinstance(x, Int8Rows):
        return _check_int8(variant, name, x, graph.indptr.device, least)
    align = variant.layout.vec * x.element_size()
    _check(name, x, (variant.heads, variant.width), variant.row, graph.indptr.device, align, least)


def _check_int8(variant: Variant, name: str, x: Tensor | Int8Rows, device: torch.device,
                least: int) -> None:
    channels = variant.heads * variant.width
    if not variant.int8 or not isinstance(x, Int8Rows) or x.width != channels:
        actual = (f"Int8Rows of {x.width} channels" if isinstance(x, Int8Rows)
                  else f"a {x.dtype} tensor")
        raise ValueError(f"{name} is {actual}, but the variant has rows of {channels} channels in "
                         f"{variant.row}: torch.int8 stands for what quantize.int8_rows makes")
    _check(f"{name}.data", x.data, (stride(channels),), torch.int8, device, ALIGN, least)
    _check(f"{name}.scale", x.scale, (x.rows,), torch.float32, device, 4)


def _check_weight(variant: Variant, graph: Rows, weight: Tensor | None) -> None:
    if (weight is None) != (variant.weight == "none"):
        raise wrong_weight(variant, weight)
    if weight is not None:
        shape = (variant.heads,) if variant.weight == "head" else ()
        _check("weight", weight, shape, torch.float32, graph.indptr.device, 4, graph.other.shape[0])


def forward(variant: Variant, graph: Rows, x: Tensor | Int8Rows, weight: Tensor | None = None,
            scale: Tensor | None = None, bias: Tensor | None = None,
            into: Tensor | None = None) -> Tensor:
    """``out[r, h] = scale[r] * (sum over the edges e of row r of w(e, h) * x[other[e], h])``, in
    fp32 and in a fixed order.

    Rows without edges are zero (plus ``bias``), whatever their scale. With ``variant.mean`` the sum
    is divided by the row's number of edges, weighted or not. A number that is not finite shows in
    the rows whose edges have it and nowhere else.

    Args:
        graph: the rows that are summed into, by the other end of their edges.
        x: [nodes of the other side, H, D] of ``variant.row``, contiguous; under
            ``variant.identity`` [edges, H, D] in this graph's order. With torch.int8 `Int8Rows` of
            H * D channels, whose values are summed; a row of scale NaN makes all channels of the
            sums that it enters NaN. Ids are not checked against its length.
        weight: fp32 [edges], or [edges, H] with ``variant.weight`` "head", by position or place;
            None with "none". "edges" is ``graph.other.shape[0]`` or more.
        scale: fp32 [rows]. bias: fp32 [H * D], added last.
        into: as the result, [rows, H, D] of ``variant.out``, contiguous: the sums are added to it
            in place, and it is returned.

    Raises:
        ValueError: a tensor's shape, dtype, device, strides or alignment is another, or the graph
            is not as the variant has it.
    """
    rows, device = graph.rows, graph.indptr.device
    check_graph(variant, graph, weight is not None and variant.weight_at == "place")
    _check_rows(variant, graph, "x", x)
    _check_weight(variant, graph, weight)
    variant = variant.banded(x.rows if isinstance(x, Int8Rows) else x.shape[0], rows,
                             graph.other.shape[0], device)
    layout = variant.layout
    if scale is not None:
        _check("scale", scale, (rows,), torch.float32, device, 4)
    if bias is not None:
        _check("bias", bias, (variant.heads * variant.width,), torch.float32, device,
               min(16, layout.vec * 4))
    out, add = _result(variant, into, rows, device)
    launch = graph.launch()
    memory, (part, _, _) = workspace(launch.chunks, (layout.heads * layout.width, 0, 0), device)
    entry, across = _way(layout, graph, launch)
    variant.kernels(entry)(
        across, THREADS, 0,
        launch.graph + launch.split
        + addresses(x) + (pointer(weight), pointer(scale), pointer(bias), add, out.data_ptr(),
                          part))
    if launch.heavy:
        variant.kernels("merge")(grid(launch.heavy, layout), THREADS, 0,
                                 launch.merge + (launch.graph[0], part, pointer(scale),
                                                 pointer(bias), add, out.data_ptr()))
    return out


class _Made(NamedTuple):
    """Prepared call of `total`, for all tensors of the same form. ``alike``: whether the result is
    of the form of x; ``partial``: numbers of unfinished sums; ``merge``: grid and graph's arguments
    of the kernel that puts them together, or None; ``copied``: whether x is made dense before."""

    alike: bool
    shape: tuple[int, ...]
    compiled: Kernels
    entry: str
    grid: tuple[int, int]
    graph: tuple
    partial: int
    merge: tuple[tuple[int, int], tuple] | None
    copied: bool


def total(graph: Rows, x: Tensor, weight: Tensor | None = None, at: str = "place",
          mean: bool = False, scale: Tensor | None = None, bias: Tensor | None = None,
          into: Tensor | None = None) -> Tensor:
    """`forward` of x [any, *features], whatever shape its rows have: [rows, *features], x's dtype.

    weight: as for `forward`, [edges] or [edges, heads], where ``at`` says; scale, bias: as there,
    the bias of any dtype; into: likewise, in the result's shape. x may have any strides. A call
    like an earlier one costs little more than its launches. ValueError as of `forward`.
    """
    bias = None if bias is None else dense(bias.float())
    key = (at, mean, *[None if t is None else (t.dtype, t.shape, t.stride(), t.device,
                                               t.data_ptr() & 15)
                       for t in (x, weight, scale, bias, into)])
    call = graph.made.get(key)
    if call is None:
        call = _made(graph, x, weight, at, mean, scale, bias, into)
        if graph.launched is not None:
            graph.keep(key, call)
    alike, shape, compiled, entry, across, graph_args, partial, merge, copied = call
    add, out, x = _NO if into is None else _YES, into, dense(x) if copied else x
    if out is None:
        out = torch.empty_like(x) if alike else torch.empty(shape, dtype=x.dtype, device=x.device)
    memory = torch.empty(partial, dtype=torch.float32, device=x.device) if partial else None
    rows, weights, scales, biases, part, to = [
        0 if t is None else t.data_ptr() for t in (x, weight, scale, bias, memory, out)]
    compiled(entry)(across, THREADS, 0, graph_args + (rows, weights, scales, biases, add, to, part))
    if merge is not None:
        compiled("merge")(merge[0], THREADS, 0, merge[1] + (part, scales, biases, add, to))
    return out


def _made(graph: Rows, x: Tensor, weight: Tensor | None, at: str, mean: bool,
          scale: Tensor | None, bias: Tensor | None, into: Tensor | None) -> _Made:
    """Check and prepare a call of `total` unlike those before."""
    features, device = math.prod(x.shape[1:]), graph.indptr.device
    heads, width = (factored(features) if weight is None or weight.dim() == 1
                    else (weight.shape[1], features // weight.shape[1]))
    kind = "none" if weight is None else "edge" if weight.dim() == 1 else "head"
    form = variant(heads, width, x.dtype, x.dtype, kind, at, False, mean, graph.wide)
    rows, shape = graph.rows, (graph.rows, *x.shape[1:])
    aligned = dense(x)
    _check("x", aligned.view(-1, heads, width), (heads, width), x.dtype, device, 1, 0)
    if weight is not None:
        check_graph(form, graph, form.weight_at == "place")
        _check_weight(form, graph, weight)
    for name, t, count in ("scale", scale, rows), ("bias", bias, features):
        if t is not None:
            _check(name, t, (count,), torch.float32, device, 4)
    form = form.banded(x.shape[0], rows, graph.other.shape[0], device)
    if into is not None:
        _check("into", into, shape, x.dtype, device, min(16, form.layout.vec * into.element_size()))
    launch, layout = graph.launch(), form.layout
    merge = ((grid(launch.heavy, layout), (*launch.merge, launch.graph[0])) if launch.heavy
             else None)
    return _Made(shape == x.shape, shape, form.kernels, *_way(layout, graph, launch),
                 launch.graph + launch.split, launch.chunks * layout.heads * layout.width, merge,
                 aligned is not x)


def _way(layout: Layout, graph: Rows, launch: Launch) -> tuple[str, tuple[int, int]]:
    """The kernel for a graph's rows, and its grid. Where a warp holds several rows, and they are
    short, it sums them side by side."""
    short = (layout.slots > 1 and layout.lh * layout.hl >= layout.unroll
             and graph.other.shape[0] <= _SHORT * graph.rows)
    warps = launch.slots + (-(-graph.rows // layout.slots) if short else graph.rows)
    return "forward_short" if short else "forward", grid(warps, layout)


def _result(variant: Variant, into: Tensor | None, rows: int,
            device: torch.device) -> tuple[Tensor, np.int32]:
    """Memory of a sum, and whether the sum is added to its contents."""
    shape = rows, variant.heads, variant.width
    if into is None:
        return torch.empty(shape, dtype=variant.out, device=device), _NO
    _check("into", into, shape, variant.out, device,
           min(16, variant.layout.vec * into.element_size()))
    return into, _YES


def edge_dot(variant: Variant, graph: Rows, left: Tensor | Int8Rows,
             right: Tensor | Int8Rows) -> Tensor:
    """``<left[r, h], right[other[e], h]>`` for every edge e of every row r: with ``left`` the
    gradient of `forward`'s result (times scale, over count) and ``right`` its x, the gradient of
    the weights.

    Args:
        left: [rows, H, D] of ``variant.out``, contiguous; with torch.int8 also `Int8Rows`.
        right: as `forward`'s x, of ``variant.row``; under ``variant.identity`` by position.

    Returns:
        fp32 [edges, H], "edges" being ``graph.other.shape[0]``, by position or place as
        ``variant.weight_at`` says; zeros where the graph has no edge (dropped loops). The sum over
        the heads is the gradient of weights [edges]. Of int8 rows without weights per head [edges,
        1], that sum.

    Raises:
        ValueError: as `forward`.
    """
    layout, rows, edges = variant.layout, graph.rows, graph.other.shape[0]
    check_graph(variant, graph, variant.weight_at == "place")
    _check_left(variant, graph, left)
    _check_rows(variant, graph, "right", right)
    launch = graph.launch()
    # Not every place need have an edge. Only the device knows; zeroing costs less than asking it.
    make = torch.empty if graph.split.known and graph.split.edges == edges else torch.zeros
    out = make((edges, layout.heads), dtype=torch.float32, device=graph.indptr.device)
    kernels = variant.int8_dot if isinstance(left, Int8Rows) else variant.kernels
    kernels("edge_dot")(grid(launch.slots + rows, layout), THREADS, 0,
                        launch.graph + launch.split + addresses(left) + addresses(right)
                        + (out.data_ptr(),))
    return (out.sum(1, keepdim=True) if layout.heads > 1 and variant.int8 and not variant.per_head
            else out)


def _check_left(variant: Variant, graph: Rows, left: Tensor | Int8Rows) -> None:
    rows, device = graph.rows, graph.indptr.device
    if not isinstance(left, Int8Rows):
        align = min(16, variant.layout.vec * left.element_size())
        _check("left", left, (rows, variant.heads, variant.width), variant.out, device, align)
        return
    _check_int8(variant, "left", left, device, rows)
    if left.rows != rows:
        raise ValueError(f"left has {left.rows} rows, the graph {rows}")
