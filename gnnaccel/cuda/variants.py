"""Definitions that every kernel family must compile with: what CI feeds to NVRTC for each architecture."""
from __future__ import annotations

import torch

from gnnaccel.cuda import additive, pairwise
from gnnaccel.cuda.layout import TYPES, layout_for

_SIZES = ((8, 8), (1, 47), (3, 512))
_TYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16))


def sample_defines(family: str) -> list[tuple[tuple[str, str], ...]]:
    """Sets of definitions for ``family``, over sizes, dtypes and options. KeyError for an unknown family."""
    return list(dict.fromkeys(_SAMPLES[family]()))


def _additive(build):
    for (heads, width), (row, out) in zip(_SIZES, _TYPES):
        for edge, dropout, train, wide in ((False, False, True, False), (True, True, True, True), (False, True, False, False)):
            yield from build(additive.Variant(heads, width, row, out, edge, dropout, train, wide))


def _pairwise(build):
    for i, score in enumerate(pairwise.SCORES):
        (heads, width), (row, out) = _SIZES[i % 3], _TYPES[i % 3]
        for edge, dropout in ((False, False), (True, True)):
            yield from build(pairwise.Variant(heads, width, row, out, edge, dropout, True, dropout, score))


def _rows(*more):
    for (heads, width), (row, _) in zip(_SIZES, _TYPES):
        yield layout_for(heads, width).defines() + (("ROW_T", TYPES[row]),) + more


_SAMPLES = {
    "additive": lambda: _additive(lambda v: [v.forward_kernels.defines]),
    "additive_pmf": lambda: _additive(lambda v: [v.pmf_kernels.defines]),
    "additive_backward": lambda: _additive(lambda v: [(v.edge_grad_kernels if v.edge else v.backward_kernels).defines]),
    "pairwise": lambda: _pairwise(lambda v: [v.forward_kernels.defines]),
    "pairwise_backward": lambda: _pairwise(lambda v: [v.backward_kernels(by_src).defines for by_src in (False, True)]),
    "head_dot": _rows,
    "gather": lambda: _rows(("OFF_T", "int"), ("DROPOUT", "0")),
    "dropout": lambda: [layout_for(3, 1).defines() + (("OFF_T", "i64"), ("DROPOUT", "1"))],
    "structure": lambda: [(("INDEX_T", index), ("LOOPS", loops), ("OFF_T", offset))
                          for index in ("i64", "int") for loops in ("0", "1") for offset in ("int", "i64")],
}
