"""PyG's own tests, natively and with gnnaccel enabled, each call of a layer held against the host's
own code.

    python -m tests.hostsuites.pyg_suite --source DIR --device cpu --processes 2 --out pyg.json
    [--only test/nn/conv]

DIR holds the ``test`` folder of PyG's repository, of the version that is installed. See
docs/hostsuites.md.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.hostsuites import common

FOLDERS = ("test/nn", "test/utils", "test/explain")
_MARKED = ("-m", "not rag and not dataset")
_SHARES = {"test_basic_gnn.py": 8}  # thousands of tests
_SECOND_LOOK = 60.0  # seconds that regressions have, whatever --seconds says


def main() -> int:
    """Run, write the results, print what went wrong; 1 if anything did."""
    options = _options()
    found: dict[str, Any] = json.loads(Path(options.against).read_text()) if options.against else {}
    for mode in ("native", "enabled"):
        if (mode == "native" and "native" in found) or (options.mode and mode != options.mode):
            continue
        start = time.monotonic()
        found[mode], notes = _run(options, mode)
        unfinished = [note["unfinished"] for note in notes if "unfinished" in note]
        if mode == "enabled":
            found["stats"], found["shadow"] = _added([note for note in notes if "stats" in note])
            found["unfinished"] = unfinished
        print(f"{mode} on {_where(options)}: {common.counts(found[mode])}, "
              f"{time.monotonic() - start:.0f} s"
              + (f"; {len(unfinished)} parts did not come to their end" if unfinished else ""),
              flush=True)
    if "native" in found and "enabled" in found:
        found["regressions"] = _examined(options, found)
    Path(options.out).write_text(json.dumps(found, indent=0))
    return _report(found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hostsuites.pyg_suite",
                                     description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True,
                        help="the folder that holds PyG's `test`")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--default-device", action="store_true",
                        help="under torch.set_default_device(\"cuda\")")
    parser.add_argument("--emulate", action="store_true", help="the kernels, emulated on the CPU")
    parser.add_argument("--no-shadow", action="store_true", help="outcomes alone")
    parser.add_argument("--mode", choices=("native", "enabled"), help="one run alone")
    parser.add_argument("--against", help="results of an earlier run, whose native part is taken")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=list(FOLDERS),
                        help="folders, files or tests below --source")
    parser.add_argument("-k", help="as of pytest")
    parser.add_argument("--seconds", type=float, default=86400.0,
                        help="for all of it; the rest is left out")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    options.source = options.source.resolve()
    options.deadline = time.monotonic() + options.seconds
    return options


def _where(options: argparse.Namespace) -> str:
    return options.device + (" by default"
                             if options.default_device
                             else "") + (", emulated" if options.emulate else "")


def _suite(options: argparse.Namespace, mode: str, shadow: bool) -> common.Suite:
    backend = "cuda" if options.emulate else "auto" if options.device == "cuda" else "torch"
    plugin = dict(mode=mode, backend=backend, shadow=shadow,
                  default_device="cuda" if options.default_device else None,
                  emulate=options.emulate)
    # no decision by what was calibrated
    environment = {"HOSTSUITE_PYG": json.dumps(plugin), "GNNACCEL_CACHE_DIR": os.devnull}
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    more = ("-k", options.k) if options.k else ()
    return common.Suite(options.source, "tests.hostsuites.pyg_plugin", (*_MARKED, *more),
                        environment, options.processes, deadline=options.deadline)


def _run(options: argparse.Namespace, mode: str) -> tuple[common.Outcomes, list[dict]]:
    tests = [target for target in options.only if "::" in target]
    folders = [target for target in options.only if "::" not in target]
    chunks = (common.chunks_of(options.source, folders, 3 * options.processes, _SHARES)
              if folders else [])
    return _suite(options, mode,
                  not options.no_shadow).run([*chunks,
                                              *([common.Chunk(tuple(tests))] if tests else [])])


def _examined(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, dict]:
    """The regressions, each run again natively and without the shadow, which might have disturbed
    it."""
    tests = common.regressions(found["native"], found["enabled"], not found["unfinished"])
    again: dict[str, common.Outcomes] = {}
    options.deadline = max(options.deadline, time.monotonic() + _SECOND_LOOK)
    for name, mode in (("native", "native"), ("unshadowed", "enabled")):
        again[name] = (_suite(options, mode, False).run(_spread(tests, options.processes))[0]
                       if tests else {})
    return {test: {**found["enabled"].get(test, {"outcome": "gone"}),
                   **{f"again {name}": run.get(test, {"outcome": "gone"})["outcome"]
                      for name, run in again.items()}}
            for test in tests}


def _spread(tests: list[str], number: int) -> list[common.Chunk]:
    return [common.Chunk(part) for part in (tuple(tests[at::number]) for at in range(number))
            if part]


def _added(notes: list[dict]) -> tuple[dict, dict]:
    """Calls by layer and route or reason, and by what became of their comparison, of all
    processes."""
    calls: dict[str, Counter] = {}
    compared: Counter = Counter()
    for note in notes:
        compared.update(note["shadow"])
        for layer, entry in note["stats"].items():
            calls.setdefault(layer, Counter()).update({**entry["routes"], **entry["reasons"]})
    return {layer: dict(counter) for layer, counter in sorted(calls.items())}, dict(compared)


def _report(found: dict[str, Any]) -> int:
    for test, outcome in found.get("regressions", {}).items():
        again = ", ".join(f"{name[6:]} {value}" for name, value in outcome.items()
                          if name.startswith("again"))
        last = (outcome.get("error") or "").strip().splitlines()[-1:]
        print(f"REGRESSION {test}: {outcome['outcome']} (again: {again}) {''.join(last)[:200]}")
    enabled = found.get("enabled", {})
    alarms = [(test, text) for test, outcome in enabled.items()
              for text in outcome.get("alarms", ())]
    for test, text in alarms:
        print(f"ALARM {test}: {text}")
    print(f"{len(found.get('regressions', {}))} regressions, {len(alarms)} alarms, "
          f"{len(common.repairs(found.get('native', {}), enabled))} fail in the "
          f"host alone; compared: {found.get('shadow')}")
    return 1 if found.get("regressions") or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
