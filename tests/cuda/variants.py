"""Definitions that every kernel family must compile with, for NVRTC in CI on each architecture."""
from __future__ import annotations

import torch

from gnnaccel.cuda.attention import additive, pairwise
from gnnaccel.cuda.int8 import int8_gemm, quantize
from gnnaccel.cuda.runtime.launch import TYPES, layout_for
from gnnaccel.cuda.segment import segment_backward, segment_direct, segment_gemm, segment_gemm_grad
from gnnaccel.cuda.segment.segment_plan import grad_plan, product_plan
from gnnaccel.cuda.traverse import (aggregate, edge_list, edge_softmax, extremum, gated, gated_sum,
                                    host_rows, multi_reduce, multi_reduce_backward, outer_sum,
                                    rectified, sddmm, softmax_sum)

_SIZES = ((8, 8), (1, 47), (3, 512))
_TYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32),
          (torch.float16, torch.float16))


def sample_defines(family: str) -> list[tuple[tuple[str, str], ...]]:
    """Sets of definitions for ``family``, over sizes, dtypes and options. KeyError for an unknown
    family."""
    return list(dict.fromkeys(_SAMPLES[family]()))


def _additive(build):
    for (heads, width), (row, out) in zip(_SIZES, _TYPES):
        for edge, dropout, train, wide in ((False, False, True, False), (True, True, True, True),
                                           (False, True, False, False)):
            yield from build(additive.Variant(heads, width, row, out, edge, dropout, train, wide))
    formats = ((torch.int8, torch.int8), (torch.int8, None), (torch.int8, torch.bfloat16),
               (torch.int8, torch.int8), (torch.float32, torch.int8))
    for (heads, width), (row, grad), edge in zip((*_SIZES, (1, 128), (8, 8)), formats,
                                                 (False, True, False, True, True)):
        yield from build(additive.Variant(heads, width, row, torch.float32, edge, edge, True,
                                          grad=grad))
    yield from build(additive.Variant(8, 8, torch.float32, torch.float32, train=True, tile=4))


def _pairwise(build):
    for i, score in enumerate(pairwise.SCORES):
        (heads, width), (row, out) = _SIZES[i % 3], _TYPES[i % 3]
        for edge, dropout in ((False, False), (True, True)):
            beside = score == "dot" and edge
            yield from build(pairwise.Variant(heads, width, row, out, edge, dropout, True, dropout,
                                              score, beside))


def _vectors(build):
    for (heads, width), (row, out), wide in zip(((8, 8), (3, 512)), _TYPES, (False, True)):
        yield from build(pairwise.Variant(heads, width, row, out, False, wide, True, wide, "gatv2",
                                          False, True))


def _tiled(build):
    yield from build(pairwise.Variant(4, 32, torch.float32, torch.float32, train=True,
                                      score="gatv2", tile=1))
    yield from build(pairwise.Variant(4, 64, torch.bfloat16, torch.float32, True, train=True,
                                      tile=1))


def _kept():
    for (heads, width), (row, out), wide in zip(((4, 16), (3, 512)), _TYPES, (False, True)):
        v = pairwise.Variant(heads, width, row, out, False, wide, True, wide, "dot", not wide)
        yield from (v.backward_kernels(by_src, True).defines for by_src in (False, True))


def _aggregate():
    options = (("none", "position", False, True), ("edge", "place", False, False, True),
               ("head", "position", True), ("edge", "position"), ("head", "place"),
               ("head", "place", False, True, True), ("none", "place", True))
    for i, fields in enumerate(options):
        yield aggregate.Variant(*(*_SIZES, (1, 1))[i % 4], *_TYPES[i % 3], *fields).kernels.defines
    for (heads, width), (_, out), fields in zip((*_SIZES, (1, 128), (8, 8)), (*_TYPES, *_TYPES),
                                                options):
        int8 = aggregate.Variant(heads, width, torch.int8, out, *fields)
        yield from (int8.kernels.defines, int8.int8_dot.defines)
    for (heads, width), (row, out), weight in zip(((1, 256), (4, 64), (1, 160)), _TYPES,
                                                  ("edge", "head", "none")):
        yield aggregate.Variant(heads, width, row, out, weight, cut=True).kernels.defines


_SEGMENT_SIZES = (  # k, n, blocks, dtype, precision, bytes of a copy
    (64, 64, 1, torch.float32, "FP32", 16), (128, 128, 2, torch.bfloat16, "HALF", 16),
    (33, 7, 3, torch.float16, "HALF", 2), (512, 140, 1, torch.float32, "TF32", 8),
    (3, 5, 8, torch.float32, "FMA", 4))
_SHARED = 96 * 1024


def _segment_gemm():
    # rows of a tile, transposed, elements of a store, write, (heads, width)
    options = ((128, False, 4, "BLEND", None), (64, True, 4, "PLAIN", (2, 128)),
               (16, False, 1, "PLAIN", None), (32, True, 2, "BLEND", (7, 20)),
               (128, False, 1, "ATOMIC", None))
    for (k, n, blocks, dtype, precision, copy), (rows, transposed, store, write, heads) in zip(
        _SEGMENT_SIZES, options):
        plan = product_plan(k, n, dtype, rows, transposed, heads is not None, _SHARED)
        out = torch.float32 if write == "ATOMIC" else dtype
        yield segment_gemm.kernels(plan, k, n, blocks, dtype, out, precision, transposed, copy,
                                   copy, store, write, heads).defines


# k, n, blocks, dtype, precision, bytes of a load, transposed, elements of a store, write, (heads,
# width)
_DIRECT = (
    (64, 64, 1, torch.float32, "FP32", 16, False, 4, "BLEND", None),
    (128, 128, 1, torch.float32, "FP32", 16, True, 4, "PLAIN", None),
    (64, 32, 2, torch.bfloat16, "HALF", 16, False, 8, "PLAIN", (2, 32)),
    (48, 24, 3, torch.float16, "HALF", 2, True, 1, "BLEND", None),
    (64, 64, 1, torch.float32, "FP32", 16, True, 4, "GELU_GRAD", None),
    (112, 40, 1, torch.float32, "TF32", 4, False, 2, "ATOMIC", None),
    (24, 8, 1, torch.float32, "FP32", 8, True, 2, "PLAIN", (1, 8)))


def _segment_direct():
    for k, n, blocks, dtype, precision, load, transposed, store, write, heads in _DIRECT:
        plan = segment_direct.direct_plan(k, n, dtype, precision, heads is not None, 227 * 1024)
        out = torch.float32 if write == "ATOMIC" else dtype
        yield segment_direct.kernels(plan, k, n, blocks, dtype, out, precision, transposed, load,
                                     load, store, write, heads).defines


def _segment_gemm_grad():
    for i, (k, n, blocks, dtype, precision, copy) in enumerate(_SEGMENT_SIZES):
        yield segment_gemm_grad.kernels(grad_plan(k, n, dtype, _SHARED), k, n, blocks, dtype,
                                        precision, copy, copy, i % 2 == 0).defines


# k, n, blocks, dtype, precision, bytes of a copy, transposed, elements of a store, write, sums,
# number of the plan
_BACKWARD = (
    (64, 64, 1, torch.float32, "FP32", 16, True, 4, "BLEND", True, 0),
    (64, 64, 1, torch.float32, "FP32", 4, False, 1, "PLAIN", False, 1),
    (64, 64, 1, torch.float32, "TF32", 16, True, 4, "GELU_GRAD", True, 0),
    (64, 64, 1, torch.bfloat16, "HALF", 16, True, 8, "PLAIN", False, 0),
    (128, 64, 2, torch.float16, "HALF", 2, False, 2, "PLAIN", True, 0),
    (40, 24, 3, torch.float32, "FP32", 8, True, 2, "PLAIN", True, 0),
    (64, 128, 1, torch.float32, "TF32", 16, True, 4, "PLAIN", False, 0))


def _segment_backward():
    for k, n, blocks, dtype, precision, copy, transposed, store, write, sums, number in _BACKWARD:
        plan = segment_backward.plans(k, n, dtype, precision, 227 * 1024)[number]
        yield segment_backward.kernels(plan, blocks, dtype, dtype, precision, transposed, copy,
                                       copy, copy, store, write, sums).defines


def _edge_softmax():
    for heads, (dtype, _), wide in zip((1, 8, 33), _TYPES, (False, True, False)):
        yield edge_softmax.kernels(heads, dtype, wide).defines


def _extremum():
    forms = (("copy", "none", True), ("mul", "head", False), ("add", "edge"),
             ("copy", "none", False, True), ("mul", "edge"))
    for i, form in enumerate(forms):
        yield extremum.Variant(*_SIZES[i % 3], _TYPES[i % 3][0], *form, wide=i == 1).kernels.defines


def _multi_reduce():
    forms = ((("max",),), (multi_reduce.REDUCES, "head", True), (("std", "min"), "edge"),
             (("mean", "sum"),), (("mean", "min", "max", "std"), "added"),
             (multi_reduce.REDUCES, "added", True))
    for i, fields in enumerate(forms):
        yield multi_reduce.Variant(*_SIZES[i % 3], _TYPES[i % 3][0], *fields)


def _gated():
    for width, (dtype, _), wide in zip((64, 47, 512), _TYPES, (False, True, False)):
        yield gated.kernels(width, dtype, wide).defines


def _gated_sum():
    for width, (dtype, _), edge in zip((64, 47), _TYPES, (0, 2)):
        yield gated_sum.kernels(width, dtype, edge, width == 47).defines


def _rectified():
    for width, (dtype, _), wide in zip((64, 47), _TYPES, (False, True)):
        yield rectified.kernels(width, dtype, wide).defines


def _softmax_sum():
    for width, (dtype, _), edge in zip((64, 47, 512), _TYPES, (True, False, True)):
        yield softmax_sum.kernels(width, dtype, edge, width == 47).defines


def _sddmm():
    for op, width, (dtype, _), index in zip(("add", "mul", "mul"), (8, 33, 6), _TYPES,
                                            (torch.int32, torch.int64, torch.int32)):
        yield sddmm.kernels(op, width, dtype, index).defines


def _quantize():
    forms = ((128, torch.float32, 4, True), (64, torch.bfloat16, 4, False),
             (47, torch.float16, 1, True), (1433, torch.float32, 1, False),
             (6, torch.float32, 2, True))
    for width, dtype, vec, stochastic in forms:
        yield quantize.kernels(width, dtype, vec, stochastic)[0].defines


def _forward(variant):
    return [variant.forward_kernels.defines]


def _both_ways(variant):
    return [variant.backward_kernels(by_src).defines for by_src in (False, True)]


def _rows(*more):
    for (heads, width), (row, _) in zip(_SIZES, _TYPES):
        yield layout_for(heads, width).defines() + (("ROW_T", TYPES[row]),) + more


_SAMPLES = {
    "additive": lambda: _additive(lambda v: [v.forward_kernels.defines]),
    "additive_pmf": lambda: _additive(lambda v: [v.pmf_kernels.defines]),
    "additive_backward": lambda: _additive(lambda v: [(v.edge_grad_kernels if v.edge
                                                       else v.backward_kernels).defines]),
    "pairwise": lambda: [*_pairwise(_forward), *_vectors(_forward), *_tiled(_forward)],
    "pairwise_backward": lambda: [*_pairwise(_both_ways), *_vectors(_both_ways),
                                  *_tiled(_both_ways), *_kept()],
    "segment_gemm": _segment_gemm,
    "segment_direct": _segment_direct,
    "segment_gemm_grad": _segment_gemm_grad,
    "segment_backward": _segment_backward,
    "head_dot": _rows,
    "adam": lambda: [(("FMAD", "0"),)],
    "column_sum": lambda: [(("VEC", vec), ("ROW_T", row))
                           for vec, row in (("4", "float"), ("1", "f16"), ("2", "bf16"))],
    "blend_grad": lambda: [(("COLUMNS", columns), ("VEC", vec), ("ROW_T", row))
                           for columns, vec, row in (("64", "4", "float"), ("33", "1", "f16"),
                                                     ("6", "2", "bf16"))],
    "aggregate": _aggregate,
    "edge_list": lambda: [edge_list.kernels(width, index).defines
                          for width, index in ((64, torch.int64), (33, torch.int32),
                                               (6, torch.int64))],
    "edge_softmax": _edge_softmax,
    "extremum": _extremum,
    "gated": _gated,
    "gated_sum": _gated_sum,
    "outer_sum": lambda: [outer_sum.kernels(*sizes).defines for sizes in (
        (129, 64, False), (17, 47, True), (33, 256, False), (4, 13, False))],
    "rectified": _rectified,
    "softmax_sum": _softmax_sum,
    "multi_reduce": lambda: [v.kernels.defines for v in _multi_reduce()],
    "multi_reduce_backward": lambda: [multi_reduce_backward.kernels(v).defines
                                      for v in _multi_reduce()],
    "sddmm": _sddmm,
    "quantize": _quantize,
    "int8_gemm": lambda: [int8_gemm.kernels(*form)[0].defines for form in (
        (128, 128, torch.float32), (128, 128, torch.int8, True), (47, 7, torch.float16),
        (602, 256, torch.bfloat16), (128, 128, torch.int8), (5, 41, torch.int8))],
    "gather": lambda: _rows(("OFF_T", "int"), ("DROPOUT", "0")),
    "dropout": lambda: [layout_for(3, 1).defines() + (("OFF_T", "i64"), ("DROPOUT", "1"))],
    "host_rows": lambda: [host_rows.kernels(size).defines for size in host_rows.WORDS],
    "pairs": lambda: [()],
    "row_order": lambda: [(("OFF_T", offset),) for offset in ("int", "i64")],
    "row_split": lambda: [(("OFF_T", offset),) for offset in ("int", "i64")],
    "structure": lambda: [(("OFF_T", offset),) for offset in ("int", "i64")],
}
