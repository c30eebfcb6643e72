"""Models over a part: `use` and `init`, and functions for losses."""
from __future__ import annotations

import atexit
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.pyg.distributed import calls, data, layers
from gnnaccel.dispatch.distributed import exchange as exchanges
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.distributed.building import NODE
from gnnaccel.dispatch.distributed.failure import Watch
from gnnaccel.dispatch.distributed.part import Part
from gnnaccel.dispatch.distributed.session import Session
from gnnaccel.errors import PartitionError

_started = 0
_of_process: contextlib.ExitStack | None = None


@contextlib.contextmanager
def use(part: Part, *, group: Any = None, exchange: str = "fp32") -> Iterator[Part]:
    """A block in which PyG's layers run over ``part``: each is given the own nodes' rows and the
    part's edges, gets the halo's rows by itself, and returns the own nodes' results.

    Collective: every process of ``group`` (None: all) enters it, with its own part. ``exchange``:
    "bf16" sends rows and gradients in bfloat16, half the bytes; "int8" as integers of 8 bits with a
    scale for each row (as `gnnaccel.quantize` stores rows, rounded to nearest), a quarter of the
    bytes and 4 for each row. An error that leaves the block ends the other processes too; they do
    not print it again. Raises PartitionError, on every rank, where
    the parts are not those of one graph, one on each rank.
    """
    with watched(group) as watch:
        try:
            with _active(part, group, exchange):
                yield part
        except BaseException as error:
            if _is_failure(error):
                if watch.caused_elsewhere(error):
                    watch.wait_for_end()
                watch.tell()
            raise


def init(folder: Any, *, device: Any = None, exchange: str = "fp32", backend: str | None = None,
         verify: bool = True) -> Part:
    """Join the other processes, load this rank's part, and run layers over it until `shutdown` or
    the end of the process. Returns the part.

    ``folder``: the one that `partition` wrote; ``device``: for the part's data, by default the GPU
    of the process's LOCAL_RANK with NCCL, else the CPU; ``backend``: of torch.distributed, by
    default "nccl" where there is a GPU, else "gloo"; not asked where the process group is there
    already. ``exchange``, ``verify``: as in `use` and `load_part`. An exception that nobody catches
    ends all processes, and is printed once. Raises as `load_part` and `use`.
    """
    global _of_process
    device = _join(backend, device)
    stack = contextlib.ExitStack()
    watch = stack.enter_context(watched(None))
    stack.enter_context(excepthook(watch))
    try:
        part = data.load_part(folder, device=device, verify=verify)
        stack.enter_context(_active(part, None, exchange))
    except BaseException as error:
        if watch.caused_elsewhere(error):
            watch.wait_for_end()
        watch.tell()
        stack.close()
        raise
    _of_process = stack
    atexit.register(_leave)
    return part


def shutdown() -> None:
    """End the run that `init` began, once all processes have come here. Process groups stay:
    destroy them once DistributedDataParallel's wrappers are gone."""
    if _of_process is not None:
        dist.barrier()
        _leave()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """A block in which layers run over whole graphs, such as a small one or a sampled batch, though
    a part is active."""
    before = state.current, state.own_rows
    state.current = state.own_rows = None
    try:
        yield
    finally:
        state.current, state.own_rows = before


def check(model: Any) -> list[str]:
    """Check that a model can run over a part. Raises PartitionError, which names each module that
    cannot and why. Returns advice, such as on batch normalisation, and warns of it.

    Layers say the same when they are first called. Functions, such as ``global_mean_pool``, are not
    seen.
    """
    wrong, advice = layers.findings(model)
    if wrong:
        raise PartitionError("the model cannot run over a partitioned graph: " + "; ".join(
            f"{name or 'the model itself'}: {why} ({why.hint})" for name, why in wrong))
    notes = [f"{name}: {why}; {why.hint}" for name, why in advice]
    for line in notes:
        warnings.warn(line, RuntimeWarning, stacklevel=2)
    return notes


def halo_rows(x: Tensor, node_type: str | None = None) -> Tensor:
    """[own, ...] -> [own + halo, ...]: the rows that the active part's edges come from, each sent
    once by one ``all_to_all_single``. For layers that users write without `MessagePassing`.

    Differentiable: gradients of halo rows go to their owners, who add them in a fixed order, by
    rank. Collective. Raises PartitionError where no part is active or ``x`` has another number of
    rows.
    """
    session = _session("halo_rows")
    kind = NODE if node_type is None and not session.part.hetero else node_type
    if kind not in session.part.rows:
        raise PartitionError(f"node_type={node_type!r}; this part has {sorted(session.part.rows)}")
    return session.extend(kind, x, "x", "halo_rows")


def mean_loss(losses: Tensor) -> Tensor:
    """The mean of all parts' losses, equal on all of them, from the losses of the own nodes.

    ``losses``: one for each own node that counts, as by ``reduction="none"``; may be empty. Its
    gradients, averaged over the processes as DistributedDataParallel does, are those of one process
    with the whole graph. Collective. NaN where no part has a node that counts.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return losses.mean()
    return exchanges.global_mean(losses, _group())


def loss_weight(count: int) -> float:
    """The factor of the sum of the own nodes' losses with which gradients averaged by
    DistributedDataParallel are those of the mean over all nodes: parts / nodes that count.

    ``count``: how many own nodes count. Collective; call it once, if that stays the same.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1.0 / max(count, 1)
    counts: list[Any] = [None] * dist.get_world_size(_group())
    dist.all_gather_object(counts, int(count), group=_group())
    return len(counts) / max(sum(counts), 1)


def exchanged() -> dict[str, dict[str, int]]:
    """Traffic that this process has sent since its part became active, forward and backward, by
    node type: the number of exchanges (``calls``) and ``bytes``."""
    return {kind: {"calls": link.calls, "bytes": link.bytes}
            for kind, link in _session("exchanged").links.items()}


def _session(name: str) -> Session:
    if state.current is None:
        raise PartitionError(f"{name} needs an active part: call it within "
                             "gnnaccel.distributed.use(part), or after init(folder)")
    return state.current


def _group() -> Any:
    return None if state.current is None else state.current.group


@contextlib.contextmanager
def _active(part: Part, group: Any, exchange: str) -> Iterator[None]:
    session, patches = Session(part, group, exchange), PatchSet()
    calls.install(patches)
    state.current = session
    try:
        yield
    finally:
        state.current = None
        patches.restore()
        session.close()


@contextlib.contextmanager
def watched(group: Any) -> Iterator[Watch]:
    if not (dist.is_available() and dist.is_initialized()):
        raise PartitionError("torch.distributed is not initialised; call init_process_group, or "
                             "gnnaccel.distributed.init(folder)")
    if state.current is not None:
        raise PartitionError("a part is active already; leave its block, or call shutdown(), first")
    global _started
    _started += 1
    ranks = dist.get_process_group_ranks(group) if group is not None else [0]
    watch = Watch(dist.distributed_c10d._get_default_store(), dist.get_rank(group),
                  dist.get_world_size(group), f"gnnaccel/{ranks[0]}/{_started}")
    try:
        yield watch
    finally:
        watch.stop()


@contextlib.contextmanager
def excepthook(watch: Watch) -> Iterator[None]:
    native = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        if watch.caused_elsewhere(error):
            watch.wait_for_end()
        native(kind, error, trace)
        sys.stderr.flush()
        watch.tell()

    sys.excepthook = hook
    try:
        yield
    finally:
        if sys.excepthook is hook:
            sys.excepthook = native


def _is_failure(error: BaseException) -> bool:
    return not (isinstance(error, GeneratorExit)
                or (isinstance(error, SystemExit) and not error.code))


def _join(backend: str | None, device: Any) -> torch.device:
    """Become one of the processes that a launcher, such as torchrun, has started."""
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                   if name not in os.environ]
        if missing:
            raise PartitionError(f"{', '.join(missing)} are not set: start the script with "
                                 "torchrun --nproc-per-node N, or call init_process_group before")
        gpu = torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda")
        dist.init_process_group(backend or ("nccl" if gpu else "gloo"))
    if device is None and "nccl" in dist.get_backend_config():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cpu" if device is None else device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _leave() -> None:
    global _of_process
    stack, _of_process = _of_process, None
    if stack is not None:
        stack.close()
