"""gnnaccel.cuda.driver and sources, with a stand-in for CuPy."""
from __future__ import annotations

import sys
import threading
import types

import pytest
import torch

from gnnaccel.cuda import driver, sources
from tests.emulation.emulator import EmulatedDriver


class FakeCuda:
    """The parts of CuPy and torch that CupyDriver touches, recording what it does with them."""

    def __init__(self, monkeypatch):
        self.device, self.cupy_device, self.pointer = 0, 0, 0
        self.compiled, self.launches, self.streams, self.shared_limits = [], [], [], []
        self.failure = None
        cupy = types.ModuleType("cupy")
        cupy.RawModule = self._module
        cupy.cuda = types.SimpleNamespace(
            runtime=types.SimpleNamespace(getDevice=lambda: self.cupy_device, getDeviceCount=lambda: 2),
            Device=lambda i: types.SimpleNamespace(use=lambda: setattr(self, "cupy_device", i)),
            ExternalStream=self._stream, compiler=types.SimpleNamespace(CompileException=KeyError))
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.pointer, raising=False)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(sources, "source", lambda family: f"text of {family}")

    def _stream(self, pointer):
        self.streams.append(pointer)
        return types.SimpleNamespace(ptr=pointer)

    def _module(self, code, options):
        if self.failure:
            raise self.failure
        assert isinstance(options, tuple)  # CuPy refuses a list
        device = self.cupy_device
        self.compiled.append((device, code, options))

        def get_function(entry):
            def call(grid, block, args, shared_mem=0, stream=None):
                assert isinstance(grid, tuple) and isinstance(block, tuple) and self.cupy_device == device
                self.launches.append((device, entry, grid, block, args, shared_mem, stream.ptr))
            return Raw(self, call)
        return types.SimpleNamespace(get_function=get_function)


class Raw:
    def __init__(self, fake, call):
        self.fake, self.kernel = fake, call

    def __setattr__(self, name, value):
        if name == "max_dynamic_shared_size_bytes":
            self.fake.shared_limits.append((self.fake.cupy_device, value))
        super().__setattr__(name, value)


@pytest.fixture
def fake(monkeypatch):
    return FakeCuda(monkeypatch)


def test_launch_passes_everything_on(fake):
    fake.pointer = 77
    kernel = driver.CupyDriver().kernel("some", "k", (("A", "1"), ("B", "x")))
    kernel((3, 2), 128, 64, (1, 2))
    assert fake.compiled == [(0, "text of some", ("--std=c++17", "-DA=1", "-DB=x"))]
    assert fake.launches == [(0, "k", (3, 2), (128,), (1, 2), 64, 77)]


def test_kernels_and_streams_are_made_once(fake):
    cupy = driver.CupyDriver()
    kernel = cupy.kernel("some", "k", ())
    assert cupy.kernel("some", "k", ()) is kernel
    assert cupy.kernel("some", "k", (("A", "1"),)) is not kernel
    for pointer in (5, 0, 5, 0):
        fake.pointer = pointer
        kernel((1, 1), 32, 0, ())
    assert [launch[-1] for launch in fake.launches] == [5, 0, 5, 0]
    assert fake.streams == [5, 0] and len(fake.compiled) == 2


@pytest.mark.parametrize("grid", [(0, 1), (1, 0)])
def test_empty_grid_is_skipped(fake, grid):
    driver.CupyDriver().kernel("some", "k", ())(grid, 32, 0, ())
    assert fake.launches == []


def test_large_shared_memory_is_asked_for_once_per_device(fake):
    kernel = driver.CupyDriver().kernel("some", "k", ())
    for device, shared in ((0, 49152), (0, 60000), (0, 60000), (0, 50000), (1, 60000), (0, 70000), (1, 60000)):
        fake.device = device
        kernel((1, 1), 32, shared, ())
    assert fake.shared_limits == [(0, 60000), (1, 60000), (0, 70000)]
    assert [launch[5] for launch in fake.launches] == [49152, 60000, 60000, 50000, 60000, 70000, 60000]


def test_each_device_has_its_own_kernel(fake):
    kernel = driver.CupyDriver().kernel("some", "k", ())
    for device in (1, 0, 1):
        fake.device = device
        kernel((1, 1), 32, 0, ())
    assert [launch[0] for launch in fake.launches] == [1, 0, 1]
    assert [compiled[0] for compiled in fake.compiled] == [0, 1]


def test_compile_errors_and_times(fake):
    before = driver.compile_seconds()
    cupy = driver.CupyDriver()
    fake.failure = KeyError("the compiler's log")
    with pytest.raises(driver.CompileError, match=r"some\.cu.*\('A', '1'\)(?s:.*)the compiler's log"):
        cupy.kernel("some", "k", (("A", "1"),))
    fake.failure = None
    cupy.kernel("some", "k", (("A", "1"),))  # a failure is not remembered
    after = driver.compile_seconds()
    assert after[1] - before[1] == 2 and after[0] > before[0]


def test_threads_compile_a_kernel_once(fake):
    cupy, got = driver.CupyDriver(), []
    threads = [threading.Thread(target=lambda: got.append(cupy.kernel("some", "k", ()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.compiled) == 1 and len(got) == 8 and len(set(map(id, got))) == 1


# ---- choosing the driver ----

def test_using_nests_and_ends_with_an_exception():
    outer, inner = EmulatedDriver(), EmulatedDriver()
    with driver.using(outer) as given:
        assert given is outer and driver.current() is outer
        with pytest.raises(ZeroDivisionError), driver.using(inner):
            assert driver.current() is inner
            1 / 0
        assert driver.current() is outer


def test_using_reaches_other_threads():
    seen = []
    with driver.using(EmulatedDriver()) as mine:
        thread = threading.Thread(target=lambda: seen.append(driver.current()))
        thread.start()
        thread.join()
    assert seen == [mine]


def test_without_using_one_cupy_driver_is_made(fake, monkeypatch):
    monkeypatch.setattr(driver, "_process_driver", None)
    first = driver.current()
    assert isinstance(first, driver.CupyDriver) and driver.current() is first


# ---- available ----

@pytest.fixture
def ask():
    driver.available.cache_clear()
    yield driver.available
    driver.available.cache_clear()


def test_no_device_is_said_without_importing_cupy(ask, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    ok, text = ask()
    assert not ok and "CUDA device" in text and "cupy" not in sys.modules


def with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_available_with_cupy(ask, fake, monkeypatch):
    with_cuda(monkeypatch)
    assert ask() == (True, "")


def test_missing_cupy_is_named(ask, monkeypatch):
    with_cuda(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", None)  # makes the import fail
    ok, text = ask()
    assert not ok and "CuPy cannot be imported" in text


def test_a_failing_cupy_is_a_reason_not_an_error(ask, fake, monkeypatch):
    with_cuda(monkeypatch)

    def fail():
        raise RuntimeError("driver too old")
    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDeviceCount", fail)
    ok, text = ask()
    assert not ok and "driver too old" in text


# ---- sources ----

@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An own ``cuda/src``."""
    (tmp_path / "src").mkdir()
    monkeypatch.setattr(sources.importlib.resources, "files", lambda package: tmp_path)
    caches = (sources.source, sources._names, sources._read)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path / "src"
    for cached in caches:
        cached.cache_clear()


def test_headers_are_inlined_once_and_lines_kept(folder):
    (folder / "a.cuh").write_text('#include "b.cuh"\nA\n')
    (folder / "b.cuh").write_text('#include "a.cuh"\nB\n')  # a cycle ends
    (folder / "k.cu").write_text('// first\n#include "a.cuh"\n  #include "b.cuh"  // again\n#include <x.h>\nK\n')
    text = sources.source("k")
    code = [line for line in text.splitlines() if line and not line.startswith(("//", "#line", "  //"))]
    assert code == ["B", "A", "#include <x.h>", "K"]
    assert text.count('#line 1 "a.cuh"') == 1 and '#line 3 "k.cu"' in text and '#line 2 "a.cuh"' in text
    assert sources.families() == ["k"] and sources.source("k") is text


def test_missing_files_name_the_family(folder):
    (folder / "k.cu").write_text('#include "gone.cuh"\n')
    with pytest.raises(FileNotFoundError, match="'k'.*k.cu.*'gone.cuh'"):
        sources.source("k")
    with pytest.raises(FileNotFoundError, match="'absent'.*there are: k"):
        sources.source("absent")
    (folder.parent / "outside.cu").write_text("")
    with pytest.raises(FileNotFoundError):
        sources.source("../outside")


def test_digest_depends_on_text_and_definitions():
    sets = [("t", ()), ("u", ()), ("t", (("A", "1"),)), ("t", (("A", "11"),)), ("t", (("A1", "1"),)),
            ("t", (("A", "1"), ("B", "2"))), ("t", (("A", "1B=2"),))]
    assert len({sources.digest(*pair) for pair in sets}) == len(sets)
    assert sources.digest("t", (("A", "1"),)) == sources.digest("t", (("A", "1"),))
