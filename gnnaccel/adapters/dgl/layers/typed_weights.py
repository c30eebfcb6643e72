"""The weights of a TypedLinear, whatever its regularizer, as operands of a Program."""
from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.guards import Shapes, ordinary, plain, unfit
from gnnaccel.adapters.own import Path, path_of
from gnnaccel.dispatch.policy.reasons import Reason, reason


def module_reason(module: Any, name: str) -> Reason | None:
    """Why ``module`` cannot be replaced by its weights: it is not DGL's own TypedLinear, or more
    than that."""
    if type(module) is not _typed_linear():
        return reason("GA208", f"{name} is a {type(module).__name__}, not a TypedLinear")
    if (not plain(module, type(module)) or not ordinary(module)
            or "get_weight" in module.__dict__):
        return reason("GA208", f"{name} has hooks, or methods or weights of its own kind",
                      "remove them from the layer")
    return path().why or shapes_reason(module, name)


def all_plain(modules: list[Any]) -> bool:
    """Whether each module is DGL's own TypedLinear with a matrix for each type, and no more."""
    cls = _typed_linear()
    if path().why is not None:
        return False
    for module in modules:
        if (not plain(module, cls) or "get_weight" in module.__dict__
            or module.regularizer is not None):
            return False
    return True


def path() -> Path:
    """The path of a TypedLinear's forward; one object for as long as nothing is replaced."""
    return path_of(_typed_linear(), ("forward",))


def is_typed_linear(module: Any) -> bool:
    return isinstance(module, _typed_linear())


@functools.cache
def _typed_linear() -> type:
    from dgl.nn.pytorch import TypedLinear

    return TypedLinear


def shapes_reason(module: Any, name: str, x: Tensor | None = None) -> Reason | None:
    """Why the weights do not have the shapes of the module's sizes and regularizer, or do not go
    with rows ``x`` if there are some; ``name``: of the module."""
    types, bases = module.num_types, getattr(module, "num_bases", 0)
    ends = module.in_size, module.out_size
    if module.regularizer not in (None, "basis", "bdd"):
        return reason("GA208", f"the regularizer of {name} is {module.regularizer!r}")
    shapes: Shapes = {"W": (types if module.regularizer is None else bases, *ends)}
    if module.regularizer == "basis":
        shapes["coeff"] = types, bases
    elif module.regularizer == "bdd":
        parts = module.submat_in, module.submat_out
        if (bases * parts[0], bases * parts[1]) != ends:
            return reason("GA206", f"{bases} blocks {parts} of {name} are not {ends}")
        shapes["W"] = types, bases * parts[0] * parts[1]
    if x is None:
        return unfit(module, shapes)
    if x.shape[1] != module.in_size:
        return reason("GA206", f"rows of {x.shape[1]} features, {name} takes {module.in_size}")
    return unfit(module, shapes, x.device, x.dtype)


def narrows(x: Tensor) -> bool:
    """Whether DGL casts the operands of its own operations, sums among them: under autocast, but
    only CUDA's."""
    return x.is_cuda and x.dtype != torch.float64 and torch.is_autocast_enabled("cuda")


def has_bases(module: Any) -> bool:
    """Whether the weights are sums of shared bases."""
    return module.regularizer == "basis"


def operands(module: Any) -> dict[str, Tensor]:
    """The weights by their names in the statements."""
    if module.regularizer == "basis":
        return dict(comp=module.coeff, bases=module.W)
    if module.regularizer == "bdd":
        return dict(weight=module.W.view(module.num_types, module.num_bases, module.submat_in,
                                         module.submat_out))
    return dict(weight=module.W)
