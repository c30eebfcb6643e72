"""Seventeen planted faults, each of which the oracle has to find.

    python -m tests.oracle.faults                     all of them, a minute of each core at most
    python -m tests.oracle.faults "old version" ...   these only

A fault counts as found by a case that alarms with it and does not without it. Seconds are those of
a processor, compilers included, so that what else the machine does makes no difference.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from .driver import environment
from .judge import is_alarm

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class InKernels:
    """Replaces ``old`` in the text of every kernel that has it."""

    old: str
    new: str

    def check(self) -> None:
        """LookupError where there is nothing to replace."""
        folder = ROOT / "gnnaccel/cuda/src"
        texts = (path.read_text() for path in folder.iterdir() if path.suffix[:3] == ".cu")
        if not any(self.old in text for text in texts):
            raise LookupError(f"no kernel has {self.old!r} any more")

    def __call__(self) -> None:
        from gnnaccel.cuda.runtime import sources

        self.check()
        inline = sources.inline
        sources.source.cache_clear()
        sources.inline = lambda text, family="text": inline(text,
                                                            family).replace(self.old, self.new)


@dataclass(frozen=True)
class InModule:
    """Replaces ``old`` in the text of a module, whose functions are then defined anew."""

    name: str
    old: str
    new: str

    def check(self) -> str:
        """The text of the module; LookupError where ``old`` does not stand there once."""
        text = (ROOT / (self.name.replace(".", "/") + ".py")).read_text()
        if text.count(self.old) != 1:
            raise LookupError(f"{self.name} has {self.old!r} {text.count(self.old)} times")
        return text

    def __call__(self) -> None:
        module = importlib.import_module(self.name)
        text = self.check().replace(self.old, self.new)
        exec(compile(text, module.__file__, "exec"), module.__dict__)


@dataclass(frozen=True)
class Fault:
    part: str
    backend: str
    plant: InKernels | InModule | Callable[[], None]


def stale_norm() -> None:
    """GCN's normalisation, kept as long as the same tensors come, whatever they hold."""
    from torch_geometric.nn.conv import gcn_conv

    native, kept = gcn_conv.gcn_norm, {}

    def remembered(edge_index, edge_weight=None, *args, **kwargs):
        key = (edge_index.data_ptr(), edge_index.shape, args, tuple(sorted(kwargs.items())))
        if edge_weight is None or edge_weight.requires_grad or enabled() is None:
            return native(edge_index, edge_weight, *args, **kwargs)
        key += edge_weight.data_ptr(), edge_index._version, edge_weight._version
        if key not in kept:
            kept[key] = native(edge_index, edge_weight, *args, **kwargs), edge_index, edge_weight
        return kept[key][0]

    import torch_geometric.nn  # noqa: F401  (its modules have the function by name)

    from gnnaccel.dispatch.policy.config import current as enabled

    for name, module in list(sys.modules.items()):
        if name.startswith("torch_geometric.") and vars(module).get("gcn_norm") is native:
            module.gcn_norm = remembered


def followed_as_called() -> None:
    """DGL's users' functions, followed with gradients where the first call has them."""
    import contextlib

    from gnnaccel.adapters.dgl.udf import memory

    following = memory.following

    @contextlib.contextmanager
    def as_called():
        import torch

        wanted = torch.is_grad_enabled()
        with following() as effects, torch.set_grad_enabled(wanted):
            yield effects

    memory.following = as_called


FAULTS = {
    "permuted shares": Fault("table", "emulated",
                             InModule("gnnaccel.adapters.alike", "    return shares.to(device)\n",
                                      "    return shares.flip(0).to(device)\n")),
    "old version": Fault("histories", "emulated",
                         InModule("gnnaccel.dispatch.graph.cache", "if (ref.version != t._version",
                                  "if (False")),
    "gradient times 1.01": Fault("table", "emulated", InKernels("? 0.f : up ? 1.f : g.slope;",
                                                                "? 0.f : up ? 1.01f : g.slope;")),
    "lost self loop": Fault(
        "table",
        "cpu",
        InModule("gnnaccel.dispatch.graph.structure",
                 "nodes = torch.arange(loops, dtype=dtype, device=src.device)",
                 "nodes = torch.arange(loops, dtype=dtype, device=src.device) % max(1, loops - 1)"),
    ),
    "softmax without maximum": Fault("table", "emulated",
                                     InKernels("return exp2f(__fsub_rn(s, base) * LOG2E)",
                                               "return exp2f(s * LOG2E)")),
    "mean of long rows": Fault(
        "table",
        "emulated",
        InKernels("MEAN && edges ? (float)edges",
                  "MEAN && edges ? (float)(edges > 500 ? edges + 1 : edges)"),
    ),
    "variance of 0.001 at least": Fault("table", "emulated",
                                        InModule("gnnaccel.adapters.pyg.propagate.stock",
                                                 "out.clamp(min=1e-5).sqrt()",
                                                 "out.clamp(min=1e-3).sqrt()")),
    "lost chunk": Fault("table", "emulated",
                        InKernels("add_chunks(at, row.y, row.z, part, sum)",
                                  "add_chunks(at, row.y, row.z - 1, part, sum)")),
    "weights of other edges": Fault("table", "emulated",
                                    InModule("gnnaccel.dispatch.graph.ordered_weights",
                                             ".index_select(0, order)",
                                             ".index_select(0, order.roll(1))")),
    "what reaches a sum over channels": Fault(
        "messages",
        "emulated",
        InModule("gnnaccel.cuda.messages.message_writer", 'append(f"of_{name}_total[k / KV]")',
                 'append(f"1.02f * of_{name}_total[k / KV]")'),
    ),
    "a module that stands twice": Fault(
        "messages",
        "emulated",
        InModule("gnnaccel.adapters.tracing.layer.traced_modules",
                 "for name, one in module._modules.items() if one is not None}",
                 "for name, one in module.named_children()}"),
    ),
    "a changed list": Fault(
        "programs",
        "emulated",
        InModule("gnnaccel.adapters.tracing.layer.guarded",
                 "keys == was.keys and all(still(value[key], one, edges)",
                 "keys == was.keys and all(True"),
    ),
    "statements without gradients": Fault(
        "programs",
        "emulated",
        InModule("gnnaccel.adapters.tracing.rows.pieces",
                 "return Rows(mapped(value.tree, _still), value.meta)", "return value"),
    ),
    "first seen without gradients": Fault("dgl", "cpu", followed_as_called),
    "stale normalisation": Fault("histories", "cpu", stale_norm),
    "old edges in scripts": Fault("scripts", "emulated",
                                  InModule("gnnaccel.dispatch.graph.cache",
                                           "if (ref.version != t._version", "if (False")),
    "means of another parameter": Fault(
        "scripts",
        "emulated",
        InModule("gnnaccel.adapters.optimizers",
                 "kernel.Tensors(*written)",
                 "kernel.Tensors(written[0], [next(m for m in written[1] if m.shape == p.shape)"
                 " for p in written[0]], *written[2:])"),
    ),
}


def search(options: argparse.Namespace) -> None:
    """In a process of its own: plant the fault, and say which cases alarm."""
    from . import worker
    from .backends import Backend

    fault = FAULTS[options.names[0]]
    if not options.unplanted:
        fault.plant()
    backend = Backend(fault.backend)
    with backend.session():
        check = worker.part(fault.part, backend)
        given = SimpleNamespace(only=options.only, mode=options.mode)
        start, seed, cases = processor_seconds(), options.first, 0
        while processor_seconds() - start < options.seconds and cases < options.cases:
            what, wrong, _ = check(seed, given.only, given.mode)
            cases += 1
            if is_alarm(wrong):
                spent = round(processor_seconds() - start, 1)
                found = {"seed": seed, "what": what, "text": wrong, "cases": cases}
                print(json.dumps({**found, "seconds": spent}), flush=True)
            seed += options.step


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _started(name: str, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.oracle.faults", name, "--search", *more]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE)


def clean(name: str, alarm: dict) -> bool:
    """Whether the case passes without the fault."""
    only, _, mode = alarm["what"].partition(" --mode ")
    if FAULTS[name].part != "table":
        only = ""
    more = ("--unplanted", f"--first={alarm['seed']}", "--cases=1", f"--only={only}",
            f"--mode={mode}")
    done = _started(name, *more)
    return "{" not in done.communicate()[0] and not done.returncode


def find(name: str, seconds: float, processes: int, seed: int) -> dict | None:
    """The first case that finds the fault, with its number and the seconds that it took."""
    alarms: queue.Queue = queue.Queue()
    running = [_started(name, f"--first={seed * 1_000_000 + k}", f"--step={processes}",
                        f"--seconds={seconds}") for k in range(processes)]
    threads = [threading.Thread(target=_listen, args=(p, alarms), daemon=True) for p in running]
    for thread in threads:
        thread.start()
    ended = 0
    try:
        while ended < processes:
            alarm = alarms.get()
            ended += alarm is None
            if alarm is not None and clean(name, alarm):
                return {**alarm, "cases": alarm["cases"] * processes}
        return None
    finally:
        for process in running:
            process.kill()


def _listen(process: subprocess.Popen, alarms: queue.Queue) -> None:
    for line in process.stdout:
        if line.startswith("{"):
            alarms.put(json.loads(line))
    alarms.put(None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.faults", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"out of {', '.join(FAULTS)}")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    for name, kind in (("first", int), ("step", int), ("cases", int), ("only", str), ("mode", str)):
        default = {"first": 0, "step": 1, "cases": 1 << 40}.get(name, "")
        parser.add_argument(f"--{name}", type=kind, default=default, help=argparse.SUPPRESS)
    for name in ("search", "unplanted"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.search:
        search(options)
        return 0
    missed = 0
    for name in options.names or FAULTS:
        alarm = find(name, options.seconds, options.processes, options.seed)
        missed += alarm is None
        print(f"{name}: " + (describe(alarm) if alarm else f"not found in {options.seconds:.0f} s"),
              flush=True)
    return 1 if missed else 0


def describe(alarm: dict) -> str:
    return (f"{alarm['seconds']} s, about {alarm['cases']} cases: {alarm['what']}, "
            f"{alarm['text'][:110]}")


if __name__ == "__main__":
    sys.exit(main())
