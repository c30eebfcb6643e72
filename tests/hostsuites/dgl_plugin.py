"""A pytest plugin for DGL's own tests. ``HOSTSUITE_DGL`` holds its options as JSON: ``mode``
("native" or "enabled"), ``device`` ("cpu", "gpu", "simulated", "emulated"), ``shadow``. The journal
is that of `common`.
"""
from __future__ import annotations

import json
import os
import random
import time

import numpy
import pytest
import torch

import gnnaccel  # before dgl, which does not import without it on a current torch
from tests.hostsuites import common

_options = json.loads(os.environ["HOSTSUITE_DGL"])
_shadowed = _options["mode"] == "enabled" and _options["shadow"]
_journal = common.Journal()
_running: dict[str, dict] = {}
_BACKENDS = {"simulated": "torch", "emulated": "cuda"}  # by device


def pytest_configure(config):
    """Import DGL, and enable gnnaccel for the whole run."""
    import dgl  # noqa: F401

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # SAGEConv's LSTM is cuDNN's on the GPU
    if _options["device"] == "simulated":
        _simulate(config)
    if _options["mode"] == "enabled":
        if _options["device"] == "emulated":
            _emulate(config)
        gnnaccel.enable(when="supported", backend=_BACKENDS.get(_options["device"], "auto"))
    if _shadowed:
        from tests.hostsuites import dgl_shadow

        dgl_shadow.install()


def _emulate(config) -> None:
    from gnnaccel.cuda.runtime import driver
    from tests.emulation.emulator import EmulatedDriver

    emulation = driver.using(EmulatedDriver())
    emulation.__enter__()
    config.add_cleanup(lambda: emulation.__exit__(None, None, None))


def _simulate(config) -> None:
    from tests.dgl import simulated

    monkeypatch = pytest.MonkeyPatch()
    simulation = simulated.device(monkeypatch)
    simulation.__enter__()
    config.add_cleanup(monkeypatch.undo)
    config.add_cleanup(lambda: simulation.__exit__(None, None, None))


def pytest_collection_modifyitems(items):
    items[:] = common.remaining(items)


def pytest_runtest_setup(item):
    """Every run has the same numbers."""
    import dgl

    for seed in (torch.manual_seed, random.seed, numpy.random.seed, dgl.seed):
        seed(0)


def pytest_collectreport(report):
    if report.failed:
        _journal.write(test=report.nodeid, outcome="error", error=str(report.longrepr)[-600:],
                       seconds=0.0)


def pytest_runtest_logstart(nodeid, location):
    _running[nodeid] = dict(outcome="passed", seconds=time.perf_counter())
    _journal.write(test=nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """The first line of an error, and the places it came through, outermost first."""
    report = (yield).get_result()
    found = _running[item.nodeid]
    if report.outcome == "skipped" and found["outcome"] == "passed":
        found["outcome"] = "skipped"
    elif report.outcome == "failed" and found["outcome"] != "failed":
        lines = f"{call.excinfo.typename}: {call.excinfo.value}".strip().splitlines()
        places = [f"{os.path.basename(str(entry.path))}:{entry.lineno + 1}"
                  for entry in call.excinfo.traceback]
        found.update(outcome="failed" if call.when == "call" else "error", error=lines[0][:300],
                     more=" | ".join(lines[1:4])[:300], at=places[-6:])


def pytest_runtest_logfinish(nodeid, location):
    found = _running.pop(nodeid)
    found["seconds"] = round(time.perf_counter() - found["seconds"], 2)
    if _shadowed:
        from tests.hostsuites import dgl_shadow

        found["compared"], found["alarms"] = dgl_shadow.taken()
    found["asserts"] = _asserts()
    if torch.distributed.is_initialized():  # a test that fails leaves it to those behind it
        torch.distributed.destroy_process_group()
    _journal.write(test=nodeid, **{name: value for name, value in found.items() if value != []})
    if common.device_is_lost():  # all that follows would fail
        os._exit(common.ENDED)


def _asserts() -> list[str]:
    """Ids out of range that a GPU would not survive, as the simulated device met them."""
    if _options["device"] != "simulated":
        return []
    from tests.dgl import simulated

    found = simulated.asserts[:]
    simulated.asserts.clear()
    return found
