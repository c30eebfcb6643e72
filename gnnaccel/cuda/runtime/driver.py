"""Compiling and launching kernels.

A *driver* turns a kernel source and a set of ``-D`` definitions into callable kernels. There is one
for real use (`cupy_driver.CupyDriver`: NVRTC through ``cupy.RawModule``, launches by the CUDA
driver API); the tests put a CPU emulation in its place with `using`, so the very same launchers run
without a GPU.

Kernel conventions, which both drivers rely on:

* entry points are ``extern "C" __global__ void name(...)`` with plain pointer and scalar
  parameters;
* blocks are one-dimensional (``threadIdx.x`` only); grids may have x and y;
* all shared memory is dynamic, taken with ``DYNAMIC_SHARED(name)`` from ``common.cuh``;
* arguments: tensors as ``int`` (``data_ptr()``; 0 is the null pointer), scalars as ``numpy``
  scalars of the parameter's exact type. A kernel's first launch fixes the types; later ones may
  give plain ``int`` and ``float`` for the scalars. A first launch refuses floats, and takes ints
  for pointers: both would be passed as eight bytes.
"""
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class CompileError(RuntimeError):
    """A kernel did not compile; the message holds the compiler's log and the definitions used."""


class Kernel(Protocol):
    def __call__(self, grid: tuple, threads: int, shared: int, args: tuple) -> None:
        """Launch on torch's current stream. ``grid`` is (x, y); ``shared`` is in bytes."""


class Driver(Protocol):
    name: str

    def kernel(self, family: str, entry: str, defines: tuple) -> Kernel:
        """The kernel ``entry`` of ``cuda/src/<family>.cu`` built with ``defines`` (pairs of str).
        Memoised.

        Raises CompileError.
        """

    def ahead(self, compile_: Callable[[], None]) -> None:
        """Begin to compile, beside the program, the kernels that ``compile_`` asks `kernel` for.

        ``compile_`` is called at once and may be called again. It uses no kernel. An error of the
        compiler is raised when the kernel is asked for.
        """

    def together(self, compile_: Callable[[], None]) -> None:
        """Compile as `ahead` does, and return when all are compiled."""

    def ready(self, compile_: Callable[[], None]) -> bool:
        """Whether the kernels that ``compile_`` asks `kernel` for are all compiled. It uses no
        kernel."""


#: drivers put in place by `using`, innermost last; for lookups that cannot afford a call
in_place: list = []
_process_lock = threading.Lock()
#: the process's `CupyDriver`, once it is made
process: list[Driver] = []


@contextlib.contextmanager
def using(driver: Driver):
    """Put ``driver`` in place until exit. Nests.

    For the whole process, not for one thread: the autograd engine may run a backward pass on a
    thread of its own, which must find the same driver. Two threads that put different drivers in
    place get each other's.
    """
    in_place.append(driver)
    try:
        yield driver
    finally:
        with _process_lock:
            # the last of its kind rather than the last: another thread may have put one on top
            # meanwhile
            del in_place[max(i for i, candidate in enumerate(in_place) if candidate is driver)]


def placed() -> bool:
    """Whether `using` has put a driver in place, which then also serves tensors on the CPU."""
    return bool(in_place)


def runs_on(device: torch.device) -> bool:
    """Whether a driver can launch on tensors of this device: a CUDA device, or the CPU under the
    tests' emulation."""
    return device.type == "cuda" or bool(in_place)


def current() -> Driver:
    """The driver put in place by `using`, else the process's `CupyDriver`, made at the first
    call."""
    # slices, since another thread may take the last one out at any time
    drivers = in_place[-1:] or process
    return drivers[0] if drivers else _make_process_driver()


def _make_process_driver() -> Driver:
    from .cupy_driver import CupyDriver  # it needs this module
    with _process_lock:
        if not process:
            process.append(CupyDriver())
        return process[0]


@functools.cache
def available() -> tuple[bool, str]:
    """Whether `CupyDriver` can work here, and if not, what is missing ("" otherwise). Never raises;
    answered once.

    CuPy is not imported where torch has no CUDA device: its import alone takes a second.
    """
    try:
        import torch
        if not torch.cuda.is_available():
            return False, "torch reports no CUDA device"
    except Exception as problem:  # noqa: BLE001 - a broken torch is no reason to crash
        return False, f"torch cannot be used: {problem}"
    if torch.version.cuda is None:
        return False, "torch is not built for CUDA"
    try:
        import cupy
        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as problem:
        return False, f"CuPy cannot be imported: {problem}"
    except Exception as problem:  # noqa: BLE001 - of CuPy's own types: an old driver, say
        return False, f"CuPy finds no CUDA device: {problem}"
    return (True, "") if count else (False, "CuPy finds no CUDA device")


_compile_lock = threading.Lock()
_compile_count = 0
_compile_total = 0.0


def compile_seconds() -> tuple[float, int]:
    """Seconds this process has spent compiling and loading kernels through CuPy, and their
    number."""
    return _compile_total, _compile_count


def count_compile(seconds: float) -> None:
    """Count one kernel compiled or loaded, or tried to."""
    global _compile_count, _compile_total
    with _compile_lock:
        _compile_total += seconds
        _compile_count += 1


_noted: list[tuple[str, str, tuple]] = []


def note(key: tuple[str, str, tuple]) -> None:
    """Note a kernel (family, entry, defines) that has been made; for drivers."""
    _noted.append(key)


def noted(since: int = 0) -> list[tuple[str, str, tuple]]:
    """The kernels (family, entry, defines) made in this process, by any driver, after the first
    ``since``."""
    return _noted[since:]
