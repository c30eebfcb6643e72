"""Data-parallel training: each process, with a GPU of its own where there are some, takes its share
of every batch of graphs.

    python examples/ddp.py                          # one process, then two; native, then
    accelerated
    python examples/ddp.py --processes 1,4 --graphs 64 --nodes 20000
    torchrun --nproc-per-node 2 examples/ddp.py     # as users start it: torchrun's processes, then
    the first of them alone

DistributedDataParallel averages gradients, so the losses must be those of one process with the
whole batch. The model knows nothing of gnnaccel.
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
    """A graph that anybody makes alike from its number. A node's class is that of most of its
    neighbours' features."""
    generator = torch.Generator().manual_seed(number)
    edge_index = torch.randint(0, nodes, (2, nodes * degree), generator=generator)
    kind = torch.randint(0, CLASSES, (nodes,), generator=generator)
    x = torch.randn(nodes, FEATURES, generator=generator)
    x[:, :CLASSES] += 2 * F.one_hot(kind, CLASSES)
    votes = torch.zeros(nodes, CLASSES).index_add_(0, edge_index[1],
                                                   F.one_hot(kind, CLASSES).float()[edge_index[0]])
    return Data(x=x, edge_index=edge_index, y=votes.argmax(1), num_nodes=nodes)


def batches(args, rank: int, world: int, device) -> list:
    """The process's share of every batch. Shares are equal, so that the mean of their losses is the
    whole batch's."""
    share = args.graphs // world
    found = []
    for step in range(args.batches):
        first = step * args.graphs + rank * share
        found.append(Batch.from_data_list([graph(first + i, args.nodes, args.degree)
                                           for i in range(share)]).to(device))
    return found


def train(args, data: list, world: int, device, accelerated: bool, group=None) -> dict:
    """Mean losses of the steps over all processes of the group, milliseconds per step once
    everything is warm, and epochs/s."""
    torch.manual_seed(0)  # the weights; data come by number, and nothing else here is random
    gpus = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(Model().to(device), device_ids=gpus, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    gnnaccel.reset_stats()
    with gnnaccel.enabled() if accelerated else gnnaccel.disabled():
        for step in range(args.steps):
            if step == args.warm:
                start = _now(device, group)
            batch = data[step % len(data)]
            loss = F.cross_entropy(model(batch.x, batch.edge_index), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        seconds = (_now(device, group) - start) / (args.steps - args.warm)
    total = torch.stack(losses)
    dist.all_reduce(total, group=group)
    return {"losses": (total / world).tolist(), "ms": 1e3 * seconds,
            "epochs_per_s": 1 / (seconds * args.batches), "routes": _routes()}


def _now(device, group) -> float:
    """The clock, once every process of the group has come here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(group)
    return time.perf_counter()


def _routes() -> dict:
    return gnnaccel.stats().get("GATConv", {}).get("routes", {})


def both(args, rank: int, world: int, device, group=None) -> dict:
    data = batches(args, rank, world, device)
    return {name: train(args, data, world, device, name == "gnnaccel", group)
            for name in ("native", "gnnaccel")}


def join(args, rank: int, world: int, local: int) -> torch.device:
    """Become one of the processes; ``local``: the number of its GPU."""
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank,
                            world_size=world)
    return device


def run(rank: int, world: int, args, out: str) -> None:
    """One process: both ways, and the first process writes down what came of them."""
    device = join(args, rank, world, rank)
    try:
        found = both(args, rank, world, device)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def spawn(args, world: int) -> dict:
    """``world`` processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "found.json")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port),
                          WORLD_SIZE=str(world))
        torch.multiprocessing.spawn(run, (world, args, out), nprocs=world)
        return json.loads(Path(out).read_text())


def report(found: dict[int, dict]) -> dict:
    """Speeds, how much of the first run's gain is kept, and how far losses lie from the first
    run's."""
    print(f"{'processes':>9} {'native ms':>10} {'gnnaccel ms':>12} {'gain':>6} "
          f"{'kept':>6} {'loss, last':>11} "
          f"{'loss, largest difference':>25}  routes")
    runs = list(found.values())
    first, alone = runs[0]["native"]["losses"], runs[0]["native"]["ms"] / runs[0]["gnnaccel"]["ms"]
    worst = 0.0
    for world, ways in found.items():
        native, ours = ways["native"], ways["gnnaccel"]
        gap = max(abs(a - b) for way in (native, ours) for a, b in zip(first, way["losses"]))
        worst, gain = max(worst, gap), native["ms"] / ours["ms"]
        ways.update(gain=gain, kept=gain / alone)
        print(f"{world:9d} {native['ms']:10.2f} {ours['ms']:12.2f} {gain:5.2f}x "
              f"{gain / alone:6.0%} {ours['losses'][-1]:11.5f} "
              f"{gap:25.1e}  {ours['routes']}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__,
            "processes": {str(world): ways for world, ways in found.items()},
            "largest_loss_difference": worst}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", default="1,2",
                        help="how many processes to try, with commas between")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--graphs", type=int, default=8,
                        help="graphs of a batch, over all processes")
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
    launched = os.environ.get("WORLD_SIZE") if "LOCAL_RANK" in os.environ else None
    args.worlds = [int(part) for part in (launched or args.processes).split(",")]
    for world in args.worlds:
        if args.graphs % world:
            parser.error(f"--graphs {args.graphs} cannot be shared equally by {world} processes")
        if args.device == "cuda" and launched is None and world > torch.cuda.device_count():
            parser.error(
                f"{world} processes need as many GPUs; there are {torch.cuda.device_count()}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if "LOCAL_RANK" in os.environ:
        found = under_torchrun(args)
    else:
        found = {world: spawn(args, world) for world in args.worlds}
    if found:
        result = report(found)
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


def under_torchrun(args) -> dict:
    """All of torchrun's processes together, after the first of them alone; nothing on the
    others."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = join(args, rank, world, int(os.environ["LOCAL_RANK"]))
    try:
        alone = dist.new_group([0])  # which every process has to ask for
        found = {1: both(args, 0, 1, device, alone)} if rank == 0 else {}
        dist.barrier()
        together = both(args, rank, world, device)
    finally:
        dist.destroy_process_group()
    return {**found, world: together} if rank == 0 else {}


if __name__ == "__main__":
    main()
