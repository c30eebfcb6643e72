"""A core of the suite against the oldest and the newest torch and PyG, with every Python found on
this machine: ``make matrix``.

Each Python gets an environment for each torch under ``.venv-matrix``, made by pip once, and in it one
PyG after the other. An environment takes up to 6 GB. What came out is kept in ``tests/matrix.json``; ``--table`` prints it as the section of
``docs/compatibility.md``. The oldest releases are the lower bounds in ``setup.cfg``, the newest
ones those pinned in ``constraints.txt``.
"""
from __future__ import annotations

import argparse
import configparser
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "matrix.json"
HOME = ROOT / ".venv-matrix"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
CORE = ("tests/surface/test_import.py", "tests/pyg/test_session.py",
        "tests/pyg/test_plain_layers.py", "tests/pyg/test_options_gat.py",
        "tests/pyg/test_options_rgcn.py", "tests/pyg/test_propagate.py",
        "tests/profile/test_doctor.py")
#: PyG 2.6's own to_hetero fails with torch 2.13
LEFT_OUT = "not heterogeneous_model"
BESIDE = ("numpy", "packaging", "platformdirs", "rich", "filelock", "pytest", "hypothesis", "scipy")
TITLE = "## Versions that were tested together"


class Row(NamedTuple):
    """One combination: versions such as "3.11", "2.4.0" and "2.6.0"."""

    python: str
    torch: str
    pyg: str

    @property
    def folder(self) -> Path:
        return HOME / f"py{self.python}-torch{self.torch}"


def releases(package: str) -> tuple[str, str]:
    """(oldest, newest) of ``package``: what setup.cfg allows at least, and what tests are pinned
    to."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    required = "\n".join([setup["options"]["install_requires"],
                          setup["options.extras_require"]["pyg"]])
    oldest = re.search(rf"^{package}>=([\d.]+)", required, re.M)
    newest = re.search(rf"^{package}==([\d.]+)$",
                       (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    if oldest is None or newest is None:
        raise SystemExit(f"matrix: {package} has no lower bound in setup.cfg, or no version in "
                         "constraints.txt")
    return f"{oldest[1]}.0", newest[1]


def interpreters() -> dict[str, str]:
    """The Pythons that run on this machine, by version: ``python3.11`` and so on in the search
    path, and those that pyenv keeps."""
    found = {}
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PYTHONS:
        for path in [shutil.which(f"python{version}"), *kept.glob(f"{version}.*/bin/python")]:
            if path and _runs(str(path)) == version:
                found.setdefault(version, str(path))
    return found


def _runs(path: str) -> str | None:
    asked = subprocess.run([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                           capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None


def rows(pythons: Sequence[str], torch: Sequence[str] = (),
         pyg: Sequence[str] = ()) -> Iterator[Row]:
    """Every combination of a Python with a torch and a PyG: the oldest and the newest release where
    none are named."""
    for versions in itertools.product(pythons, torch or releases("torch"),
                                      pyg or releases("torch-geometric")):
        yield Row(*versions)


def prepare(row: Row, interpreter: str) -> str | None:
    """Make the environment of ``row`` unless it is there, and put its PyG in. What pip said where
    it could not; None where all is well."""
    ready = row.folder / ".ready"
    if not ready.exists():
        shutil.rmtree(row.folder, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", row.folder], check=True)
        problem = _install(row, f"torch=={row.torch}", *BESIDE)
        if problem is not None:
            shutil.rmtree(row.folder, ignore_errors=True)
            return problem
        ready.touch()
    return _install(row, f"torch=={row.torch}", f"torch-geometric=={row.pyg}")


def _install(row: Row, *packages: str) -> str | None:
    """pip's first error, None where it succeeded."""
    made = subprocess.run([row.folder / "bin" / "python", "-m", "pip", "-q",
                           "--disable-pip-version-check", "install", *packages],
                          capture_output=True, text=True, check=False)
    errors = [line for line in made.stderr.splitlines() if line.startswith("ERROR")]
    return ((errors or [f"pip ended with status {made.returncode}"])[0] if made.returncode
            else None)


def run(row: Row, more: list[str]) -> dict:
    """Run the core in the environment of ``row``: the record of it."""
    report = row.folder / "report.xml"
    report.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("GNNACCEL", "PYTEST", "PYTHON"))}
    subprocess.run([row.folder / "bin" / "python", "-m", "pytest", "-q", "-m", "not gpu", "--few",
                    "-k", LEFT_OUT, "-p", "no:cacheprovider", f"--junitxml={report}",
                    *(more or CORE)], cwd=ROOT, check=False,
                   env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    if not report.exists():
        return {"outcome": "pytest did not run to its end"}
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    return {"outcome": "failed" if failed else "passed", "failed": failed, "skipped": skipped,
            "passed": int(suite.get("tests", 0)) - failed - skipped,
            "machine": f"{platform.system()} {platform.machine()}"}


def table(record: dict[str, dict]) -> str:
    """The section of docs/compatibility.md about the rows in ``record``."""
    lines = [TITLE, "", "What `make matrix` found: a core of the suite that needs no GPU, on the "
             "CPU, for each Python of one machine with the oldest torch and", "PyG and those of "
             "`constraints.txt`, and with releases that were named. Only what stands here was run. "
             "DGL is not part of it.", "",
             "| Python | torch | PyG | outcome |", "|---|---|---|---|"]
    for name, found in sorted(record.items(), key=lambda item: _order(item[0])):
        outcome = found["outcome"]
        if "passed" in found:
            outcome = ", ".join(f"{found[kind]} {kind}" for kind in ("passed", "failed", "skipped")
                                if found[kind])
        lines.append(f"| {' | '.join(name.split())} | {outcome} |")
    return "\n".join(lines) + "\n"


def _order(name: str) -> list[list[int]]:
    return [[int(part) for part in version.split(".")] for version in name.split()]


def load() -> dict[str, dict]:
    """What earlier runs kept, by "Python torch PyG"."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def main(arguments: list[str] | None = None) -> int:
    """Run the combinations asked for; 1 if a test failed in any."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--table", action="store_true", help="print what earlier runs kept")
    parser.add_argument("--python", nargs="+", help="only these, such as 3.11")
    parser.add_argument("--torch", nargs="+", help="these releases of torch instead")
    parser.add_argument("--pyg", nargs="+", help="these releases of PyG instead")
    parser.add_argument("tests", nargs="*", help="tests to run instead of the core; not recorded")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(load()), end="")
        return 0
    found, bad = interpreters(), False
    print(f"matrix: Pythons found: {', '.join(found) or 'none'}", flush=True)
    for row in rows([version for version in found if version in (options.python or found)],
                    options.torch or (), options.pyg or ()):
        problem = prepare(row, found[row.python])
        outcome = {"outcome": "not installable"} if problem else run(row, options.tests)
        bad |= outcome["outcome"] not in ("passed", "not installable")
        print(f"matrix: {' '.join(row)}: {outcome} {problem or ''}", flush=True)
        if not options.tests:
            RECORD.write_text(json.dumps({**load(), " ".join(row): outcome}, indent=1) + "\n",
                              encoding="utf-8")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
