"""Data-parallel training: two processes, native and accelerated, lose what one process loses."""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

SCRIPT = Path(__file__).parents[2] / "examples" / "ddp.py"
SMALL = ["--steps", "6", "--warm", "2", "--nodes", "60", "--batches", "2"]

pytestmark = pytest.mark.skipif(not dist.is_available(),
                                reason="this torch has no torch.distributed")


@pytest.fixture(scope="module")
def ddp():
    spec = importlib.util.spec_from_file_location("ddp", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ddp"] = module  # processes that are started look it up by name
    spec.loader.exec_module(module)
    return module


def run(*arguments: str, start: tuple[str, ...] = ()) -> str:
    done = subprocess.run([sys.executable, *start, str(SCRIPT), *arguments], capture_output=True,
                          text=True, timeout=240,
                          env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]),
                               "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def judge(found: dict, processes: list[str], routes: set[str]) -> None:
    assert list(found["processes"]) == processes and found["processes"][processes[0]]["kept"] == 1.0
    assert found["largest_loss_difference"] < 1e-5
    for ways in found["processes"].values():
        assert ways["gain"] == ways["native"]["ms"] / ways["gnnaccel"]["ms"] > 0 and ways["native"][
            "epochs_per_s"] > 0
        assert sum(ways["gnnaccel"]["routes"].values()) == 12 and routes <= set(
            ways["gnnaccel"]["routes"])
        assert not ways["native"]["routes"]
        assert ways["native"]["losses"][-1] < ways["native"]["losses"][0] < 4


@pytest.mark.gpu
def test_as_many_processes_as_gpus(tmp_path):
    out, count = tmp_path / "ddp.json", min(2, torch.cuda.device_count())
    processes = [str(i) for i in range(1, count + 1)]
    run(*SMALL, "--device", "cuda", "--port", "29614", "--processes", ",".join(processes), "--json",
        str(out))
    judge(json.loads(out.read_text()), processes, {"cuda"})


@pytest.mark.long
def test_under_torchrun(tmp_path):
    out = tmp_path / "ddp.json"
    shown = run(*SMALL, "--device", "cpu", "--json", str(out),
                start=("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
                       "29615"))
    assert [line.split()[0] for line in shown.splitlines()[-2:]] == ["1", "2"]
    judge(json.loads(out.read_text()), ["1", "2"], set())


def test_shares_are_equal(ddp, capsys):
    with pytest.raises(SystemExit):
        ddp.main(["--processes", "3", "--graphs", "8"])
    assert "cannot be shared equally by 3" in capsys.readouterr().err
