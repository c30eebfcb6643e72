"""DGL's own tests, natively and with gnnaccel enabled, each call of an operation or layer held
against DGL's own code.

    python -m tests.hostsuites.dgl_suite --source DIR --device cpu --processes 2 --out dgl.json

DIR holds the ``tests`` folder of DGL's repository, of the version that is installed. See
docs/hostsuites.md.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.hostsuites import common

#: what is run of ``tests/python``; the rest needs data sets, other backends, dgl.sparse, graphbolt
#: or several machines
FILES = ("common/*.py", "common/ops/*.py", "common/function/*.py", "common/transforms/*.py",
         "common/utils/*.py", "common/backend/*.py", "common/cuda/*.py", "common/dataloading/*.py",
         "common/sampling/*.py", "common/data/test_serialize.py", "pytorch/*.py", "pytorch/nn/*.py",
         "pytorch/nn/conv/*.py", "pytorch/mpops/*.py", "pytorch/optim/*.py",
         "pytorch/geometry/*.py", "pytorch/utils/*.py", "pytorch/cuda/*.py",
         "pytorch/dataloading/*.py")
#: large files, and into how many processes each is divided
SHARES = {"test_nn.py": 4, "test_ops.py": 3, "test_heterograph.py": 2, "test_transform.py": 2,
          "test_sampling.py": 2, "test_heterograph-kernel.py": 2}
#: files whose tests listen on the same ports: one after the other
PORTS = ("pytorch/dataloading/test_dataloader.py", "pytorch/optim/test_optim.py",
         "pytorch/nn/test_sparse_emb.py", "pytorch/cuda/test_nccl.py")


def main() -> int:
    """Run, write the results, print what went wrong; 1 if anything did."""
    options = _options()
    found: dict[str, Any] = json.loads(Path(options.against).read_text()) if options.against else {}
    for mode in ("native", "enabled"):
        if (mode == "native" and "native" in found) or (options.mode and mode != options.mode):
            continue
        device = "cpu" if mode == "native" else options.device
        found[mode], notes = _run(options, mode, device)
        unfinished = found[f"{mode} unfinished"] = [note["unfinished"] for note in notes
                                                    if "unfinished" in note]
        print(f"{mode} on {device}: {common.counts(found[mode])}; "
              f"{len(unfinished)} parts did not come to their end", flush=True)
    Path(options.out).write_text(json.dumps(found, indent=0))
    return _report(found, options.only is FILES and not options.k)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hostsuites.dgl_suite",
                                     description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True,
                        help="the folder that holds DGL's `tests`")
    parser.add_argument("--device", choices=("cpu", "gpu", "simulated", "emulated"),
                        default="cpu", help="of the enabled run; emulated: kernels on the CPU")
    parser.add_argument("--mode", choices=("native", "enabled"), help="one run alone")
    parser.add_argument("--against", help="results of an earlier run, whose native part is taken")
    parser.add_argument("--no-shadow", action="store_true", help="outcomes alone")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=FILES,
                        help="patterns of files under tests/python")
    parser.add_argument("-k", help="as of pytest")
    parser.add_argument("--seconds", type=float, default=86400.0,
                        help="for all of it; the rest is left out")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    options.deadline = time.monotonic() + options.seconds
    return options


def _run(options: argparse.Namespace, mode: str, device: str) -> tuple[common.Outcomes, list[dict]]:
    root = options.source.resolve() / "tests"
    plugin = dict(mode=mode, device=device, shadow=not options.no_shadow)
    with tempfile.TemporaryDirectory() as folder:
        # read by every Python that a test starts, where DGL needs it as much
        enable = ("gnnaccel.enable(when='supported')" if mode == "enabled"
                  and device not in ("simulated", "emulated") else "")
        Path(folder, "sitecustomize.py").write_text(f"import gnnaccel\n{enable}\n")
        path = [folder, str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"HOSTSUITE_DGL": json.dumps(plugin), "GNNACCEL_CACHE_DIR": os.devnull,
                       "PYTHONPATH": os.pathsep.join(path), "DGLBACKEND": "pytorch",
                       "DGLTESTDEV": "cpu" if device in ("cpu", "emulated") else "gpu"}
        more = ("-k", options.k) if options.k else ()
        suite = common.Suite(root / "python", "tests.hostsuites.dgl_plugin",
                             ("--import-mode=prepend", *more), environment, options.processes,
                             deadline=options.deadline)
        return suite.run(_chunks(root / "python", options.only))


def _chunks(source: Path, patterns: list[str]) -> list[common.Chunk]:
    """Each file in a process of its own, large ones in several, largest first."""
    files = {file for pattern in patterns for file in source.glob(pattern)
             if file.name.startswith("test_")}
    ordered = sorted(files, key=lambda file: (-file.stat().st_size, file))
    names = [str(file.relative_to(source)) for file in ordered]
    together = tuple(name for name in names if name in PORTS)
    return [*([common.Chunk(together)] if together else []),
            *(common.Chunk((name,), share, of) for name in names if name not in PORTS
              for of in [SHARES.get(Path(name).name, 1)] for share in range(of))]


def _report(found: dict[str, Any], everything: bool) -> int:
    enabled = found.get("enabled", {})
    complete = everything and not found.get("enabled unfinished")
    tests = common.regressions(found.get("native", {}), enabled, complete) if enabled else []
    for test in tests:
        outcome = enabled.get(test, {"outcome": "gone"})
        print(f"REGRESSION {test}: {outcome['outcome']} "
              f"{outcome.get('error', '')} {outcome.get('at', '')}")
    alarms = [(test, text) for test, outcome in enabled.items()
              for text in (*outcome.get("alarms", ()), *outcome.get("asserts", ()))]
    for test, text in alarms:
        print(f"ALARM {test}: {text}")
    alone = common.repairs(found.get("native", {}), enabled)
    print(f"{len(tests)} regressions, {len(alarms)} alarms, {len(alone)} fail in the host alone; "
          f"{sum(outcome.get('compared', 0) for outcome in enabled.values())} calls compared")
    return 1 if tests or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
