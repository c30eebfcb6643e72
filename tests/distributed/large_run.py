"""Training steps over graphs of published sizes, on one GPU and on all of a machine.

    torchrun --nproc-per-node 4 tests/distributed/large_run.py
    torchrun --nproc-per-node 2 tests/distributed/large_run.py --only mag

pytest does not collect this file. Every figure is one line of JSON on standard output: the median
step of rounds within which nothing waits for the devices, the most memory (``beside_gb``: what
others than torch hold at the end), bytes that were exchanged, and what the step would take by the
formula of docs/scaling.md. Losses of the first and the last step are those of one GPU, or the exit
status is 1. Without GPUs the same runs under gloo, over smaller graphs: ``--scale 0.0005``.
"""
from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gnnaccel
import gnnaccel.distributed as distributed
from tests.distributed import large_parts, nccl_models, scaling
from tests.distributed.large_parts import PIECES, SHAPES

STARTED = time.monotonic() - time.process_time()
CLASSES = 16


class Case(NamedTuple):
    """``alone``: whether one GPU is to train, too; ``recompute``: whether the first layer runs
    again in the backward pass, in the place of keeping what it made."""

    shape: str
    kind: str
    model: str
    alone: bool = True
    dtype: torch.dtype = torch.float32
    recompute: bool = False


CASES = (
    *(Case("products", kind, model) for kind in ("well clustered", "clustered", "random", "power law")
      for model in ("gcn", "gat")),
    Case("proteins", "random", "gat 8x8"),
    *(Case("mag", kind, model) for kind in ("well clustered", "clustered", "random")
      for model in ("rgcn", "hgt")),
    Case("papers", "clustered", "sage", False, torch.bfloat16),
    Case("papers", "clustered", "sage", False, torch.float32, recompute=True),
)


class Typed(nn.Module):
    def __init__(self, metadata: Any, width: int):
        from torch_geometric.nn import HGTConv

        super().__init__()
        self.first = HGTConv(width, 64, metadata, 4)
        self.second = HGTConv(64, 64, metadata, 4)
        self.last = nn.Linear(64, CLASSES)

    def forward(self, x: dict, edges: dict) -> Tensor:
        x = self.first(x, edges)
        x = self.second({kind: rows.relu() for kind, rows in x.items()}, edges)
        return self.last(x["paper"])


def model(name: str, shape: large_parts.Shape) -> nn.Module:
    from torch_geometric import nn as pyg

    torch.manual_seed(6)
    if name == "hgt":
        return Typed((list(shape.nodes), list(shape.edges)), shape.width)
    if name == "gat 8x8":
        return nccl_models.Three(pyg.GATConv(shape.width, 8, 8), pyg.GATConv(64, 8, 8),
                                 pyg.GATConv(64, 8, 8))
    if name == "sage":
        return Two(pyg.SAGEConv(shape.width, 128), pyg.SAGEConv(128, 128))
    if name == "rgcn":
        relations = len(SHAPES["mag"].edges)
        return Two(pyg.RGCNConv(shape.width, 64, relations), pyg.RGCNConv(64, 64, relations))
    return nccl_models.timed(name)


class Two(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second, self.recompute = first, second, False

    def _hidden(self, x: Tensor, *edges: Tensor) -> Tensor:
        return F.relu(self.first(x, *edges), inplace=True)

    def forward(self, x: Tensor, *edges: Tensor) -> Tensor:
        if self.recompute:
            return self.second(checkpoint(self._hidden, x, *edges, use_reentrant=False), *edges)
        return self.second(self._hidden(x, *edges), *edges)


class Data(NamedTuple):
    """What a model is called with, and the rows of its result that the loss is of."""

    arguments: tuple
    labels: Tensor


def joined(shape: large_parts.Shape) -> large_parts.Shape:
    """One type of nodes and one of edges, for layers that take types of edges as numbers."""
    return large_parts.Shape({"node": sum(shape.nodes.values())},
                             {("node", "to", "node"): sum(shape.edges.values())}, shape.width)


def data(case: Case, shape: large_parts.Shape, edges: Any, x: Any, pieces: range) -> Data:
    device = next(iter(x.values())).device
    kind = "paper" if "paper" in x else "node"
    count = len(x[kind])
    if case.shape == "papers":
        count //= 64  # of which the labels are known
    g = torch.Generator(device).manual_seed(5)
    labels = torch.randint(0, CLASSES, (shape.nodes[kind],), generator=g, device=device)
    low = large_parts.bounds(shape.nodes[kind], pieces)[0]
    labels = labels[low:low + count]
    if case.model == "hgt":
        return Data((x, edges), labels)
    edge_index = next(iter(edges.values()))
    types = ()
    if case.model == "rgcn":
        # the same for any number of parts, in which destinations are numbered anew
        types = ((edge_index[1] + low) % len(SHAPES["mag"].edges),)
    return Data((x["node"], edge_index, *types), labels)


def step(net: nn.Module, found: Data, optimizer: Any, mean: Any) -> Tensor:
    optimizer.zero_grad()
    out = net(*found.arguments)[:len(found.labels)]
    loss = mean(F.cross_entropy(out.float(), found.labels, reduction="none"))
    loss.backward()
    optimizer.step()
    return loss.detach()


def timed(args: argparse.Namespace, net: nn.Module, found: Data, mean: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    gpu = found.labels.is_cuda
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    with gnnaccel.enabled(first_use="wait"):
        for round_ in range(args.rounds + 1):
            begun = _now(gpu)
            count = args.steps if round_ else args.warm
            losses += [step(net, found, optimizer, mean) for _ in range(count)]
            times.append(1e3 * (_now(gpu) - begun) / count)
    return {"ms": round(statistics.median(times[1:]), 3), "worst_ms": round(max(times[1:]), 3),
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if gpu else None,
            "beside_gb": round(_beside() / 1e9, 2) if gpu else None,
            "losses": [losses[0].item(), losses[-1].item()]}


def _now(gpu: bool) -> float:
    """The clock, once the device is done."""
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def _beside() -> int:
    """Bytes of the device that are in use beside what torch's allocator holds."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def say(**figure: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(figure), flush=True)


def run(args: argparse.Namespace, case: Case, device: torch.device) -> bool:
    """Whether losses are those of one GPU."""
    begun = time.monotonic()
    parts, rank = dist.get_world_size(), dist.get_rank()
    shape = SHAPES[case.shape].scaled(args.scale)
    if case.model == "rgcn":
        shape = joined(shape)
    each = PIECES // parts
    pieces = range(rank * each, (rank + 1) * each)
    alone = None
    if case.alone and rank == 0:
        every = range(PIECES)
        edges = large_parts.edges(shape, case.kind, every, device)
        found = data(case, shape, edges, large_parts.rows(shape, every, device, case.dtype), every)
        alone = timed(args, model(case.model, shape).to(device, case.dtype), found, torch.mean)
        del found, edges
        clear(device)
    dist.barrier()
    part = large_parts.part(shape, large_parts.edges(shape, case.kind, pieces, device), pieces)
    found = data(case, shape, part.edges, large_parts.rows(shape, pieces, device, case.dtype),
                 pieces)
    clear(device)
    with distributed.use(part, exchange=args.exchange):
        bare = model(case.model, shape).to(device, case.dtype)
        bare.recompute = case.recompute  # type: ignore[assignment]
        net = DistributedDataParallel(bare, find_unused_parameters=case.model == "hgt")
        together = timed(args, net, found, distributed.mean_loss)
        sent = sum(kind["bytes"] for kind in distributed.exchanged().values())
        calls = sum(kind["calls"] for kind in distributed.exchanged().values())
        del net, bare
    count = args.warm + args.rounds * args.steps
    worst: list[Any] = [None] * parts
    dist.all_gather_object(worst, (together["ms"], together["peak_gb"], sent // count))
    together.update(ms=max(ms for ms, *_ in worst), peak_gb=max(gb or 0 for _, gb, _ in worst),
                    mb_sent_per_step=round(max(b for *_, b in worst) / 1e6, 1),
                    exchanges_per_step=round(calls / count, 2))
    rows = part.rows.values()
    own, halo = sum(len(r.own) for r in rows), sum(len(r.halo) for r in rows)
    bound = least(case, shape, own, halo, sum(e.shape[1] for e in part.edges.values()),
                  together["mb_sent_per_step"] * 1e6)
    right = alone is None or all(abs(a - b) <= args.tolerance * max(1, abs(a)) for a, b in
                                 zip(alone["losses"], together["losses"]))
    say(figure="step", shape=case.shape, kind=case.kind, model=case.model, processes=parts,
        dtype=str(case.dtype), recompute=case.recompute, one=alone, all=together, own=own, halo=halo, bound_ms=bound,
        over_bound=round(together["ms"] / bound, 2) if bound else None,
        speedup=round(alone["ms"] / together["ms"], 3) if alone else None, ok=right,
        seconds=round(time.monotonic() - begun, 1))
    del part, found
    clear(device)
    verdict = [right]
    dist.broadcast_object_list(verdict)
    return verdict[0]


def least(case: Case, shape: large_parts.Shape, own: int, halo: int, edges: int,
          sent: float) -> float:
    """Milliseconds of a step by docs/scaling.md: reading and writing rows, two traversals of the
    edges, products in fp32, and the bytes that were sent."""
    layers = 3 if case.model in ("gcn", "gat", "gat 8x8") else 2
    size, width = case.dtype.itemsize, 64 if case.shape in ("mag", "proteins") else 128
    newer = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
    memory = 4.8e12 if newer else scaling.MEMORY
    moved = 2 * edges * (size * width + 4) + (12 * own + 6 * halo) * size * width
    computed = 6 * own * width ** 2
    return round(1e3 * (layers * (moved / memory + computed / scaling.FLOPS)
                        + sent / scaling.NVLINK), 2)


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", default=[], help="shapes, graphs or models")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="after which the clock is read")
    parser.add_argument("--rounds", type=int, default=5, help="of so many steps")
    parser.add_argument("--exchange", default="fp32")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.backends.cuda.matmul.allow_tf32 = False
    device, gpu = nccl_models.device(), torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo", **({"device_id": device} if gpu else {}))
    say(figure="machine", processes=dist.get_world_size(), torch=torch.__version__,
        device=torch.cuda.get_device_name() if gpu else "cpu", scale=args.scale)
    right = True
    for case in CASES:
        if args.only and not {case.shape, case.kind, case.model} & set(args.only):
            continue
        left = [args.seconds - (time.monotonic() - STARTED)]
        dist.broadcast_object_list(left)
        if left[0] < (60 if case.shape == "papers" else 15):
            say(figure="skipped", case=str(case), why=f"{left[0]:.0f} s are left")
            continue
        right &= run(args, case, device)
    say(figure="done", seconds=round(time.monotonic() - STARTED, 1), ok=right)
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
