"""A driver that runs the package's own ``.cu`` files on the CPU, for tests.

`EmulatedDriver` takes the place of `gnnaccel.cuda.runtime.driver.CupyDriver`: each kernel file is compiled
with g++ behind ``cuda_emulation.h`` and run by ``emulation_runtime.cpp``. See those two files for
what is emulated, and ``test_emulator.py`` for the faults that it finds.
"""
from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable

from gnnaccel.cuda.runtime import sources
from gnnaccel.cuda.runtime.driver import CompileError, note

from . import signatures
from .guards import guarded  # noqa: F401  (tests take both from here)

_HERE = pathlib.Path(__file__).parent
_HEADER = _HERE / "cuda_emulation.h"
_RUNTIME = _HERE / "emulation_runtime.cpp"
_COMMON_FLAGS = ("-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-w")
# Unset local variables get a pattern instead of what happens to lie there; alignment is checked as
# the GPU does;
# and the kernels' type punning (vector loads) stays defined.
_KERNEL_FLAGS = _COMMON_FLAGS + ("-ftrivial-auto-var-init=pattern", "-fsanitize=alignment",
                                 "-fno-strict-aliasing", "-ffp-contract=off", "-fmax-errors=20")
_ORDERS = {"normal": 0, "reversed": 1, "uneven": 2}
_MAX_THREADS, _MAX_GRID_X, _MAX_GRID_Y = 1024, 2**31 - 1, 65535
MAX_SHARED = 232448  # bytes: the largest dynamic shared memory of one block on sm_90
# a loaded library has one set of fibers, and ctypes lets go of the interpreter lock
_launching = threading.Lock()


class EmulationError(RuntimeError):
    """A kernel did something that would hang, trap or corrupt memory on a GPU; the message says
    where."""


class EmulatedDriver:
    """`gnnaccel.cuda.runtime.driver.Driver` on the CPU.

    ``order`` is how blocks, warps and lanes take turns: "normal", "reversed", or "uneven" (by
    chance, from ``seed``, with one warp of each block running ahead). A correct kernel gives the
    same result in all of them, up to the rounding of floating-point atomics.
    """
    name = "emulation"

    def __init__(self, order: str = "normal", seed: int = 0):
        if order not in _ORDERS:
            raise ValueError(f"order is one of {sorted(_ORDERS)}, not {order!r}")
        self.order, self.seed = order, seed
        self._kernels: dict = {}

    def kernel(self, family: str, entry: str, defines: tuple = ()) -> EmulatedKernel:
        """See `Driver.kernel`. Raises CompileError, and FileNotFoundError for an unknown family."""
        key = family, entry, defines
        if key not in self._kernels:
            library = load_library(sources.source(family), tuple(defines), family + ".cu")
            self._kernels[key] = self._bind(library, entry)
            note(key)
        return self._kernels[key]

    def ahead(self, compile_: Callable[[], None]) -> None:
        """See `Driver.ahead`. Nothing: compiled kernels are kept on disk."""

    def together(self, compile_: Callable[[], None]) -> None:
        """See `Driver.together`."""
        compile_()

    def ready(self, compile_: Callable[[], None]) -> bool:
        """See `Driver.ready`. Never: to ask would be to compile."""
        return False

    def load_text(self, text: str, defines: tuple = ()) -> dict:
        """Every kernel of a source text (``#include "common.cuh"`` works), by name. Raises
        CompileError."""
        library = load_library(sources.inline(text), tuple(defines), "text.cu")
        return {entry: self._bind(library, entry) for entry in library.entries}

    def _bind(self, library: Library, entry: str) -> EmulatedKernel:
        if entry not in library.entries:
            known = ", ".join(library.entries) or "none"
            raise CompileError(f"{library.label} has no kernel {entry!r}; it has {known}")
        return EmulatedKernel(library, entry, _ORDERS[self.order], self.seed)


class EmulatedKernel:
    """One entry point; calling it runs the whole launch before it returns.

    Raises TypeError for arguments that do not fit the parameters, ValueError for a launch that a
    GPU would refuse, EmulationError for a fault inside.
    """

    def __init__(self, library: Library, entry: str, order: int, seed: int):
        self.entry, self._library, self._order, self._seed = entry, library, order, seed
        self.parameters = library.parameters(entry)
        self._bound = library.bound(entry)
        self._function = library.function(entry)

    def __call__(self, grid: tuple, threads: int, shared: int, args: tuple) -> None:
        self._check_launch(grid, threads, shared)
        slots = self._pack(args)
        if 0 in grid:
            return
        pointers = (ctypes.c_void_p * (len(args) + 1))(
            *(ctypes.addressof(slots) + 8 * i for i in range(len(args))), None)
        message = ctypes.create_string_buffer(4096)
        launch = _Launch(grid[0], grid[1], threads, shared, self._order, self._seed, pointers,
                         ctypes.cast(message, ctypes.c_void_p), len(message))
        with _launching:
            failed = self._library.run(self._function, ctypes.byref(launch))
        if failed:
            raise EmulationError(
                f"{self._library.label}: {self.entry}: {message.value.decode(errors='replace')}")

    def _check_launch(self, grid, threads, shared):
        if len(grid) != 2 or not (0 <= grid[0] <= _MAX_GRID_X and 0 <= grid[1] <= _MAX_GRID_Y):
            raise ValueError(
                f"{self.entry}: grid {grid} is not (x <= {_MAX_GRID_X}, y <= {_MAX_GRID_Y})")
        if not 1 <= threads <= min(self._bound, _MAX_THREADS):
            raise ValueError(
                f"{self.entry}: {threads} threads; __launch_bounds__ allows {self._bound}")
        if not 0 <= shared <= MAX_SHARED:
            raise ValueError(f"{self.entry}: {shared} bytes of shared memory; at most {MAX_SHARED}")

    def _pack(self, args):
        """The arguments in 8-byte slots, each checked against its parameter."""
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.entry} takes {len(self.parameters)} arguments "
                            f"({', '.join(p.name for p in self.parameters)}), got {len(args)}")
        slots = (ctypes.c_uint64 * (len(args) + 1))()
        for i, (value, parameter) in enumerate(zip(args, self.parameters)):
            problem = parameter.mismatch(value)
            if problem:
                raise TypeError(
                    f"{self.entry}: parameter {i} ({parameter.name!r}) is {parameter.describe()}: "
                                f"{problem}")
            if parameter.kind == "p":
                slots[i] = value
            else:
                ctypes.memmove(ctypes.addressof(slots) + 8 * i, value.tobytes(), parameter.size)
        return slots


class _Launch(ctypes.Structure):
    """``EmuLaunch`` of emulation_runtime.cpp."""
    _fields_ = [("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("threads", ctypes.c_uint),
                ("shared", ctypes.c_uint), ("order", ctypes.c_int), ("seed", ctypes.c_uint64),
                ("arguments", ctypes.c_void_p), ("error", ctypes.c_void_p),
                ("error_size", ctypes.c_uint64)]

    def __init__(self, x, y, threads, shared, order, seed, pointers, error, error_size):
        super().__init__(x, y, threads, shared, order, seed, ctypes.addressof(pointers), error,
                         error_size)


class Library:
    """A compiled kernel file: its entry points, by name."""

    def __init__(self, path: pathlib.Path, label: str):
        self.label = label
        self._handle = ctypes.CDLL(str(path))
        self.run = self._handle.emu_launch
        self.run.argtypes, self.run.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
        self.entries = tuple(filter(None, self._text("emu_entries").split(",")))

    def _text(self, symbol: str) -> str:
        return ctypes.c_char_p.in_dll(self._handle, symbol).value.decode()

    def function(self, entry: str) -> int:
        return ctypes.cast(self._handle[f"emu_call_{entry}"], ctypes.c_void_p).value

    def bound(self, entry: str) -> int:
        return ctypes.c_int.in_dll(self._handle, f"emu_bound_{entry}").value

    def parameters(self, entry: str) -> list:
        names = list(filter(None, self._text(f"emu_names_{entry}").split(",")))
        kinds = ctypes.create_string_buffer(len(names) + 1)
        sizes = (ctypes.c_int * (len(names) + 1))()
        count = self._handle[f"emu_describe_{entry}"](kinds, sizes)
        if count != len(names):
            raise CompileError(f"{self.label}: cannot read the signature of {entry}")
        return [signatures.Parameter(n, chr(k), s) for n, k, s in zip(names, kinds.raw, sizes)]


def digest(text: str, defines: tuple) -> str:
    """SHA-256 (hex) over a source text and its definitions (pairs of str); their order counts."""
    state = hashlib.sha256(text.encode())
    for name, value in defines:
        # lengths in front, so that no two different lists of definitions run together into the same
        # bytes
        state.update(f"\0{len(name)}:{name}={len(value)}:{value}".encode())
    return state.hexdigest()


@functools.cache
def load_library(text: str, defines: tuple, label: str) -> Library:
    """Compile ``text``, whose headers are already inlined, or take it from the cache; both by
    content."""
    key = hashlib.sha256(
        f"{digest(text, defines)} {label} {_toolchain()}".encode()).hexdigest()[:32]
    path = _cache() / f"{key}.so"
    if not path.exists():
        _build(text, defines, label, path)
    return Library(path, label)


def _build(text: str, defines: tuple, label: str, target: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
        folder = pathlib.Path(scratch)
        # not as -D: a definition such as H must not reach into our own header
        macros = "".join(f"#define {name} {value}\n"
                         for name, value in (*defines, ("GNNACCEL_EMULATE", "1")))
        (folder / "in.cu").write_text(f'{macros}#line 1 "{label}"\n{text}')
        _compiler("-E", *_KERNEL_FLAGS, "-include", str(_HEADER), "-x", "c++",
                  str(folder / "in.cu"), "-o", str(folder / "in.ii"), what=label, defines=defines)
        expanded = (folder / "in.ii").read_text()
        (folder / "in.ii").write_text(expanded + signatures.trampolines(expanded))
        _compiler("-c", *_KERNEL_FLAGS, str(folder / "in.ii"), "-o", str(folder / "out.o"),
                  what=label, defines=defines)
        # linked without -fsanitize: the runtime answers the alignment check itself, so libubsan is
        # not needed
        _compiler("-shared", str(folder / "out.o"), str(_runtime_object()), "-lm", "-o",
                  str(folder / "out.so"), what=label, defines=defines)
        # atomic: another pytest process sees all of it or nothing
        os.replace(folder / "out.so", target)


@functools.cache
def _runtime_object() -> pathlib.Path:
    target = _cache() / f"runtime-{_toolchain()}.o"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
            built = pathlib.Path(scratch) / "runtime.o"
            _compiler("-c", *_COMMON_FLAGS, str(_RUNTIME), "-o", str(built), what=_RUNTIME.name,
                      defines=())
            os.replace(built, target)
    return target


def _compiler(*arguments: str, what: str, defines: tuple) -> None:
    command = shutil.which("g++")
    if command is None:
        raise CompileError("the CPU emulation needs g++, which is not on PATH")
    done = subprocess.run([command, *arguments], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise CompileError(
            f"{what} did not compile for the CPU emulation with {list(defines)}:\n{done.stderr}")


@functools.cache
def _toolchain() -> str:
    """A hash of all that shapes a compiled file besides its text."""
    state = hashlib.sha256()
    for part in (_HEADER, _RUNTIME, _HERE / "signatures.py"):
        state.update(part.read_bytes())
    state.update(repr((_KERNEL_FLAGS, platform.machine(), shutil.which("g++"))).encode())
    return state.hexdigest()[:16]


@functools.cache
def _cache() -> pathlib.Path:
    # one folder per user: on a shared machine, nobody else can put a library there for us to load
    folder = pathlib.Path(tempfile.gettempdir()) / f"gnnaccel-emulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder
