"""``python -m gnnaccel warmup``: compiles what given layers need, so that the first training step
does not.

Each layer runs forward and backward on a small random graph, and forward alone, which makes the
very kernels that it launches. Or a log tells which kernels a run has made, of whatever layers.
Their binaries stay in CuPy's cache on disk.
"""
from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from typing import Any

from gnnaccel.cuda.runtime import driver, sources
from gnnaccel.dispatch.observe.records import Record
from gnnaccel.profile.log import summary

DTYPES = ("float32", "float16", "bfloat16")
Key = tuple[str, str, tuple[tuple[str, str], ...]]
_NAME, _VALUE = re.compile(r"[A-Za-z_]\w*"), re.compile(r"[\w.+-]*")


def add_parser(commands) -> None:
    from gnnaccel.adapters.pyg.bench import samples

    parser = commands.add_parser("warmup", help="compile the kernels of given layers, or of a "
                                                "recorded run, ahead")
    parser.set_defaults(run=run)
    parser.add_argument("--log", action="append", default=[], metavar="FILE.jsonl",
                        help="all kernels that the run made which wrote this log; repeatable")
    parser.add_argument("layers", nargs="*", metavar="CLASS:HxD",
                        help="heads times width per head, as GATConv:8x8, or for relational "
                        "layers output channels, as RGCNConv:64; classes: "
                        f"{', '.join(samples.LAYERS)}")
    parser.add_argument("--inputs", type=int, default=64, metavar="N", help="input channels (64)")
    parser.add_argument("--relations", type=int, default=8, metavar="N",
                        help="of relational layers (8)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"],
                        help="of features and weights")


def run(options, arguments: list[str]) -> int:
    """Compile and say how long it took. 2 on a wrong layer or log or without a GPU, 1 when a layer
    did not take the kernels or a log names some that there are not."""
    from gnnaccel.adapters.pyg.bench import samples

    try:
        wanted = [samples.parse(text, options.inputs, options.relations) for text in options.layers]
        recorded = {path: _recorded(path) for path in options.log}
        if not (wanted or recorded):
            raise ValueError("name layers, such as GATConv:8x8, or --log FILE.jsonl of a run")
    except (ValueError, OSError) as problem:
        print(f"warmup: {problem}", file=sys.stderr)
        return 2
    ready, why = driver.available()
    if not (ready or driver.placed()):
        print(f"warmup: there is nothing to compile for: {why}. Run python -m gnnaccel doctor",
              file=sys.stderr)
        return 2
    status = 0
    for path, kernels in recorded.items():
        status |= _all(path, kernels)
    for sample in wanted:
        for dtype in options.dtype:
            status |= _one(sample, dtype, "cpu" if driver.placed() else "cuda")
    return status



def kernels_of(found: Iterable[Record]) -> list[Key]:
    """The kernels (family, entry, defines) that the process behind these records made, each
    once."""
    made = (kernel for record in found for kernel in record["kernels"])
    return list(dict.fromkeys((kernel["family"], kernel["entry"], tuple(kernel["defines"].items()))
                              for kernel in made))


def _recorded(path: str) -> list[Key]:
    found = kernels_of(summary.read(path).records)
    if not found:
        raise ValueError(f"{path} tells of no kernel: record a run on a GPU, by python -m gnnaccel "
                         f"--log={path} script.py")
    return found


def _all(path: str, kernels: list[Key]) -> int:
    """Compile them; 1 when one of them cannot be had here, as of another version of gnnaccel. Not
    those that were written for a user's message: records do not hold their text."""
    written = [kernel for kernel in kernels if sources.is_written(kernel[0])]
    if written:
        print(f"{path}: {len(written)} kernels are written for messages, and compiled when these "
              "first run")
        kernels = [kernel for kernel in kernels if kernel not in written]
    begin, (before, _) = time.perf_counter(), driver.compile_seconds()
    failed = 0
    for family, entry, defines in kernels:
        problem = _problem(family, entry, defines)
        if problem is None:
            try:
                driver.current().kernel(family, entry, defines)
            except driver.CompileError as found:
                problem = str(found)
        if problem is not None:
            failed += 1
            print(f"warmup: {path}: not compiled: {problem}", file=sys.stderr)
    print(f"{path}: {len(kernels) - failed} of {len(kernels)} kernels: " + _times(begin, before))
    return int(failed > 0)


def _problem(family: str, entry: str, defines: tuple) -> str | None:
    """What is wrong with a kernel's name or definitions, which come from a file."""
    # a macro makes kernels that differ by a type alone, the last part of their names
    names = rf"\b(?:{re.escape(entry)}|{re.escape(entry.rpartition('_')[0])}_##T)\("
    if family not in sources.families() or not re.search(names, sources.source(family)):
        return f"{entry} of {family} is no kernel of this version of gnnaccel"
    odd = next((f"{name}={value}" for name, value in defines
                if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value))), None)
    return odd and f"{odd!r} is no definition of a kernel"


def _times(begin: float, before: float) -> str:
    compiling = driver.compile_seconds()[0] - before
    seconds = time.perf_counter() - begin
    return f"{seconds:.1f} s, {compiling:.1f} of them compiling or loading kernels"


def _one(sample: Any, dtype: str, device: str) -> int:
    from gnnaccel.errors import FallbackError

    begin, (before, _) = time.perf_counter(), driver.compile_seconds()
    try:
        run_once(sample, dtype, device)
    except FallbackError as problem:
        print(f"{sample} {dtype}: not compiled: {problem}", file=sys.stderr)
        return 1
    print(f"{sample} {dtype}: " + _times(begin, before))
    return 0


def run_once(sample: Any, dtype: str, device: str) -> None:
    """One training step and one forward by the kernels. FallbackError when the layer would run
    natively."""
    import torch

    from gnnaccel import session
    from gnnaccel.adapters.pyg.bench import samples

    layer, inputs = samples.build(sample, getattr(torch, dtype), device)
    with session.enabled(backend="cuda", when="supported", on_fallback="raise"):
        layer(*inputs).float().square().mean().backward()
        with torch.no_grad():
            layer.eval()(*inputs)
    if device == "cuda":
        torch.cuda.synchronize()
