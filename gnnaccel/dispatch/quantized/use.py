"""A call of a layer that is asked to quantize: its format, or why it runs in fp32; counted either
way."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import cost, settings
from gnnaccel.dispatch.quantized.cost import Sizes
from gnnaccel.dispatch.quantized.measure import Stopwatch
from gnnaccel.dispatch.quantized.rows import Storage
from gnnaccel.dispatch.quantized.settings import Entry
from gnnaccel.dispatch.run.autograd import checkpointed

_HALF = (torch.float16, torch.bfloat16)


class Use(NamedTuple):
    """Storage of a quantized call; ``kernels``: by CUDA kernels, else by torch operations."""

    storage: Storage
    entry: Entry
    kernels: bool

    @property
    def text(self) -> str:
        return (self.storage.format
                if self.storage.format == self.storage.backward else "/".join(self.storage))


class Counted:
    """A run in fp32 of a layer that was asked to quantize; ``plain``: the run itself."""

    __slots__ = ("entry", "why", "plain")
    storage = None

    def __init__(self, entry: Entry, why: Reason, plain: Callable[..., Any]):
        self.entry, self.why, self.plain = entry, why, plain

    def __call__(self, *given: Any) -> Any:
        self.entry.fell_back(self.why)
        return self.plain(*given)


class Guarded:
    """A quantized run, under the eyes of the guard."""

    __slots__ = ("use", "stopwatch")

    def __init__(self, use: Use):
        self.use, self.stopwatch = use, Stopwatch(use.entry) if use.kernels else None

    def guarded(self, device: torch.device, run: Callable[[], Tensor], plain: Callable[[], Tensor],
                sampled: Callable[[int, int], Tensor], timed: bool = True,
                unfit: Reason | None = None) -> Tensor:
        """The result of ``run()``; of ``plain()``, the same in fp32, where the guard has found the
        layer's error too large, or a call ``unfit``. ``sampled(count, turn)``: the error in a part
        of the rows; ``timed``: whether both may be compared by time."""
        entry = self.use.entry
        still = settings.captured(device) or checkpointed()
        due = entry.watch.begin(device, still)
        why = reason("GA605", entry.watch.failure) if entry.watch.failure else unfit
        if why is not None:
            entry.fell_back(why)
            return plain()
        entry.quantized += 1
        out = run()
        if due:
            entry.watch.check(sampled)
        if self.stopwatch is not None and not still and timed:
            self.stopwatch.compare(run, plain)
        return out


def decide(layer: Any, found: Entry, config: Config, route: str, why_native: Reason | None,
           dtype: torch.dtype, sizes: Sizes, unfit: Reason | None) -> Use | Reason:
    """The storage of this call.

    ``route``: where the call runs as it is; ``why_native``: if that is "native", why; ``unfit``:
    why calls of this form cannot be quantized. Counts nothing.
    """
    storage = settings.wanted(layer, found, config, checkpointed())
    if type(storage) is Reason:
        return storage
    if route == "native":
        return reason("GA607", "" if why_native is None else str(why_native))
    if unfit is None:
        unfit = _dtype_reason(dtype, storage)
    if unfit is not None:
        return unfit
    if config.when == "profitable":
        against = (cost.reason_against(sizes, storage) if route == "cuda" else
                   reason("GA604", "torch operations only imitate the format, which is not faster"))
        if against is not None:
            return against
    return Use(storage, found, route == "cuda")


def _dtype_reason(dtype: torch.dtype, storage: Storage) -> Reason | None:
    if dtype is torch.float32 or (dtype in _HALF and storage.format == "int8"):
        return None
    return reason("GA603",
                  f"rows come in {str(dtype).removeprefix('torch.')}, which "
                  f"{storage.format} cannot stand for")
