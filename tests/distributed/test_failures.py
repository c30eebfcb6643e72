"""What is refused before anything is exchanged, and how all processes end when one fails."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torch_geometric")

import gnnaccel.distributed as distributed
from gnnaccel.dispatch.distributed import state
from gnnaccel.errors import PartitionError
from tests.distributed import graphs
from tests.distributed.processes import start

pytestmark = pytest.mark.skipif(not dist.is_available(),
                                reason="this torch has no torch.distributed")
ROOT = Path(__file__).parents[2]


def message_of(call) -> str:
    with pytest.raises(PartitionError) as caught:
        call()
    assert state.current is None or not any(link.calls for link in state.current.links.values())
    return str(caught.value)


def entered(part, **options):
    with distributed.use(part, **options):
        raise AssertionError("it was let in")


def refused(rank, world, folder, other):
    """Messages by what is wrong; the same on every rank where the parts do not fit together."""
    # what a process raises would end the others, which expect the same here
    from gnnaccel.adapters.pyg.distributed import running
    running.Watch.tell = running.Watch.wait_for_end = lambda self: None
    running.Watch.caused_elsewhere = lambda self, error: False
    wrong = distributed.load_part(folder, 1 - rank)
    changed = distributed.load_part(other if rank else folder)
    return {
        "rank": message_of(lambda: entered(wrong)),
        "changed": message_of(lambda: entered(changed)),
        "exchange": message_of(lambda: entered(distributed.load_part(folder),
                                               exchange="bf16" if rank else "fp32")),
        "unknown": message_of(lambda: entered(distributed.load_part(folder), exchange="int3")),
        "count": message_of(lambda: distributed.load_part(Path(folder).parent / "three")),
    }


@pytest.mark.long
def test_parts_that_do_not_fit(tmp_path):
    data = graphs.homogeneous()
    folder = distributed.partition(data, 2, out=tmp_path / "two")
    distributed.partition(data, 3, out=tmp_path / "three")
    data.edge_index[0, 0] += 1
    other = distributed.partition(data, 2, out=tmp_path / "other")
    found = start(2, refused, folder, other)
    assert found[0] == found[1]
    for messages in found:
        assert "rank 0 holds part 1; it has to load part 0" in messages["rank"]
        assert "another graph than rank 0" in messages["changed"]
        assert "rank 1 exchanges bf16, rank 0 fp32" in messages["exchange"]
        assert "exchange='int3'" in messages["unknown"]
        assert "has 3 parts and there are 2 processes" in messages["count"]


def wrong_calls(rank, world, folder, typed):
    """Messages of layers that are given what does not fit; all before an exchange."""
    from torch_geometric import nn as pyg

    class Mine(pyg.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

    part, found = distributed.load_part(folder), {}
    data = part.data
    x, edges = data.x, data.edge_index

    def say(name, call):
        found[name] = message_of(call)

    with distributed.use(part):
        conv = pyg.GCNConv(graphs.FEATURES, 2)
        gat = pyg.GATConv(graphs.FEATURES, 2)
        say("length", lambda: Mine()(torch.cat([x, x]), edges))
        say("bipartite length", lambda: gat(torch.cat([x, x]), edges))
        say("graph", lambda: conv(x, edges + len(x) + 50))
        say("destinations", lambda: conv(x, edges.flip(0) + part.rows["node"].extended))
        say("sparse", lambda: conv(x, edges.to(torch.float).to_sparse()))
        say("ids", lambda: pyg.RGCNConv(9, 2, 3)(None, edges, data.edge_type))
        say("flow", lambda: pyg.GCNConv(2, 2, flow="target_to_source")(x, edges))
        say("cheb", lambda: pyg.ChebConv(graphs.FEATURES, 2, 2)(x, edges))
        say("norm", lambda: pyg.GraphNorm(graphs.FEATURES)(x))
        say("layer norm", lambda: pyg.LayerNorm(graphs.FEATURES)(x))
        say("readout", lambda: pyg.SumAggregation()(x, torch.zeros(len(x), dtype=torch.long)))
        say("colours", lambda: pyg.WLConv()(data.y, edges))
        say("pooling", lambda: pyg.TopKPooling(graphs.FEATURES)(x, edges))
        say("unknown", lambda: pyg.LabelPropagation(2, 0.5)(data.y, edges))
        say("again", lambda: entered(part))
        say("type", lambda: distributed.halo_rows(x, "paper"))
        assert pyg.LayerNorm(graphs.FEATURES, mode="node")(x).shape == x.shape
        with distributed.paused():  # a graph that is whole
            small = torch.tensor([[0, 1], [1, 0]])
            assert pyg.GraphNorm(3)(conv(torch.ones(2, graphs.FEATURES), small).repeat(1, 2)[:, :3]
                                    ).shape == (2, 3)
        distributed.halo_rows(x)  # which works still
    part = distributed.load_part(typed)
    with distributed.use(part):
        papers = part.data["paper"].x
        say("relation", lambda: conv(papers, part.edges["paper", "cites", "paper"].clone()))
        say("loops", lambda: pyg.GATConv((6, 6), 2)(
            (part.data["author"].x, papers), part.data["author", "writes", "paper"].edge_index))
        assert conv(papers, part.data["paper", "cites", "paper"].edge_index).shape[1] == 2
    assert pyg.GraphNorm(3)(torch.ones(2, 3)).shape == (2, 3)  # all is as it was
    return found


@pytest.mark.long
def test_calls_that_do_not_fit(tmp_path):
    folder = distributed.partition(graphs.homogeneous(), 2, out=tmp_path / "out")
    typed = distributed.partition(graphs.heterogeneous(), 2, out=tmp_path / "typed")
    for found in start(2, wrong_calls, folder, typed):
        assert "own nodes, so it needs as many rows" in found["length"]
        assert "GATConv was given x" in found["bipartite length"]
        assert "not the one that was partitioned" in found["graph"]
        assert "not the one that was partitioned" in found["destinations"]
        assert "needs a dense tensor" in found["sparse"]
        assert "take part.own" in found["ids"]
        assert "GA702" in found["flow"] and "target_to_source" in found["flow"]
        for name in ("cheb", "norm", "layer norm", "readout", "pooling", "colours"):
            assert found[name].startswith("GA701"), name
        assert "never compared" in found["unknown"]
        assert "active already" in found["again"]
        assert "node_type='paper'" in found["type"]
        assert "none of this part's relations" in found["relation"]
        assert "set add_self_loops=False" in found["loops"]


def test_a_model_is_checked_before_training():
    from torch import nn
    from torch_geometric import nn as pyg

    good = nn.ModuleList([pyg.GCNConv(3, 3), pyg.PNAConv(3, 3, ["sum"], ["identity"],
                                                         torch.ones(4, dtype=torch.long)),
                          nn.LayerNorm(3), pyg.LayerNorm(3, mode="node")])
    assert distributed.check(good) == []
    with pytest.warns(RuntimeWarning, match="1.module: GA703"):
        assert "SyncBatchNorm" in distributed.check(nn.Sequential(nn.ReLU(), pyg.BatchNorm(3)))[0]
    with pytest.raises(PartitionError, match=r"0: GA701 GraphNorm.*; 1: GA701 HANConv"):
        distributed.check(nn.Sequential(pyg.GraphNorm(3), pyg.HANConv(
            3, 4, (["a"], [("a", "to", "a")]))))


def different_widths(rank, world, folder):
    part = distributed.load_part(folder)
    with distributed.use(part):
        return message_of(lambda: distributed.halo_rows(torch.ones(part.data.num_nodes, 2 + rank)))


@pytest.mark.long
def test_rows_of_other_widths_on_other_ranks(tmp_path):
    folder = distributed.partition(graphs.homogeneous(), 2, out=tmp_path / "out")
    found = start(2, different_widths, folder)
    assert found[0] == found[1]
    assert "rows [2] of torch.float32 on rank 0" in found[0] and "[3]" in found[0]


SCRIPT = """
import os, sys, time, torch
from torch_geometric.nn import GCNConv
import gnnaccel
part = gnnaccel.distributed.init(sys.argv[1])
conv, rank = GCNConv(6, 2), part.rank
for step in range(1000):
    if step == 3 and rank == int(sys.argv[2]):
        if sys.argv[3] == "raise":
            raise ValueError("the cause of it all")
        os._exit(9)
    conv(torch.randn(part.data.num_nodes, 6), part.data.edge_index).sum().backward()
    time.sleep(0.05)
"""


def failing(rank, world, folder, failing):
    from torch_geometric import nn as pyg

    said = os.open(Path(folder).parent / f"said-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)
    part = distributed.load_part(folder)
    conv = pyg.GCNConv(graphs.FEATURES, 2)
    with distributed.use(part):
        for step in range(1000):
            if step == 3 and rank == failing:
                raise ValueError("the cause of it all")
            conv(torch.randn(part.data.num_nodes, graphs.FEATURES), part.data.edge_index)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_fails_in_a_block_ends_all(tmp_path, rank):
    folder = distributed.partition(graphs.homogeneous(), 3, out=tmp_path / "out")
    begun = time.monotonic()
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as caught:
        start(3, failing, folder, rank)
    assert time.monotonic() - begun < 60
    assert "the cause of it all" in str(caught.value) and caught.value.error_index == rank
    for other in {0, 1, 2} - {rank}:  # none of them takes the lost connection for the cause
        said = (tmp_path / f"said-{other}").read_text()
        assert said == f"gnnaccel: rank {other} ends because rank {rank} failed\n"


@pytest.mark.long
@pytest.mark.parametrize("rank, how, launcher", [(0, "raise", False), (1, "die", False),
                                                 (1, "raise", True), (1, "harm", False)])
def test_one_that_fails_ends_all(tmp_path, rank, how, launcher):
    folder = distributed.partition(graphs.homogeneous(), 2, out=tmp_path / "out")
    if how == "harm":  # which this rank finds when it loads its part
        (folder / f"part-{rank}" / "manifest.json").write_text("{}")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    arguments = [str(script), str(folder), str(rank), how]
    if launcher:
        commands = [[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                     "--master-port", port, *arguments]]
    else:
        commands = [[sys.executable, *arguments]] * 2
    begun = time.monotonic()
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                                env={**environment, "RANK": str(at), "WORLD_SIZE": "2",
                                     "LOCAL_RANK": str(at)})
               for at, command in enumerate(commands)]
    said = [process.communicate(timeout=60)[1] for process in running]
    assert time.monotonic() - begun < 60
    assert all(process.returncode for process in running), said
    if how != "die":
        cause = "ValueError: the cause" if how == "raise" else "folders are mixed up"
        assert "".join(said).count(cause) == 1, said
        assert "".join(said).count("Traceback") == 1 or launcher, said
        assert f"rank {1 - rank} ends because rank {rank} failed" in "".join(said)
