"""Tensors inside of tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def tree_map(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: tree_map(function, part) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(tree_map(function, part) for part in value)
    return value


def named(value: Any, path: str = "out") -> dict[str, Tensor]:
    """Every tensor in ``value`` by its path, such as ``out[a][0]``."""
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, (tuple, list)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {}
    return {k: t for key, part in value.items() for k, t in named(part, f"{path}[{key}]").items()}


def dense_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout == torch.strided


def with_strides(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device`` that lies in memory as ``tensor`` does, expanded dimensions included."""
    if tensor.layout != torch.strided:
        return tensor.to(device)
    if 0 in tensor.stride() and tensor.numel():
        one = tensor[tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())]
        return one.clone().to(device).expand(tensor.shape)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)


def placed(value: Any, device: torch.device) -> Any:
    """``value`` on ``device``: tensors as they lie, and graphs of a host."""
    if isinstance(value, dict):
        return {key: placed(part, device) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(placed(part, device) for part in value)
    if isinstance(value, Tensor):
        return with_strides(value, device)
    return value.to(device) if hasattr(value, "to") else value


def as_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """``value`` with its floating tensors in ``dtype``."""
    if dtype is None:
        return value
    return tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def as_long(value: Any) -> Any:
    """``value`` with int32 indices as int64: with int32 the host is wrong or raises on a CPU."""
    return tree_map(lambda t: t.long() if t.dtype == torch.int32 else t, value)


def has_int32(value: Any) -> bool:
    return any(t.dtype == torch.int32 for t in named(value).values())


def longest_sum(value: Any) -> int:
    """The most edges that meet in a node, of the graphs among the arguments in ``value``."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return max((longest_sum(part) for part in value), default=0)
    if isinstance(value, Tensor):
        whole = not value.is_floating_point() and value.layout == torch.strided
        ends = value if whole and value.dim() == 2 and value.shape[0] == 2 else ()
    else:
        # a graph that is bound to CSC or CSR refuses to list its edges; its copy does not
        graph = hasattr(value, "in_degrees")
        ends = value.formats(["coo", "csr", "csc"]).edges() if graph else ()
    return max((int(end.long().bincount().max()) for end in ends if end.numel()), default=0)


def layers_in_a_row(module: nn.Module) -> int:
    """How many layers that pass messages a module has in a row.

    Those of a dictionary stand side by side, and so do the bases of a relational layer.
    """
    if hasattr(module, "propagate"):
        return 1
    basis = type(module).__name__ == "HeteroBasisConv"
    found = [layers_in_a_row(part) for part in (module.convs if basis else module.children())]
    beside = basis or isinstance(module, nn.ModuleDict)
    return max(found, default=0) if beside else sum(found)
