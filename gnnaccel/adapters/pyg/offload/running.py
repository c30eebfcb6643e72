"""`offload`: a block in which models run over rows in the host's memory."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.pyg.distributed import calls
from gnnaccel.adapters.pyg.offload.banding import Bander
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.offload.memory import Memory
from gnnaccel.errors import OffloadError

_blocks = 0
_held: tuple[int | str | None, contextlib.ExitStack] = None, contextlib.ExitStack()
_patches = PatchSet()


@contextlib.contextmanager
def offload(limit: int | str = "auto", *, device: Any = None) -> Iterator[Bander]:
    """A block in which PyG's models, on the GPU, run over features and edges in the host's memory:
    band by band, with results in the host's memory.

    ``limit``: the bytes of the GPU that one layer's call may take, or "auto", most of what is free
    then; ``device``: where bands are computed, by default the GPU, without one the CPU. Features
    and results in pinned memory come and go fastest (``x.pin_memory()``). docs/offload.md says what
    can run so. Gives a `Bander`, which counts what ran. Raises OffloadError where a part is active,
    or blocks nest, and within, where an operation cannot run in bands.
    """
    if limit != "auto" and (not isinstance(limit, int) or limit <= 0):
        raise ValueError(f"limit={limit!r}; it has to be 'auto' or a number of bytes")
    if state.each_layer():
        raise OffloadError("a part, a division over processes or another offload() block is active")
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None
                         else device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    bander = Bander(Memory(place), limit if isinstance(limit, int) else None, installed)
    with installed():
        state.divider = bander
        try:
            bander.rowwise.__enter__()
            yield bander
        finally:
            bander.rowwise.end()
            state.divider = None
            bander.close()


def hold(limit: int | str | None) -> None:
    """Open the `offload` block of ``enable()`` with this limit, which stays open until another
    limit is asked for, or None, for none."""
    global _held
    if limit == _held[0]:
        return
    block, _held = _held[1], (None, contextlib.ExitStack())
    block.close()
    if limit is not None:
        block = contextlib.ExitStack()
        block.enter_context(offload(limit))
        _held = limit, block


@contextlib.contextmanager
def option(limit: int | str | None) -> Iterator[Any]:
    """A block in which an option of ``enabled()`` holds: `offload` with this limit, or, for None,
    none. Within another `offload` block that one's limit stays."""
    around = state.divider if isinstance(state.divider, Bander) else None
    if limit is None and around is not None:
        with around.left():
            yield None
    elif limit is None or around is not None:
        yield around
    else:
        with offload(limit) as bander:
            yield bander


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """A block in which layers look for a division of their calls; it nests. Backward opens it, too,
    which may come after the block of the forward pass."""
    global _blocks
    if not _blocks:
        calls.install(_patches)
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        if not _blocks:
            _patches.restore()
