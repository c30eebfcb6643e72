"""One graph over the GPUs of a machine, by NCCL: is training right, and how fast is it?

    torchrun --nproc-per-node 2 tests/distributed/nccl_run.py

pytest does not collect this file. Every figure is one line of JSON on standard output. Losses and
gradients after 1 and 20 steps are compared with those of one GPU, which trains on the whole graph
with PyG's own layers: over parts natively and by gnnaccel's layers, and divided as by
``python -m gnnaccel --partition``; then steps over a large graph are timed, on one GPU and on all.
The run takes at most ``--seconds``: that for which no time is left is named as skipped; a second
run finds its kernels compiled. The exit status is 1 where a difference is above ``--tolerance``.

Without GPUs the same runs under gloo, on small graphs:

    torchrun --nproc-per-node 2 tests/distributed/nccl_run.py --nodes 4000 --edges 40000 --steps 3
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gnnaccel
import gnnaccel.distributed as distributed
from gnnaccel.adapters.pyg.distributed import script
from tests.distributed import nccl_models as models
from tests.distributed.nccl_models import FEATURES

#: when the process began: what it computed until here are its imports
STARTED = time.monotonic() - time.process_time()
#: steps after which losses and gradients are compared
STEPS = (1, 20)


def say(**figure: Any) -> None:
    """Print one figure, on the first rank."""
    if dist.get_rank() == 0:
        print(json.dumps(figure), flush=True)


# --- correctness ----------------------------------------------------------------------------------

def train(model: nn.Module, losses: Callable[[nn.Module, int], Tensor],
          mean: Callable[[Tensor], Tensor]) -> dict[int, dict[str, Any]]:
    """By step of `STEPS`: the loss, and the gradients by the name of the weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = {}
    for step in range(1, STEPS[-1] + 1):
        optimizer.zero_grad()
        loss = mean(losses(model, step))
        loss.backward()
        if step in STEPS:
            found[step] = {"loss": loss.item(), "gradients": {
                name.removeprefix("module."): weight.grad.clone()
                for name, weight in model.named_parameters() if weight.grad is not None}}
        optimizer.step()
    return found


def compare(args: argparse.Namespace, folder: Path, device: torch.device) -> bool:
    """All models over all processes and on one; whether they agree."""
    right = True
    for hetero in (False, True):
        data = models.heterogeneous(args.check_nodes) if hetero else models.homogeneous(
            args.check_nodes)
        cut(folder / f"check-{hetero}", lambda out, data=data: distributed.partition(
            data, dist.get_world_size(), models.random_parts(data, dist.get_world_size()),
            out=out))
        part = distributed.load_part(folder / f"check-{hetero}", device=device)
        for name in models.HETERO if hetero else models.HOMOGENEOUS:
            # kernels that are compiled for the first time may take long; timings need some time
            if over(args, f"correctness of {name}", 3 if args.only else min(45, args.seconds / 2)):
                continue
            right &= compare_model(args, name, data, part, device)
    return right


def compare_model(args: argparse.Namespace, name: str, data: Any, part: Any,
                  device: torch.device) -> bool:
    rows = next(iter(part.rows.values()))
    truth = None
    if dist.get_rank() == 0:
        with gnnaccel.disabled():
            truth = train(models.make(name).to(device), models.losses(
                data.clone().to(device), torch.arange(rows.total, device=device), rows.total),
                torch.mean)
    with gnnaccel.enabled(when="supported"), script.divided(1):  # as with --partition
        whole = models.losses(data.clone().to(device), torch.arange(rows.total, device=device),
                              rows.total)
        found = train(models.make(name).to(device), whole, torch.mean)
    right = judge(args, name, "gnnaccel, divided", truth, found)
    if name == "batchnorm" and device.type == "cpu":
        say(figure="skipped", model=name, why="SyncBatchNorm runs on GPUs only")
        return right
    for layers in ("native", "gnnaccel"):
        switched = (gnnaccel.enabled(when="supported") if layers == "gnnaccel"
                    else gnnaccel.disabled())
        with switched, distributed.use(part):
            model = models.make(name).to(device)
            if name == "batchnorm":
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            model = DistributedDataParallel(model)
            found = train(model, models.losses(part.data, rows.own, rows.total),
                          distributed.mean_loss)
            del model
        right &= judge(args, name, layers, truth, found)
    return right


def judge(args: argparse.Namespace, name: str, layers: str, truth: Any, found: Any) -> bool:
    """Say how far loss and gradients are from those of one process; whether near enough, on all
    ranks alike."""
    verdict = [True]
    if dist.get_rank() == 0:
        for step in STEPS:
            loss, right = found[step]["loss"], truth[step]["loss"]
            gaps = [((found[step]["gradients"][key] - gradient).abs().max().item(),
                     gradient.abs().max().item())
                    for key, gradient in truth[step]["gradients"].items()]
            worst = max(gap for gap, _ in gaps)
            good = max(abs(loss - right), worst) <= args.tolerance
            verdict[0] &= good
            say(figure="correctness", model=name, layers=layers, step=step, loss=loss,
                loss_difference=abs(loss - right), gradient_difference=worst,
                relative_to_largest=worst / max(size for _, size in gaps), ok=good)
    dist.broadcast_object_list(verdict)
    return verdict[0]


# --- timing ---------------------------------------------------------------------------------------

def measure(args: argparse.Namespace, folder: Path, device: torch.device) -> None:
    """Steps of each model over each graph: on one GPU, then on all."""
    for graph in ("clustered", "random"):
        if over(args, f"timing over the {graph} graph", 15):
            return
        edges = models.edges(graph, args.nodes, args.edges, device)
        begun = time.monotonic()
        cut(folder / graph, lambda out, edges=edges: distributed.partition_arrays(
            edges.cpu().numpy(), args.nodes, dist.get_world_size(), out=out))
        part = distributed.load_part(folder / graph, device=device, verify=False)
        say(figure="partition", graph=graph, nodes=args.nodes, edges=args.edges,
            seconds=round(time.monotonic() - begun, 2), own=len(part.own),
            halo=len(part.rows["node"].halo))
        x, y = models.rows(args.nodes, device)
        exchange(args, graph, part, x[part.own])
        for name in models.TIMED:
            if over(args, f"{name} over the {graph} graph", 8):
                return
            alone = None
            if dist.get_rank() == 0:
                alone = steps(args, models.timed(name).to(device), x, y, edges, torch.mean)
            dist.barrier()
            together = over_parts(args, name, part, x, y)
            if dist.get_rank() == 0:
                say(figure="timing", graph=graph, model=name, processes=dist.get_world_size(),
                    one=alone, all=together,
                    speedup=round(alone["ms"] / together["ms"], 3))


def over_parts(args: argparse.Namespace, name: str, part: Any, x: Tensor, y: Tensor
               ) -> dict[str, Any]:
    device = x.device
    with distributed.use(part, exchange=args.exchange):
        model = DistributedDataParallel(models.timed(name).to(device))
        found = steps(args, model, x[part.own], y[part.own], part.data.edge_index,
                      distributed.mean_loss)
        sent = distributed.exchanged()["node"]
        count = args.warm + args.steps
        found.update(bytes_sent_per_step=sent["bytes"] // count, exchanges=sent["calls"] / count)
        del model
    return found


def steps(args: argparse.Namespace, model: nn.Module, x: Tensor, y: Tensor, edges: Tensor,
          mean: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The median step in milliseconds, and the most memory that was held, in bytes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if x.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    with gnnaccel.enabled():
        for _ in range(args.warm + args.steps):
            begun = now(x)
            optimizer.zero_grad()
            mean(F.cross_entropy(model(x, edges), y, reduction="none")).backward()
            optimizer.step()
            times.append(1e3 * (now(x) - begun))
    return {"ms": round(statistics.median(times[args.warm:]), 3),
            "peak_bytes": torch.cuda.max_memory_allocated() if x.is_cuda else None}


def exchange(args: argparse.Namespace, graph: str, part: Any, x: Tensor) -> None:
    """One exchange of rows as wide as the layers', forward and backward, by itself."""
    x = x.clone().requires_grad_()
    times = []
    with distributed.use(part, exchange=args.exchange):
        for _ in range(args.warm + args.steps):
            begun = now(x)
            rows = distributed.halo_rows(x * 1)
            between = now(x)
            rows.backward(rows.detach())
            times.append((between - begun, now(x) - between))
        sent = distributed.exchanged()["node"]["bytes"] // (2 * len(times))
    forward, backward = (statistics.median(t) for t in zip(*times[args.warm:]))
    say(figure="exchange", graph=graph, width=FEATURES, dtype=args.exchange, bytes_sent=sent,
        forward_ms=round(1e3 * forward, 3), backward_ms=round(1e3 * backward, 3),
        forward_gb_per_s=round(sent / forward / 1e9, 2))


def now(x: Tensor) -> float:
    """The clock, once the device is done."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


# --- the run --------------------------------------------------------------------------------------

def cut(out: Path, make: Callable[[Path], Any]) -> None:
    """Cut a graph on the first rank, while the others wait."""
    if dist.get_rank() == 0:
        make(out)
    dist.barrier()


def over(args: argparse.Namespace, what: str, needed: float) -> bool:
    """Whether less than ``needed`` seconds are left, which is said; the same on all ranks."""
    left = [args.seconds - (time.monotonic() - STARTED)]
    dist.broadcast_object_list(left)
    if left[0] < needed:
        say(figure="skipped", what=what, why=f"{left[0]:.0f} s of {args.seconds:.0f} s are left")
    return left[0] < needed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1_000_000, help="of the timed graphs")
    parser.add_argument("--edges", type=int, default=20_000_000, help="of the timed graphs")
    parser.add_argument("--check-nodes", type=int, default=2_000,
                        help="of the graph on which losses are compared")
    parser.add_argument("--warm", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--exchange", default="fp32",
                        help="of the timed runs: what rows are sent in, as use(exchange=) takes it")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--only", choices=("correctness", "timing"))
    return parser.parse_args()


def main() -> int:
    args = arguments()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu = torch.cuda.is_available()
    device = models.device()
    dist.init_process_group("nccl" if gpu else "gloo", **({"device_id": device} if gpu else {}))
    say(figure="machine", processes=dist.get_world_size(), torch=torch.__version__,
        backend=dist.get_backend(), gnnaccel=gnnaccel.__version__,
        device=torch.cuda.get_device_name() if gpu else "cpu",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if gpu else None)
    right = [True]
    with models.shared_folder() as folder:
        if args.only != "timing":
            right = [compare(args, folder, device)]
        if args.only != "correctness":
            measure(args, folder, device)
        dist.barrier()
    say(figure="done", seconds=round(time.monotonic() - STARTED, 1), ok=right[0])
    dist.destroy_process_group()
    return 0 if right[0] else 1


if __name__ == "__main__":
    sys.exit(main())
