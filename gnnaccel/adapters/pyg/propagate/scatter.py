"""PyG's ``scatter``, ``segment`` and ``softmax``, and so ``global_add_pool`` and its like, behind
the router for operations.

Modules of PyG import these functions from each other by name, so every such name is replaced; not
those of the layers and of the utilities that they call, which belong to what was decided of the
layer. Nor those where the functions are defined: that is where pickles of what was imported earlier
look for it. Aggregation modules serve layers, which pass them a row of their ``edge_index``, and as
readouts, with an index that is a tensor of its own: only that is routed. The functions for pooling
are not replaced, but what they call: so what a user imported earlier is routed too. On a CPU the
host's own code runs.

That ``scatter`` and ``softmax`` ask the device for the number of groups, where they are not given
it, is kept per tensor.
"""
from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, compiler
from torch.compiler import is_dynamo_compiling

from gnnaccel.adapters import own
from gnnaccel.adapters.guards import TENSORS, context_reason
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.observe.counters import count
from gnnaccel.dispatch.observe.records import listening
from gnnaccel.dispatch.ops import by_index, route
from gnnaccel.dispatch.ops.by_index import IndexGraph
from gnnaccel.dispatch.ops.call import OpCall
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.config import Config, current
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.uncompiled import uncompiled

_FEW = 1 << 20
_tracing, _drivers = torch._C._get_tracing_state, driver.in_place
_UTILS = "torch_geometric.utils."
_LAYERS = ("torch_geometric.nn.conv", _UTILS)
_AGGREGATIONS = "torch_geometric.nn.aggr."
_REDUCES = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "min": "min", "amax": "max",
            "amin": "min"}


def install(patches: PatchSet) -> None:
    """Replace the functions, through ``patches``, where they are, and wherever a module that is
    none of `_LAYERS` has them."""
    wrappers = {}
    for name, (module, wrapper) in _ROUTED.items():
        native = getattr(importlib.import_module(_UTILS + module), name)
        if not own.is_function(native, "torch_geometric", name):
            continue  # what a user put there may do anything
        if tuple(inspect.signature(native).parameters) == tuple(
            inspect.signature(wrapper(native)).parameters):
            wrappers[native] = tuple(_scriptable(wrapper(native, readout), native)
                                     for readout in (False, True))
    for module in modules():
        for name, value in list(vars(module).items()):
            pair = wrappers.get(value) if inspect.isfunction(value) else None
            if pair is not None and not module.__name__.startswith(_LAYERS):
                patches.set(module, name, pair[module.__name__.startswith(_AGGREGATIONS)],
                            "Runs reductions and softmax over groups of rows, and so pooling, by "
                            "kernels on a GPU where that is faster; on a CPU PyG's code runs.")


def _scriptable(wrapper: Callable, native: Callable) -> Callable:
    """``wrapper``, for which `torch.jit.script` compiles ``native``, also where a user's function
    calls it by a global name, and which pickles name where users find it."""
    wrapper.__module__ = _UTILS.rstrip(".")
    wrapper.__dict__.update(__script_if_tracing_wrapper=True, __original_fn=native)
    return wrapper


def modules() -> list[Any]:
    """The modules of PyG that are loaded, each once."""
    by_id = {id(m): m for name, m in list(sys.modules.items())
             if name.startswith("torch_geometric.") and hasattr(m, "__dict__")}
    return list(by_id.values())


@uncompiled
def _left_alone(name: str, src: Any, index: Any, readout: bool, config: Config) -> bool:
    """Whether a call goes native without a further look; counts it where it could have been
    another. ``readout``: of an aggregation module, which is routed only as a readout. Calls that
    torch.jit traces stay native: a number of rows known of this index is not that of others."""
    if _tracing() is not None:
        return True
    if readout and (type(index) is not Tensor or index._is_view() or index.is_inference()):
        return True
    if type(src) not in TENSORS or not src.is_floating_point():
        return True
    return src.is_cpu and not _drivers and route.on_cpu_native(name, config)


def _too_few(name: str, src: Tensor, config: Config) -> bool:
    """Whether no reduction of so few numbers gains, so that a call goes native unread; counts it
    then."""
    if (src.numel() >= _FEW or config.when != "profitable" or config.on_fallback != "native"
        or src.is_cpu or listening()):
        return False
    count(name, "native", "GA301")
    return True


def _unpaid(name: str, src: Tensor, index: Any, config: Config) -> bool:
    """Whether no softmax of about so many numbers gains, or none over this index yet, so that a
    call goes native unread; counts it then."""
    if (config.when != "profitable" or config.on_fallback != "native" or src.is_cpu
        or type(index) is not Tensor or listening()
        or not by_index.softmax_unpaid(src, index, config)):
        return False
    count(name, "native", "GA301")
    return True


# --- the functions as they are called -------------------------------------------------------------

def _scatter(native: Callable, readout: bool = False) -> Callable:
    @functools.wraps(native)
    def scatter(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None,
                reduce: str = "sum") -> Tensor:
        # compiled regions (`is_compiling`, without its call) trace the host's own code; a layer's
        # aggregation gets a row of its edges
        if is_dynamo_compiling() or compiler._is_compiling_flag or (
                readout and type(index) is Tensor and index._is_view()):
            return native(src, index, dim, dim_size, reduce)
        cell = configs.held()  # `current`, without its call
        config = (cell.config if cell is not None else current() if configs.cells
                  else configs.of_process)
        if config is None or _left_alone("pyg.scatter", src, index, readout, config):
            return native(src, index, dim, dim_size, reduce)
        if _too_few("pyg.scatter", src, config):
            if dim_size is None and type(index) is Tensor and index.dim() == 1:
                dim_size = by_index.groups_in(index)
            return native(src, index, dim, dim_size, reduce)
        call: OpCall | Reason | None = context_reason() or _index_reason(src, index, dim)
        if call is None:
            dim_size = by_index.groups_in(index) if dim_size is None else dim_size
            call = _reduced(IndexGraph(index, src.shape[0], dim_size), src, reduce, config)
        return route.run("pyg.scatter", call, lambda: native(src, index, dim, dim_size, reduce),
                         config)

    return scatter


def _segment(native: Callable, readout: bool = False) -> Callable:
    @functools.wraps(native)
    def segment(src: Tensor, ptr: Tensor, reduce: str = "sum") -> Tensor:
        compiles = is_dynamo_compiling() or compiler._is_compiling_flag  # as `is_compiling` says
        config = None if compiles else current()  # compiled regions trace the host's own code
        if config is None or readout or _left_alone("pyg.segment", src, ptr, False, config) or (
                _too_few("pyg.segment", src, config)):
            return native(src, ptr, reduce)
        call: OpCall | Reason | None = context_reason() or _index_reason(src, ptr, 0, offsets=True)
        if call is None:
            call = _segments(src, ptr, reduce, config)
        return route.run("pyg.segment", call, lambda: native(src, ptr, reduce), config)

    return segment


def _softmax(native: Callable, readout: bool = False) -> Callable:
    @functools.wraps(native)
    def softmax(src: Tensor, index: Any = None, ptr: Tensor | None = None,
                num_nodes: int | None = None, dim: int = 0) -> Tensor:
        compiles = is_dynamo_compiling() or compiler._is_compiling_flag  # as `is_compiling` says
        config = None if compiles else current()  # compiled regions trace the host's own code
        if config is None or _left_alone("pyg.softmax", src, index, readout, config):
            return native(src, index, ptr, num_nodes, dim)
        if ptr is None and _unpaid("pyg.softmax", src, index, config):
            if num_nodes is None and index._base is None and index.numel():
                num_nodes = by_index.groups_in(index)  # known of a tensor that came before
            return native(src, index, ptr, num_nodes, dim)
        call: OpCall | Reason | None = context_reason() or _softmax_reason(src, index, ptr, dim)
        if call is None:
            num_nodes = by_index.groups_in(index) if num_nodes is None else num_nodes
            call = by_index.softmax(IndexGraph(index, src.shape[0], num_nodes), src, config)
        return route.run("pyg.softmax", call, lambda: native(src, index, ptr, num_nodes, dim),
                         config)

    return softmax


#: name -> (the module of `torch_geometric.utils` that has the function, what goes around it)
_ROUTED = {"scatter": ("_scatter", _scatter), "segment": ("_segment", _segment),
           "softmax": ("_softmax", _softmax)}


# --- reading a call -------------------------------------------------------------------------------

def _index_reason(src: Tensor, given: Any, dim: Any, offsets: bool = False) -> Reason | None:
    """Why rows cannot be grouped by ``given``: an index, or ``offsets``."""
    if (type(given) is not Tensor or given.dim() != 1 or given.dtype != torch.int64
        or given.device != src.device):
        description = (f"{given.dtype} {list(given.shape)} on {given.device}"
                       if isinstance(given, Tensor) else type(given).__name__)
        return reason("GA206", f"the {'offsets' if offsets else 'index'}: {description}",
                      "pass a dense int64 tensor of one dimension")
    if type(dim) is not int or not src.dim() or dim not in (0, -src.dim()):
        return reason("GA206", f"dimension {dim} of {src.dim()}", "reduce the first dimension")
    if (src.layout != torch.strided or src.is_meta or src.is_neg() or not offsets
        and given.shape[0] != src.shape[0]):
        return reason("GA206",
                      f"rows {list(src.shape)}, {src.layout}, for an index of {given.shape[0]}")
    return reason("GA303", "there are no rows") if not src.numel() or not given.shape[0] else None


def _softmax_reason(src: Tensor, index: Any, ptr: Any, dim: Any) -> Reason | None:
    if ptr is not None:
        return reason("GA208", "a softmax by ptr", "pass index alone")
    why = _index_reason(src, index, dim)
    if (why is None and src.dtype != torch.float32
        and torch.is_autocast_enabled(src.device.type)):  # which raises of the meta device
        return reason("GA203", f"a softmax of {src.dtype} numbers under autocast")
    return why


@uncompiled
def _reduced(graph: IndexGraph, src: Tensor, reduce: Any, config: Config) -> OpCall | Reason:
    name = _REDUCES.get(reduce) if type(reduce) is str else None
    if name is None:
        return _unknown(reduce)
    if name in ("max", "min") and _differentiated(src) and src.is_cuda and _with_torch_scatter():
        return reason("GA208", "torch-scatter gives the gradient of equal numbers to one of them")
    return by_index.reduce(graph, src, name, config)


@uncompiled
def _segments(src: Tensor, ptr: Tensor, reduce: Any, config: Config) -> OpCall | Reason:
    if type(reduce) is not str or reduce not in by_index.REDUCES:
        return _unknown(reduce)
    graph = IndexGraph(ptr, src.shape[0], ptr.shape[0] - 1, offsets=True)
    if reduce not in ("max", "min"):
        return by_index.reduce(graph, src, reduce, config)
    if _differentiated(src):
        return reason("GA208", "gradients of a maximum or minimum by segment",
                      "use scatter, which shares those of equal numbers evenly")
    call = by_index.reduce(graph, src, reduce, config)
    if type(call) is Reason or _with_torch_scatter():
        return call
    # the host takes infinities for empty segments
    return by_index.mapped(call, lambda out: torch.where(out.isinf(), 0, out))


def _differentiated(src: Tensor) -> bool:
    return src.requires_grad and torch.is_grad_enabled()


def _unknown(reduce: Any) -> Reason:
    return reason("GA208", f"reduce={reduce!r} is none of {', '.join(_REDUCES)}")


def _with_torch_scatter() -> bool:
    from torch_geometric import typing

    return typing.WITH_TORCH_SCATTER
