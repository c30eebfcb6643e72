"""Launchers for several reduces of each row's messages in one pass (``src/multi_reduce.cu``)."""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import (THREADS, TYPES, Kernels, Layout, dense, factored, grid,
                                          layout_for, no_places, over_rows, pointer,
                                          wrong_offsets, wrong_weight)
from gnnaccel.cuda.structures.structure import Rows

REDUCES = ("sum", "mean", "var", "std", "max", "min")
WEIGHTS = {"none": 0, "edge": 1, "head": 2, "added": 3}
_PLACES = dict(zip(REDUCES, ("SUM_AT", "MEAN_AT", "VAR_AT", "STD_AT", "MAX_AT", "MIN_AT")))


@dataclass(frozen=True)
class Variant:
    """Key of a kernel of this family. ValueError for a value that none covers.

    ``heads`` x ``width`` of a row of dtype ``row``; ``reduces``: some of `REDUCES`, in the order of
    the result; ``weight``: a key of `WEIGHTS`: messages are rows, or rows times a number per edge,
    or per edge and head, or rows to each of which one of its edge is added; ``wide``: the graph has
    int64 offsets.
    """

    heads: int
    width: int
    row: torch.dtype
    reduces: tuple[str, ...]
    weight: str = "none"
    wide: bool = False

    def __post_init__(self) -> None:
        checks = (("row", (self.row,), TYPES), ("weight", (self.weight,), WEIGHTS),
                  ("reduces", self.reduces, REDUCES))
        for name, chosen, values in checks:
            if not set(chosen) <= set(values):
                raise ValueError(f"{name}={getattr(self, name)!r}: the kernels know "
                                 f"{', '.join(map(str, values))}")
        if not self.reduces or len(set(self.reduces)) < len(self.reduces):
            raise ValueError(f"reduces={self.reduces!r}: needed is one or more of "
                             f"{', '.join(REDUCES)}, each once")
        layout_for(self.heads, self.width)

    @functools.cached_property
    def layout(self) -> Layout:
        return layout_for(self.heads, self.width)

    @functools.cached_property
    def moments(self) -> bool:
        """Whether backward needs the rows' means."""
        return "var" in self.reduces or "std" in self.reduces

    @functools.cached_property
    def extrema(self) -> int:
        """Number of extrema of which equal messages are counted."""
        return sum(r in ("max", "min") for r in self.reduces)

    @functools.cached_property
    def partial(self) -> int:
        """Numbers that a chunk of a split row leaves per channel."""
        return any(r in ("sum", "mean") for r in self.reduces) + 2 * self.moments + 2 * self.extrema

    @functools.cached_property
    def terms(self) -> int:
        """Coefficients of a message's gradient (`multi_reduce_backward.spread`)."""
        return (self.moments or self.partial > 2 * self.extrema) + self.moments + self.extrema

    @functools.cached_property
    def defines(self) -> tuple:
        flags = dict(ROW_T=TYPES[self.row], OFF_T="i64" if self.wide else "int", DROPOUT=0,
                     WEIGHT=WEIGHTS[self.weight], REDUCES=len(self.reduces))
        flags |= {at: self.reduces.index(name) if name in self.reduces else -1
                  for name, at in _PLACES.items()}
        unroll = min(self.layout.unroll, 32 // self.layout.slots)  # a turn is 32 edges
        if self.weight == "added":  # each brings two rows
            unroll = max(1, unroll // 2)
        return self.layout.defines(unroll) + tuple((k, str(v)) for k, v in flags.items())

    @functools.cached_property
    def kernels(self) -> Kernels:
        """``forward`` and ``merge``."""
        return Kernels("multi_reduce", self.defines)


#: `Variant`s by their fields in order, one object each
variant = functools.lru_cache(maxsize=512)(Variant)


class Reduced(NamedTuple):
    """``out`` [rows, reduces, H, D]; for backward, else None: ``counts`` int32 [rows, extrema, H,
    D], how many messages equal the largest, then the smallest; ``mean`` fp32 [rows, H, D]."""

    out: Tensor
    counts: Tensor | None
    mean: Tensor | None


def forward(variant: Variant, graph: Rows, x: Tensor, weight: Tensor | None = None,
            train: bool = False) -> Reduced:
    """Every reduce of ``variant`` over the messages ``weight[place[e], h] * x[other[e], h]`` of
    each row's edges e, with "added" ``x[other[e], h] + weight[place[e], h]``.

    "var" is the mean of squares less the square of the mean, "std" its root, 0 where the variance
    is at most 1e-5 (PyG's `StdAggregation`). Rows without edges are 0 throughout. NaN wins both
    extrema. Sums are fp32, in a fixed order.

    Args:
        x: [nodes of the other side, H, D] of ``variant.row``, contiguous. Ids are not checked
            against it.
        weight: fp32 [edges] or [edges, H] by place; with "added" [edges, H, D] of ``variant.row``;
            None with "none".
        train: whether `multi_reduce_backward` will be asked.

    Raises:
        ValueError: for a tensor that does not fit.
    """
    rows, device = graph.rows, graph.indptr.device
    check_call(variant, graph, x, weight)
    shape = variant.heads, variant.width
    size = variant.heads * variant.width
    out = torch.empty((rows, len(variant.reduces), *shape), dtype=variant.row, device=device)
    counts = (torch.empty((rows, variant.extrema, *shape), dtype=torch.int32, device=device)
              if train and variant.extrema else None)
    mean = (torch.empty((rows, *shape), dtype=torch.float32, device=device)
            if train and variant.moments else None)
    inputs, outs = (x.data_ptr(), pointer(weight)), (out.data_ptr(), pointer(counts), pointer(mean))
    over_rows(graph, variant.layout, variant.kernels, "forward", inputs + outs,
              (variant.partial * size,), "merge", outs, inputs, 3)
    return Reduced(out, counts, mean)


# ---- rows of any shape, remembered by their form ----

def variant_of(x: Tensor, reduces: tuple[str, ...], weight: Tensor | None,
               wide: bool = False, added: bool = False) -> Variant:
    """The variant for x [any, *features] with weights [edges], [edges, H] or none; where rows of
    edges are ``added``, [edges, *features]."""
    features = math.prod(x.shape[1:])
    if added:
        return variant(*factored(features), x.dtype, reduces, "added", wide)
    if weight is not None and weight.dim() == 2:
        return variant(weight.shape[1], features // weight.shape[1], x.dtype, reduces, "head", wide)
    return variant(*factored(features), x.dtype, reduces, "none" if weight is None else "edge",
                   wide)


class _Made(NamedTuple):
    """Prepared call of `reduced`: only its tensors' addresses change from one call to the next.
    ``shape``: of the result; ``counts``, ``mean``: shapes of these, None where they are not saved;
    ``partial``: numbers of the workspace; ``merge``: grid and arguments, or None where no row is
    split."""

    variant: Variant
    shape: tuple[int, ...]
    counts: tuple[int, ...] | None
    mean: tuple[int, ...] | None
    grid: tuple[int, int]
    graph: tuple
    partial: int
    merge: tuple[tuple[int, int], tuple, tuple] | None


def reduced(graph: Rows, x: Tensor, reduces: tuple[str, ...], weight: Tensor | None = None,
            train: bool = False, added: bool = False) -> Reduced:
    """`forward` of x [any, *features], in whatever shape its rows are: ``out`` is [rows, reduces,
    *features], of a single reduce [rows, *features].

    weight: fp32 [edges], or [edges, H] of which each is for a part of the features; if it is
    ``added``, [edges, *features] of x's dtype, contiguous. x may have any strides. A call like an
    earlier one costs little more than its launches, as small graphs need. ValueError as
    of `forward`.
    """
    key = ("reduced", reduces, train, added, x.dtype, x.shape, x.stride(), x.device,
           x.data_ptr() & 15,
           None if weight is None else (weight.dtype, weight.shape, weight.stride(), weight.device,
                                        added and weight.data_ptr() & 15))
    call = graph.made.get(key)
    if call is None:
        return _first(key, graph, x, reduces, weight, train, added)
    form, device = call.variant, x.device
    out = torch.empty(call.shape, dtype=form.row, device=device)
    counts = (None if call.counts is None
              else torch.empty(call.counts, dtype=torch.int32, device=device))
    mean = None if call.mean is None else torch.empty(call.mean, dtype=torch.float32, device=device)
    memory = torch.empty(call.partial, dtype=torch.float32, device=device) if call.partial else None
    inputs, part = (x.data_ptr(), pointer(weight)), (pointer(memory),)
    outputs = out.data_ptr(), pointer(counts), pointer(mean)
    form.kernels("forward")(call.grid, THREADS, 0, call.graph + inputs + outputs + part)
    if call.merge is not None:
        across, merge_args, row_args = call.merge
        form.kernels("merge")(across, THREADS, 0, merge_args + row_args + inputs + part + outputs)
    return Reduced(out, counts, mean)


def _first(key: tuple, graph: Rows, x: Tensor, reduces: tuple[str, ...], weight: Tensor | None,
           train: bool, added: bool) -> Reduced:
    """A call of `reduced` unlike those before: checked, and remembered if the next one needs
    nothing but the same launches."""
    form, rows = variant_of(x, reduces, weight, graph.wide, added), dense(x)
    if added:
        weight = weight.view(-1, form.heads, form.width)  # type: ignore[union-attr]  # as it is added
    out, counts, mean = forward(form, graph, rows.view(-1, form.heads, form.width), weight, train)
    shape = graph.rows, *((len(reduces),) if len(reduces) > 1 else ()), *x.shape[1:]
    if rows is x and graph.launched is not None:
        launch, layout = graph.launch(), form.layout
        merge = ((grid(launch.heavy, layout), launch.merge, launch.graph[:3]) if launch.heavy
                 else None)
        shapes = [None if t is None else tuple(t.shape) for t in (counts, mean)]
        graph.keep(key, _Made(form, shape, shapes[0], shapes[1],
                              grid(launch.slots + graph.rows, layout), launch.graph + launch.split,
                              launch.chunks * form.partial * form.heads * form.width, merge))
    # no view, which nobody could change in place behind a Function
    return Reduced(out.view(shape).detach(), counts, mean)


def check_call(variant: Variant, graph: Rows, x: Tensor, weight: Tensor | None,
               own: int | None = None) -> None:
    """ValueError unless the kernels may run over ``graph`` with these rows, ``own`` in number if
    that is known."""
    # `launch.check_graph`, without its call
    if graph.wide != variant.wide:
        raise wrong_offsets(variant, graph)
    if variant.weight != "none" and graph.place.shape[0] != graph.other.shape[0]:
        raise no_places(graph)
    device = graph.indptr.device
    check("x", x, (own, variant.heads, variant.width), variant.row, device, variant.layout.vec)
    if (weight is None) != (variant.weight == "none"):
        raise wrong_weight(variant, weight)
    if variant.weight == "added":
        check("weight", weight,  # type: ignore[arg-type]  # as was asked above
              (None, variant.heads, variant.width), variant.row, device, variant.layout.vec)
    elif weight is not None:
        shape = (variant.heads,) if variant.weight == "head" else ()
        check("weight", weight, (None, *shape), torch.float32, device, 1)


def check(name: str, t: Tensor, shape: tuple, dtype: torch.dtype, device: torch.device,
          vec: int) -> None:
    """ValueError unless a kernel may read ``t`` as [*shape], of which None is any size, ``vec``
    numbers at a time."""
    fits = t.dim() == len(shape)
    for n, m in zip(shape, t.shape):
        if n is not None and n != m:
            fits = False
    if (fits and t.dtype is dtype and t.device == device and t.is_contiguous()
        and t.data_ptr() % (vec * t.element_size()) == 0):
        return
    wanted = ", ".join("any" if n is None else str(n) for n in shape)
    raise ValueError(f"{name} is {list(t.shape)}, {t.dtype}, on {t.device}, strides "
                     f"{list(t.stride())}; needed is [{wanted}], {dtype}, contiguous and aligned, "
                     f"on {device}")
