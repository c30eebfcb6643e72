"""Captures beside other threads and on several streams."""
from __future__ import annotations

import contextvars
import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gnnaccel
from gnnaccel.adapters.captured import streams, threads
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import Net, given, on, refused, replays, same, step  # noqa: F401


def submitted(pool, model, args):
    """A step in another thread, with the options of this one."""
    return pool.submit(contextvars.copy_context().run, step, model, *args)


def test_threads_that_train_at_once(on):
    """While one captures, torch would let the other draw no random numbers on a GPU."""
    models = [Net(0.5), Net(0.5)]
    args = given()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for _ in range(8):
            for job in [submitted(pool, model, args)
                        for pool, model in zip((one, other), models)]:
                assert all(t.isfinite().all() for t in job.result())
    # on a GPU the wait of one thread may be seen while the other is watched
    assert not replays() and "other threads call modules, too" in refused()


def test_threads_that_have_ended(on):
    args = given()
    with ThreadPoolExecutor(1) as pool:
        submitted(pool, Net(), args).result()
    model = Net()
    for _ in range(8):
        step(model, *args)
    assert replays() == 4 and threads.alone()


def test_a_replay_waits_for_one_on_another_stream(on, monkeypatch):
    """Both use the memory of the capture, and cuBLAS's workspace for it."""
    current, told = [0], []
    monkeypatch.setattr(streams, "stream_of", lambda device: current[0])
    monkeypatch.setattr(streams, "_wait", lambda device, event: told.append((current[0], event)))
    monkeypatch.setattr(streams, "_event", lambda device: f"after {current[0]}")
    monkeypatch.setattr(streams, "_last", {})
    model, args = Net(), given()
    for _ in range(6):
        step(model, *args)
    assert replays() and not told
    for number in (1, 1, 2, 0):
        current[0] = number
        step(model, *args)
    assert told == [(1, None), (2, "after 1"), (0, "after 2")]


@pytest.mark.gpu
def test_two_streams_at_once():
    model, (x, edge_index) = Net().to("cuda"), [t.to("cuda") for t in given()]
    twin, inputs = copy.deepcopy(model), [x, x * 2]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    model.eval()
    twin.eval()
    with torch.no_grad():
        expected = [[twin(one, edge_index)] for one in inputs]
        torch.cuda.synchronize()
        with gnnaccel.enabled(capture=True, when="supported"):
            for _ in range(30):
                found = []
                for stream, one in zip(streams, inputs):
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(10**5)
                        found.append(model(one, edge_index))
                torch.cuda.synchronize()
                assert all(same([a], b) for a, b in zip(found, expected))
    assert replays() > 20
