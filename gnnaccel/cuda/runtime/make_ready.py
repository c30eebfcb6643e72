"""``python -m gnnaccel.cuda.runtime.make_ready``: compiles the texts of ``ready.json`` into
``cuda/ready``, from where `ready` takes them, and prints their sizes. ``make wheel`` runs this
command.

The command needs the ``nvidia-cuda-nvrtc`` wheel and no GPU.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import io
import json
import os
import shutil
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from gnnaccel.cuda.runtime import nvrtc, ready

#: GPUs of 8.9 run the kernels of 8.6, whose definitions are the same: a seventh of the size saved
ARCHITECTURES = tuple(arch for arch in nvrtc.ARCHITECTURES if arch != 89)
#: bytes of a wheel
MOST = 20 * 10**6
Build = tuple[str, tuple, int]


def builds(listed: Path = ready.LIST,
           architectures: Iterable[int] = ARCHITECTURES) -> list[Build]:
    """(family, defines, architecture) of all that is listed."""
    wanted = list(architectures)
    return [(family, tuple(map(tuple, defines)), arch)
            for arch in wanted
            for family, defines, *only in json.loads(listed.read_text(encoding="utf-8"))
            if not only or arch in only[0]]


def compiled(build: Build) -> bytes:
    """The cubin. Raises NvrtcError."""
    return nvrtc.cubin(*build)


def make(folder: Path, wanted: list[Build], processes: int) -> Counter:
    """Fill ``folder`` anew. Returns the bytes of each family in a wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    files: dict[str, dict[str, str]] = {}
    sizes: Counter = Counter()
    with concurrent.futures.ProcessPoolExecutor(processes) as pool:
        for (family, defines, arch), cubin in zip(wanted, pool.map(compiled, wanted, chunksize=8)):
            text = ready.digest(family, defines)
            path = ready.file_of(folder, arch, text)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(cubin)
            files.setdefault(str(arch), {})[text] = hashlib.sha256(cubin).hexdigest()
            sizes[family] += _in_a_wheel(f"gnnaccel/cuda/ready/sm_{arch}/{path.name}", cubin)
    # last, since a folder without it counts as none
    (folder / ready.MANIFEST).write_text(json.dumps({"nvrtc": nvrtc.version(), "files": files}),
                                         encoding="utf-8")
    return sizes


def rest(package: Path) -> int:
    """Bytes of all other files in a wheel, with the list of all files, which is about as large as
    the manifest."""
    files = [file for file in package.rglob("*") if file.is_file()
             and file.suffix in (".py", ".cu", ".cuh", ".json") and file.name != ready.MANIFEST]
    manifest = (ready.FOLDER / ready.MANIFEST).read_bytes()
    return (sum(_in_a_wheel(str(file.relative_to(package.parent)), file.read_bytes())
                for file in files) + 2 * _in_a_wheel(ready.MANIFEST, manifest))


def _in_a_wheel(name: str, content: bytes) -> int:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(name, content)
    return len(packed.getvalue())


def table(sizes: Counter) -> str:
    """Families by size."""
    lines = [f"{family:24}{size / 1e6:8.2f} MB" for family, size in sizes.most_common()]
    return "\n".join([*lines, f"{'all':24}{sizes.total() / 1e6:8.2f} MB"])


def main(arguments: list[str] | None = None) -> int:
    """Make the files. 1 where they are too large for a wheel, 2 where there is no NVRTC."""
    parser = argparse.ArgumentParser(prog="python -m gnnaccel.cuda.runtime.make_ready")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES,
                        choices=nvrtc.ARCHITECTURES, metavar="SM")
    options = parser.parse_args(arguments)
    if nvrtc.found_at() is None:
        print(f"{nvrtc.MISSING}; pip install nvidia-cuda-nvrtc", file=sys.stderr)
        return 2
    begin, wanted = time.perf_counter(), builds(architectures=options.arch)
    sizes = make(ready.FOLDER, wanted, options.processes)
    kernels = sizes.total()
    sizes["(all that is no kernel)"] = rest(Path(__file__).parents[2])
    print(f"{len(wanted)} kernel files in {time.perf_counter() - begin:.0f} s, "
          f"{kernels / 1e6:.1f} of {sizes.total() / 1e6:.1f} MB of a wheel, by "
          f"NVRTC {ready.made_by()}: {ready.FOLDER}")
    if sizes.total() < MOST:
        return 0
    print(f"more than {MOST / 1e6:.0f} MB, by family:\n{table(sizes)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
