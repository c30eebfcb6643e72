"""Names of functions and methods of torch that make something of edges."""
from __future__ import annotations

#: functions and methods of torch that may make some; none draws numbers
NAMES = frozenset((
    "cat", "concat", "hstack", "vstack", "stack", "flip", "fliplr", "index_select", "gather",
    "sort", "argsort", "unique", "unique_consecutive", "nonzero", "where", "isin", "isfinite",
    "isinf", "isnan", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
    "logical_not", "logical_xor", "add", "sub", "mul", "div", "remainder", "fmod", "floor_divide",
    "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "log", "abs", "neg", "sign", "clamp",
    "clamp_min", "clamp_max", "minimum", "maximum", "sum", "mean", "max", "min", "amax", "amin",
    "any", "all", "cumsum", "bincount", "zeros_like", "ones_like", "full_like", "new_zeros",
    "new_ones", "new_full", "new_tensor", "scatter_add", "scatter_reduce", "scatter", "index_add",
    "index_fill", "masked_fill", "masked_select", "fill", "view", "reshape", "squeeze", "unsqueeze",
    "flatten", "expand", "expand_as", "repeat", "repeat_interleave", "permute", "transpose", "t",
    "contiguous", "clone", "detach", "long", "int", "float", "double", "bool", "to", "type_as",
    "sin", "cos", "norm", "nan_to_num", "select", "narrow", "chunk", "split", "unbind", "cpu",
    "cuda", "searchsorted", "arange", "zeros", "ones", "full", "argmax", "argmin", "topk", "roll",
    "logical_and", "sigmoid", "tanh", "relu", "tensor_split", "count_nonzero", "diff"))
WRITES = frozenset(("add", "sub", "mul", "div", "clamp", "clamp_min", "pow", "masked_fill",
                     "scatter_add", "index_add", "fill", "zero", "index_fill", "scatter_reduce",
                     "reciprocal", "sqrt", "rsqrt"))
#: views of an index of which indices of ends have the like
LAID = ("unsqueeze", "view", "reshape", "expand", "expand_as", "repeat")
#: methods that give ids as they are
STILL = ("contiguous", "long", "to", "clone", "detach", "cpu", "cuda")
