"""Compiling CUDA C++ with the ``nvidia-cuda-nvrtc`` wheel: no GPU and no CUDA toolkit needed.

The options are those that CuPy's RawModule passes, so that a text that compiles here compiles
there: `sources.options`, and some of CuPy's. Wheels and tests come here, calls never.
"""
from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import pathlib

from gnnaccel.cuda.runtime import sources

#: compute capabilities that the kernels are compiled for, in tests and in wheels
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
MISSING = "NVRTC is not installed as a Python package: kernels cannot be compiled here"

_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


class NvrtcError(RuntimeError):
    """NVRTC refused a text; the message is its log."""


@functools.cache
def found_at() -> pathlib.Path | None:
    """libnvrtc of an installed ``nvidia-cuda-nvrtc`` wheel (any CUDA major), or None without
    one."""
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if not name.startswith("nvidia-cuda-nvrtc"):
            continue
        for entry in distribution.files or ():
            if entry.name.startswith("libnvrtc.so"):
                return pathlib.Path(str(distribution.locate_file(entry))).resolve()
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    path = found_at()
    if path is None:
        raise FileNotFoundError(MISSING)
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def version() -> tuple[int, int]:
    """Version of NVRTC, as CUDA counts: (13, 0)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def cubin(family: str, defines: tuple, arch: int) -> bytes:
    """A family for ``sm_<arch>``, of the text and options that CuPy gets. Raises NvrtcError."""
    return _compile(sources.defined(family, defines), sources.options(defines), f"sm_{arch}",
                    "CUBIN")


def compile_text(text: str, defines: tuple, arch: int) -> bytes:
    """``text`` as a cubin for ``sm_<arch>``, built with ``defines`` (pairs of str). Raises
    NvrtcError."""
    return _compile(text, _given(defines), f"sm_{arch}", "CUBIN")


def compile_ptx(text: str, defines: tuple, arch: int) -> str:
    """``text`` as PTX for ``compute_<arch>``, to look at single instructions. Raises NvrtcError."""
    return _compile(text, _given(defines), f"compute_{arch}", "PTX").decode().rstrip("\0")


def _given(defines: tuple) -> tuple[str, ...]:
    return *sources.options(defines), *(f"-D{name}={value}" for name, value in defines)


def _compile(text: str, given: tuple[str, ...], target: str, kind: str) -> bytes:
    library, program = _library(), ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None,
                                      None))
    try:
        options = [*given, *_OPTIONS, f"--gpu-architecture={target}"]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), array):
            log = _output(program, "ProgramLog").decode().rstrip("\0")
            raise NvrtcError(f"{target} with {list(given)}:\n{log}")
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
