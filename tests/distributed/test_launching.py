"""``python -m gnnaccel --partition``: what is set up around a script, in processes as torchrun starts
them."""
from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torch_geometric")

from gnnaccel.errors import PartitionError

pytestmark = pytest.mark.skipif(not dist.is_available(),
                                reason="this torch has no torch.distributed")
ROOT = Path(__file__).parents[2]

SCRIPT = """
    import random, torch, torch.nn.functional as F
    from torch_geometric.data import Data
    from torch_geometric.nn import GCNConv
    torch.manual_seed(1)
    x, edges = torch.randn(50, 4), torch.randint(0, 50, (2, 300))
    layer = GCNConv(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(x, edges), x[:, :3].argmax(1))
        loss.backward()
        optimizer.step()
        print(round(loss.item(), 5))
        if {fails} and step and torch.distributed.get_rank() == 1:
            raise ValueError("the script's own")
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launched(folder, world=2, fails=False, **environment):
    """(exit status, standard output, standard error) of each process."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.replace("{fails}", str(fails))))
    known = {name: value for name, value in os.environ.items() if not name.startswith("GNNACCEL")}
    known.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1",
                 MASTER_PORT=str(free_port()), WORLD_SIZE=str(world), **environment)
    started = [subprocess.Popen([sys.executable, "-m", "gnnaccel", "--partition=100", str(script)],
                                env={**known, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for rank in range(world)]
    return [(*process.communicate(timeout=100), process.returncode) for process in started]


@pytest.mark.long
def test_a_script_as_it_is(tmp_path):
    (out, err, status), (silent, _, other) = launched(tmp_path)
    assert status == other == 0, err
    alone = io.StringIO()
    with contextlib.redirect_stdout(alone):
        exec(textwrap.dedent(SCRIPT.replace("{fails}", "False")), {})
    assert out == alone.getvalue() and len(out.split()) == 3 and not silent
    assert "2 processes divided GCNConv (3 calls)" in err


@pytest.mark.long
def test_one_failure_ends_all(tmp_path):
    (_, first, status), (_, second, other) = launched(tmp_path, fails=True)
    assert status == 1 and other == 1
    assert "rank 0 ends because rank 1 failed" in first and "Traceback" not in first
    assert "the script's own" in second


@pytest.mark.parametrize("given, local, left", [
    (None, 2, "2"), ("4,6", 1, "6"), ("GPU-a,GPU-b", 0, "GPU-a"), ("", 0, "")])
def test_each_process_sees_the_gpu_of_its_local_rank(monkeypatch, given, local, left):
    from gnnaccel.adapters.pyg.distributed import script

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    script._own_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


def test_a_process_without_a_gpu_of_its_own(monkeypatch):
    from gnnaccel.adapters.pyg.distributed import script

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(PartitionError, match="process 2 of this host has no GPU"):
        script._own_gpu()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PartitionError, match="in use already"):
        script._own_gpu()


@pytest.mark.long
def test_without_a_launcher_it_says_how_to_start(tmp_path):
    known = {name: value for name, value in os.environ.items() if name != "RANK"}
    ran = subprocess.run([sys.executable, "-m", "gnnaccel", "--partition", "train.py"], text=True,
                         capture_output=True, env={**known, "PYTHONPATH": str(ROOT)}, timeout=100)
    assert ran.returncode == 2 and "torchrun --nproc-per-node N -m gnnaccel" in ran.stderr
