"""Random cases, held against the host's own layers.

python -m tests.oracle --seconds 600 --seed 7
    all parts, on a GPU if there is one, else on both CPU backends
python -m tests.oracle table histories --backend emulated
    these parts only
python -m tests.oracle table GATConv --seed 123 --mode grad --backend emulated
    one case again
python -m tests.oracle table --replay 7000000:7000400:16 --backend emulated
    all cases of one process again
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from . import driver, worker

PARTS = tuple(driver.SHARES)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*",
                        help=f"parts out of {', '.join(PARTS)}; after one part, the name of a case")
    parser.add_argument("--seconds", type=float, default=60, help="of each backend")
    parser.add_argument("--seed", type=int, default=1,
                        help="of a run; with a name or one part and --mode or --one, of a case")
    parser.add_argument("--one", action="store_true", help="run the one case that --seed names")
    parser.add_argument("--mode", default="")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--backend", default="", help="cpu, emulated, gpu; several with commas")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cases", type=int, default=0,
                        help="at most so many of each part, instead of --seconds alone")
    parser.add_argument(
        "--scale",
        type=int,
        default=1,
        help="so many times as many nodes and edges, of the parts table, dgl and messages",
    )
    parser.add_argument("--replay", default="", help="first:last:step, the cases of one process")
    parser.add_argument("--out", default="", help="a file for a summary in JSON")
    return parser.parse_args(arguments)


def worker_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle worker")
    for name, kind in (
        ("part", str),
        ("backend", str),
        ("first", int),
        ("step", int),
        ("seconds", float),
        ("cases", int),
        ("only", str),
        ("mode", str),
    ):
        parser.add_argument(f"--{name}", type=kind)
    return parser.parse_args(arguments)


def backends(given: str) -> list[str]:
    if given:
        return given.split(",")
    import torch

    return ["gpu"] if torch.cuda.is_available() else ["cpu", "emulated"]


def tasks(options: argparse.Namespace, parts: list[str], backend: str) -> list[driver.Task]:
    """Processes for parts by their shares; with fewer processes than parts, parts take turns."""
    parts = [p for p in parts if p != "captures" or backend == "gpu"]
    whole = sum(driver.SHARES[p] for p in parts)
    found = []
    for part in parts:
        wanted = driver.SHARES[part] / whole * options.processes
        processes = max(1, round(wanted))
        seconds = options.seconds * min(1.0, wanted / processes)
        for k in range(processes):
            cases = -(-options.cases // processes) if options.cases else 1 << 40
            found.append(driver.Task(part, backend, options.seed * 1_000_000 + k, processes,
                                     seconds, cases, options.only, options.mode))
    return found


def one_case(options: argparse.Namespace, part: str, name: str) -> list[driver.Task]:
    first, last, step = options.seed, options.seed + 1, 1
    if options.replay:
        first, last, step = map(int, options.replay.split(":"))
    only = name or options.only
    return [driver.Task(part, backend, first, step, 3600, len(range(first, last, step)), only,
                        options.mode) for backend in backends(options.backend)]


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["worker"]:
        return worker.work(worker_options(arguments[1:]))
    options, start = parsed(arguments), time.time()
    if options.scale != 1:  # for the processes that this one starts
        os.environ["GNNACCEL_ORACLE_SCALE"] = str(options.scale)
    parts = [w for w in options.what if w in PARTS]
    names = [w for w in options.what if w not in PARTS]
    if names and len(parts) != 1:
        sys.exit(f"{names[0]} is no part; parts are {', '.join(PARTS)}")
    if len(parts) == 1 and (names or options.mode or options.one or options.replay):
        summary = driver.run(one_case(options, parts[0], " ".join(names)), options.processes)
    else:
        summary = driver.Summary()
        for backend in backends(options.backend):
            done = driver.run(tasks(options, parts or list(PARTS), backend), options.processes)
            summary.counts.update(done.counts)
            summary.alarms += done.alarms
        driver.reproduce(summary, options.processes)
    report = {**summary.as_dict(), "seconds": round(time.time() - start, 1), "seed": options.seed}
    for key, amounts in report["counts"].items():
        print(f"{key}: " + ", ".join(f"{value:g} {name}" for name, value in amounts.items()))
    for alarm in summary.alarms:
        if alarm.get("alone") is False:
            print("not by itself: " + alarm["reproduce"])
            print("  with the cases before it: " + alarm["replay"])
    alarms = sum(amounts["alarms"] for amounts in summary.counts.values())
    print(f"{alarms:.0f} alarms in {report['seconds']:.0f} s")
    if options.out:
        with open(options.out, "w") as file:
            json.dump(report, file, indent=1)
    return 1 if summary.alarms else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
