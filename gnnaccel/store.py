"""Small files that outlive a process: what was measured on this machine. Many processes may read
and write them at once.

They lie in the user's cache folder, as platformdirs has it, or in ``GNNACCEL_CACHE_DIR``. A file is
replaced whole, so readers need no lock; who changes one holds ``<name>.lock`` meanwhile, so that no
change is lost.
"""
from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnnaccel import env
from gnnaccel.errors import GnnaccelError

_WAIT = 20.0  # seconds for a lock; holders take milliseconds


def folder() -> Path:
    """Where the files are; it need not exist yet. GnnaccelError when neither the variable nor
    platformdirs tells."""
    chosen = env.cache_dir()
    if chosen is not None:
        return Path(chosen).expanduser()
    try:
        import platformdirs
    except ImportError:
        raise GnnaccelError("platformdirs is not installed, so the user's cache folder is not "
                            "known: pip install platformdirs, or set GNNACCEL_CACHE_DIR to a "
                            "folder") from None
    return Path(platformdirs.user_cache_dir("gnnaccel"))


def read(name: str) -> dict[str, Any] | None:
    """The object in the JSON file ``name``; None where there is no such file, with a warning where
    it cannot be understood."""
    try:
        path = folder() / name
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, GnnaccelError):
        return None
    except (OSError, ValueError) as problem:
        warnings.warn(f"gnnaccel: {path} cannot be read and is left aside: {problem}",
                      RuntimeWarning, stacklevel=2)
        return None
    if isinstance(found, dict):
        return found
    warnings.warn(f"gnnaccel: {path} holds no JSON object and is left aside", RuntimeWarning,
                  stacklevel=2)
    return None


def update(name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Replace the object in ``name`` by ``change`` of it ({} where there is none), and say where it
    is.

    Raises GnnaccelError where the folder is not known or cannot be locked, OSError where it cannot
    be written.
    """
    path = folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        text = json.dumps(change(read(name) or {}), indent=1) + "\n"
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False,
                                         encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)
    return path


def check() -> None:
    """Raises as `update` does where nothing can be kept."""
    where = folder()
    where.mkdir(parents=True, exist_ok=True)
    _locked(where / "any")
    with tempfile.TemporaryFile(dir=where):
        pass


def _locked(path: Path) -> Any:
    try:
        from filelock import FileLock
    except ImportError:
        raise GnnaccelError(f"filelock is not installed, so {path} cannot be written safely: pip "
                            "install filelock") from None
    return FileLock(str(path) + ".lock", timeout=_WAIT)


def size(where: Path) -> tuple[int, int]:
    """(files, bytes) below a folder; (0, 0) where there is none."""
    count = total = 0
    for parent, _, names in os.walk(where):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # another process has just removed it
                continue
            count += 1
    return count, total
