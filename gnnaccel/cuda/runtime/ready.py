"""Kernels that come with the package, compiled when its wheel was made (`make_ready`).

``cuda/ready`` holds a folder for each compute capability, with a file for each text, named by the
text's digest: a changed source never meets an old file. A source checkout has no such folder.
"""
from __future__ import annotations

import functools
import hashlib
import json
import warnings
from pathlib import Path

from gnnaccel.cuda.runtime import sources

FOLDER = Path(__file__).parents[1] / "ready"
MANIFEST = "manifest.json"
#: kernels of a wheel: [family, definitions, and architectures unless all]
LIST = Path(__file__).parents[1] / "ready.json"
#: a family and its definitions
Text = tuple[str, tuple[tuple[str, str], ...]]
#: compute capabilities of systems on a chip, which run no kernels of other GPUs
_APART = frozenset(((7, 2), (8, 7), (8, 8), (10, 1)))


@functools.cache
def manifest(folder: Path) -> dict | None:
    """The folder's list: "nvrtc" (major, minor), and for each architecture the SHA-256 of each file
    by its text's digest. None where there is no folder. Read once per process."""
    path = folder / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def digest(family: str, defines: tuple) -> str:
    """Digest of all that the compiler gets."""
    text = "\0".join((*sources.options(defines), sources.defined(family, defines)))
    return hashlib.sha256(text.encode()).hexdigest()


def file_of(folder: Path, arch: int, text: str) -> Path:
    """The file of a text, by its digest."""
    return folder / f"sm_{arch}" / f"{text}.cubin"


class Ready:
    """Kernels of the package for one GPU. ``capability``: (9, 0); ``cuda``: the major version
    of the newest CUDA that the driver runs; ``found``: a `manifest`, None where there is none."""

    def __init__(self, capability: tuple[int, int], cuda: int, found: dict | None):
        self._held: dict[Text, str | None] = {}
        self._folder = FOLDER
        # an older driver may not know the files of a newer compiler
        self._files: dict[int, dict[str, str]] = (
            {} if found is None or cuda < found["nvrtc"][0] else
            {arch: found["files"][str(arch)] for arch in _runs(capability, found)})

    def __len__(self) -> int:
        """Number of texts."""
        return len(set().union(*self._files.values()))

    def path(self, family: str, defines: tuple) -> str | None:
        """The file of this text; None where it is to be compiled."""
        if not self._files:
            return None
        text = family, defines
        if text not in self._held:
            self._held[text] = self._find(digest(family, defines))
        return self._held[text]

    def _find(self, text: str) -> str | None:
        for arch, files in self._files.items():
            if text in files:
                path = file_of(self._folder, arch, text)
                if _is(path, files[text]):
                    return str(path)
                warnings.warn(f"gnnaccel: {path} is not the file that came with the package; its "
                              "kernels are compiled instead. Install gnnaccel again",
                              RuntimeWarning, stacklevel=2)
        return None


def on_device(device: int) -> Ready:
    """`Ready` for a GPU of this process. Without files, neither torch nor CuPy is asked."""
    files = manifest(FOLDER)
    if files is None:
        return Ready((0, 0), 0, None)
    import cupy
    import torch

    return Ready(torch.cuda.get_device_capability(device),
                 cupy.cuda.runtime.driverGetVersion() // 1000, files)


def _runs(capability: tuple[int, int], found: dict) -> list[int]:
    """The architectures whose kernels this GPU runs, its own or the next best first: a GPU runs
    those of its major version and of no later minor one."""
    major, minor = capability
    least = 10 * major if capability not in _APART else 10 * major + minor
    return sorted((arch for arch in map(int, found["files"])
                   if least <= arch <= 10 * major + minor), reverse=True)


def _is(where: Path, expected: str) -> bool:
    return where.is_file() and hashlib.sha256(where.read_bytes()).hexdigest() == expected


def made_by() -> str | None:
    """The version of NVRTC that compiled the package's kernels; None where it brings none."""
    files = manifest(FOLDER)
    return None if files is None else "{}.{}".format(*files["nvrtc"])
