"""Parts on disk: one folder a part, each with a manifest of its files, and one manifest of all.

    out/manifest.json            format, parts, numbers of nodes and edges, digests of the next ones
    out/part-0/manifest.json     sizes and SHA-256 digests of the files, and what they hold
    out/part-0/000.npy, ...      or tensors.safetensors, where safetensors is installed

The folder is written under another name, and gets its own name last.
"""
from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnaccel.errors import PartitionError

FORMAT = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial-"
_ONE_FILE = "tensors.safetensors"
_AGAIN = "delete it and call gnnaccel.distributed.partition again"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def to_array(tensor: Tensor) -> tuple[np.ndarray, str]:
    """A tensor as an array, and its dtype's name. Dtypes that numpy lacks, such as bfloat16, become
    integers of as many bytes."""
    name = str(tensor.dtype).partition(".")[2]
    tensor = tensor.detach().cpu().contiguous()
    if not hasattr(np, name) and name != "bool":
        tensor = tensor.view(_WORDS[tensor.element_size()])
    return tensor.numpy(), name


def from_array(array: np.ndarray, name: str) -> Tensor:
    """The tensor that `to_array` made an array of."""
    tensor = torch.from_numpy(array)
    dtype = getattr(torch, name)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


class Folder:
    """A part's folder as it is written. ``keys`` of arrays are lists of strings."""

    def __init__(self, path: Path, part: int):
        self.path, self._part = path, part
        self._tensors: list[dict[str, Any]] = []
        self._small: dict[str, np.ndarray] = {}
        path.mkdir()

    def create(self, key: list[str], shape: tuple[int, ...], dtype: Any,
               name: str | None = None) -> np.ndarray:
        """An array to fill in, which lies in its file. ``name``: torch's name of the dtype."""
        file = f"{len(self._tensors):03d}.npy"
        name = name or np.dtype(dtype).name
        self._tensors.append({"key": key, "file": file, "dtype": name})
        if 0 in shape:  # there is nothing to map into memory
            array = self._small[file] = np.empty(shape, dtype)
            return array
        return np.lib.format.open_memmap(self.path / file, "w+", dtype, shape)

    def put(self, key: list[str], array: np.ndarray, name: str | None = None) -> None:
        self.create(key, array.shape, array.dtype, name)[...] = array

    def close(self) -> str:
        """Write the remaining arrays and the manifest. Returns the manifest's digest."""
        for file, array in self._small.items():
            np.save(self.path / file, array)
        if importlib.util.find_spec("safetensors") is not None:
            self._into_one_file()
        files = {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)}
                 for path in sorted(self.path.iterdir())}
        return write_json(self.path / MANIFEST, {"format": FORMAT, "part": self._part,
                                                 "files": files, "tensors": self._tensors})

    def _into_one_file(self) -> None:
        from safetensors.numpy import (  # type: ignore[import-not-found, unused-ignore]
            save_file,
        )

        names = [entry["file"] for entry in self._tensors]
        save_file({name: np.load(self.path / name) for name in names}, self.path / _ONE_FILE)
        for name in names:
            (self.path / name).unlink()


def write_json(path: Path, content: dict) -> str:
    """Write ``content``. Returns the digest of the file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    return digest(path)


def writing(out: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` with a folder of another name, which becomes ``out`` once it is complete.
    Nothing is left of one that fails."""
    if out.exists():
        raise PartitionError(f"{out} exists already; {_AGAIN}, or choose another folder")
    partial = out.with_name(f"{out.name}{PARTIAL}{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        write(partial)
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_manifest(out: Path) -> tuple[dict[str, Any], str]:
    """The manifest of all parts and its digest. PartitionError where the folder is not a complete
    one of this format."""
    path = out / MANIFEST
    if not path.is_file():
        halves = sorted(out.parent.glob(out.name + PARTIAL + "*"))
        what = (f"; {halves[0]} is half-written: its partition was interrupted or is still going on"
                if halves else "; it is half-written, or no partition" if out.is_dir() else "")
        raise PartitionError(f"{out} has no {MANIFEST}{what}. Needed is a folder written by "
                             "gnnaccel.distributed.partition")
    manifest = _read_json(path)
    if manifest.get("format") != FORMAT:
        raise PartitionError(f"{path} is of format {manifest.get('format')}; this gnnaccel reads "
                             f"{FORMAT}: {_AGAIN}")
    return manifest, digest(path)


def read_part(out: Path, part: int, expected: str,
              verify: bool = True) -> dict[tuple[str, ...], Tensor]:
    """A part's tensors by key, once sizes and digests are found right. ``expected``: the digest of
    the part's manifest; ``verify`` False: do not read the files for their digests."""
    folder = out / f"part-{part}"
    path = folder / MANIFEST
    if not path.is_file():
        raise PartitionError(f"{path} is missing: the folder is incomplete; {_AGAIN}")
    if digest(path) != expected:
        raise PartitionError(f"{path} is not the one that {out / MANIFEST} was written with: "
                             f"folders are mixed up or were changed; {_AGAIN}")
    manifest = _read_json(path)
    for name, facts in manifest["files"].items():
        _check_file(folder / name, facts, verify)
    arrays = _arrays(folder, [entry["file"] for entry in manifest["tensors"]])
    return {tuple(entry["key"]): from_array(arrays[entry["file"]], entry["dtype"])
            for entry in manifest["tensors"]}


def _check_file(path: Path, seen: dict[str, Any], verify: bool) -> None:
    if not path.is_file():
        raise PartitionError(f"{path} is missing: the folder is incomplete; {_AGAIN}")
    size = path.stat().st_size
    if size != seen["bytes"]:
        raise PartitionError(f"{path} has {size} bytes; {seen['bytes']} were written: it is cut "
                             f"off or was changed; {_AGAIN}")
    if verify and digest(path) != seen["sha256"]:
        raise PartitionError(f"{path} is not what was written: its SHA-256 is another; {_AGAIN}")


def _arrays(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    if not (folder / _ONE_FILE).is_file():
        return {name: np.load(folder / name, allow_pickle=False) for name in names}
    if importlib.util.find_spec("safetensors") is None:
        raise PartitionError(f"{folder / _ONE_FILE} needs safetensors: pip install safetensors")
    from safetensors.numpy import load_file  # type: ignore[import-not-found, unused-ignore]

    return load_file(folder / _ONE_FILE)


def _read_json(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise PartitionError(f"{path} is no JSON ({error}): it is half-written; {_AGAIN}") from None
    if not isinstance(content, dict):
        raise PartitionError(f"{path} holds no manifest; {_AGAIN}")
    return content
