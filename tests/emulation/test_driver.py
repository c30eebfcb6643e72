"""gnnaccel.cuda.runtime.driver, cupy_driver and sources, with a stand-in for CuPy."""
from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from gnnaccel.cuda.runtime import capture, driver, ready, sources
from gnnaccel.cuda.runtime.cupy_driver import CupyDriver
from gnnaccel.cuda.runtime.driver import CompileError
from gnnaccel.cuda.runtime.launch import Kernels
from tests.emulation.emulator import EmulatedDriver


class FakeCuda:
    """The parts of CuPy and torch that CupyDriver touches, recording what it does with them.

    ``direct``: CuPy has its wrapper of the driver API. ``parameters`` are the ctypes of the
    kernel's parameters, by which such a launch is read; ``contexts`` the device whose context is
    current, by thread; ``memory`` the devices that hold memory, by address; ``gpus`` how many torch
    counts; ``cuda`` the driver's version; ``loaded`` what was loaded from files.
    """
    gpus, cuda = 1, 13000

    def __init__(self, monkeypatch, direct):
        self.direct, self.device, self.pointer = direct, 0, 0
        self.compiled, self.launches, self.streams, self.shared_limits = [], [], [], []
        self.loaded: list[tuple[int, str]] = []
        self.failure, self.parameters, self.contexts, self.entries = None, (), {
            threading.get_ident(): 0}, {}
        self.while_launching, self.while_loading, self.memory = lambda: None, lambda: None, {}
        cupy = types.ModuleType("cupy")
        cupy.RawModule = self._module
        cupy.cuda = types.SimpleNamespace(
            runtime=types.SimpleNamespace(getDevice=lambda: self.cupy_device,
                                          getDeviceCount=lambda: 2,
                                          driverGetVersion=lambda: self.cuda,
                                          memGetInfo=lambda: self.use(self.cupy_device),
                                          pointerGetAttributes=self._pointer_attributes),
            Device=lambda i: types.SimpleNamespace(use=lambda: self.use(i)),
            ExternalStream=self._stream, compiler=types.SimpleNamespace(CompileException=KeyError))
        if direct:
            cupy.cuda.driver = types.SimpleNamespace(launchKernel=self._launch_kernel,
                                                     ctxGetCurrent=self._context)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.pointer,
                            raising=False)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.gpus)
        monkeypatch.setattr(torch.cuda, "device", self._current_device)
        monkeypatch.setattr(sources, "source", lambda family: f"text of {family}")
        # a checkout may hold files that `make wheel` has left
        monkeypatch.setattr(ready, "FOLDER", Path("no such folder"))

    @property
    def cupy_device(self):
        return self.contexts.get(threading.get_ident(), 0)

    def use(self, device):
        self.contexts[threading.get_ident()] = device

    @contextlib.contextmanager
    def _current_device(self, device):
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    def _pointer_attributes(self, address):
        """What CUDA says of an address: 2 is a GPU's memory, 0 is none that it knows."""
        device = self.memory.get(address)
        return types.SimpleNamespace(type=0 if device is None else 2,
                                     device=-1 if device is None else device)

    def _context(self):
        device = self.contexts.get(threading.get_ident())
        return 0 if device is None else 1000 + device

    def _stream(self, pointer):
        self.streams.append(pointer)
        return types.SimpleNamespace(ptr=pointer)

    def _module(self, code=None, options=(), path=None):
        if self.failure:
            raise self.failure
        assert isinstance(options, tuple)  # CuPy refuses a list
        assert (code is None) != (path is None)
        device = self.cupy_device
        self.use(device)  # as loading a module does
        self.while_loading()
        if path is None:
            self.compiled.append((device, code, options))
        else:
            self.loaded.append((device, path))

        def get_function(entry):
            def call(grid, block, args, shared_mem=0, stream=None):
                assert isinstance(grid,
                                  tuple) and isinstance(block, tuple) and self.cupy_device == device
                assert not self.direct
                # CuPy passes as many bytes as the value's type has
                for value, kind in zip(args, self.parameters):
                    assert type(value) is int or value.itemsize == ctypes.sizeof(kind)
                self._record(device, entry, grid, *block, args, shared_mem, stream.ptr)
            call.ptr = 7 + len(self.entries)
            self.entries[call.ptr] = device, entry
            return Raw(self, call)
        return types.SimpleNamespace(get_function=get_function)

    def _launch_kernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        device, entry = self.entries[function]
        assert self._context() == 1000 + device and (gz, by, bz, extra) == (1, 1, 1, 0)
        addresses = (ctypes.c_void_p * len(self.parameters)).from_address(parameters)
        assert all(address % ctypes.sizeof(kind) == 0
                   for kind, address in zip(self.parameters, addresses))
        self.while_launching()
        args = tuple(kind.from_address(address).value
                     for kind, address in zip(self.parameters, addresses))
        self._record(device, entry, (gx, gy), bx, args, shared, stream)

    def _record(self, device, entry, grid, threads, args, shared, stream):
        self.launches.append((device, entry, grid, threads, args, shared, stream))


class Raw:
    def __init__(self, fake, call):
        self.fake, self.kernel = fake, call

    def __setattr__(self, name, value):
        if name == "max_dynamic_shared_size_bytes":
            self.fake.shared_limits.append((self.fake.cupy_device, value))
        super().__setattr__(name, value)


@pytest.fixture(params=["direct", "plain"])
def fake(request, monkeypatch):
    return FakeCuda(monkeypatch, request.param == "direct")


@pytest.fixture
def direct(monkeypatch):
    return FakeCuda(monkeypatch, True)


POINTER = ctypes.c_uint64
MIXED = (POINTER, ctypes.c_int32, POINTER, ctypes.c_float, ctypes.c_uint64, ctypes.c_int32,
         ctypes.c_int64)
FIRST = (2**47, np.int32(-3), 0, np.float32(0.5), np.uint64(2**64 - 1), np.int32(7),
         np.int64(-2**40))


def test_launch_passes_everything_on(fake):
    fake.pointer, fake.parameters = 77, MIXED
    kernel = CupyDriver().kernel("some", "k", (("A", "1"), ("B", "x")))
    kernel((3, 2), 128, 64, FIRST)
    assert fake.compiled == [(0, '#define A 1\n#define B x\n#line 1 "some.cu"\ntext of some',
                              ("--std=c++17",))]
    assert fake.launches == [(0, "k", (3, 2), 128, FIRST, 64, 77)]


def test_products_that_are_not_to_be_fused(fake):
    CupyDriver().kernel("some", "k", (("FMAD", "0"),))
    assert fake.compiled[0][2] == ("--std=c++17", "--fmad=false")


def test_kernels_and_streams_are_made_once(fake):
    cupy = CupyDriver()
    kernel = cupy.kernel("some", "k", ())
    assert cupy.kernel("some", "k", ()) is kernel
    assert cupy.kernel("some", "k", (("A", "1"),)) is not kernel
    for pointer in (5, 0, 5, 0):
        fake.pointer = pointer
        kernel((1, 1), 32, 0, ())
    assert [launch[-1] for launch in fake.launches] == [5, 0, 5, 0]
    assert fake.streams == ([] if fake.direct else [5, 0]) and len(fake.compiled) == 2


# ---- arguments ----

def test_later_launches_may_give_plain_scalars(fake):
    fake.parameters = MIXED
    kernel = CupyDriver().kernel("some", "k", ())
    later = (1, 2, 3, 0.25, 4, -5, 6)
    for args in (FIRST, later, FIRST, (1, np.int64(2), 3, 1, np.int32(4), -5, np.int32(6))):
        kernel((1, 1), 32, 0, args)
    assert [launch[4] for launch in fake.launches] == [FIRST, later, FIRST,
                                                       (1, 2, 3, 1.0, 4, -5, 6)]


@pytest.mark.parametrize("value",
                         [0.5, True, None, "1", torch.ones(1), np.ones(1, np.float32),
                          np.complex64(1)], ids=repr)
def test_first_launch_refuses_what_has_no_exact_type(fake, value):
    kernel = CupyDriver().kernel("some", "k", ())
    with pytest.raises(TypeError, match="first launch takes pointers as int"):
        kernel((1, 1), 32, 0, (1, value))
    fake.parameters = POINTER, ctypes.c_int32
    kernel((1, 1), 32, 0, (1, np.int32(2)))  # the refused ones fixed nothing
    assert [launch[4] for launch in fake.launches] == [(1, 2)]


@pytest.mark.parametrize("args",
                         [(1,), (1, 2, 3), (1, 2.5), (1, np.float32(2)), (1, 2**31), (None, 2),
                          (0.5, 2)], ids=repr)
def test_arguments_that_do_not_fit_are_refused(direct, args):
    direct.parameters = POINTER, ctypes.c_int32
    kernel = CupyDriver().kernel("some", "k", ())
    kernel((1, 1), 32, 0, (1, np.int32(2)))
    with pytest.raises(TypeError, match="k: the arguments .* do not fit 'Pi'"):
        kernel((1, 1), 32, 0, args)
    kernel((1, 1), 32, 0, (3, 4))
    assert [launch[4] for launch in direct.launches] == [(1, 2), (3, 4)]


def test_too_few_arguments_are_refused_without_the_driver_api(monkeypatch):
    fake = FakeCuda(monkeypatch, False)
    kernel = CupyDriver().kernel("some", "k", ())
    kernel((1, 1), 32, 0, (1, 2))
    with pytest.raises(TypeError, match="k takes 2 arguments, got 1"):
        kernel((1, 1), 32, 0, (1,))
    assert len(fake.launches) == 1


def test_a_launch_within_a_launch_has_its_own_parameters(direct):
    """As when another thread launches while CUDA has the first one's parameters."""
    direct.parameters = POINTER, ctypes.c_int32
    kernel = CupyDriver().kernel("some", "k", ())

    def inner():
        direct.while_launching = lambda: None
        kernel((1, 1), 32, 0, (3, np.int32(4)))
    for _ in range(2):
        direct.while_launching = inner
        kernel((1, 1), 32, 0, (1, np.int32(2)))
    assert [launch[4] for launch in direct.launches] == [(3, 4), (1, 2)] * 2


def test_a_failed_launch_is_followed_by_a_good_one(direct):
    direct.parameters = (POINTER,)
    kernel = CupyDriver().kernel("some", "k", ())
    direct.while_launching = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        kernel((1, 1), 32, 0, (1,))
    direct.while_launching = lambda: None
    kernel((1, 1), 32, 0, (2,))
    assert [launch[4] for launch in direct.launches] == [(2,)]


# ---- memory that CUDA lacks ----

class NoMemory(RuntimeError):
    """As CuPy raises it."""
    status = 2


def failing(times, error=NoMemory):
    """A function that raises so many times."""
    left = [error()] * times
    return lambda: left and (_ for _ in ()).throw(left.pop())


@pytest.fixture
def emptied(monkeypatch):
    """Appended to whenever torch's allocator is asked to give memory back."""
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    return calls


def test_a_kernel_is_loaded_once_torch_has_given_memory_back(fake, emptied):
    fake.while_loading = failing(1)
    CupyDriver().kernel("some", "k", ())((1, 1), 32, 0, ())
    assert len(fake.launches) == len(emptied) == 1


def test_a_kernel_for_which_there_is_no_memory_at_all(fake, emptied):
    fake.while_loading = failing(2)
    with pytest.raises(CompileError, match=r"some.cu was not loaded: CUDA out of memory"):
        CupyDriver().kernel("some", "k", ())
    assert len(emptied) == 1


def test_a_kernel_is_launched_once_torch_has_given_memory_back(direct, emptied):
    direct.parameters = (POINTER,)
    kernel = CupyDriver().kernel("some", "k", ())
    direct.while_launching = failing(1)
    kernel((1, 1), 32, 0, (5,))
    assert [launch[4] for launch in direct.launches] == [(5,)] and len(emptied) == 1
    direct.while_launching = failing(2)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        kernel((1, 1), 32, 0, (6,))
    direct.while_launching = failing(1, RuntimeError)
    with pytest.raises(RuntimeError):  # another error is no reason
        kernel((1, 1), 32, 0, (7,))
    kernel((1, 1), 32, 0, (8,))
    assert [launch[4] for launch in direct.launches] == [(5,), (8,)] and len(emptied) == 2


def test_memory_is_not_given_back_within_a_capture(direct, emptied, monkeypatch):
    kernel = CupyDriver().kernel("some", "k", ())
    monkeypatch.setattr(capture, "capturing", lambda: True)
    direct.while_launching = failing(1)
    with pytest.raises(NoMemory):
        kernel((1, 1), 32, 0, ())
    assert emptied == []


# ---- threads, devices, shared memory ----

def test_a_new_thread_gets_the_context(fake):
    """The fake refuses a direct launch on a thread that has none, as CUDA does."""
    kernel = CupyDriver().kernel("some", "k", ())
    failures = []

    def work():
        try:
            for _ in range(2):
                kernel((1, 1), 32, 0, ())
        except BaseException as problem:  # shown by the assertion below
            failures.append(problem)
    for fake.device in (0, 1):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert failures == [] and [launch[0] for launch in fake.launches] == [0, 0, 1, 1]


def test_another_current_device_of_cupy_is_put_right(fake):
    kernel = CupyDriver().kernel("some", "k", ())
    for device in (0, 1, 1):
        fake.use(1 - device)
        fake.device = device
        kernel((1, 1), 32, 0, ())
    assert [launch[0] for launch in fake.launches] == [0, 1, 1] and fake.cupy_device == 1


@pytest.mark.parametrize("grid", [(0, 1), (1, 0)])
def test_empty_grid_is_skipped(fake, grid):
    CupyDriver().kernel("some", "k", ())(grid, 32, 0, ())
    assert fake.launches == []


def test_large_shared_memory_is_asked_for_once_per_device(fake):
    kernel = CupyDriver().kernel("some", "k", ())
    for device, shared in ((0, 49152), (0, 60000), (0, 60000), (0, 50000), (1, 60000), (0, 70000),
                           (1, 60000)):
        fake.device = device
        kernel((1, 1), 32, shared, ())
    assert fake.shared_limits == [(0, 60000), (1, 60000), (0, 70000)]
    assert [launch[5] for launch in fake.launches] == [49152, 60000, 60000, 50000, 60000, 70000,
                                                       60000]


def test_each_device_has_its_own_kernel(fake):
    kernel = CupyDriver().kernel("some", "k", ())
    for device in (1, 0, 1):
        fake.device = device
        kernel((1, 1), 32, 0, ())
    assert [launch[0] for launch in fake.launches] == [1, 0, 1]
    assert [compiled[0] for compiled in fake.compiled] == [0, 1]


def test_launches_on_the_device_that_holds_the_arguments(fake):
    """Whatever device is current, as torch's own operations. A scalar and the host's memory say
    nothing."""
    fake.gpus, here, there, host = 2, 2**40, 2**40 + 64, 2**41
    fake.memory = {here: 0, there: 1}
    fake.parameters = ctypes.c_int32, POINTER, POINTER
    kernel = CupyDriver().kernel("some", "k", ())
    first = {here: 0, there: 1, host: 0}
    for pointer, device in first.items():
        kernel((1, 1), 32, 0, (np.int32(5), host, pointer))
        assert fake.launches[-1][0] == device and fake.device == 0
    fake.device = 1
    for pointer, device in {**first, host: 1}.items():
        kernel((1, 1), 32, 0, (5, pointer, there if device else here))
        assert fake.launches[-1][0] == device and fake.device == 1
    assert len(fake.launches) == 6


def test_one_device_asks_for_no_addresses(fake):
    fake.parameters = (POINTER,)
    sys.modules["cupy"].cuda.runtime.pointerGetAttributes = None
    kernel = CupyDriver().kernel("some", "k", ())
    kernel((1, 1), 32, 0, (2**40,))
    assert [launch[0] for launch in fake.launches] == [0]


def test_compile_errors_and_times(fake):
    before = driver.compile_seconds()
    cupy = CupyDriver()
    fake.failure = KeyError("the compiler's log")
    with pytest.raises(driver.CompileError,
                       match=r"some\.cu.*\('A', '1'\)(?s:.*)the compiler's log"):
        cupy.kernel("some", "k", (("A", "1"),))
    fake.failure = None
    cupy.kernel("some", "k", (("A", "1"),))  # a failure is not remembered
    after = driver.compile_seconds()
    assert after[1] - before[1] == 2 and after[0] > before[0]


def test_threads_compile_a_kernel_once(fake):
    cupy, got = CupyDriver(), []
    threads = [threading.Thread(target=lambda: got.append(cupy.kernel("some", "k", ())))
               for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.compiled) == 1 and len(got) == 8 and len(set(map(id, got))) == 1


def _of_many(cupy, got=None):
    """What asks for four kernels, two of which have the same source; ``got``: keeps them."""
    def compile_():
        found = [cupy.kernel(family, entry, ()) for family, entry in
                 (("a", "k"), ("a", "l"), ("b", "k"), ("a", "k"), ("c", "k"))]
        if got is not None:
            got[:] = found
    return compile_


def test_kernels_are_compiled_side_by_side(fake, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    cupy, got, all_there = CupyDriver(), [], threading.Barrier(3)
    begun: set = set()

    def loading():  # no text is compiled before all have begun
        if threading.get_ident() not in begun:
            begun.add(threading.get_ident())
            all_there.wait(20)

    fake.while_loading = loading
    cupy.together(_of_many(cupy))
    assert len(begun) == 3, "the kernels of a text are compiled together"
    assert len(fake.compiled) == 4
    _of_many(cupy, got)()
    assert len(fake.compiled) == 4 and all(map(callable, got))


def test_one_core_compiles_them_all_the_same(fake, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    cupy = CupyDriver()
    cupy.together(_of_many(cupy))
    assert len(fake.compiled) == 4
    cupy.together(_of_many(cupy))
    assert len(fake.compiled) == 4


def test_a_kernel_that_is_compiled_ahead_is_waited_for(fake):
    cupy, go, begun = CupyDriver(), threading.Event(), threading.Event()
    main = threading.current_thread()

    def loading():
        assert threading.current_thread() is not main, "the program compiled it again"
        begun.set()
        assert go.wait(20)

    fake.while_loading = loading
    cupy.ahead(lambda: cupy.kernel("a", "k", ()))
    assert begun.wait(20) and not fake.compiled
    threading.Timer(0.05, go.set).start()
    assert callable(cupy.kernel("a", "k", ())) and len(fake.compiled) == 1


def test_a_text_is_compiled_by_one_thread_at_a_time(fake):
    """Who wants another of its kernels meanwhile takes it from CuPy's memory afterwards."""
    cupy, begun, open_, most = CupyDriver(), threading.Event(), [], []

    def loading():
        open_.append(None)
        most.append(len(open_))
        begun.set()
        time.sleep(0.05)
        open_.pop()

    fake.while_loading = loading
    cupy.ahead(lambda: cupy.kernel("a", "first", ()))
    assert begun.wait(20)
    assert callable(cupy.kernel("a", "second", ()))
    assert most == [1, 1]


def test_what_does_not_compile_is_said_to_who_asks_for_it(fake):
    cupy = CupyDriver()
    fake.failure = KeyError("the compiler's log")
    cupy.together(_of_many(cupy))
    with pytest.raises(driver.CompileError, match="the compiler's log"):
        cupy.kernel("b", "k", ())
    fake.failure = None
    assert callable(cupy.kernel("b", "k", ()))


def test_kernels_are_ready_once_they_are_compiled_for_the_device(fake):
    cupy, go = CupyDriver(), threading.Event()
    fake.while_loading = lambda: go.wait(20)
    work = _of_many(cupy)
    assert not cupy.ready(work) and not fake.compiled
    cupy.ahead(work)
    assert not cupy.ready(work), "they are being compiled"
    go.set()
    cupy.together(work)
    work()
    assert cupy.ready(work) and len(fake.compiled) == 4
    cupy.ahead(lambda: cupy.kernel("e", "k", ()))
    until = time.monotonic() + 20
    while not cupy.ready(lambda: cupy.kernel("e", "k", ())):
        assert time.monotonic() < until
        time.sleep(0.005)
    fake.device = 1
    assert not cupy.ready(lambda: cupy.kernel("e", "k", ()))


def test_asking_which_kernels_are_missing_leaves_no_trace(fake):
    """A launcher's memo must not keep the answer."""
    cupy = CupyDriver()
    found = Kernels("a", ())
    with driver.using(cupy):
        cupy.together(lambda: found("k"))
        assert callable(found("k"))
        with pytest.raises(ZeroDivisionError):
            cupy.together(lambda: found("l") or 1 // 0)
        assert callable(found("l")), "kernels are still asked for only"


# ---- choosing the driver ----

def test_using_nests_and_ends_with_an_exception():
    outer, inner = EmulatedDriver(), EmulatedDriver()
    with driver.using(outer) as given:
        assert given is outer and driver.current() is outer
        with pytest.raises(ZeroDivisionError), driver.using(inner):
            assert driver.current() is inner
            raise ZeroDivisionError
        assert driver.current() is outer


def test_using_reaches_other_threads():
    seen = []
    with driver.using(EmulatedDriver()) as mine:
        thread = threading.Thread(target=lambda: seen.append(driver.current()))
        thread.start()
        thread.join()
    assert seen == [mine]


def test_without_using_one_cupy_driver_is_made(fake, monkeypatch):
    monkeypatch.setattr(driver, "process", [])
    first = driver.current()
    assert isinstance(first, CupyDriver) and driver.current() is first


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
    (folder
     / "k.cu").write_text(
         '// first\n#include "a.cuh"\n  #include "b.cuh"  // again\n#include <x.h>\nK\n')
    text = sources.source("k")
    code = [line for line in text.splitlines() if line
            and not line.startswith(("//", "#line", "  //"))]
    assert code == ["B", "A", "#include <x.h>", "K"]
    assert text.count(
        '#line 1 "a.cuh"') == 1 and '#line 3 "k.cu"' in text and '#line 2 "a.cuh"' in text
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
