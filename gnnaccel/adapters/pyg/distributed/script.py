"""``torchrun -m gnnaccel --partition``: the setup around a script that knows one process."""
from __future__ import annotations

import atexit
import contextlib
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.pyg.distributed import calls
from gnnaccel.adapters.pyg.distributed.dividing import Divider
from gnnaccel.adapters.pyg.distributed.running import excepthook, watched
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.distributed.failure import Watch
from gnnaccel.errors import PartitionError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def begin(least: int) -> None:
    """Join the other processes and divide layers' calls over graphs of at least ``least`` edges,
    until the process ends.

    Each process sees one GPU, the one of its LOCAL_RANK, so that "cuda" and "cuda:0" mean that; it
    has to be called before CUDA is used. ``random`` and ``numpy.random`` get seeds that are the
    same in all processes, as torch's are; ranks above 0 print nothing to standard output. Raises
    PartitionError where no launcher has started the process, or CUDA is in use already.
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise PartitionError(f"--partition: {', '.join(missing)} are not set. Start the script "
                             "with torchrun --nproc-per-node N -m gnnaccel --partition train.py")
    gpu = _own_gpu()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    _alike()
    stack = contextlib.ExitStack()
    watch = stack.enter_context(watched(None))
    stack.enter_context(excepthook(watch))
    atexit.register(_end, stack, stack.enter_context(divided(least)), watch)
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")  # until the process ends


@contextlib.contextmanager
def divided(least: int) -> Iterator[Divider]:
    """A block in which every process of torch.distributed runs the same, and layers' calls over
    graphs of at least ``least`` edges are divided among them. Collective."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    patches = PatchSet()
    calls.install(patches)
    patches.set(dist, "init_process_group", _refused,
                "Says that a script of several processes is not for --partition.",
                active="While `python -m gnnaccel --partition` runs a script.")
    divider = state.divider = Divider(least)
    handle = register_optimizer_step_pre_hook(_same_gradients)
    try:
        yield divider
    finally:
        state.divider = None
        handle.remove()
        patches.restore()


def _refused(*args: Any, **kwargs: Any) -> None:
    raise PartitionError("the script sets up torch.distributed itself; --partition is for scripts "
                         "that know one process. Run it without --partition, and see "
                         "docs/distributed.md for one graph over several processes")


def _own_gpu() -> bool:
    """Leave this process the GPU of its LOCAL_RANK alone. Returns whether there is one."""
    if not torch.backends.cuda.is_built():
        return False
    if torch.cuda.is_initialized():
        raise PartitionError("--partition: CUDA is in use already; each process has to choose its "
                             "GPU before")
    at = int(os.environ.get("LOCAL_RANK", "0"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(at)
    else:
        gpus = [name for name in visible.split(",") if name]
        if gpus and at >= len(gpus):
            raise PartitionError(f"--partition: process {at} of this host has no GPU: "
                                 f"CUDA_VISIBLE_DEVICES={visible}")
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[at]
    return torch.cuda.is_available()


def _alike() -> None:
    """Seed the generators of Python and numpy, which begin at random, alike in all processes.
    torch's own begin with one number everywhere."""
    import numpy as np

    seed = [random.getrandbits(32)]
    dist.broadcast_object_list(seed)
    random.seed(seed[0])
    np.random.seed(seed[0])


def _same_gradients(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Replace gradients by their mean over the processes, before each step. All hold the same but
    for rounding, where a GPU adds up in another order, so that weights stay equal bit for bit."""
    state.divider.compare_weights(optimizer)
    by_kind: dict[Any, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None and not weight.grad.is_sparse:
                by_kind.setdefault((weight.dtype, weight.device), []).append(weight.grad)
    for grads in by_kind.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=state.divider.group)
        flat /= state.divider.parts
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(mean.view_as(grad))


def _end(stack: contextlib.ExitStack, divider: Divider, watch: Watch) -> None:
    if dist.get_rank() == 0:
        sys.stderr.write(summary(divider) + "\n")
    stack.close()
    if dist.is_initialized() and not watch.failed:  # others may wait for what never comes
        with contextlib.suppress(RuntimeError):  # of a process that ended by an error of its own
            dist.barrier()  # gloo may abort where another process is gone already
        dist.destroy_process_group()


def summary(divider: Divider) -> str:
    """The calls that were divided, those that were not, and why."""
    divided = [f"{name} ({count} calls)" for (name, why), count in divider.ran.items()
               if why is None]
    whole = [f"  whole in each process: {name} ({count} calls): {why}; {why.hint}"
             for (name, why), count in divider.ran.items() if why is not None]
    head = (", ".join(divided) if divided else
            "no layer, so that every process did the work of all")
    return "\n".join([f"gnnaccel --partition: {divider.parts} processes divided {head}", *whole])
