"""What users' functions may name, and how they are made ready to run on stand-ins."""
from __future__ import annotations

import sys
from typing import Any


from gnnaccel.adapters import own
from gnnaccel.adapters.tracing.code import function_names, naming, supers
from gnnaccel.adapters.tracing.layer.traced_layer import Layer
from gnnaccel.adapters.tracing.rows import channels, pointwise
from gnnaccel.adapters.tracing.rows.pointwise_calls import OPERATIONS
from gnnaccel.adapters.tracing.rows.specials import Special
from gnnaccel.adapters.tracing.rows.standins import NUMBERS

NAMES = frozenset((
    *OPERATIONS, *pointwise.NAMES, *pointwise.IN_PLACE, *function_names.BESIDE, "linear",
    "matmul", "mm", "dropout", "dim", "ndim", "shape", "size", "nn", "functional", "special",
    "multiply", "subtract", "divide", "true_divide", "negative", "absolute", "pi", "e",
    "float32", "float64", "float16", "bfloat16", "half", "int64"))
#: other names in messages: functions of PyG and others, contents of dictionaries, and what
#: they may have in a branch that is not taken
OF_MESSAGES = NAMES | function_names.NAMES | {
    "indices",  # of what sorts
    "scatter", "scatter_add", "scatter_sum", "scatter_mean", "scatter_max",
    "scatter_min", "scatter_softmax", "utils", "degree",
    "index_select", "rearrange", "no_grad", "enable_grad", "dtype", "device", "items", "keys",
    "values", "get",
    "numel", "bmm", "repeat", "stack", "zeros", "max", "item",
    "arange", "linspace", "logspace", "eye", "full", "tensor", "cpu", "cuda", "numpy", "tolist",
    "ones", "new_ones", "new_zeros", "zeros_like", "ones_like", "einsum", "any", "all", "nonzero",
    "linalg", "vector_norm", "t", "T", "bincount",
    "Tensor", "Module",  # of which something may be one
    "scatter_add_", "index_add", "index_add_",  # into zeros
    "append",  # of lists that the message makes itself, as no others come to it
    "format", "startswith", "endswith", "lower", "upper",  # of texts
    # PyG's BatchNorm, of a single row
    "batch_norm", "running_mean", "running_var", "weight", "bias", "eps"}


def prepared(function: Any, layer: Layer) -> Any:
    """``function`` with stand-ins for what it names, where it can do nothing but compute."""
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            if variable == supers.CELL:
                if not naming.class_for_super(function.__code__):
                    return None
            elif not may_be_read(cell.cell_contents):
                return None
        except ValueError:  # nothing is in it yet
            return None
    functions = layer._traced_functions

    def instead(name: str, value: Any) -> Any:
        if functions is None:
            return instead_of(value)
        if value is super:
            return supers.above(function, layer)
        if isinstance(value, type) and value in type(layer._traced_layer).__mro__:
            return supers.Class(value, layer)
        stands = functions.instead(value)
        if stands is None:
            stands = layer._traced_global(function.__globals__, name, value)
        if stands is None and value is not None and not naming.is_known(
            value, layer._traced_manner.names):
            return Special("")  # a branch that is not taken may name it
        return stands

    def imported(name: str) -> Any:
        stands, module = functions.imported(name), sys.modules.get(name)
        if naming.is_users_module(module):
            return layer._traced_global(function.__globals__, name, module)
        return stands

    replacements = naming.globals_in_place(function, layer._traced_manner.names, instead,
                                           None if functions is None else imported)
    return None if replacements is None else (
        naming.with_globals(function, replacements) if replacements else function)


def may_be_read(value: Any) -> bool:
    return type(value) in NUMBERS


def instead_of(value: Any) -> Any:
    """Stand-in for a global value: a number stands for itself."""
    if own.is_function(value, "torch_geometric", "softmax"):
        return channels.softmax
    return value if may_be_read(value) else None


def functions(layer: Layer) -> Any:
    """Stand-ins for functions of PyG and others."""
    from gnnaccel.adapters.tracing.graph_functions import GraphFunctions  # needs this module

    return GraphFunctions(layer)
