"""torch's autograd as a host: backward passes over a single GPU run in the thread that asked for
them.

Autograd gives every GPU a thread of its own. With one GPU the calling thread does nothing but wait
for that one, and handing the work over and the interpreter lock back and forth costs as much as all
kernels of a small graph: 0.3 to 0.5 ms of each step on the hosts measured.
``torch.autograd.set_multithreading_enabled(False)`` is torch's own way to do without. The same
nodes run, in the same order, on the same streams.

The setting holds for one call of backward at a time, where gnnaccel is enabled, and never where the
process uses several GPUs: there the threads launch side by side.
"""
from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gnnaccel.adapters.patching import PatchSet
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.config import current

# the function behind torch.autograd.backward, torch.autograd.grad and Tensor.backward
_ENTRY = "_engine_run_backward"
_OF_STEPS = "gnnaccel.adapters.captured.modules"
_others: dict[int, list[int]] = {}  # by a GPU's number, those of all others


def install(patches: PatchSet) -> list[str]:
    """Replace the entry of backward. Nothing where this torch has none by that name: then its
    threads stay."""
    import torch

    from gnnaccel.adapters import checkpointing, linear, optimizers, scripting  # need torch
    from gnnaccel.adapters.plain import replaced

    native = vars(torch.autograd).get(_ENTRY)
    if native is not None:
        patches.set(
            torch.autograd, _ENTRY, _in_this_thread(native, torch),
            "Runs a backward pass over a single GPU in the thread that asked for it: handing it to "
            "autograd's own thread costs 0.3 to 0.5 ms of each step. It calls torch's own function "
            "with `torch.autograd.set_multithreading_enabled(False)`, nothing else: the same "
            "nodes run, in the same order, on the same streams.",
            active="While gnnaccel is enabled in the calling thread, the loss is on a GPU, the "
                   "process has used no other GPU, and multithreaded backward passes are not "
                   "switched off already. `enable(backward=\"workers\")` turns it "
                   "off. On a CPU it "
                   "goes straight to torch's function.",
            cost="0.3 microseconds per backward pass on a CPU, where it does nothing. Hooks and "
                 "custom autograd functions run in the calling thread.")
    optimizers.install(patches)
    linear.watch()
    checkpointing.install(patches)
    replaced.install(patches)
    scripting.install(patches)
    return patches.names()


def update_on_demand(patches: PatchSet) -> None:
    """`gnnaccel.adapters.update_on_demand` of torch: patches for whole steps, where they are
    asked for, and for linear maps once there is a large graph."""
    from gnnaccel.adapters import linear, sequences

    linear.update_on_demand(patches)
    sequences.update_on_demand(patches)
    if configs.capturing or _OF_STEPS in sys.modules:
        importlib.import_module(_OF_STEPS).asked(patches)


def path_of(cls: type) -> None:
    """None: no class of torch's is a layer of a graph."""


def on_demand(patches: PatchSet) -> None:
    """Replace all that `update_on_demand` may replace."""
    from gnnaccel.adapters import linear, sequences

    linear.install(patches)
    sequences.install(patches)
    importlib.import_module(_OF_STEPS).replace(patches)


def _in_this_thread(native: Callable, torch: Any) -> Callable:
    enabled, set_enabled = torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled

    @functools.wraps(native)
    def run(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        gpu = _gpu_of(t_outputs)
        config = current() if gpu is not None else None
        if (gpu is None or config is None or config.backward != "caller" or not enabled()
            or not _single_gpu(torch, gpu)):
            return native(t_outputs, *args, **kwargs)
        set_enabled(False)
        try:
            return native(t_outputs, *args, **kwargs)
        finally:
            set_enabled(True)

    return run


def _gpu_of(outputs: Sequence[Any]) -> int | None:
    """The number of the GPU that backward starts on, if it does."""
    first: Any = outputs[0] if outputs else None
    # an edge of the graph may stand for an output
    return first.device.index if getattr(first, "is_cuda", False) else None


def _single_gpu(torch: Any, own: int) -> bool:
    """Whether this process has used no other GPU."""
    used = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    others = _others.get(own)
    if others is None:  # the number of GPUs stays what it is once one is used
        others = _others[own] = [i for i in range(torch.cuda.device_count()) if i != own]
    return used is not None and not (others and any(map(used, others)))
