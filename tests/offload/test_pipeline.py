"""The order in which bands come, are computed and go on a GPU, with stand-ins for its streams."""
from __future__ import annotations

import contextlib
import types

import pytest
import torch

from gnnaccel.dispatch.offload import pipeline


class Stream:
    """Keeps the work it is given; an event is how much of it that was."""

    def __init__(self, name, log):
        self.name, self.log, self.work, self.device = name, log, [], "the device"

    def record_event(self):
        return Event(self, len(self.work))

    def wait_event(self, event):
        self.work.append(("wait", event))

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        self.record_event().synchronize()


class Event:
    def __init__(self, stream, count):
        self.stream, self.count = stream, count

    def synchronize(self):
        self.stream.log.append(("host waits", self))


@pytest.fixture
def gpu(monkeypatch):
    """Stand-ins for torch's streams; the current one last in ``stack``."""
    log = []
    main, loading, storing = (Stream(name, log) for name in ("main", "loading", "storing"))
    stack = [main]

    @contextlib.contextmanager
    def stream(one):
        stack.append(one)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stack[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(pipeline, "_streams", lambda device: (loading, storing))
    return types.SimpleNamespace(main=main, loading=loading, storing=storing, stack=stack, log=log)


class Held:
    """What was loaded for a band; remembers which streams it was given to."""

    alive: set = set()

    def __init__(self, band):
        self.band, self.streams = band, []
        Held.alive.add(band)

    def __del__(self):
        Held.alive.discard(self.band)

    def record_stream(self, stream):
        self.streams.append(stream.name)


def happened_before(gpu, work, stream, at):
    """All work that is done before a stream's work number ``at``."""
    found, left = set(), [(stream, at)]
    while left:
        stream, at = left.pop()
        for what in stream.work[:at]:
            if what[0] == "wait":
                if ("event", what[1]) not in found:
                    found.add(("event", what[1]))
                    left.append((what[1].stream, what[1].count))
            else:
                found.add(what)
    return work in found


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_order(gpu, count):
    most, stored = [], []

    def load(band):
        gpu.stack[-1].work.append(("load", band))
        held = Held(band)
        most.append(len(Held.alive))
        return held

    def compute(band, held):
        assert held.band == band and held.streams == ["main"]
        gpu.stack[-1].work.append(("compute", band))
        if band == 0:
            assert ("load", 1) not in gpu.loading.work
        return types.SimpleNamespace(band=band, record_stream=lambda stream: None)

    def store(band, result):
        assert result.band == band
        gpu.stack[-1].work.append(("store", band))
        stored.append(band)

    device = types.SimpleNamespace(type="cuda")
    pipeline.run(device, range(count), load, compute, store, lambda held: [held])
    assert stored == list(range(count)) and max(most) <= 2
    for stream, what in ((gpu.main, "compute"), (gpu.storing, "store")):
        for at, (name, band) in enumerate(stream.work):
            if name == what:
                assert happened_before(gpu, ("load", band), stream, at)
                assert what == "compute" or happened_before(gpu, ("compute", band), stream, at)
    assert gpu.log[-1][1].stream is gpu.main
    assert happened_before(gpu, ("store", count - 1), gpu.main, len(gpu.main.work))
    # a third band is asked for once the host has seen the first one computed
    if count > 2:
        order = [event.count for kind, event in gpu.log[:-1]]
        assert len(order) == count - 2 and order == sorted(order)


def test_without_a_gpu_bands_follow_one_another():
    order = []
    pipeline.run(torch.device("cpu"), [0, 1], lambda band: order.append(("load", band)),
                 lambda band, held: order.append(("compute", band)),
                 lambda band, result: order.append(("store", band)), lambda held: [])
    assert order == [(what, band) for band in (0, 1) for what in ("load", "compute", "store")]
