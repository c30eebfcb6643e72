"""By which moments steps are timed, and that their beginning is told."""
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gnnaccel.profile.gain.steps import Steps, between, waited  # noqa: E402


def test_marks_that_wait_for_the_device(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(1))
    start, end = waited(), waited()
    assert len(waits) == 2 and between(start, end) == (end - start) / 1e6 >= 0


def test_steps_are_told_when_they_begin_and_end_and_use_the_marks_given():
    told, weight = [], torch.nn.Parameter(torch.ones(1))

    def counted():
        told.append("mark")
        return len(told)

    optimizer = torch.optim.SGD([weight], lr=0.1)
    steps = Steps(lambda: told.append("done"), counted, lambda: told.append("begun"))
    steps.install()
    try:
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.zero_grad()  # not the first of its step
            weight.sum().backward()
            optimizer.step()
    finally:
        steps.uninstall()
    assert told == ["begun", "mark", "mark", "done"] * 2
    assert steps.as_dict()["ms"] == [1e-6, 1e-6]
