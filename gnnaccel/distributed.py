"""One PyG graph over several processes, on torch.distributed: ``gnnaccel.distributed``.

    gnnaccel.distributed.partition(data, 4, out="parts")        # once, in one process

    part = gnnaccel.distributed.init("parts")                   # in each of torchrun's processes
    model = DistributedDataParallel(Model().to(part.data.x.device))
    out = model(part.data.x, part.data.edge_index)              # rows of the own nodes
    loss = gnnaccel.distributed.mean_loss(F.cross_entropy(out, part.data.y, reduction="none"))

docs/distributed.md says what can run so, and what it costs.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnaccel.adapters.partitioning import partition as partition
    from gnnaccel.adapters.partitioning import partition_arrays as partition_arrays
    from gnnaccel.adapters.pyg.distributed.data import load_part as load_part
    from gnnaccel.adapters.pyg.distributed.running import check as check
    from gnnaccel.adapters.pyg.distributed.running import exchanged as exchanged
    from gnnaccel.adapters.pyg.distributed.running import halo_rows as halo_rows
    from gnnaccel.adapters.pyg.distributed.running import init as init
    from gnnaccel.adapters.pyg.distributed.running import loss_weight as loss_weight
    from gnnaccel.adapters.pyg.distributed.running import mean_loss as mean_loss
    from gnnaccel.adapters.pyg.distributed.running import paused as paused
    from gnnaccel.adapters.pyg.distributed.running import shutdown as shutdown
    from gnnaccel.adapters.pyg.distributed.running import use as use
    from gnnaccel.dispatch.distributed.part import sizes as sizes
    from gnnaccel.errors import PartitionError as PartitionError

_PYG = "gnnaccel.adapters.pyg.distributed"
_HOMES = {
    **dict.fromkeys(("partition", "partition_arrays"), "gnnaccel.adapters.partitioning"),
    "load_part": f"{_PYG}.data",
    **dict.fromkeys(("check", "exchanged", "halo_rows", "init", "loss_weight", "mean_loss",
                     "paused", "shutdown", "use"), f"{_PYG}.running"),
    "sizes": "gnnaccel.dispatch.distributed.part",
    "PartitionError": "gnnaccel.errors",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Resolve a public name (PEP 562) and keep it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gnnaccel.distributed' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
