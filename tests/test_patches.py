"""docs/patches.md lists what is replaced now, and everything replaced has a reason there."""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnnaccel.profile import patches

DOC = Path(__file__).resolve().parents[1] / "docs" / "patches.md"


@pytest.mark.long
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("torch_geometric", "dgl"))),
                    reason="it is about both hosts")
def test_it_is_current():
    """In a process of its own, without a GPU: with one, DGL's bridge replaces more."""
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("GNNACCEL")}
    made = subprocess.run([sys.executable, "-m", "gnnaccel.profile.patches"], capture_output=True,
                          text=True, check=False,
                          env={**environment, "PYTHONPATH": str(DOC.parents[1]),
                               "CUDA_VISIBLE_DEVICES": ""})
    assert made.returncode == 0, made.stderr
    assert made.stdout == DOC.read_text(
        encoding="utf-8"), "python -m gnnaccel.profile.patches > docs/patches.md"


def test_what_has_no_reason_is_an_error():
    with pytest.raises(ValueError, match=r"torch\.matmul is replaced, and no group"):
        patches.grouped("torch", ["torch.matmul"])


@pytest.mark.parametrize("host, path, title", [
    ("pyg", "torch_geometric.nn.conv.gat_conv.GATConv.forward", "Layers as a whole"),
    ("pyg", "torch_geometric.transforms.gcn_norm.GCNNorm.forward",
     "What depends on the edges alone"),
    ("pyg", "torch_geometric.nn.pool.glob.scatter", "Pools, scatter, segment, softmax"),
    ("dgl", "dgl.backend.pytorch.edge_softmax", "Operations under all message passing")])
def test_groups(host, path, title):
    assert [group.title for group in patches.grouped(host, [path])] == [title]
