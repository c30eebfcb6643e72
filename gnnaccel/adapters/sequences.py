"""Sequences of linear maps with activations between, of many rows, such as networks of the edges'
features: by kernels that keep the rows between two maps in registers, or that compute an activation
as they read the rows of a map.

torch writes and reads all rows for each module. The kernels are those of messages with such
networks (`dispatch.run.mlp`, `skinny_matmul`). All other modules of a sequence run as ever.
"""
from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnnaccel.adapters import guards, linear
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.ops import route
from gnnaccel.dispatch.ops.call import Kernel, OpCall
from gnnaccel.dispatch.policy.config import Config, current
from gnnaccel.dispatch.run import mlp, skinny_matmul
from gnnaccel.dispatch.run.skinny_matmul import Pointwise
from gnnaccel.dispatch.uncompiled import uncompiled

_SIMPLE = (int, float, bool, str, type(None))  # types of the options of activations


def update_on_demand(patches: PatchSet) -> None:
    """`gnnaccel.adapters.update_on_demand` for torch's class."""
    if linear.may_replace(patches, nn.Sequential):
        install(patches)


def install(patches: PatchSet) -> None:
    """Wrap the ``forward`` of torch's class."""
    patches.set(
        nn.Sequential, "forward", linear.routed(nn.Sequential.forward, of_many),
        "Runs linear maps and the activations between them together, where both are of many rows: "
        "rows that torch would write and read again for each module stay in registers. All other "
        "modules run in their order, as torch's own function runs them. Replaced only once a graph "
        "with at least 131,072 edges came.",
        active="As for `torch.nn.Linear`, for sequences in which an activation is followed by a "
               "linear map; where nobody watches these modules, and none of them is excluded.",
        cost="Some 0.3 microseconds for each call, some 30 for one of so many rows.")


class Part(NamedTuple):
    """Modules of a sequence that kernels may run together. ``first``: a linear map, or None;
    ``between``: modules that are a function of each number; ``last``: a linear map; ``end``: the
    place behind it."""

    first: nn.Linear | None
    between: tuple[nn.Module, ...]
    last: nn.Linear
    end: int


@uncompiled
def of_many(native: Callable, module: Any, x: Tensor) -> Any:
    """The sequence ``module`` of many numbers."""
    config, modules = current(), [*module._modules.values()]
    if (config is None or not (x.is_cuda or driver.in_place) or nn.Linear not in map(type, modules)
        or not guards.plain(module, nn.Sequential) or not linear.may_run(config, x, module)):
        return native(module, x)
    at, out = 0, x
    while at < len(modules):
        part = part_at(modules, at) if type(out) is Tensor else None
        operation = None if part is None else _operation(part, out, config)
        if part is None or operation is None:
            out, at = modules[at](out), at + 1
        else:
            out, at = _run(part, operation, out, config), part.end
    return out


def part_at(modules: list[Any], at: int) -> Part | None:
    """The part of the modules that begins there, if one does."""
    first = modules[at] if guards.plain(modules[at], nn.Linear) else None
    begin = end = at + (first is not None)
    while end < len(modules) and _is_pointwise(modules[end]):
        end += 1
    if end == begin or end == len(modules) or not guards.plain(modules[end], nn.Linear):
        return None
    before = modules[at - 1] if at else None
    if first is None and not guards.plain(before, nn.Linear) and any(
            getattr(one, "inplace", False) for one in modules[begin:end]):
        return None  # somebody else may have the rows that it changes, such as a hook of the map
    return Part(first, tuple(modules[begin:end]), modules[end], end + 1)


def _is_pointwise(module: Any) -> bool:
    """Whether the module is torch's, without parameters, and may be a function of each number."""
    cls = type(module)
    return (cls.__module__ == "torch.nn.modules.activation" or cls is nn.Identity
            or cls is nn.Dropout and not module.training) and guards.plain(module, cls) and not (
                module._parameters or module._buffers or module._modules)


def _operation(part: Part, x: Tensor, config: Config) -> skinny_matmul.Linear | mlp.Two | None:
    """The operation of a part by kernels; None where it is left to its modules."""
    weights = linear.weights_of(part.last)
    if weights is None or not x.dim() == 2 == weights[0].dim():
        return None
    function = pointwise(tuple(map(_kind, part.between)), _functions(), *weights[0].shape[::-1])
    if function is None or not linear.may_run(config, x, *part.between, part.last):
        return None
    if part.first is None:
        return (skinny_matmul.operation_of(x, *weights, function, again=True)
                if linear.fits(x, *weights) else None)
    before = linear.weights_of(part.first)
    if (before is None or not linear.fits(x, *before) or not linear.may_run(config, x, part.first)
        or not linear.are_ordinary(*weights)):
        return None
    return mlp.operation_of(x, *before, function, *weights, again=True)


def _run(part: Part, operation: Any, x: Tensor, config: Config) -> Tensor:
    """The part's result, counted as a linear map."""
    modules = (part.first, *part.between, part.last)

    def native() -> Any:
        out: Any = x
        for module in modules:
            out = out if module is None else module(out)
        return out

    weights: list[Any] = []
    for module in (part.first, part.last):
        weights += () if module is None else (module.weight, module.bias)
    name = "a linear map of an activation" if part.first is None else "two linear maps as one"
    call = OpCall(x.device, x.dtype, plain=native, kernel=Kernel(
        f"{name}, of many rows", operation.key, operation.compile,
        lambda: operation.mapped(x, *weights)))
    return route.run(linear.NAME, call, native, config)


# --- functions of each number ---------------------------------------------------------------------

def _kind(module: nn.Module) -> tuple:
    """What a module's function follows from: its class and its options."""
    options = [(name, value) for name, value in module.__dict__.items() if type(value) in _SIMPLE]
    return type(module), tuple(options)


class _Options(types.SimpleNamespace):
    """Options of a module. One that is no plain number or text is unknown."""

    def __getattr__(self, name: str) -> Any:
        from gnnaccel.adapters.tracing.rows.standins import Unseen
        raise Unseen


def _functions() -> tuple:
    """The functions that the modules call: users may replace them."""
    from gnnaccel.adapters.tracing.layer.traced_modules import functions
    return functions()


@functools.lru_cache(maxsize=64)
def pointwise(kinds: tuple, functions: tuple, k: int, n: int) -> Pointwise | None:
    """The function that modules of such ``kinds`` are together, for kernels that map its k columns
    to n; None where they have none. ``functions``: of which they are made."""
    from gnnaccel.adapters.tracing.layer import traced_modules
    from gnnaccel.adapters.tracing.rows.linear_maps import pointwise_of
    from gnnaccel.adapters.tracing.rows.pointwise import Rows
    from gnnaccel.adapters.tracing.rows.row_count import ROWS
    from gnnaccel.adapters.tracing.rows.standins import Unseen
    from gnnaccel.dispatch.generated.tree import Call, Leaf, leaves

    if not traced_modules.are_torchs(functions):
        return None
    meta = torch.empty(ROWS, k, dtype=torch.float32, device="meta")
    rows: Any = Rows(Leaf("e", lambda given: given, (k,), frozenset("x"), ()), meta)
    try:
        with torch.enable_grad():  # else their results are detached
            for cls, options in kinds:
                module = _Options(**dict(options))
                rows = traced_modules.ACTIVATIONS[cls](module, rows)
    except (Unseen, KeyError):
        return None
    tree = rows.tree if isinstance(rows, Rows) and rows.meta.shape == meta.shape else None
    if type(tree) is not Call or len(leaves(tree)) != 1 or leaves(tree)[0].tail != (k,):
        return None
    return pointwise_of(tree, k, n)
