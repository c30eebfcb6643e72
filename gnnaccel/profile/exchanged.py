"""What layers over a part exchanged with other processes: bytes and time, by layer."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gnnaccel.dispatch.observe.exchanges import Exchange
from gnnaccel.profile.frames import Naming, who
from gnnaccel.profile.tables import milliseconds, table
from gnnaccel.profile.timeline import Interval, Timeline


@dataclass
class Exchanged:
    """Of one layer, all exchanges together. Bytes are those that this process sent to others;
    times, in milliseconds, hold the wait for the slowest process."""

    name: str
    layer: str
    forwards: int = 0
    backwards: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0

    def add(self, exchange: Exchange) -> None:
        if exchange.backward:
            self.backwards += 1
            self.backward_bytes += exchange.bytes
        else:
            self.forwards += 1
            self.forward_bytes += exchange.bytes

    def took(self, backward: bool, taken: float) -> None:
        if backward:
            self.backward_ms += taken
        else:
            self.forward_ms += taken


class Exchanges:
    """A watcher of exchanges that adds them up by layer. ``nvtx``: each is an NVTX range, too."""

    def __init__(self, naming: Naming, timeline: Timeline, nvtx: bool):
        self._naming, self._timeline, self._nvtx = naming, timeline, nvtx
        self.by_layer: dict[str, Exchanged] = {}

    @contextlib.contextmanager
    def __call__(self, exchange: Exchange) -> Iterator[None]:
        if exchange.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield  # events in it would be part of the graph
            return
        entry = self.of(exchange.layer)
        entry.add(exchange)
        interval = Interval(self._timeline.clock.mark(exchange.device), -1,
                            functools.partial(entry.took, exchange.backward))
        if self._nvtx:
            torch.cuda.nvtx.range_push(f"gnnaccel exchange {entry.name}")
        try:
            yield
        finally:
            if self._nvtx:
                torch.cuda.nvtx.range_pop()
        interval.end = self._timeline.clock.mark(exchange.device)
        self._timeline.add(interval)

    def of(self, layer: Any) -> Exchanged:
        """The entry of a layer, a module or a name; None: one that is gone."""
        kind = (layer if isinstance(layer, str) else
                "layer that is gone" if layer is None else type(layer).__name__)
        name = kind if layer is None else self._naming.of(layer)
        return self.by_layer.setdefault(name, Exchanged(name, kind))

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in self.by_layer.values()]

    def __str__(self) -> str:
        """A table; empty where nothing was exchanged."""
        if not self.by_layer:
            return ""
        import torch.distributed as dist

        rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
        columns = ("layer", "forward", "sent MB", "forward ms", "backward", "sent back MB",
                   "backward ms")
        rows = [(who(e.name, e.layer), e.forwards, megabytes(e.forward_bytes),
                 milliseconds(e.forward_ms), e.backwards, megabytes(e.backward_bytes),
                 milliseconds(e.backward_ms)) for e in self.by_layer.values()]
        return table(f"exchanged with other processes, by {rank}; layers' times hold what lies "
                     "inside them", columns, rows, right=columns[1:])


def megabytes(count: int | None) -> str | None:
    """For a reader, in 10⁶ bytes."""
    return None if count is None else f"{count / 1e6:.4g}"
