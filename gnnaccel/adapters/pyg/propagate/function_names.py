"""Functions of torch that a ``message`` may call and that no kernel has: names, and where they take
a dimension."""
from __future__ import annotations

#: made of other operations (`composed`)
COMPOSED = frozenset(("glu", "cosine_similarity", "pairwise_distance", "one_hot", "gather",
                      "full_like", "rand_like", "randn_like", "zeros_like", "ones_like", "addmm",
                      "inner", "tile", "max", "min"))
#: number by number. None that jumps where numbers are equal or 0, such as `floor` and `atan2`: the
#: sign of a sum of zeros may be another than the host's
_BY_NUMBER = frozenset((
    "acos", "arccos", "asin", "arcsin", "atan", "arctan", "tan", "sinh", "cosh", "asinh", "acosh",
    "atanh", "erfc", "logaddexp", "hypot", "sinc", "exp2", "log2", "log10", "xlogy", "logit",
    "hardshrink", "softshrink", "threshold"))
#: of channels alone, whatever their arguments
_BY_ROW = frozenset(("bilinear", "rms_norm", "pad", "conv1d"))
#: along one dimension or several, by the place of that argument, and what it is by default
ALONG = {"cross": (2, None), "linalg_cross": (2, -1), "cumprod": (1, None), "flip": (1, None),
         "roll": (2, None), "sort": (1, -1), "topk": (2, -1), "prod": (1, None),
         "repeat_interleave": (2, None)}
#: which torch computes, row by row (`products.by_torch`)
BY_TORCH = frozenset((*_BY_NUMBER, *_BY_ROW, *ALONG))
NAMES = COMPOSED | BY_TORCH
