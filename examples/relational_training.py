"""Trains unmodified PyG models on relational graphs, natively and with gnnaccel, ten seeds each,
and compares.

    python examples/relational_training.py                        # AIFB, MUTAG, DBLP through PyG
    (downloaded on first use)
    python examples/relational_training.py --data DIR             # from aifb.npz, mutag_rdf.npz and
    het_dblp.npz in DIR
    python examples/relational_training.py --datasets aifb --layer rgcn fast_rgcn rgat --out
    results.json --table table.md
    python examples/relational_training.py --quick                # one seed, few epochs

AIFB and MUTAG: classes of entities with the public split, RGCN without node features. DBLP: classes
of authors, HGT. Both sides run in this process, from the same weights at each seed, and test
accuracy is that after the last epoch: no epoch is chosen by it. The models (relational_models.py)
do not mention gnnaccel; it is enabled in `compare`.
"""
from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric
from torch_geometric.nn import MessagePassing

import gnnaccel
import relational_hosted
import relational_models
import relational_npz
import relational_report
from relational_report import SIDES, Decisions, Run
from relational_tasks import Task

WARM_UP = 3  # epochs left out of the median, or fewer if there are only few


# -- training --------------------------------------------------------------------------------------

def train_epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, task: Task) -> float:
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(*task.inputs)[task.train_idx], task.train_y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())  # waits for the GPU, so wall-clock time is the epoch's time


@torch.no_grad()
def accuracy(model: torch.nn.Module, task: Task) -> float:
    model.eval()
    right = model(*task.inputs)[task.test_idx].argmax(dim=-1) == task.test_y
    return float(right.double().mean())


def fit(model: torch.nn.Module, task: Task, epochs: int, seed: int) -> Run:
    """Full-graph training with Adam: ``epochs + 1`` calls of the model, the last to test it."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), **relational_models.learning_rate(task))
    seconds, loss = [], float("nan")
    for _ in range(epochs):
        start = time.perf_counter()
        loss = train_epoch(model, optimizer, task)
        seconds.append(time.perf_counter() - start)
    steady = statistics.median(seconds[min(WARM_UP, len(seconds) // 2):])
    return Run(accuracy(model, task), loss, steady, seconds[0])


def compare(task: Task, layer: str, seeds: int, epochs: int,
            progress: Callable[[str], None]) -> dict:
    """All seeds on both sides. At odd seeds gnnaccel comes first, so a machine that slows down
    favours neither."""
    device, name = task.train_idx.device, relational_models.layer_name(task, layer)
    decisions = Decisions(calls=0)
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = relational_models.build(task, layer).to(device)
        if seed == 0:  # thrown away: no run below pays for starting torch up
            fit(copy.deepcopy(model), task, 1, seed)
        for side in reversed(SIDES) if seed % 2 else SIDES:
            progress(f"{task.title}, {name}: seed {seed} of {seeds}, {side}")
            mine = copy.deepcopy(model)
            gnnaccel.reset_stats()
            with gnnaccel.enabled(first_use="wait") if side == "gnnaccel" else nullcontext():
                runs[side].append(fit(mine, task, epochs, seed))
            if side == "gnnaccel":
                decisions.calls += (epochs + 1) * sum(isinstance(part, MessagePassing)
                                                      for part in mine.modules())
                decisions.add(gnnaccel.stats(), name)
    decisions.describe(recorded(model, task), name)
    return {"layer": name,
            **relational_report.summarize(runs["native"], runs["gnnaccel"], decisions)}


def recorded(model: torch.nn.Module, task: Task) -> list[dict]:
    """gnnaccel's records of two more epochs, which nothing else counts: listening costs time. The
    first epoch builds the graph's structure for a later one, so only the second decides as most of
    the run did."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    with gnnaccel.enabled(records=10_000):
        train_epoch(model, optimizer, task)
        gnnaccel.clear_records()
        train_epoch(model, optimizer, task)
        accuracy(model, task)
        return gnnaccel.records()


# -- running ---------------------------------------------------------------------------------------

def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def target(text: str) -> Path:
    """A file to write, checked before hours of training rather than after."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: there is no folder {str(path.parent)!r}")
    return path


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR",
                        help=f"a folder with {', '.join(relational_npz.FILES.values())}")
    parser.add_argument("--datasets", nargs="+", choices=list(relational_npz.FILES),
                        default=list(relational_npz.FILES))
    parser.add_argument("--layer", nargs="+", choices=list(relational_models.LAYERS),
                        default=["rgcn"], help="of AIFB and MUTAG; DBLP always has HGTConv")
    parser.add_argument("--seeds", type=positive, default=10,
                        help="how many: 0, 1, ... (default: 10)")
    parser.add_argument("--epochs", type=positive, default=50)
    parser.add_argument("--device", default="auto",
                        help="auto (the GPU if there is one), cpu, cuda, cuda:1, ...")
    parser.add_argument("--quick", action="store_true",
                        help="one seed, four epochs: whether it runs, not how well")
    parser.add_argument("--out", type=target, metavar="JSON",
                        help="write everything measured there")
    parser.add_argument("--table", type=target, metavar="MD",
                        help="write the table there, in Markdown")
    args = parser.parse_args(given)
    if args.quick:
        args.seeds, args.epochs = 1, 4
    return args


def chosen_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise SystemExit(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None


def environment(args: argparse.Namespace, device: torch.device) -> dict:
    """What the numbers depend on; no path of the machine."""
    with gnnaccel.enabled():
        status = gnnaccel.status()
    name = (torch.cuda.get_device_name(device)
            if device.type == "cuda" else f"{device.type}, {torch.get_num_threads()} threads")
    return {"device": name, "torch": torch.__version__, "pyg": torch_geometric.__version__,
            "gnnaccel": gnnaccel.__version__, "backend": status["backend"],
            "backend_text": status["backend_text"], "seeds": args.seeds, "epochs": args.epochs,
            "data": "files" if args.data else "PyG's dataset classes"}


def main(given: list[str] | None = None) -> None:
    from rich.console import Console

    args, console = arguments(given), Console()
    device = chosen_device(args.device)
    load = (relational_hosted.load
            if args.data is None else lambda name: relational_npz.load(args.data, name))
    # all first: errors come early
    tasks = {name: load(name).to(device) for name in dict.fromkeys(args.datasets)}
    meta, results = environment(args, device), []
    with console.status("training") as status:
        for name, task in tasks.items():
            for layer in dict.fromkeys(args.layer) if name != "dblp" else [""]:
                found = compare(task, layer, args.seeds, args.epochs, status.update)
                results.append({"dataset": name.upper(), "source": task.title, **found})
    relational_report.show(console, meta, results)
    if args.out:
        args.out.write_text(json.dumps({"environment": meta, "results": results}, indent=2) + "\n",
                            encoding="utf-8")
    if args.table:
        args.table.write_text(relational_report.markdown(meta, results), encoding="utf-8")


if __name__ == "__main__":
    main()
