"""Running somebody else's test files in processes of their own, and holding the outcomes of two
runs against each other.

A process writes a line of JSON when a test starts and when it ends (`Journal`), so whatever ends
it, a device assert or a segmentation fault, is charged to one test, and another process goes on
with the rest.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
#: for the plugin: the path of its journal; that of a list of tests to leave out; "i/n": every n-th
#: test, from the i-th on
JOURNAL, SKIP, SHARE = "HOSTSUITE_JOURNAL", "HOSTSUITE_SKIP", "HOSTSUITE_SHARE"
ENDED = 70  # exit status of a process whose device cannot be used any more
_AROUND_TESTS = 600.0  # seconds in which a process may start, or end
_INI = "[pytest]\naddopts =\n"

Outcome = dict[str, Any]  # "outcome", "error", "seconds", and what the plugin adds
Outcomes = dict[str, Outcome]


class Journal:
    """The plugin's side: lines of JSON, each on disk before the next thing happens."""

    def __init__(self) -> None:
        self._file = open(os.environ[JOURNAL], "a", encoding="utf-8")

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def device_is_lost() -> bool:
    """Whether nothing runs on the GPU any more in this process."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def remaining(items: list[Any]) -> list[Any]:
    """Of pytest's items this process's share, without what an earlier process has done with."""
    done = set(json.loads(Path(os.environ[SKIP]).read_text(encoding="utf-8")))
    share, shares = map(int, os.environ[SHARE].split("/"))
    return [item for item in items[share::shares] if item.nodeid not in done]


class Chunk(NamedTuple):
    """``targets``: files or test ids, of which every ``shares``-th test is run."""

    targets: tuple[str, ...]
    share: int = 0
    shares: int = 1


@dataclass
class Suite:
    """``source``: the folder in which pytest runs; ``plugin``: dotted name of the pytest plugin;
    ``arguments``: more for pytest; ``environment``: for the plugin; ``patience``: seconds that a
    test may take before its process is ended; ``deadline``: by `time.monotonic`, when all processes
    are."""

    source: Path
    plugin: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    processes: int = 1
    patience: float = 120.0
    deadline: float = float("inf")

    def run(self, chunks: Iterable[Chunk]) -> tuple[Outcomes, list[dict]]:
        """The outcome of every test in the chunks, a process each, and the journals' other lines. A
        chunk that the deadline kept from its end adds the line ``{"unfinished": targets}``."""
        outcomes: Outcomes = {}
        notes: list[dict] = []
        with concurrent.futures.ThreadPoolExecutor(self.processes) as pool:
            try:
                for found, more in pool.map(self._chunk, chunks):
                    outcomes.update(found)
                    notes.extend(more)
            except BaseException:  # Ctrl-C, which processes in sessions of their own do not see
                self.deadline = 0.0
                raise
        return outcomes, notes

    def _chunk(self, chunk: Chunk) -> tuple[Outcomes, list[dict]]:
        outcomes: Outcomes = {}
        notes: list[dict] = []
        with tempfile.TemporaryDirectory() as folder:
            while time.monotonic() < self.deadline:
                before = len(outcomes)
                status, how = self._process(chunk, set(outcomes), Path(folder))
                running = _read(Path(folder, "journal"), outcomes, notes)
                if how == "unfinished":
                    break
                if running is not None:
                    outcomes[running] = dict(outcome=how or "crashed",
                                             error=_tail(Path(folder, "output")), seconds=0.0)
                elif status in (0, 1, 5):
                    return outcomes, notes
                if len(outcomes) == before:  # it dies before its first test
                    outcomes[chunk.targets[0]] = dict(outcome="crashed",
                                                      error=_tail(Path(folder, "output")),
                                                      seconds=0.0)
                    return outcomes, notes
        return outcomes, [*notes, {"unfinished": chunk.targets}]

    def _process(self, chunk: Chunk, done: set[str], folder: Path) -> tuple[int | None, str | None]:
        """Its exit status, or None and why it was ended."""
        journal, skip, ini = folder / "journal", folder / "skip", folder / "pytest.ini"
        journal.write_text("")
        skip.write_text(json.dumps(sorted(done)))
        ini.write_text(_INI)
        command = [sys.executable, "-m", "pytest", "-q", "-p", self.plugin, "-p",
                   "no:cacheprovider", "--import-mode=importlib", "-c", str(ini), "--rootdir",
                   str(self.source), "--tb=short", *self.arguments, *chunk.targets]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment,
                       JOURNAL: str(journal), SKIP: str(skip),
                       SHARE: f"{chunk.share}/{chunk.shares}"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT),
                                                     *filter(None,
                                                             [environment.get("PYTHONPATH")])])
        with open(folder / "output", "w") as output:
            process = subprocess.Popen(command, cwd=self.source, env=environment, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True)
            while process.poll() is None:
                time.sleep(0.2)
                idle, late = (time.time() - journal.stat().st_mtime,
                              time.monotonic() >= self.deadline)
                slow = (idle > self.patience
                        and (idle > _AROUND_TESTS or _read(journal, {}, []) is not None))
                if late or slow:
                    break
        ended = process.poll()
        with contextlib.suppress(ProcessLookupError):  # none is left
            # what a test started as well: it holds ports, and the processor
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return (None, "unfinished" if late else "hung") if ended is None else (ended, None)


def _read(journal: Path, outcomes: Outcomes, notes: list[dict]) -> str | None:
    """Take the journal's lines over; the test that started and did not end."""
    running = None
    for text in journal.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the process was ended while it wrote
            continue
        if "test" not in line:
            notes.append(line)
        elif "outcome" in line:
            outcomes[line.pop("test")] = line
            running = None
        else:
            running = line["test"]
    return running


def _tail(output: Path) -> str:
    return output.read_text(errors="replace")[-1500:]


def chunks_of(source: Path, targets: list[str], number: int,
              shares: dict[str, int] | None = None) -> list[Chunk]:
    """The test files under ``targets``, relative to ``source``: those named in ``shares`` in so
    many chunks each, then the others in about ``number`` of equal length of text, largest first."""
    files = sorted({found for target in targets for found in _files(source / target)},
                   key=lambda f: (-f.stat().st_size, f))
    found, rest = [], []
    for file in files:
        parts = (shares or {}).get(file.name, 0)
        found += [Chunk((str(file.relative_to(source)),), part, parts) for part in range(parts)]
        rest += [] if parts else [file]
    filled: list[tuple[int, tuple[str, ...]]] = [(0, ())
                                                 for _ in range(max(1, min(number, len(rest))))]
    for file in rest:
        smallest = min(filled, key=lambda chunk: chunk[0])
        filled.remove(smallest)
        filled.append((smallest[0] + file.stat().st_size,
                       (*smallest[1], str(file.relative_to(source)))))
    return found + [Chunk(names) for _, names in sorted(filled, key=lambda chunk: -chunk[0])
                    if names]


def _files(path: Path) -> Iterator[Path]:
    yield from [path] if path.is_file() else path.rglob("test_*.py")


# --- two runs -------------------------------------------------------------------------------------

_BAD = ("failed", "error", "crashed", "hung")


def regressions(native: Outcomes, enabled: Outcomes, complete: bool = True) -> list[str]:
    """Tests that the host passes, or skips, and that go wrong with gnnaccel; also those that this
    run lacks, if ``complete``."""
    return [test for test, found in native.items() if found["outcome"] not in _BAD
            and (enabled[test]["outcome"] in _BAD if test in enabled else complete)]


def repairs(native: Outcomes, enabled: Outcomes) -> list[str]:
    """Tests that go wrong in the host alone."""
    return [test for test, found in native.items() if found["outcome"] in _BAD
            and enabled.get(test, {"outcome": "gone"})["outcome"] == "passed"]


def counts(outcomes: Outcomes) -> str:
    """"3400 passed, 2 failed"."""
    found = Counter(outcome["outcome"] for outcome in outcomes.values())
    return ", ".join(f"{number} {name}" for name, number in found.most_common()) or "nothing ran"
