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


def seen(gpu, work):
    """Whether the host knows that work is done."""
    return any(happened_before(gpu, work, event.stream, event.count) for _, event in gpu.log)


class Run:
    """Bands on the stand-ins, each step of which is checked when it is asked for. ``most``: how
    many bands' rows there were at once."""

    def __init__(self, gpu, count, fails=None):
        self.gpu, self.most, self.stored, self._fails = gpu, 0, [], fails
        pipeline.run(types.SimpleNamespace(type="cuda"), range(count), self.load, self.compute,
                     self.store, lambda held: [held])

    def asked(self, what, band):
        self.gpu.stack[-1].work.append((what, band))
        if self._fails == (what, band):
            raise ValueError(band)

    def load(self, band):
        assert band < 2 or seen(self.gpu, ("compute", band - 2))  # whose rows' memory is free
        self.asked("load", band)
        held = Held(band)
        self.most = max(self.most, len(Held.alive))
        return held

    def compute(self, band, held):
        assert held.band == band and held.streams == ["main"]
        assert band < 2 or seen(self.gpu, ("store", band - 2))  # whose results' memory is free
        assert not band or not seen(self.gpu, ("compute", band - 1))  # so the GPU has work meanwhile
        self.asked("compute", band)
        if band == 0:
            assert ("load", 1) not in self.gpu.loading.work
        return types.SimpleNamespace(band=band, record_stream=lambda stream: None)

    def store(self, band, result):
        assert result.band == band
        self.asked("store", band)
        self.stored.append(band)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_order(gpu, count):
    ran = Run(gpu, count)
    assert ran.stored == list(range(count)) and ran.most <= 2 and not Held.alive
    for stream, what in ((gpu.main, "compute"), (gpu.storing, "store")):
        for at, (name, band) in enumerate(stream.work):
            if name == what:
                assert happened_before(gpu, ("load", band), stream, at)
                assert what == "compute" or happened_before(gpu, ("compute", band), stream, at)
    if count > 1:  # what the first band has fetched for all is there
        at = gpu.loading.work.index(("load", 1))
        assert happened_before(gpu, ("compute", 0), gpu.loading, at)
    assert all(seen(gpu, ("store", band)) for band in range(count))


@pytest.mark.parametrize("fails", [(what, band) for what in ("load", "compute", "store")
                                   for band in (0, 1, 4)])
def test_nothing_is_under_way_after_an_error(gpu, fails):
    with pytest.raises(ValueError):
        Run(gpu, 6, fails)
    assert all(seen(gpu, work) for stream in (gpu.loading, gpu.main, gpu.storing)
               for work in stream.work if work[0] != "wait")


def test_what_outlasts_a_call_has_the_memory_that_rows_come_into(gpu):
    gpu.loading.work.append(("load", 0))
    gpu.stack.append(gpu.storing)
    with pipeline.lasting(types.SimpleNamespace(type="cuda")):
        assert gpu.stack[-1] is gpu.loading
    assert happened_before(gpu, ("load", 0), gpu.storing, len(gpu.storing.work))
    with pipeline.lasting(torch.device("cpu")):
        assert gpu.stack[-1] is gpu.storing


def test_without_a_gpu_bands_follow_one_another():
    order = []
    pipeline.run(torch.device("cpu"), [0, 1], lambda band: order.append(("load", band)),
                 lambda band, held: order.append(("compute", band)),
                 lambda band, result: order.append(("store", band)), lambda held: [])
    assert order == [(what, band) for band in (0, 1) for what in ("load", "compute", "store")]
