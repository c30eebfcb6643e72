"""Functions of torch that a ``message`` may call and that no kernel has: names, and where they take
a dimension."""
from __future__ import annotations

import types
from typing import Any

from gnnaccel.adapters.tracing.rows.standins import Unseen

#: made of other operations (`composed`)
COMPOSED = frozenset(("glu", "cosine_similarity", "pairwise_distance", "one_hot", "gather",
                      "full_like", "rand_like", "randn_like", "zeros_like", "ones_like",
                      "empty_like", "addmm", "baddbmm", "inner", "tile", "max", "min", "vecdot"))
#: number by number. None that jumps where numbers are equal or 0, such as `floor` and `atan2`: the
#: sign of a sum of zeros may be another than the host's
_BY_NUMBER = frozenset((
    "acos", "arccos", "asin", "arcsin", "atan", "arctan", "tan", "sinh", "cosh", "asinh", "acosh",
    "atanh", "erfc", "logaddexp", "hypot", "sinc", "exp2", "log2", "log10", "xlogy", "logit",
    "hardshrink", "softshrink", "threshold"))
#: of channels alone, whatever their arguments
_BY_ROW = frozenset(("bilinear", "rms_norm", "group_norm", "pad", "conv1d", "diag_embed"))
#: along one dimension or several, by the place of that argument, and what it is by default
ALONG = {"cross": (2, None), "linalg_cross": (2, -1), "cumprod": (1, None), "flip": (1, None),
         "roll": (2, None), "sort": (1, -1), "topk": (2, -1), "prod": (1, None),
         "repeat_interleave": (2, None)}
#: which torch computes, row by row (`products.by_torch`)
BY_TORCH = frozenset((*_BY_NUMBER, *_BY_ROW, *ALONG))
NAMES = COMPOSED | BY_TORCH
#: which lay tensors side by side; the last two in their second dimension
BESIDE = ("cat", "concat", "concatenate", "hstack", "column_stack")
VIEWS = {"view", "reshape", "view_as", "reshape_as", "unsqueeze", "squeeze", "flatten", "unflatten",
         "contiguous"}
#: operations linear in their first argument
LINEAR = VIEWS | {"mul", "div", "neg", "sum", "mean", "matmul"}
POINTWISE = LINEAR | {"add", "sub", "relu", "leaky_relu", "sigmoid", "tanh", "exp", "elu", "abs",
                      "linear", "to", "float"}
#: names of torch's functions that mean one of these
ALIASES = {"multiply": "mul", "divide": "div", "true_divide": "div", "truediv": "div",
           "negative": "neg", "subtract": "sub", "rsub": "rsub", "__rsub__": "rsub",
           "linalg_norm": "norm", "linalg_vector_norm": "norm", "linalg_vecdot": "vecdot"}
#: names of arguments that some of torch's functions take: numpy's, and one of `torch.dropout` alone
_NAMES = {"axis": "dim", "keepdims": "keepdim", "train": "training"}


def by_torchs_names(function: Any, kwargs: dict) -> dict:
    """Arguments by torch's usual names, of functions that take others for them, as those do that
    are not written in Python."""
    if not _NAMES.keys() & kwargs.keys() or type(function) is types.FunctionType:
        return kwargs
    named = {_NAMES.get(name, name): value for name, value in kwargs.items()}
    if len(named) < len(kwargs):
        raise Unseen  # torch does not take both
    return named


def name_of(function: Any) -> str:
    name = getattr(function, "__name__", "").strip("_")
    return ALIASES.get(name, name)
