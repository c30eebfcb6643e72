"""A pytest plugin for PyG's own tests, which writes the journal of `common`.

``HOSTSUITE_PYG`` holds its options as JSON: ``mode`` ("native" or "enabled"), ``backend``,
``shadow``, ``default_device`` ("cuda" or null), ``emulate``.
"""
from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import time

import numpy
import pytest
import torch

from tests.hostsuites import common

_options = json.loads(os.environ["HOSTSUITE_PYG"])
_journal = common.Journal()
_stack = contextlib.ExitStack()
_shadow = None
_ATOL = 1e-5
_phases: dict[str, dict] = {}


def pytest_configure(config):
    """Enable gnnaccel, where that is asked for, for the whole run."""
    global _shadow
    import torch_geometric  # noqa: F401

    for line in ("rag: needs more than PyG", "dataset: needs the network"):
        config.addinivalue_line("markers", line)
    torch.set_num_threads(1)
    _initialise_l2()
    _compare_in_fp32()
    if _options["mode"] == "enabled":
        _enable()
    if _options["default_device"]:
        torch.set_default_device(_options["default_device"])


def _initialise_l2() -> None:
    """PyG leaves this parameter of RGATConv as the memory was: its `reset_parameters` makes a
    tensor of 1 / out_channels and drops it. With what is found there, numbers near the end of
    fp32's range, two orders of summation differ by all they are."""
    from torch_geometric.nn import RGATConv

    native = RGATConv.reset_parameters

    @functools.wraps(native)
    def reset_parameters(self):
        native(self)
        torch.nn.init.constant_(self.l2, 1 / self.out_channels)

    RGATConv.reset_parameters = reset_parameters


def _compare_in_fp32() -> None:
    """Some tests compare two ways to a result with `torch.allclose` as it is, near zero to 1e-8.
    That asks for the same operations in the same order: the host's own fp32 result is mostly
    farther from its fp64 result."""
    def at_least(native):
        @functools.wraps(native)
        def allclose(input, other, rtol=1e-5, atol=1e-8, equal_nan=False):
            least = 0.0 if input.dtype is torch.float64 else _ATOL
            return native(input, other, rtol=rtol, atol=max(atol, least), equal_nan=equal_nan)

        return allclose

    torch.allclose, torch.Tensor.allclose = at_least(torch.allclose), at_least(
        torch.Tensor.allclose)


def _enable() -> None:
    global _shadow
    import gnnaccel
    from gnnaccel.cuda.runtime import driver

    if _options["emulate"]:
        from tests.emulation.emulator import EmulatedDriver

        _stack.enter_context(driver.using(EmulatedDriver()))
    gnnaccel.enable(when="supported", backend=_options["backend"])
    if _options["shadow"]:
        from tests.hostsuites.pyg_shadow import Shadow

        _shadow = Shadow()
        _shadow.install()


def pytest_collection_modifyitems(items):
    items[:] = common.remaining(items)


def pytest_runtest_setup(item):
    """Every run has the same numbers."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def pytest_collectreport(report):
    if report.failed:
        _journal.write(test=report.nodeid, outcome="error", error=_text(report), seconds=0.0)


def pytest_runtest_logstart(nodeid, location):
    _phases[nodeid] = dict(outcome="passed", error="", seconds=time.perf_counter())
    _journal.write(test=nodeid)


def pytest_runtest_logreport(report):
    found = _phases[report.nodeid]
    if report.outcome == "failed":
        found.update(outcome="failed" if report.when == "call" else "error", error=_text(report))
    elif report.outcome == "skipped" and found["outcome"] == "passed":
        found.update(outcome="skipped", error=str(report.longrepr)[-200:])


def pytest_runtest_logfinish(nodeid, location):
    found = _phases.pop(nodeid)
    found["seconds"] = round(time.perf_counter() - found["seconds"], 2)
    _journal.write(test=nodeid, **found,
                   **({"alarms": alarms} if _shadow and (alarms := _shadow.taken()) else {}))
    if common.device_is_lost():  # all that follows would fail
        os._exit(common.ENDED)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if _options["mode"] == "enabled":
        import gnnaccel

        _journal.write(stats=gnnaccel.stats(), shadow=dict(_shadow.counts) if _shadow else {})
    _stack.close()


def _text(report) -> str:
    return str(report.longrepr)[-1200:]
