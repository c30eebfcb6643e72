"""The result file: a flat list of records, so that a run cut short loses nothing and runs can be
merged.

Only the standard library is needed to read one: tables and plots are made on other machines too.
"""
from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

FORMAT = "gnnaccel-bench"
VERSION = 1
KINDS = ("shape", "layer", "check", "floor", "structure", "fresh", "overhead", "kernel", "note",
         "relation", "memory", "compaction", "segment-gemm", "dgl", "aggregate", "fresh-plain",
         "spmm", "operation", "quantized", "quantized-model", "once", "script")


@dataclasses.dataclass
class Record:
    """One measurement, or the reason why there is none.

    ``kind`` is one of KINDS. ``timing`` holds milliseconds per call (``timing.Timing``'s fields);
    ``values`` holds whatever else the kind has: ``peak_mib`` and ``resident_mib`` in MiB,
    ``rel_l2`` and ``max_abs`` of a check, ``overhead_us`` in microseconds, ``floor_ms`` in
    milliseconds, what `once_cells.once_record` and `script_figures.record` say. ``error`` is the
    text of a failure ("out of memory", ...).
    """

    kind: str
    shape: str = ""
    layer: str = ""
    mode: str = ""
    impl: str = ""
    device: str = ""
    timing: dict | None = None
    values: dict = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def key(self) -> tuple:
        """What a record measures; of two with the same key the later one counts."""
        return self.kind, self.shape, self.layer, self.mode, self.impl, self.device

    @property
    def ms(self) -> float | None:
        return self.timing["ms"] if self.timing else None


@dataclasses.dataclass
class Result:
    provenance: dict = dataclasses.field(default_factory=dict)
    settings: dict = dataclasses.field(default_factory=dict)
    records: list[Record] = dataclasses.field(default_factory=list)

    def find(self, **fields) -> list[Record]:
        return [r for r in self.records if all(getattr(r, name) == value
                                               for name, value in fields.items())]

    def one(self, **fields) -> Record | None:
        """The latest record whose fields equal the given ones."""
        found = self.find(**fields)
        return found[-1] if found else None

    def save(self, path: str | Path) -> None:
        """Write by renaming, so a run killed while writing leaves the previous file whole."""
        path = Path(path)
        data = {"format": FORMAT, "version": VERSION, "provenance": self.provenance,
                "settings": self.settings, "records": [dataclasses.asdict(record)
                                                       for record in self.records]}
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(partial, path)


def load(path: str | Path) -> Result:
    """Read a result file. Raises ValueError when it is not one, or of another version."""
    data = json.loads(Path(path).read_text())
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise ValueError(f"{path} is not a {FORMAT} file of version {VERSION}")
    return Result(data["provenance"], data["settings"],
                  [Record(**record) for record in data["records"]])


def merge(results: list[Result]) -> Result:
    """One result out of several; where two measured the same thing, the later in the list
    counts."""
    records = {record.key: record for result in results for record in result.records}
    return Result(results[-1].provenance, results[-1].settings, list(records.values()))


def provenance(arguments: list[str]) -> dict:
    """Where and with what this was measured. ``arguments`` is the command line after ``python -m
    gnnaccel``."""
    import torch

    from gnnaccel import session

    versions = session.status()["versions"]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu, "cuda": torch.version.cuda, "torch": torch.__version__,
        "cupy": versions["cupy"], "torch_geometric": versions["torch_geometric"],
        "dgl": versions["dgl"], "python": platform.python_version(),
        "cpu_threads": torch.get_num_threads(), "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(
            timespec="seconds"),
        "command": " ".join(["python -m gnnaccel",  # no paths
                             *(argument.rpartition("/")[2] for argument in arguments)]),
    }


def _commit() -> str | None:
    """The git commit of this source tree, "+" after it when it has changes; None outside a
    checkout."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True,
                              text=True, timeout=10, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def progress(text: str) -> None:
    """A line for whoever waits; standard error, so that a table on standard output stays clean."""
    print(text, file=sys.stderr, flush=True)
