"""Versions of CuPy, NVRTC and the NVIDIA driver: for ``doctor``, ``calibrate`` and ``enable()``,
never on the way of a call."""
from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
LEAST_CAPABILITY = (7, 5)
#: CuPy on PyPI: one distribution for each major version of CUDA, and one that is built from source
CUPY_NAMES = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
EXTRAS = (12, 13)  # majors of CUDA for which setup.cfg has a cuda.. extra
LEAST_CUPY = "13"  # as in setup.cfg


@dataclass
class Probe:
    """Versions as texts such as "13.0", None where unknown. ``driver_cuda``: the newest CUDA that
    the driver runs; ``cupy_cuda``: the one that CuPy was built for; ``problems``: why a version is
    unknown, by its name."""

    cupy: str | None = None
    cupy_cuda: str | None = None
    nvrtc: str | None = None
    driver_cuda: str | None = None
    problems: dict[str, str] = field(default_factory=dict)


def cupy() -> Probe:
    """Ask CuPy, which is imported for it. Never raises; without CuPy ``problems`` says so under
    "cupy"."""
    probe = Probe()
    try:
        import cupy

        probe.cupy = cupy.__version__
    except Exception as problem:  # noqa: BLE001 - a broken CuPy raises many kinds
        probe.problems["cupy"] = f"{type(problem).__name__}: {problem}"
        return probe
    for name, ask in {"cupy_cuda": lambda: _dotted(cupy.cuda.runtime.runtimeGetVersion()),
                      "nvrtc": lambda: "{}.{}".format(*cupy.cuda.nvrtc.getVersion()),
                      "driver_cuda": lambda: _dotted(cupy.cuda.runtime.driverGetVersion())}.items():
        try:
            setattr(probe, name, ask())
        except Exception as problem:  # noqa: BLE001 - no library to load, no driver
            probe.problems[name] = f"{type(problem).__name__}: {problem}"
    return probe


def version_of(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed; None where none is."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


@functools.cache
def cupy_installed() -> tuple[str, ...]:
    """Distributions of CuPy that are installed, by their metadata; CuPy is not imported."""
    return tuple(filter(version_of, CUPY_NAMES))


def mismatch(torch_cuda: str | None, installed: Iterable[str]) -> tuple[str, str] | None:
    """(disagreement, what to install), where torch is built for another major version of CUDA than
    CuPy; None where they agree or the names do not tell.

    ``torch_cuda`` is ``torch.version.cuda``; ``installed`` has names as in `CUPY_NAMES`.
    """
    built = {name: int(number[1]) for name in installed
             if (number := re.fullmatch(r"cupy-cuda(\d+)x", name))}
    if torch_cuda is None or not built or major(torch_cuda) in built.values():
        return None
    return (f"torch is built for CUDA {torch_cuda}, but {' and '.join(built)} is installed",
            f"pip uninstall -y {' '.join(built)}, then {install_command(major(torch_cuda))}")


def install_command(cuda: int) -> str:
    """Command that installs the CuPy for a major version of CUDA."""
    return (f"pip install 'gnnaccel[cuda{cuda}]'" if cuda in EXTRAS
            else f"pip install 'cupy-cuda{cuda}x>={LEAST_CUPY}'")


def major(version: str) -> int:
    """"13.0" -> 13."""
    return int(version.partition(".")[0])


def _dotted(version: int) -> str | None:
    """13000 -> "13.0"; 0 means that there is none."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


def driver_text() -> str | None:
    """The NVIDIA driver's version as the kernel module tells it; None where no such module is
    loaded."""
    try:
        words = _DRIVER_FILE.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), " ".join(words[:6]))


def kernel_cache() -> Path:
    """Folder of CuPy's compiled kernels, by its own rule."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()


def devices() -> list[dict]:
    """For each GPU that torch sees: name, capability (pair), memory in bytes, L2 in bytes (None
    where unknown)."""
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        gpus.append(dict(name=gpu.name, capability=(gpu.major, gpu.minor),
                         memory=gpu.total_memory, l2=getattr(gpu, "L2_cache_size", None)))
    return gpus
