"""``python -m gnnaccel calibrate``: this GPU's ceilings into the user's cache, for the cost model
(`gnnaccel.dispatch.policy.calibration`)."""
from __future__ import annotations

import datetime
import functools
import json
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from gnnaccel import store
from gnnaccel.dispatch.policy import calibration
from gnnaccel.errors import GnnaccelError

_ROW = 64  # channels of the rows gathered, 256 bytes


@dataclass(frozen=True)
class Sizes:
    """What is measured on: ``copy`` bytes; ``edges`` gathered, from ``hbm_rows`` rows and from as
    many as fit into a third of the L2."""

    copy: int
    edges: int
    hbm_rows: int


def sizes_for(memory: int) -> Sizes:
    """For a GPU with so many bytes free: far beyond any L2, in at most an eighth of them."""
    part = max(1 << 20, min(1 << 31, memory // 8))
    return Sizes(copy=part // 2, edges=min(1 << 24, part // 64), hbm_rows=part // (4 * _ROW))


def measure(device: Any, sizes: Sizes, l2: int, repeats: int = 5,
            batch_ms: float = 20.0) -> dict[str, float]:
    """The ceilings of ``device`` (`calibration.CEILINGS`), each the median of ``repeats`` medians
    over batches of ``batch_ms``."""
    import torch

    from gnnaccel.cuda.traverse import head_dot
    from gnnaccel.profile.bench import timing

    effort = timing.Effort(batches=5, batch_ms=batch_ms, seconds=0.5)

    def seconds(call) -> float:
        return statistics.median(timing.measure(call, device, effort).ms
                                 for _ in range(repeats)) / 1e3

    source = torch.zeros(sizes.copy // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    found = {"copy": 2 * sizes.copy / seconds(functools.partial(target.copy_, source))}
    del source, target
    x = torch.ones(4, 1, 8, dtype=torch.float32, device=device)
    att = torch.ones(1, 8, dtype=torch.float32, device=device)
    found["launch"] = seconds(lambda: head_dot.dot(x, att))
    for name, rows in (("gather_l2", max(1, l2 // 3 // (4 * _ROW))),
                       ("gather_hbm", sizes.hbm_rows)):
        found[name] = _gathered(device, rows, sizes.edges, seconds)
        timing.release(device)
    found["l2"] = l2
    return found


def _gathered(device: Any, rows: int, edges: int, seconds) -> float:
    """Bytes per second of gathering one of ``rows`` rows per edge, where every destination has 32
    edges."""
    import torch

    from gnnaccel.cuda.traverse.gather import row_gather
    from gnnaccel.dispatch.graph.view import GraphView

    generator = torch.Generator(device).manual_seed(0)
    src = torch.randint(0, rows, (edges,), device=device, generator=generator)
    dst = torch.arange(edges, device=device) // 32
    view = GraphView(torch.stack([src, dst]), rows, -(-edges // 32), own=True).csc(places=False)
    x = torch.zeros(rows, _ROW, dtype=torch.float32, device=device)
    return edges * 4 * _ROW / seconds(lambda: row_gather(view, x))


# --- the command line -----------------------------------------------------------------------------

def add_parser(commands) -> None:
    parser = commands.add_parser("calibrate", help="measure this GPU's bandwidths and launch cost "
                                                   "for the cost model")
    parser.set_defaults(run=run)
    parser.add_argument("--dry-run", action="store_true", help="measure and print, write nothing")
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")


def run(options, arguments: list[str]) -> int:
    """Measure torch's current GPU, print and keep it. 2 without a GPU; 1 when the numbers cannot be
    believed or kept."""
    from gnnaccel.cuda.runtime import driver

    ready, why = driver.available()
    if not ready:
        print(f"calibrate: there is no GPU to measure: {why}. Run python -m gnnaccel doctor",
              file=sys.stderr)
        return 2
    import torch

    from gnnaccel.cuda.runtime import probe

    device = torch.device("cuda", torch.cuda.current_device())
    about = probe.devices()[device.index]
    free, _ = torch.cuda.mem_get_info(device)
    return keep(about["name"], measure(device, sizes_for(free), about["l2"] or 40 * 2**20), options)


def keep(name: str, ceilings: dict[str, float], options) -> int:
    """Judge, print and, but for a dry run, store what was measured of the GPU ``name``; the exit
    status."""
    from gnnaccel.dispatch.plan import cost

    reference = cost._published()["cuda"]["ceilings"]
    date = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"
    found = {"date": date, "versions": versions(), "ceilings": ceilings}
    print(json.dumps({name: found}, indent=1) if options.json else text(name, ceilings, reference))
    why = calibration.problem(ceilings) or calibration.implausible(ceilings, reference)
    if why is not None:
        print(f"calibrate: {why}; nothing is kept. Is the GPU busy? Look at nvidia-smi and try "
              "again", file=sys.stderr)
        return 1
    if options.dry_run:
        return 0

    def change(held: dict[str, Any]) -> dict[str, Any]:
        devices = held.get("devices", {}) if held.get("schema") == calibration.SCHEMA else {}
        return {"schema": calibration.SCHEMA, "devices": {**devices, name: found}}

    try:
        path = store.update(calibration.NAME, change)
    except (GnnaccelError, OSError) as problem:
        print(f"calibrate: cannot be kept: {problem}", file=sys.stderr)
        return 1
    print(f"kept in {path}; processes started from now on use it", file=sys.stderr)
    return 0


def versions() -> dict[str, str | None]:
    """What the numbers may depend on."""
    from gnnaccel import session
    from gnnaccel.cuda.runtime import probe

    found = session.status()["versions"]
    return {"torch": found["torch"], "cupy": found["cupy"], "driver": probe.driver_text()}


def text(name: str, ceilings: dict[str, float], reference: dict[str, float]) -> str:
    """A line per ceiling, next to the reference GPU's."""
    lines = [f"{name}, next to the GPU of constants.json:"]
    for key, what, unit, factor in (("copy", "device copy", "TB/s", 1e-12),
                                    ("gather_l2", "rows gathered from L2", "TB/s", 1e-12),
                                    ("gather_hbm", "rows gathered from memory", "TB/s", 1e-12),
                                    ("launch", "launch", "us", 1e6)):
        lines.append(f"  {what:<26} {ceilings[key] * factor:8.3g} {unit}   "
                     f"({reference[key] * factor:.3g})")
    return "\n".join(lines)
