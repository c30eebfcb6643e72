"""``python -m gnnaccel cache``: what is kept on disk, and forgetting it. (`gnnaccel.cache` is about
structures in memory.)"""
from __future__ import annotations

import sys
from pathlib import Path

from gnnaccel import store
from gnnaccel.cuda.runtime import probe
from gnnaccel.dispatch.policy import calibration, tuned
from gnnaccel.errors import GnnaccelError

_KERNELS = "*.cubin"


def add_parser(commands) -> None:
    parser = commands.add_parser("cache", help="show or clear what is kept on disk")
    parser.set_defaults(run=run)
    parser.add_argument("action", choices=("info", "clear"))
    parser.add_argument("--kernels", action="store_true",
                        help="clear: CuPy's compiled kernels too, of all programs that use CuPy")


def run(options, arguments: list[str]) -> int:
    """Do it; 1 when a folder is not known or a file cannot be removed."""
    try:
        lines = info() if options.action == "info" else clear(options.kernels)
    except (GnnaccelError, OSError) as problem:
        print(f"cache: {problem}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def info() -> list[str]:
    found = []
    for what, where in (("gnnaccel", store.folder()),
                        ("kernels, kept by CuPy", probe.kernel_cache())):
        files, total = store.size(where)
        found.append(f"{what}: {where}: {files} files, {total / 2**20:.1f} MiB")
    return found


def clear(kernels: bool) -> list[str]:
    """Remove what gnnaccel itself has written and, if asked to, compiled kernels; nothing else in
    these folders."""
    own = [path for path in (store.folder() / name for name in (calibration.NAME, tuned.NAME))
           if path.is_file()]
    compiled = sorted(probe.kernel_cache().glob(_KERNELS)) if kernels else []
    return [_removed("measurements", own),
            *([_removed("compiled kernels", compiled)] if kernels else [])]


def _removed(what: str, files: list[Path]) -> str:
    total = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink(missing_ok=True)
    return f"{what}: {len(files)} files removed, {total / 2**20:.1f} MiB"
