"""The demo runs from end to end on a small graph, on the CPU, and writes what it measured."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch_geometric")

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/quickstart.py", "--device", "cpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=300)


@pytest.mark.long
def test_quickstart_on_a_file(tmp_path):
    random = np.random.default_rng(0)
    np.savez(tmp_path / "graph.npz", edge_index=random.integers(0, 60, (2, 300)),
             x=random.normal(size=(60, 7)), y=random.integers(-1, 3, 60))
    done = run("--data", str(tmp_path / "graph.npz"), "--epochs", "3", "--json",
               str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    for side in ("native", "gnnaccel"):
        assert result[side]["epochs_per_s"] > 0 and 0 <= result[side]["test"] <= 1
    assert result["compiled"] == {"kernels": 0, "pending": 0,
                                  "seconds": 0.0} and "compiling or loading" not in done.stdout
    assert {row["route"] for row in result["decisions"]} <= {"cuda", "torch", "native"}
    assert {row["layer"] for row in result["decisions"]} == {"first (GATConv)", "second (GATConv)"}


@pytest.mark.long
def test_quickstart_with_more_runs(tmp_path):
    random = np.random.default_rng(0)
    np.savez(tmp_path / "graph.npz", edge_index=random.integers(0, 60, (2, 300)),
             x=random.normal(size=(60, 7)), y=random.integers(-1, 3, 60))
    done = run("--data", str(tmp_path / "graph.npz"), "--epochs", "3", "--torch-compile",
               "--capture", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["torch.compile"]["epochs_per_s"] > 0 and result["capture"]["epochs_per_s"] > 0
    assert "torch.compile: " in done.stdout and "capture: " in done.stdout


@pytest.mark.long
def test_quickstart_names_a_file_that_is_not_there(tmp_path):
    done = run("--data", str(tmp_path / "nothing.npz"))
    assert done.returncode == 1
    assert "nothing.npz is not a file" in done.stderr and "Traceback" not in done.stderr
