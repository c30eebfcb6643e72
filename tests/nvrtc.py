"""Compiling CUDA C++ with the ``nvidia-cuda-nvrtc`` wheel: no GPU and no CUDA toolkit needed.

The options are those that CuPy's RawModule passes, so that what compiles here compiles there:
those of `sources.options`, and some of its own.
"""
from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import pathlib

import pytest

from gnnaccel.cuda import sources

_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


class NvrtcError(RuntimeError):
    """NVRTC refused a text; the message is its log."""


@functools.cache
def library_path() -> pathlib.Path | None:
    """libnvrtc of an installed ``nvidia-cuda-nvrtc`` wheel (any CUDA major), or None without
    one."""
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if not name.startswith("nvidia-cuda-nvrtc"):
            continue
        for entry in distribution.files or ():
            if entry.name.startswith("libnvrtc.so"):
                return pathlib.Path(distribution.locate_file(entry)).resolve()
    return None


_MISSING = "NVRTC is not installed as a Python package: kernels cannot be compiled here"
needed = pytest.mark.skipif(library_path() is None, reason=_MISSING)


@functools.cache
def _library() -> ctypes.CDLL:
    path = library_path()
    if path is None:
        raise FileNotFoundError(_MISSING)
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def architectures() -> list[int]:
    """The compute capabilities (75, 80, ...) that this NVRTC compiles for."""
    count = ctypes.c_int()
    _check(_library().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    values = (ctypes.c_int * count.value)()
    _check(_library().nvrtcGetSupportedArchs(values))
    return list(values)


def compile_text(text: str, defines: tuple, arch: int) -> bytes:
    """``text`` as a cubin for ``sm_<arch>``, built with ``defines`` (pairs of str). Raises
    NvrtcError."""
    return _compile(text, defines, f"sm_{arch}", "CUBIN")


def compile_ptx(text: str, defines: tuple, arch: int) -> str:
    """``text`` as PTX for ``compute_<arch>``, to look at single instructions. Raises NvrtcError."""
    return _compile(text, defines, f"compute_{arch}", "PTX").decode().rstrip("\0")


def _compile(text: str, defines: tuple, target: str, kind: str) -> bytes:
    library, program = _library(), ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None,
                                      None))
    try:
        options = [*sources.options(defines), *_OPTIONS, f"--gpu-architecture={target}",
                   *(f"-D{name}={value}" for name, value in defines)]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), array):
            log = _output(program, "ProgramLog").decode().rstrip("\0")
            raise NvrtcError(f"{target} with {list(defines)}:\n{log}")
        return _output(program, kind)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _output(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), f"nvrtcGet{what}")(program, buffer))
    return buffer.raw[:size.value]


def _check(status: int) -> None:
    if status:
        raise NvrtcError(_library().nvrtcGetErrorString(status).decode())
