"""The driver for GPUs: NVRTC through CuPy, launches as cheap as Python allows.

A launch of the small graphs' kernels takes the GPU a few microseconds, and CuPy's own call takes
the host more than that: it makes an object for every argument. `DirectKernel` packs the arguments
with one precompiled `struct.Struct` and calls CuPy's thin wrapper of ``cuLaunchKernel``. Where CuPy
lacks that wrapper, `PlainKernel` goes CuPy's way.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
import time
import warnings
from collections.abc import Callable

import torch

from . import background, capture, ready, sources
from .driver import CompileError, count_compile, note
from .out_of_memory import with_room

# Dynamic shared memory that a kernel may use without asking for more.
_PLAIN_SHARED = 48 * 1024

# cudaMemoryTypeDevice. Pinned memory of the host, the other kind that kernels get, is no GPU's.
_DEVICE_MEMORY = 2

# Smaller numbers are plain scalars, never addresses of a GPU's memory.
_LEAST_ADDRESS = 1 << 32

# The numpy scalars that may be parameters, by their dtype's letter; `struct` uses the same letters
# in native mode.
_SCALARS = frozenset("?bBhHiIlLqQefd")


class _Here(threading.local):
    """``wanted``: kernels that callers have not got yet, in a thread that only asks for these; None
    elsewhere."""

    wanted: list[tuple] | None = None


_here = _Here()


class CupyDriver:
    """`driver.Driver` for the GPUs of this process. Raises ImportError at once where CuPy is
    missing."""
    name = "cupy"

    def __init__(self):
        import cupy
        self._cupy = cupy
        self._kernels: dict = {}  # the callables that callers get
        self._made: dict = {}  # the kernels, some of which may not be compiled yet
        self._texts: dict = {}  # a lock for each text
        self._ready: dict = {}  # kernels that the package brings, by device
        self._streams: dict = {}
        self.lock = threading.RLock()
        self.device_of_torch = (getattr(torch._C, "_cuda_getDevice", None)
                                or torch.cuda.current_device)
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
            lambda device: torch.cuda.current_stream(device).cuda_stream)
        api = getattr(cupy.cuda, "driver", None)
        self.launch_kernel = getattr(api, "launchKernel", None)
        self.context = getattr(api, "ctxGetCurrent", None)
        self.device_of_cupy = cupy.cuda.runtime.getDevice
        self._attributes = cupy.cuda.runtime.pointerGetAttributes
        self.several, self.current_device = torch.cuda.device_count() > 1, torch.cuda.device
        self._kernel_type = DirectKernel if self.launch_kernel and self.context else PlainKernel
        torch.cuda.init()  # the short cuts above skip torch's lazy initialisation

    def kernel(self, family: str, entry: str, defines: tuple = ()):
        """See `Driver.kernel`. Compiled here for torch's current device; for another one at its
        first launch there."""
        key = family, entry, defines
        kernel = self._kernels.get(key)
        if kernel is None and _here.wanted is not None:
            _here.wanted.append(key)
            return None
        return kernel or self._make_kernel(key)

    def ahead(self, compile_: Callable[[], None]) -> None:
        """See `Driver.ahead`."""
        for work in self._to_compile(compile_):
            background.submit(work)

    def together(self, compile_: Callable[[], None]) -> None:
        """See `Driver.together`."""
        background.share(self._to_compile(compile_))

    def ready(self, compile_: Callable[[], None]) -> bool:
        """See `Driver.ready`."""
        device = self.device_of_torch()
        return all((key in self._made and self._made[key].there(device))
                   or self._brought(key[0], key[2], device) for key in self._wanted(compile_))

    def _wanted(self, compile_: Callable[[], None]) -> list[tuple]:
        """Kernels that ``compile_`` asks for and no caller has got yet."""
        outer, _here.wanted = _here.wanted, []
        try:
            compile_()
            return list(dict.fromkeys(_here.wanted))
        finally:
            _here.wanted = outer

    def _to_compile(self, compile_: Callable[[], None]) -> list[Callable[[], None]]:
        """Functions that compile the kernels that ``compile_`` asks for: one for each text, since
        the kernels of a text are compiled together. None for texts that the package brings."""
        texts: dict[tuple[str, tuple], list[tuple]] = {}
        for key in self._wanted(compile_):
            if key not in self._made:
                texts.setdefault((key[0], key[2]), []).append(key)
        device = self.device_of_torch()
        return [functools.partial(self._compile_early, keys, device)
                for text, keys in texts.items() if not self._brought(*text, device)]

    def _compile_early(self, keys: list[tuple], device: int) -> None:
        """Compile for ``device``, so that `kernel` need not. Errors suppressed here, be they the
        compiler's or a full disk's, are raised there: none may end a thread others wait for."""
        with contextlib.suppress(Exception):
            for key in keys:
                self._made_kernel(key).enter(device, 0)

    def _made_kernel(self, key: tuple):
        with self.lock:
            kernel = self._made.get(key)
            if kernel is None:
                kernel = self._made[key] = self._kernel_type(self, *key)
            return kernel

    def _make_kernel(self, key: tuple):
        kernel = self._made_kernel(key)
        kernel.enter(self.device_of_torch(), 0)  # compile errors belong to this call
        with self.lock:
            launch = self._kernels.get(key)
            if launch is None:
                # the bound method, because calling an object with __call__ takes twice as long
                launch = self._kernels[key] = kernel.launch
                note(key)
            return launch

    def use(self, device: int) -> None:
        """Make ``device`` CuPy's current one, and the CUDA context current on this thread."""
        if self.device_of_cupy() != device:
            self._cupy.cuda.Device(device).use()
        if self.context is not None and not self.context():
            # A thread on which nothing has used the GPU yet; any call of the runtime that needs the
            # context binds it.
            self._cupy.cuda.runtime.memGetInfo()

    def device_of(self, args: tuple, otherwise: int) -> int:
        """The GPU whose memory the first pointer to any GPU's memory leads to."""
        for value in args:
            if type(value) is int and value >= _LEAST_ADDRESS:
                attributes = self._attributes(value)
                if attributes.type == _DEVICE_MEMORY:
                    return attributes.device
        return otherwise

    def stream(self, pointer: int):
        """The CuPy object for a raw stream. One is kept per pointer: making it costs as much as a
        launch."""
        stream = self._streams.get(pointer)
        if stream is None:
            with warnings.catch_warnings():
                # CuPy 14 announces that this class will go; 14.0 with the first category, 14.2 with
                # the second
                warnings.simplefilter("ignore", PendingDeprecationWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
                stream = self._streams.setdefault(pointer, self._cupy.cuda.ExternalStream(pointer))
        return stream

    def load(self, family: str, entry: str, defines: tuple):
        """A ``cupy.RawKernel`` for the device that is current in CuPy, from the file that the
        package brings or compiled. Raises CompileError."""
        path = self._brought(family, defines, self.device_of_cupy())
        module = dict(path=path) if path else dict(code=sources.defined(family, defines),
                                                   options=sources.options(defines))
        start = time.perf_counter()
        with self.lock:
            text_lock = self._texts.setdefault((family, defines), threading.Lock())
        try:
            # threads that want another kernel of this text wait, rather than compile it as well
            with background.piece(), text_lock, capture.loading():
                return with_room(
                    lambda: _loaded(self._cupy.RawModule(**module).get_function(entry)))
        except self._cupy.cuda.compiler.CompileException as problem:
            raise CompileError(
                f"{family}.cu did not compile with {list(defines)}:\n{problem}") from problem
        except torch.cuda.OutOfMemoryError as problem:
            raise CompileError(f"{family}.cu was not loaded: {problem}") from problem
        finally:
            count_compile(time.perf_counter() - start)

    def _brought(self, family: str, defines: tuple, device: int) -> str | None:
        """The file of kernels for ``device`` that comes with the package; None where there is
        none."""
        files = self._ready.get(device)
        if files is None:
            files = self._ready[device] = ready.on_device(device)
        return files.path(family, defines)


def _loaded(raw):
    """The ``cupy.RawKernel``, on the device by now. CUDA loads a function when it is first launched
    or asked about, for which memory may be missing later on."""
    getattr(raw, "local_size_bytes", None)
    return raw


def argument_code(value) -> str:
    """The `struct` letter for an argument of a kernel's first launch. TypeError for a value that
    cannot be a parameter."""
    if type(value) is int:
        return "P"
    code = getattr(getattr(value, "dtype", None), "char", "")
    if code not in _SCALARS or getattr(value, "shape", None) != ():
        raise TypeError("a kernel's first launch takes pointers as int and scalars as numpy "
                        f"scalars, not {value!r}")
    return code


class _Loaded:
    """A kernel on one device. ``context`` is where it was loaded, and so the only one in which it
    can be launched."""
    __slots__ = ("raw", "function", "address", "context", "shared")

    def __init__(self, raw, context: int | None):
        # RawKernel looks up RawKernel.kernel in each call; it is per device, so it can be held
        # here. It must be held: with it goes the module.
        self.raw, self.function = raw, getattr(raw, "kernel", raw)
        self.address = getattr(self.function, "ptr", None)
        self.context, self.shared = context, _PLAIN_SHARED


class _Kernel:
    """One entry point with one set of definitions, on every device where it has been launched.

    Subclasses have ``launch``, which callers get (`driver.Kernel`). It launches on the GPU that
    holds the arguments, as torch's own operations do, whatever torch's current device is.
    """
    __slots__ = ("_driver", "_source", "_loaded", "_device_of_torch", "_raw_stream", "_several",
                 "_lock")

    def __init__(self, driver: CupyDriver, family: str, entry: str, defines: tuple):
        self._driver, self._source = driver, (family, entry, defines)
        self._loaded: dict = {}  # by device
        self._lock = threading.RLock()  # other kernels may be compiled in other threads meanwhile
        self._device_of_torch, self._raw_stream = driver.device_of_torch, driver.raw_stream
        self._several = driver.several

    def launch(self, grid: tuple, threads: int, shared: int, args: tuple) -> None:
        """Launch; see `driver.Kernel`."""
        raise NotImplementedError

    def elsewhere(self, device: int, grid: tuple, threads: int, shared: int, args: tuple) -> bool:
        """Launch where the arguments are, unless that is ``device``. Whether it was launched."""
        target = self._driver.device_of(args, device)
        if target == device:
            return False
        with self._driver.current_device(target):
            self.launch(grid, threads, shared, args)
        return True

    def there(self, device: int) -> bool:
        """Whether the kernel is loaded on ``device``."""
        return device in self._loaded

    def enter(self, device: int, shared: int) -> _Loaded:
        """Make ``device`` current, load the kernel there, and let it use ``shared`` bytes. Raises
        CompileError."""
        driver = self._driver
        driver.use(device)
        with self._lock:
            loaded = self._loaded.get(device)
            if loaded is None:
                raw = driver.load(*self._source)
                loaded = self._loaded[device] = _Loaded(raw, driver.context and driver.context())
            if shared > loaded.shared:
                loaded.raw.max_dynamic_shared_size_bytes = shared
                loaded.shared = shared
            return loaded


class DirectKernel(_Kernel):
    """Launches by ``cuLaunchKernel``.

    The parameters lie in buffers that are used again and again. A launch takes one out of ``_free``
    for itself: other threads may launch the same kernel meanwhile (autograd's do, and
    ``cuLaunchKernel`` runs without the interpreter lock), and so may a finaliser on this very
    thread. ``cuLaunchKernel`` copies the parameters before it returns.
    """
    __slots__ = ("_context", "_launch_kernel", "_free", "_codes")

    def __init__(self, driver: CupyDriver, family: str, entry: str, defines: tuple):
        super().__init__(driver, family, entry, defines)
        self._context, self._launch_kernel = driver.context, driver.launch_kernel
        self._free: list = []
        self._codes: str | None = None  # fixed by the first launch

    def launch(self, grid: tuple, threads: int, shared: int, args: tuple) -> None:
        x, y = grid
        if not (x and y):
            return
        device = self._device_of_torch()
        if self._several and self.elsewhere(device, grid, threads, shared, args):
            return
        loaded = self._loaded.get(device)
        # The context stands for the device as well. It is none at all on a thread that has not used
        # the GPU.
        if loaded is None or loaded.context != self._context() or loaded.shared < shared:
            loaded = self.enter(device, shared)
        try:
            pack, parameters = buffer = self._free.pop()
        except IndexError:
            pack, parameters = buffer = self._make_buffer(args)
        try:
            pack(*args)
        except (struct.error, OverflowError) as problem:
            raise TypeError(f"{self._source[1]}: the arguments {args} do not fit {self._codes!r}: "
                            f"{problem}") from problem
        try:
            self._launch_kernel(loaded.address, x, y, 1, threads, 1, 1, shared,
                                self._raw_stream(device), parameters, 0)
        except RuntimeError as problem:
            with_room(lambda: self._launch_kernel(loaded.address, x, y, 1, threads, 1, 1, shared,
                                                  self._raw_stream(device), parameters, 0), problem)
        self._free.append(buffer)

    def _make_buffer(self, args: tuple) -> tuple:
        """A function that packs arguments into a new buffer, and the address of the array of their
        addresses."""
        with self._driver.lock:
            if self._codes is None:
                self._codes = "".join(map(argument_code, args))
        codes = self._codes
        count, packer = len(codes), struct.Struct("@" + codes)
        # the addresses, then the arguments
        buffer = (ctypes.c_uint64 * (count + -(-packer.size // 8)))()
        base = ctypes.addressof(buffer)
        for i, code in enumerate(codes):
            end = struct.calcsize("@" + codes[:i + 1])
            buffer[i] = base + 8 * count + end - struct.calcsize(code)
        return functools.partial(packer.pack_into, buffer, 8 * count), base


class PlainKernel(_Kernel):
    """Launches by CuPy's own call."""
    __slots__ = ("_device_of_cupy", "_types")

    def __init__(self, driver: CupyDriver, family: str, entry: str, defines: tuple):
        super().__init__(driver, family, entry, defines)
        self._device_of_cupy = driver.device_of_cupy
        self._types: tuple | None = None  # fixed by the first launch

    def launch(self, grid: tuple, threads: int, shared: int, args: tuple) -> None:
        if not (grid[0] and grid[1]):
            return
        device = self._device_of_torch()
        if self._several and self.elsewhere(device, grid, threads, shared, args):
            return
        loaded = self._loaded.get(device)
        if loaded is None or self._device_of_cupy() != device or loaded.shared < shared:
            loaded = self.enter(device, shared)
        stream = self._driver.stream(self._raw_stream(device))
        typed = self._typed(args)
        with_room(lambda: loaded.function(grid, (threads,), typed, shared_mem=shared,
                                          stream=stream))

    def _typed(self, args: tuple) -> tuple:
        """Arguments with the types of the first launch for plain ints and floats: CuPy goes by
        their types."""
        with self._driver.lock:
            if self._types is None:
                for value in args:
                    argument_code(value)  # refuses values that cannot be arguments
                self._types = tuple(map(type, args))
        if len(args) != len(self._types):
            raise TypeError(f"{self._source[1]} takes {len(self._types)} arguments, got "
                            f"{len(args)}")
        return tuple(value if type(value) is kind else kind(value)
                     for value, kind in zip(args, self._types))
