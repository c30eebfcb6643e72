"""``python -m gnnaccel warmup``: compiles what given layers need, so that the first training step does not.

Each layer runs forward and backward on a small random graph, and forward alone, which makes the very kernels that it launches.
Their binaries stay in CuPy's cache on disk.
"""
from __future__ import annotations

import sys
import time
from typing import Any

DTYPES = ("float32", "float16", "bfloat16")


def add_parser(commands) -> None:
    """Add ``warmup`` to an argparse subcommand collection."""
    from gnnaccel.adapters.pyg import samples

    parser = commands.add_parser("warmup", help="compile the kernels of given layers ahead")
    parser.set_defaults(run=run)
    parser.add_argument("layers", nargs="+", metavar="CLASS:HxD",
                        help="heads times width per head, as GATConv:8x8, or for relational "
                        f"layers output channels, as RGCNConv:64; classes: {', '.join(samples.LAYERS)}")
    parser.add_argument("--inputs", type=int, default=64, metavar="N", help="input channels (64)")
    parser.add_argument("--relations", type=int, default=8, metavar="N", help="of relational layers (8)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"], help="of features and weights")


def run(options, arguments: list[str]) -> int:
    """Compile and say how long it took. 2 on a wrong layer or without a GPU, 1 when a layer did not take the kernels."""
    from gnnaccel.cuda import driver
    from gnnaccel.adapters.pyg import samples

    try:
        wanted = [samples.parse(text, options.inputs, options.relations) for text in options.layers]
    except ValueError as problem:
        print(f"warmup: {problem}", file=sys.stderr)
        return 2
    ready, why = driver.available()
    if not (ready or driver.placed()):
        print(f"warmup: there is nothing to compile for: {why}. Run python -m gnnaccel doctor", file=sys.stderr)
        return 2
    status = 0
    for sample in wanted:
        for dtype in options.dtype:
            status |= _one(sample, dtype, "cpu" if driver.placed() else "cuda")
    return status


def _one(sample: Any, dtype: str, device: str) -> int:
    from gnnaccel.cuda import driver
    from gnnaccel.errors import FallbackError

    begin, (before, _) = time.perf_counter(), driver.compile_seconds()
    try:
        run_once(sample, dtype, device)
    except FallbackError as problem:
        print(f"{sample} {dtype}: not compiled: {problem}", file=sys.stderr)
        return 1
    compiling = driver.compile_seconds()[0] - before
    print(f"{sample} {dtype}: {time.perf_counter() - begin:.1f} s, {compiling:.1f} of them compiling or loading kernels")
    return 0


def run_once(sample: Any, dtype: str, device: str) -> None:
    """One training step and one forward by the kernels. FallbackError when the layer would run natively."""
    import torch

    from gnnaccel import session
    from gnnaccel.adapters.pyg import samples

    layer, inputs = samples.build(sample, getattr(torch, dtype), device)
    with session.enabled(backend="cuda", when="supported", on_fallback="raise"):
        layer(*inputs).float().square().mean().backward()
        with torch.no_grad():
            layer.eval()(*inputs)
    if device == "cuda":
        torch.cuda.synchronize()
