"""The installed DGL, imported in fresh processes: with gnnaccel first it imports, and all that
needs no graphbolt works."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DGL_DIST_MODE": "standalone"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True,
                          text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_graphbolt_is_real_or_says_what_is_missing():
    code = ("import gnnaccel, dgl\nfrom dgl import graph, DGLGraph\nimport dgl.graphbolt as gb\n"
            "if gb.__spec__.origin == 'stand-in by gnnaccel':\n    assert 'The "
            "rest of DGL works' in gb.__doc__\n"
            "    assert not hasattr(gb, 'ItemSampler')\nelse:\n    gb.ItemSampler\n"
            "print(gnnaccel.status()['enabled'])")
    assert run(code) == "False\n"


@pytest.mark.long
def test_sampling_and_distributed_graphs(tmp_path):
    code = (f"import os\nos.chdir({str(tmp_path)!r})\n"
            "import gnnaccel, dgl, torch\n"
            "g = dgl.add_self_loop(dgl.rand_graph(60, 300))\ng.ndata['h'] = torch.randn(60, 4)\n"
            "loader = dgl.dataloading.DataLoader(g, torch.arange(60), "
            "dgl.dataloading.NeighborSampler([3, 3]), batch_size=20)\n"
            "print(sum(len(blocks) for _, _, blocks in loader))\n"
            "dgl.distributed.partition_graph(g, 'x', 1, '.', part_method='random')\n"
            "print(dgl.distributed.load_partition('x.json', 0)[0].num_edges())\n"
            "dgl.distributed.initialize('ip.txt')\n"
            "whole = dgl.distributed.DistGraph('x', part_config='x.json')\n"
            "print(dgl.distributed.sample_neighbors(whole, torch.arange(5), 2).num_edges() > 0)\n")
    lines = run(code).splitlines()
    assert lines[0] == "6" and "360" in lines and lines[-1] == "True"


@pytest.mark.long
def test_enabling_before_and_after_the_import():
    code = ("import sys, gnnaccel\n{}\nfrom dgl.nn import GATConv\nimport torch\n"
            "status = gnnaccel.status()['hosts']['dgl']\n"
            "assert 'dgl.nn.pytorch.conv.gatconv.GATConv.forward' in "
            "status['patched'] and not status['pending'], status\n"
            "g = dgl.add_self_loop(dgl.rand_graph(20, 90))\n"
            "with gnnaccel.enabled(when='supported', backend='torch', on_fallback='raise'):\n"
            "    GATConv(3, 4, 2)(g, torch.randn(20, 3))\n"
            "print(gnnaccel.stats()['GATConv']['routes'])\n")
    before = ("gnnaccel.enable()\nassert 'torch' not in sys.modules and "
              "gnnaccel.status()['hosts']['dgl']['pending']\nimport dgl")
    for order in (before, "import dgl\ngnnaccel.enable()",
                  "gnnaccel.exclude('TypedLinear')\ngnnaccel.enable(include=['GATConv'])\nimport dgl"):
        assert run(code.format(order)) == "{'torch': 1}\n"
