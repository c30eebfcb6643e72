"""Fixtures of the hosts' tests: a clean session around each test, and the routes that are held
against the host's own layers.

A conftest takes them by importing them.
"""
from __future__ import annotations

import contextlib
import random
import shutil
from dataclasses import dataclass

import pytest
import torch

import gnnaccel
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.observe import counters, records
from gnnaccel.dispatch.plan import planner
from gnnaccel.dispatch.policy import config, rules
from gnnaccel.dispatch.quantized import settings as quantized_settings
from tests import probes
from tests.undone import forget_names


@dataclass(frozen=True)
class Route:
    """Where a layer is to run: ``backend`` as `gnnaccel.enable` takes it."""

    name: str
    backend: str
    device: torch.device

    def on(self, **options):
        """A block in which every call takes this route or raises."""
        return gnnaccel.enabled(**{"backend": self.backend, "when": "supported",
                                   "on_fallback": "raise", **options})

    def put(self, *values):
        """Tensors, graphs and modules, on the route's device."""
        return [value.to(self.device) for value in values]


@contextlib.contextmanager
def opened(name: str):
    """The route called "torch", "emulated" or "cuda", open; skips the test where it cannot be."""
    if name == "cuda":
        possible, why = driver.available()
        if not possible:
            pytest.skip(why)
        yield Route(name, "cuda", torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()
    elif name == "torch":
        yield Route(name, "torch", torch.device("cpu"))
    else:
        if shutil.which("g++") is None:
            pytest.skip("the CPU emulation of kernels needs g++")
        from tests.emulation.emulator import EmulatedDriver
        with driver.using(EmulatedDriver()):
            planner.forget()
            yield Route(name, "cuda", torch.device("cpu"))
        planner.forget()


@pytest.fixture(params=["torch", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def route(request):
    """The torch backend, the CUDA kernels emulated, the CUDA kernels on a GPU."""
    with opened(request.param) as found:
        yield found


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels(request):
    """The CUDA kernels, emulated or on a GPU."""
    with opened(request.param) as found:
        yield found


@pytest.fixture
def gpu():
    """The GPU route alone; for tests marked ``gpu``."""
    with opened("cuda") as found:
        yield found


@pytest.fixture
def by_torch():
    """The torch backend alone, for what is the same on every route."""
    with opened("torch") as found:
        yield found


@pytest.fixture
def emulated():
    """The emulated route alone."""
    with opened("emulated") as found:
        yield found


@pytest.fixture
def stated(monkeypatch):
    """The classes of the layers whose calls went the long way."""
    return probes.decided(monkeypatch)


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """The graphs are tiny, and threads that wait for each other cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _reset() -> None:
    gnnaccel.disable()
    rules.reset_rules()
    forget_names()
    counters.reset_stats()
    gnnaccel.clear_records()
    cache.clear()
    planner.forget()
    quantized_settings.forget()


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Nothing enabled, no rules, counts or cached graphs, fixed seeds; a test that leaves a block
    or a sink fails."""
    for name in ("GNNACCEL", "GNNACCEL_BACKEND", "GNNACCEL_WHEN", "GNNACCEL_ON_FALLBACK",
                 "GNNACCEL_INCLUDE", "GNNACCEL_EXCLUDE", "GNNACCEL_RECORDS", "GNNACCEL_LOG",
                 "GNNACCEL_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    _reset()
    torch.manual_seed(0)
    random.seed(0)
    yield
    _reset()
    assert config.current() is None and not config._cells and not records.listening() and not driver.placed()
