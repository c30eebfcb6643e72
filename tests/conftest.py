"""The devices on which kernel tests run, and memory that shows what a kernel forgets or
oversteps."""
from __future__ import annotations

import datetime
import gc
import os
import shutil
import time

import pytest

# no folder: what was calibrated on this machine is not to change decisions
os.environ["GNNACCEL_CACHE_DIR"] = os.devnull
# calls wait for kernels, so that they take the same way on any machine
os.environ.setdefault("GNNACCEL_FIRST_USE", "wait")

import gnnaccel  # noqa: F401  (before dgl, which pytest-xdist may import to show a warning of its)
from tests import thinning

_START = time.monotonic()


def pytest_addoption(parser):
    parser.addoption(thinning.OPTION, action="store_true",
                     help="a smaller, fixed set: see tests/thinning.py")
    parser.addoption(thinning.MINUTES, type=float,
                     help="skip the tests that have not begun by then: see tests/thinning.py")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    minutes = item.config.getoption(thinning.MINUTES)
    if minutes is not None and time.monotonic() - _START > 60 * minutes:
        pytest.skip(f"{thinning.MINUTES} {minutes:g} are over")


def pytest_collection_modifyitems(config, items):
    if config.getoption(thinning.MINUTES) is not None:
        items[:] = thinning.turned(items, datetime.date.today().toordinal())
    if config.getoption(thinning.OPTION):
        items[:], left_out = thinning.thinned(items)
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Thousands of collected tests live as long as the run: no garbage collection needs to look at
    them, neither while they are made nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The torch device of the kernels: a GPU, or the CPU under the emulation. Seeds torch."""
    import torch
    torch.manual_seed(0)
    if request.param == "cuda":
        from gnnaccel.cuda.runtime import driver
        possible, why = driver.available()
        if not possible:
            pytest.skip(why)
        yield torch.device("cuda", torch.cuda.current_device())
        torch.cuda.synchronize()
        return
    if shutil.which("g++") is None:
        pytest.skip("the CPU emulation of kernels needs g++")
    from gnnaccel.cuda.runtime import driver
    from tests.emulation.emulator import EmulatedDriver
    with driver.using(EmulatedDriver()):
        yield torch.device("cpu")


@pytest.fixture
def chunk_edges(monkeypatch):
    """``chunk_edges(n)``: from here on rows of more than n edges are split."""
    from gnnaccel.cuda.structures import structure
    return lambda size: monkeypatch.setattr(structure, "chunk_edges", lambda edges: size)


@pytest.fixture
def poison(device, monkeypatch):
    """New tensors hold NaN (or -1) instead of leftovers, and on the CPU they lie between guard
    zones."""
    from tests.helpers import Poison
    memory = Poison(device)
    memory.install(monkeypatch)
    yield memory
    monkeypatch.undo()
    memory.check()
