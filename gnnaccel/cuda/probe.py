"""What CuPy, NVRTC and the NVIDIA driver say about themselves: for ``doctor`` and ``calibrate``,
never on the way of a call."""
from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
LEAST_CAPABILITY = (7, 5)


@dataclass
class Probe:
    """Versions as texts such as "13.0", None where unknown. ``driver_cuda``: the newest CUDA that
    the driver runs; ``cupy_cuda``: the one that CuPy was built for; ``problems``: what could not be
    asked, by what was asked."""

    cupy: str | None = None
    cupy_cuda: str | None = None
    nvrtc: str | None = None
    driver_cuda: str | None = None
    problems: dict[str, str] = field(default_factory=dict)


def cupy() -> Probe:
    """Ask CuPy, which is imported for it. Never raises; without CuPy ``problems`` says so under
    "cupy"."""
    found = Probe()
    try:
        import cupy

        found.cupy = cupy.__version__
    except Exception as problem:  # noqa: BLE001 - a broken CuPy raises many kinds
        found.problems["cupy"] = f"{type(problem).__name__}: {problem}"
        return found
    for name, ask in {"cupy_cuda": lambda: _dotted(cupy.cuda.runtime.runtimeGetVersion()),
                      "nvrtc": lambda: "{}.{}".format(*cupy.cuda.nvrtc.getVersion()),
                      "driver_cuda": lambda: _dotted(cupy.cuda.runtime.driverGetVersion())}.items():
        try:
            setattr(found, name, ask())
        except Exception as problem:  # noqa: BLE001 - no library to load, no driver
            found.problems[name] = f"{type(problem).__name__}: {problem}"
    return found


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
    """Where CuPy keeps compiled kernels, by its own rule."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()


def devices() -> list[dict]:
    """Of each GPU that torch sees: name, capability (pair), memory in bytes, L2 in bytes (None
    where unknown)."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(dict(name=about.name, capability=(about.major, about.minor),
                          memory=about.total_memory, l2=getattr(about, "L2_cache_size", None)))
    return found
