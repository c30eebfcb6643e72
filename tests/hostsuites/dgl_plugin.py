"""A pytest plugin for DGL's own tests: enables gnnaccel, or does not, and writes one JSON line per test as it goes.

Lines are written when a test starts and when it ends, so that a process that dies names its last test. Reads from the
environment: ``HOSTSUITE_MODE`` (native, enabled), ``HOSTSUITE_DEVICE`` (cpu, gpu, simulated), ``HOSTSUITE_RESULTS`` (a file to
append to), ``HOSTSUITE_SHARD`` ("i/n": every n-th test), ``HOSTSUITE_SHADOW`` ("1": compare every call with the host's own).
"""
from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import gnnaccel  # before dgl, which does not import without it on a current torch

SECONDS_PER_TEST = 60
_results = Path(os.environ["HOSTSUITE_RESULTS"])
_enabled = os.environ["HOSTSUITE_MODE"] == "enabled"
_device = os.environ["HOSTSUITE_DEVICE"]


def pytest_configure(config):
    """Import DGL, and enable gnnaccel for the whole run."""
    import dgl  # noqa: F401

    torch.backends.cudnn.allow_tf32 = False  # DGL's LSTM aggregator, which is the host's on both sides
    if _device == "simulated":
        from tests.dgl import simulated

        monkeypatch = pytest.MonkeyPatch()
        simulation = simulated.device(monkeypatch)
        simulation.__enter__()
        config.add_cleanup(monkeypatch.undo)
        config.add_cleanup(lambda: simulation.__exit__(None, None, None))
    if _enabled:
        gnnaccel.enable(when="supported", backend="torch" if _device == "simulated" else "auto")
        if os.environ.get("HOSTSUITE_SHADOW") == "1":
            from tests.hostsuites import shadow_dgl

            shadow_dgl.install()


def pytest_collection_modifyitems(items):
    """This process's share, without what an earlier one has finished."""
    share, of = map(int, os.environ.get("HOSTSUITE_SHARD", "0/1").split("/"))
    done = {line["test"] for line in _lines()}
    items[:] = [item for number, item in enumerate(items) if number % of == share and item.nodeid not in done]


def _lines() -> list[dict]:
    return [json.loads(line) for line in _results.read_text().splitlines()] if _results.exists() else []


def _write(**line) -> None:
    with _results.open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """A line before the test, and an alarm for tests that hang."""
    _write(test=item.nodeid, outcome="started")
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS_PER_TEST)
    item.began = time.perf_counter()
    yield
    signal.alarm(0)
    if torch.distributed.is_initialized():  # a test that fails leaves it to those behind it
        torch.distributed.destroy_process_group()


def _late(number, frame):
    raise TimeoutError(f"longer than {SECONDS_PER_TEST} s")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A line for whatever ends a test: its call, or a setup or teardown that did not pass."""
    report = (yield).get_result()
    if report.when != "call" and report.outcome == "passed":
        return
    line = {"test": item.nodeid, "outcome": report.outcome, "seconds": round(time.perf_counter() - item.began, 2)}
    if report.outcome == "failed":
        line.update(_cause(call.excinfo))
    if _device == "simulated":
        from tests.dgl import simulated

        if simulated.asserts:
            line["asserts"] = simulated.asserts[:]
            simulated.asserts.clear()
    if os.environ.get("HOSTSUITE_SHADOW") == "1" and _enabled:
        from tests.hostsuites import shadow_dgl

        line["compared"], line["shadow"] = shadow_dgl.taken()
    _write(**line)
    if report.outcome == "failed" and _device == "gpu" and _is_lost():
        _write(test=item.nodeid, outcome="device lost", **_cause(call.excinfo))
        os._exit(70)  # nothing runs on this device any more; the suite goes on in another process


def _cause(info) -> dict:
    """The first line of the error, and the places it came through, outermost first."""
    text = f"{info.typename}: {info.value}".strip().splitlines()
    places = [f"{entry.path.name if hasattr(entry.path, 'name') else entry.path}:{entry.lineno + 1}" for entry in info.traceback]
    return {"error": text[0][:300], "more": " | ".join(text[1:4])[:300], "at": places[-6:]}


def _is_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False

