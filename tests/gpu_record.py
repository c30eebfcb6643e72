"""The tests that need a GPU, and the record that they passed for the present sources.

    python tests/gpu_record.py --run [pytest arguments]   run them, write tests/gpu_record.json
           [--oracle-seconds 60]                          then random cases for so long; 0: none
    python tests/gpu_record.py --again                    run those that failed once more, for the
                                                          same sources, where tests were mended
    python tests/gpu_record.py --check                    is it complete, green, of these sources?
    python tests/gpu_record.py --hash                     the hash that the record must have

CI has no GPU: it can only check that somebody ran these tests after the last change. --check and
--hash need nothing but the standard library.
"""
from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
FOLDERS = ("gnnaccel/cuda", "gnnaccel/dispatch", "gnnaccel/adapters")
SUFFIXES = {".py", ".cu", ".cuh"}
PACKAGES = {"torch": ("torch",), "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
            "torch_geometric": ("torch-geometric",), "dgl": ("dgl",)}


def sources_hash(root: Path) -> str:
    """SHA-256 over the sorted relative paths and contents of all kernel, dispatch and adapter
    sources."""
    files = [path for folder in FOLDERS for path in (root / folder).rglob("*")
             if path.suffix in SUFFIXES]
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def complaint(root: Path, record_path: Path) -> str | None:
    """Why the record does not vouch for the present sources; None if it does."""
    try:
        record = json.loads(record_path.read_text())
        schema, tested, counts, arguments = (record[key]
                                             for key in ("schema", "hash", "counts", "arguments"))
    except OSError:
        return f"{record_path.name} is missing: run make gpu-test on a machine with a GPU"
    except (ValueError, KeyError, TypeError):
        return f"{record_path.name} is not a record: run make gpu-test on a machine with a GPU"
    if schema != SCHEMA:
        return f"{record_path.name} has schema {schema}, not {SCHEMA}: run make gpu-test again"
    if tested != sources_hash(root):
        return ("sources changed since the GPU tests were recorded: run make gpu-test on a "
                "machine with a GPU")
    if arguments:
        return (f"the record is of a partial run ({' '.join(arguments)}): run make gpu-test "
                "without ARGS")
    if counts["failed"]:
        return f"{counts['failed']} GPU tests failed when they were recorded"
    alarms = len((record.get("oracle") or {}).get("alarms", ()))
    if alarms:
        return f"{alarms} random cases alarmed on the GPU when they were recorded"
    return None if counts["passed"] else "the record counts no passed test"


class Counts:
    """A pytest plugin that counts tests by outcome."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failures: list[str] = []
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report) -> None:
        # A test is three phases. Its call decides, and so does a set-up or tear-down that did not
        # pass.
        if report.when == "call" or report.outcome != "passed":
            self.count(report)

    def pytest_collectreport(self, report) -> None:
        if report.outcome != "passed":
            self.count(report)

    def count(self, report) -> None:
        self.counts[report.outcome] += 1
        if report.outcome == "failed":
            self.failures.append(report.nodeid)
            self.passed.discard(report.nodeid)
        elif report.outcome == "passed":
            self.passed.add(report.nodeid)


def versions() -> dict[str, str | None]:
    """Versions of what the tests ran on; None where it is not installed."""
    def installed(names: tuple[str, ...]) -> str | None:
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                pass
        return None

    import torch

    found = {key: installed(names) for key, names in PACKAGES.items()}
    return {**found, "cuda": torch.version.cuda, "python": sys.version.split()[0]}


def parallel() -> list[str]:
    """Arguments that spread the tests over processes, which share the GPU: compiling kernels takes
    a core each."""
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(min(28, os.cpu_count() or 1)), "--dist", "worksteal"]


def oracle(seconds: float) -> dict | None:
    """Random cases on the GPU for so many seconds: how many ran, with how many alarms, by part."""
    if not seconds:
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "oracle.json"
        seed = int(time.time()) % 100_000
        command = [sys.executable, "-m", "tests.oracle", "--backend", "gpu", "--seconds",
                   str(seconds)]
        processes = str(min(16, os.cpu_count() or 1))
        command += ["--seed", str(seed), "--processes", processes, "--out", str(out)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        nothing = {"counts": {},
                   "alarms": [{"reproduce": "the oracle itself did not come to its end"}]}
        found = json.loads(out.read_text()) if out.exists() else nothing
    parts = {key.split()[0]: {k: int(amounts.get(k, 0))
                              for k in ("cases", "checks", "refused", "alarms")}
             for key, amounts in found["counts"].items()}
    alarms = [alarm["reproduce"] for alarm in found["alarms"]]
    return {"seed": seed, "seconds": seconds, "parts": parts, "alarms": alarms}


def run(arguments: list[str], record_path: Path, oracle_seconds: float = 0) -> int:
    """Runs the suite, then the oracle, writes the record after each; returns the exit status."""
    import pytest
    import torch

    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing was run or recorded")
        return 1
    _from_root()
    before, start, counts = sources_hash(ROOT), time.time(), Counts()
    status = int(pytest.main(["-q", "-m", "gpu", *parallel(), *arguments], plugins=[counts]))
    record: dict = {
        "schema": SCHEMA, "hash": before, "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "arguments": arguments,
        "counts": counts.counts, "failures": counts.failures,
    }
    for step in (None, oracle_seconds):
        found = None if step is None else oracle(step)
        if sources_hash(ROOT) != before:
            print("sources changed while the tests ran: nothing more was recorded")
            return 1
        record.update(seconds=round(time.time() - start, 1), oracle=found)
        record_path.write_text(json.dumps(record, indent=2) + "\n")
    return status or int(bool(record["oracle"] and record["oracle"]["alarms"]))


def _from_root() -> None:
    os.chdir(ROOT)
    # A script's own folder comes first on the path: tests/profile would hide the standard
    # library's.
    sys.path[:] = [str(ROOT),
                   *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "tests")]


def again(record_path: Path, root: Path = ROOT) -> int:
    """Runs the recorded failures once more and counts those that pass as passed; the record names
    them. Nothing is done where the sources are others than the record's."""
    import pytest

    record = json.loads(record_path.read_text())
    if record["hash"] != sources_hash(root):
        print("sources changed since the GPU tests were recorded: nothing was run")
        return 1
    _from_root()
    counts = Counts()
    status = int(record["failures"] and pytest.main(
        ["-q", "-m", "gpu", *record["failures"]], plugins=[counts]) or 0)
    passed = [test for test in record["failures"] if test in counts.passed]
    record["counts"]["passed"] += len(passed)
    record["counts"]["failed"] -= len(passed)
    record["failures"] = [test for test in record["failures"] if test not in passed]
    record["again"] = record.get("again", []) + passed
    before = record.get("oracle") or {}
    if before.get("alarms"):  # other random cases, once what alarmed is understood
        record["again"] += before["alarms"]
        record["oracle"] = oracle(before["seconds"])
        status = status or int(bool(record["oracle"]["alarms"]))
    record_path.write_text(json.dumps(record, indent=2) + "\n")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    for name in ("run", "again", "check", "hash"):
        action.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--oracle-seconds", type=float, default=60)
    args, rest = parser.parse_known_args()
    record_path = ROOT / "tests" / "gpu_record.json"
    if args.run:
        return run(rest, record_path, args.oracle_seconds)
    if args.again:
        return again(record_path)
    if args.hash:
        print(sources_hash(ROOT))
        return 0
    problem = complaint(ROOT, record_path)
    print(problem or "the GPU tests passed for these sources")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
