"""Replays on several streams: each waits for the one before it, where that ran on another stream.

Replays may not run at once. A capture has one memory for all of its replays, and torch captures all
graphs on one stream, for which cuBLAS has a single workspace.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gnnaccel.cuda.runtime.capture import stream as stream_of

#: device -> the stream of the last replay, and an event behind it; of the default stream, which is
#: always there, none is needed
_last: dict[torch.device, tuple[int, Any]] = {}


@contextlib.contextmanager
def in_turn(device: torch.device) -> Iterator[None]:
    """A block that replays on torch's current stream."""
    here = stream_of(device)
    last, event = _last.get(device, (here, None))
    if last != here:
        _wait(device, event)
    try:
        yield
    finally:
        _last[device] = here, None if here == 0 else _event(device)


def _wait(device: torch.device, event: Any) -> None:
    current = torch.cuda.current_stream(device)
    if event is None:
        current.wait_stream(torch.cuda.default_stream(device))
    else:
        current.wait_event(event)


def _event(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).record_event()
