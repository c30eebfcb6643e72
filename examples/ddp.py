"""Data-parallel training: each process, with a GPU of its own where there are some, takes its share of every batch of graphs.

    python examples/ddp.py                          # one process, then two; native, then accelerated
    python examples/ddp.py --processes 1,4 --graphs 64 --nodes 20000
    torchrun --nproc-per-node 2 examples/ddp.py     # as users start it: this script's processes are torchrun's

DistributedDataParallel averages gradients, so the losses must be those of one process with the whole batch. The model knows
nothing of gnnaccel.
"""
from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv

import gnnaccel

FEATURES, CLASSES = 32, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv(FEATURES, 8, heads=8)
        self.second = GATConv(64, CLASSES, heads=1)

    def forward(self, x, edge_index):
        return self.second(F.elu(self.first(x, edge_index)), edge_index)


def graph(number: int, nodes: int, degree: int) -> Data:
    """A graph that anybody makes alike from its number. A node's class is that of most of its neighbours' features."""
    generator = torch.Generator().manual_seed(number)
    edge_index = torch.randint(0, nodes, (2, nodes * degree), generator=generator)
    kind = torch.randint(0, CLASSES, (nodes,), generator=generator)
    x = torch.randn(nodes, FEATURES, generator=generator)
    x[:, :CLASSES] += 2 * F.one_hot(kind, CLASSES)
    votes = torch.zeros(nodes, CLASSES).index_add_(0, edge_index[1], F.one_hot(kind, CLASSES).float()[edge_index[0]])
    return Data(x=x, edge_index=edge_index, y=votes.argmax(1), num_nodes=nodes)


def batches(args, rank: int, world: int, device) -> list:
    """The process's share of every batch. Shares are equal, so that the mean of their losses is the whole batch's."""
    share = args.graphs // world
    found = []
    for step in range(args.batches):
        first = step * args.graphs + rank * share
        found.append(Batch.from_data_list([graph(first + i, args.nodes, args.degree) for i in range(share)]).to(device))
    return found


def train(args, rank: int, world: int, device, accelerated: bool) -> dict:
    """Mean losses of the steps over all processes, and seconds per step once everything is warm."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().to(device), device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    data = batches(args, rank, world, device)
    losses = []
    with gnnaccel.enabled() if accelerated else gnnaccel.disabled():
        for step in range(args.steps):
            if step == args.warm:
                start = _now(device)
            batch = data[step % len(data)]
            loss = F.cross_entropy(model(batch.x, batch.edge_index), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        seconds = (_now(device) - start) / (args.steps - args.warm)
    total = torch.stack(losses)
    dist.all_reduce(total)
    return {"losses": (total / world).tolist(), "ms": 1e3 * seconds, "routes": _routes()}


def _now(device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter()


def _routes() -> dict:
    routes = gnnaccel.stats().get("GATConv", {}).get("routes", {})
    gnnaccel.reset_stats()
    return routes


def run(rank: int, world: int, args, out: str) -> None:
    """One process: both ways, and the first process writes down what came of them."""
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world)
    try:
        found = {name: train(args, rank, world, device, name == "gnnaccel") for name in ("native", "gnnaccel")}
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def spawn(args, world: int) -> dict:
    """``world`` processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "found.json")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port), WORLD_SIZE=str(world))
        torch.multiprocessing.spawn(run, (world, args, out), nprocs=world)
        return json.loads(Path(out).read_text())


def report(found: dict[int, dict]) -> dict:
    """Speeds, and how far losses lie from the first run's."""
    print(f"{'processes':>9} {'native ms':>10} {'gnnaccel ms':>12} {'gain':>6} {'loss, last':>11} {'loss, largest difference':>25}"
          "  routes")
    first = next(iter(found.values()))["native"]["losses"]
    worst = 0.0
    for world, ways in found.items():
        native, ours = ways["native"], ways["gnnaccel"]
        gap = max(abs(a - b) for way in (native, ours) for a, b in zip(first, way["losses"]))
        worst = max(worst, gap)
        print(f"{world:9d} {native['ms']:10.2f} {ours['ms']:12.2f} {native['ms'] / ours['ms']:5.2f}x {ours['losses'][-1]:11.5f} "
              f"{gap:25.1e}  {ours['routes']}")
    return {"processes": {str(world): ways for world, ways in found.items()}, "largest_loss_difference": worst}


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", default="1,2", help="how many processes to try, with commas between")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--graphs", type=int, default=8, help="graphs of a batch, over all processes")
    parser.add_argument("--nodes", type=int, default=400, help="nodes of a graph")
    parser.add_argument("--degree", type=int, default=8)
    parser.add_argument("--batches", type=int, default=4, help="different batches")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warm", type=int, default=8, help="steps before the clock starts")
    parser.add_argument("--port", type=int, default=29511)
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    worlds = [int(part) for part in args.processes.split(",")]
    for world in worlds:
        if args.graphs % world:
            parser.error(f"--graphs {args.graphs} cannot be shared equally by {world} processes")
        if args.device == "cuda" and world > torch.cuda.device_count():
            parser.error(f"{world} processes need as many GPUs; there are {torch.cuda.device_count()}")
    result = report({world: spawn(args, world) for world in worlds})
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return result


def under_torchrun() -> None:
    args = argparse.Namespace(device="cuda" if torch.cuda.is_available() else "cpu", graphs=8, nodes=400, degree=8, batches=4,
                              steps=24, warm=8)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "found.json")
        run(rank, world, args, out)
        if rank == 0:
            report({world: json.loads(Path(out).read_text())})


if __name__ == "__main__":
    under_torchrun() if "LOCAL_RANK" in os.environ else main()
