"""Processes for tests: each runs a function of a module under gloo, and gives back what it
returns."""
from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

#: imported once, by the process that the others are forked from
_PRELOADED = ["tests.distributed.preloaded"]


def start(world: int, function: Callable, *args: Any) -> list[Any]:
    """``function(rank, world, *args)`` in ``world`` processes; what each returns, by rank.

    What one raises is raised here, by `torch.multiprocessing`.
    """
    import torch
    from torch.multiprocessing import start_processes

    multiprocessing.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_main, (function, world, folder, args), nprocs=world,
                        start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
                for rank in range(world)]


def _main(rank: int, function: Callable, world: int, folder: str, args: tuple) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=world, timeout=timedelta(seconds=60))
    found = function(rank, world, *args)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    gc.collect()  # wrappers of DistributedDataParallel have to be gone before their group is
    dist.destroy_process_group()
