"""Launchers for the gradients of several reduces in one pass (``src/multi_reduce_backward.cu``)."""
from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import THREADS, Kernels, dense, grid, over_rows, pointer
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.cuda.traverse.multi_reduce import Reduced, Variant, check, check_call, variant_of


@functools.lru_cache(maxsize=512)
def kernels(variant: Variant) -> Kernels:
    """``spread``, ``backward``, ``add_parts``, ``edge_grad``."""
    return Kernels("multi_reduce_backward", variant.defines)


def spread(variant: Variant, graph: Rows, reduced: Reduced, grad: Tensor,
           zero_share: bool = True) -> Tensor:
    """Coefficients, fp32 [rows, terms, H, D], of the gradient of each row's messages, for
    `rows_grad` and `weight_grad`.

    Equal messages share the gradient of their extremum evenly. ``zero_share``: an extremum of
    exactly 0 counts itself among them, as in the gradient of `torch.Tensor.scatter_reduce` into
    zeros, which PyG's max and min use.

    Args:
        graph, reduced: as of `multi_reduce.forward` with ``train``.
        grad: as ``reduced.out``: its gradient.

    Raises:
        ValueError: for a tensor that does not fit, or a forward without ``train``.
    """
    if (variant.extrema and reduced.counts is None) or (variant.moments and reduced.mean is None):
        raise ValueError("the forward kept nothing for backward: call it with train=True")
    layout, device = variant.layout, graph.indptr.device
    check("grad", grad, tuple(reduced.out.shape), variant.row, device, layout.vec)
    terms = torch.empty((graph.rows, variant.terms, variant.heads, variant.width),
                        dtype=torch.float32, device=device)
    kernels(variant)("spread")(grid(-(-graph.rows // layout.slots), layout), THREADS, 0, (
        graph.indptr.data_ptr(), np.int32(graph.rows), grad.data_ptr(), reduced.out.data_ptr(),
        pointer(reduced.counts), pointer(reduced.mean), np.int32(zero_share), terms.data_ptr()))
    return terms


def rows_grad(variant: Variant, graph: Rows, x: Tensor, weight: Tensor | None, out: Tensor,
              coefficients: Tensor) -> Tensor:
    """[rows, H, D]: the gradient of forward's x.

    graph: that of `multi_reduce.forward` by the other end, with the same places; x, weight, out: of
    it. Sums are fp32, in a fixed order. ValueError for a tensor that does not fit.
    """
    check_call(variant, graph, x, weight, graph.rows)
    _check_results(variant, out, coefficients, graph.indptr.device)
    grad = torch.empty_like(x)
    end = grad.data_ptr(),
    over_rows(graph, variant.layout, kernels(variant), "backward",
              (x.data_ptr(), pointer(weight), out.data_ptr(), coefficients.data_ptr(), *end),
              (variant.heads * variant.width,), "add_parts", end)
    return grad


def weight_grad(variant: Variant, graph: Rows, x: Tensor, weight: Tensor, out: Tensor,
                coefficients: Tensor) -> Tensor:
    """Gradient of ``weight``, in its shape, fp32; of one that is "added", in its dtype. graph, x,
    weight, out: of `multi_reduce.forward`. ValueError for a tensor that does not fit."""
    layout, device = variant.layout, graph.indptr.device
    check_call(variant, graph, x, weight)
    _check_results(variant, out, coefficients, device, graph.rows)
    if variant.weight == "added":
        grad = graph.edges_like(weight)
    else:
        columns = variant.heads if variant.weight == "head" else layout.tiles
        grad = torch.zeros((weight.shape[0], columns), dtype=torch.float32, device=device)
    launch = graph.launch()
    kernels(variant)("edge_grad")(grid(launch.slots + graph.rows, layout), THREADS, 0,
                                  launch.graph + launch.split + (
        x.data_ptr(), pointer(weight), out.data_ptr(), coefficients.data_ptr(), grad.data_ptr()))
    return grad.sum(1) if variant.weight == "edge" else grad


def _check_results(variant: Variant, out: Tensor, coefficients: Tensor, device: torch.device,
                   rows: int | None = None) -> None:
    shape = variant.heads, variant.width
    check("out", out, (rows, len(variant.reduces), *shape), variant.row, device, variant.layout.vec)
    check("coefficients", coefficients, (out.shape[0], variant.terms, *shape), torch.float32,
          device, variant.layout.vec)


def added_grad(by_dst: Rows, reduces: tuple[str, ...], x: Tensor, added: Tensor, reduced: Reduced,
               grad: Tensor, zero_share: bool) -> Tensor:
    """Gradient of ``added``, each edge's part in that of x. The arguments are those of
    `multi_reduce.reduced` with ``added`` and ``train``; grad: as ``reduced.out``, with any strides.
    ValueError as of `spread`."""
    form = variant_of(x, reduces, added, by_dst.wide, True)
    parts = form.heads, form.width
    split = reduced._replace(out=reduced.out.view(-1, len(reduces), *parts))
    terms = spread(form, by_dst, split, dense(grad).view(split.out.shape), zero_share)
    return weight_grad(form, by_dst, dense(x).view(-1, *parts), added.view(-1, *parts), split.out,
                       terms).view(added.shape)


# ---- rows of any shape, remembered by their form ----

class _Made(NamedTuple):
    """Prepared call of `gradient`: only its tensors' addresses change from one call to the next.
    ``terms``: the shape of the coefficients; ``rows``, ``zero_share``: as kernels take them;
    ``partial``: numbers of the workspace; ``merge``: grid and arguments, or None where no row is
    split."""

    kernels: Kernels
    terms: tuple[int, ...]
    spread: tuple[int, int]
    rows: np.int32
    zero_share: np.int32
    grid: tuple[int, int]
    graph: tuple
    partial: int
    merge: tuple[tuple[int, int], tuple] | None


def gradient(by_dst: Rows, by_src: Rows, reduces: tuple[str, ...], x: Tensor,
             weight: Tensor | None, reduced: Reduced, grad: Tensor,
             zero_share: bool = True) -> Tensor:
    """The gradient of x, by `spread` and `rows_grad`, in x's shape and dtype.

    by_dst, reduces, x, weight, reduced: of `multi_reduce.reduced` with ``train``; by_src: that
    graph by the other end; grad: as ``reduced.out``, with any strides. A call like an earlier one
    costs little more than its launches. ValueError as of those two.
    """
    out, counts, mean = reduced
    key = ("gradient", reduces, zero_share,
           *[None if t is None else (t.dtype, t.shape, t.stride(), t.device, t.data_ptr() & 15)
             for t in (x, out, grad, weight)])
    call = by_src.made.get(key)
    if call is None:
        return _first(key, by_dst, by_src, reduces, x, weight, reduced, grad, zero_share)
    terms = torch.empty(call.terms, dtype=torch.float32, device=x.device)
    d_x = torch.empty_like(x)
    memory = (torch.empty(call.partial, dtype=torch.float32, device=x.device)
              if call.partial else None)
    address, part = d_x.data_ptr(), pointer(memory)
    call.kernels("spread")(call.spread, THREADS, 0, (
        by_dst.indptr.data_ptr(), call.rows, grad.data_ptr(), out.data_ptr(), pointer(counts),
        pointer(mean), call.zero_share, terms.data_ptr()))
    call.kernels("backward")(call.grid, THREADS, 0, call.graph + (
        x.data_ptr(), pointer(weight), out.data_ptr(), terms.data_ptr(), address, part))
    if call.merge is not None:
        call.kernels("add_parts")(call.merge[0], THREADS, 0, call.merge[1] + (part, address))
    return d_x


def _first(key: tuple, by_dst: Rows, by_src: Rows, reduces: tuple[str, ...], x: Tensor,
           weight: Tensor | None, reduced: Reduced, grad: Tensor, zero_share: bool) -> Tensor:
    """A call of `gradient` unlike those before: checked, and remembered if the next one needs
    nothing but the same launches."""
    form = variant_of(x, reduces, weight, by_dst.wide)
    parts = form.heads, form.width
    rows, gradients = dense(x), dense(grad)
    split = Reduced(reduced.out.view(-1, len(reduces), *parts), *reduced[1:])
    terms = spread(form, by_dst, split, gradients.view(split.out.shape), zero_share)
    d_x = rows_grad(form, by_src, rows.view(-1, *parts), weight, split.out, terms)
    if rows is x and gradients is grad and by_src.launched is not None:
        launch, layout = by_src.launch(), form.layout
        by_src.keep(key, _Made(
            kernels(form), tuple(terms.shape), grid(-(-by_dst.rows // layout.slots), layout),
            np.int32(by_dst.rows), np.int32(zero_share), grid(launch.slots + by_src.rows, layout),
            launch.graph + launch.split, launch.chunks * form.heads * form.width,
            (grid(launch.heavy, layout), launch.merge) if launch.heavy else None))
    return d_x.view(x.shape)
