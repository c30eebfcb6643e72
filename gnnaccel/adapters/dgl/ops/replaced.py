"""DGL's backend operations, which run all message passing, behind the router for operations.

``dgl.ops``, ``update_all``, ``apply_edges`` and the rest call functions of
``dgl.backend.pytorch.sparse`` by names that their modules imported. Every such name is replaced, in
all modules of DGL; the functions of ``dgl.ops`` themselves are not, so that what a user imported
from there earlier is routed too. Nor are the names in ``sparse`` itself: the host's backward calls
them, and a forward that went native stays so.

On the CPU the host's own kernels run. With tensors on a GPU and a DGL built without CUDA nothing of
the host can run, so there everything is ours, and calls that are not understood raise DGLError as
the host would.
"""
from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.adapters import own
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.dispatch.uncompiled import kept_apart, uncompiled

#: functions of dgl.backend.pytorch.sparse that `op_calls` reads; those that make new graphs (csrmm,
#: csrsum, csrmask) stay native
ROUTED = ("gspmm", "gsddmm", "gspmm_hetero", "gsddmm_hetero", "edge_softmax", "edge_softmax_hetero",
          "segment_reduce", "scatter_add", "segment_mm", "gather_mm")
_SPARSE = "dgl.backend.pytorch.sparse"


def install(patches: PatchSet) -> None:
    """Replace the operations, through ``patches``, wherever a module of DGL has them."""
    import importlib

    from gnnaccel.adapters.dgl.ops import calls

    sparse = importlib.import_module(_SPARSE)
    wrappers = {}
    for name in ROUTED:
        native: Any = getattr(sparse, name, None)
        # older versions have fewer; what a user put there may do anything
        if own.is_function(native, "dgl", name):
            wrappers[id(native)] = native, routed(name, native, getattr(calls, name))
    for module in _modules():
        for name, value in list(vars(module).items()):
            entry = wrappers.get(id(value))
            if entry is not None and entry[0] is value:
                patches.set(module, name, entry[1],
                            "Runs message passing, softmax over edges, reductions by segment and "
                            "products by type by kernels on a GPU where that is faster. With a "
                            "DGL without CUDA nothing else can run them there.")


def _modules() -> list[Any]:
    """Every module of DGL that is loaded, once, but the one that defines the operations."""
    modules = {id(m): m for name, m in list(sys.modules.items())
               if m is not None and (name == "dgl" or name.startswith("dgl.")) and name != _SPARSE
               and hasattr(m, "__dict__")}
    return list(modules.values())


@functools.cache
def built_with_cuda() -> bool:
    """Whether this DGL has kernels for GPUs."""
    from dgl._ffi.function import get_global_func

    return get_global_func("device_api.cuda", True) is not None


class _Layers(threading.local):
    """How many routed layers are running in this thread, one inside the other."""

    depth = 0


#: the count of this thread
layers = _Layers()


def around(forward: Callable, native: Callable) -> Callable:
    """``forward`` of a routed layer, with its operations on the CPU left to the host: the layer's
    decision holds for them too, and a native layer gives the host's result to the last bit.
    Compiled regions get ``native``, the host's."""
    from torch.compiler import is_compiling

    @kept_apart
    @functools.wraps(forward)
    def layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return native(self, *args, **kwargs)
        layers.depth += 1
        try:
            return forward(self, *args, **kwargs)
        finally:
            layers.depth -= 1

    return layer


def routed(name: str, native: Callable, state: Callable) -> Callable:
    """``native``, an operation called ``name``, behind the router; ``state(*args)`` reads its
    calls."""
    from torch.compiler import is_compiling

    from gnnaccel.adapters.dgl.ops.calls import first_tensor
    from gnnaccel.adapters.guards import context_reason, inference_reason, subclass_reason
    from gnnaccel.dispatch.ops import route
    from gnnaccel.dispatch.policy.config import current
    from gnnaccel.dispatch.policy.reasons import Reason

    counted = f"dgl.{name}"
    uncompiled(state)

    @kept_apart
    @functools.wraps(native)
    def operation(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # compiled regions trace the host's own code
            return native(*args, **kwargs)
        for first in args:
            if isinstance(first, torch.Tensor):
                break
        else:  # in a list, or given by name
            first = first_tensor((*args, *kwargs.values()))
        on_gpu = first is not None and not first.is_cpu
        if not on_gpu and layers.depth:
            return native(*args, **kwargs)
        config, can = current(), not on_gpu or built_with_cuda()
        if can and (config is None or not on_gpu and route.on_cpu_native(counted, config)):
            return native(*args, **kwargs)
        given = (*args, *kwargs.values())
        why = can and (context_reason() or inference_reason(given) or subclass_reason(given))
        call = why or state(*args, **kwargs)
        if not can and type(call) is Reason:
            raise _error(f"{name}: {call.text}")
        return route.run(counted, call, functools.partial(native, *args, **kwargs) if can else None,
                         config)

    return operation


def _error(text: str) -> Exception:
    from dgl.base import DGLError

    return DGLError(text)

