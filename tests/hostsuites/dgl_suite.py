"""DGL's own tests, natively and with gnnaccel enabled: ``python -m tests.hostsuites.dgl_suite --source DIR --device cpu``.

DIR holds the ``tests`` folder of DGL's repository at the tag of the installed version. Each file runs in a process of its own,
and in another one after a crash; results are compared test by test. ``--device gpu`` is for the wheel without CUDA, through the
bridge: there is no native run on a GPU, so it is compared with the native run on the CPU. ``simulated`` is ``gpu`` without one.
"""
from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: folders and files of ``tests/python`` that are run; those left out need data sets, other backends or several machines
FILES = ("common/*.py", "common/ops/*.py", "common/function/*.py", "common/transforms/*.py", "common/utils/*.py",
         "common/backend/*.py", "common/cuda/*.py", "pytorch/cuda/*.py", "common/dataloading/*.py", "common/sampling/*.py",
         "common/data/test_serialize.py", "common/data/test_utils.py", "pytorch/*.py", "pytorch/nn/*.py", "pytorch/nn/conv/*.py",
         "pytorch/mpops/*.py", "pytorch/optim/*.py", "pytorch/geometry/*.py", "pytorch/utils/*.py", "pytorch/dataloading/*.py")
#: large files, and into how many processes each is divided
SHARES = {"test_nn.py": 4, "test_ops.py": 3, "test_heterograph.py": 2, "test_transform.py": 2, "test_sampling.py": 2,
          "test_optim.py": 2, "test_heterograph-kernel.py": 2}
_CRASHES = 25  # processes that one file may take with it


def main() -> int:
    """Run what was asked for, write the results, print the regressions; 1 if there are any."""
    options = _options()
    deadline = time.monotonic() + options.seconds
    runs = {}
    modes = ["native", "enabled"] if not (options.native or options.enabled) else ["native"] if options.native else ["enabled"]
    for mode in modes:
        device = "cpu" if mode == "native" else options.device
        runs[mode] = run(options, mode, device, deadline)
        print(f"{mode} on {device}: {dict(collections.Counter(r['outcome'] for r in runs[mode].values()))}")
    if options.against:
        runs["native"] = json.loads(Path(options.against).read_text())["native"]
    Path(options.out).write_text(json.dumps(runs, indent=0))
    if len(runs) < 2:
        return 0
    found = regressions(runs["native"], runs["enabled"])
    for test in found:
        result = runs["enabled"][test]
        print(f"{result['outcome']}: {test}\n    {result.get('error', '')} {result.get('at', '')}")
    print(f"{sum(r.get('compared', 0) for r in runs['enabled'].values())} calls compared")
    alarms = {test: result["shadow"] for test, result in runs["enabled"].items() if result.get("shadow")}
    for test, lines in alarms.items():
        print(f"other numbers: {test}\n    " + "\n    ".join(lines[:3]))
    print(f"{len(found)} regressions, {len(alarms)} tests with other numbers")
    return 1 if found or alarms else 0


def regressions(native: dict, enabled: dict) -> list[str]:
    """Tests that pass natively and neither pass nor are skipped when enabled."""
    return sorted(test for test, result in enabled.items() if result["outcome"] not in ("passed", "skipped", "not run")
                  and native.get(test, {}).get("outcome") == "passed")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, type=Path, help="folder that holds DGL's tests/")
    parser.add_argument("--device", choices=("cpu", "gpu", "simulated"), default="cpu")
    parser.add_argument("--native", action="store_true", help="only the native run, on the CPU")
    parser.add_argument("--enabled", action="store_true", help="only the enabled run")
    parser.add_argument("--against", help="results with a native run to compare with")
    parser.add_argument("--shadow", action="store_true", help="compare values and gradients of every call with the host's own")
    parser.add_argument("--files", nargs="*", default=FILES, help="patterns under tests/python")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--seconds", type=float, default=36000, help="for everything; what is left then is not run")
    parser.add_argument("--out", required=True, help="results as JSON")
    return parser.parse_args()


def run(options: argparse.Namespace, mode: str, device: str, deadline: float) -> dict[str, dict]:
    """Test -> its result, of all files in this mode."""
    root = options.source.resolve() / "tests" / "python"
    files = list(dict.fromkeys(file for pattern in options.files for file in sorted(root.glob(pattern))
                               if file.name.startswith("test_")))
    jobs = [(file, share, SHARES.get(file.name, 1)) for file in files for share in range(SHARES.get(file.name, 1))]
    jobs.sort(key=lambda job: -job[0].stat().st_size)
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(lambda job: _file(options, mode, device, job, Path(scratch), deadline), jobs):
            results.update(found)
    return results


def _file(options, mode: str, device: str, job: tuple, scratch: Path, deadline: float) -> dict[str, dict]:
    """The share of one file, begun again behind each test that took the process with it."""
    file, share, of = job
    root = options.source.resolve() / "tests"
    lines = scratch / f"{mode}-{file.parent.name}-{file.stem}-{share}.jsonl"
    # read by every Python that a test starts: DGL does not import there without gnnaccel on a current torch
    code = "import gnnaccel\n" + ("gnnaccel.enable(when='supported')\n" if mode == "enabled" and device != "simulated" else "")
    (scratch / "sitecustomize.py").write_text(code)
    env = {**os.environ, "HOSTSUITE_MODE": mode, "HOSTSUITE_DEVICE": device, "HOSTSUITE_RESULTS": str(lines),
           "HOSTSUITE_SHARD": f"{share}/{of}", "HOSTSUITE_SHADOW": str(int(options.shadow)), "DGLBACKEND": "pytorch",
           "DGLTESTDEV": "cpu" if device == "cpu" else "gpu", "OMP_NUM_THREADS": "1", "GNNACCEL_CACHE_DIR": os.devnull,
           "PYTHONPATH": os.pathsep.join([str(scratch), os.getcwd(), str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.hostsuites.dgl_plugin", "-p",
               "no:cacheprovider", "-p", "no:randomly", "-c", os.devnull, "--rootdir", str(root / "python"), "--tb=no", str(file)]
    last = None
    for _ in range(_CRASHES):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        code, text = _call(command, env, scratch, left)
        results = _read(lines)
        if code in (0, 1, 5, None):
            return results
        if not results or len(results) == last:  # it died before any test
            return {**results, str(file.relative_to(root / "python")): {"outcome": "not collected", "error": text}}
        last = len(results)
    return _read(lines)


def _call(command: list[str], env: dict, folder: Path, seconds: float) -> tuple[int | None, str]:
    """A process's exit code, None if it took too long, and the end of what it said. What it started ends with it."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        said.seek(0)
        return code, " | ".join(said.read().strip().splitlines()[-4:])[:500]


def _read(lines: Path) -> dict[str, dict]:
    """What is known of each test: the worst of what was written, "crashed" where only its start was."""
    results: dict[str, dict] = {}
    for text in lines.read_text().splitlines() if lines.exists() else ():
        line = json.loads(text)
        test = line.pop("test")
        before = results.get(test)
        if before is None or before["outcome"] in ("crashed", "passed") or line["outcome"] == "device lost":
            results[test] = line if line["outcome"] != "started" else {"outcome": "crashed"}
    return results


if __name__ == "__main__":
    sys.exit(main())
