"""Trains an ordinary PyG GAT twice from the same weights: as it is, and with gnnaccel enabled.
Prints both.

    python examples/quickstart.py                     # the code graph of the installed packages
    python examples/quickstart.py --data cora         # Planetoid's Cora (downloaded on first use)
    python examples/quickstart.py --data graph.npz    # any file with edge_index [2, E], x [N, F]
    and y [N]

The model below does not mention gnnaccel. Speeding it up takes one line, in `main`.
"""
from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch_geometric.nn import GATConv

import gnnaccel
from quickstart_data import Data, PeakMemory, load_data

DROPOUT = 0.6
# epochs left out of the median, or fewer if there are only few: compiling, allocating, planning
WARM_UP = 3


class GAT(torch.nn.Module):
    """Two layers: ``heads`` heads of ``hidden`` channels, then one head of ``classes`` channels."""

    def __init__(self, inputs: int, hidden: int, heads: int, classes: int) -> None:
        super().__init__()
        self.first = GATConv(inputs, hidden, heads=heads, dropout=DROPOUT)
        self.second = GATConv(hidden * heads, classes, heads=1, concat=False, dropout=DROPOUT)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, DROPOUT, self.training)
        x = F.elu(self.first(x, edge_index))
        x = F.dropout(x, DROPOUT, self.training)
        return self.second(x, edge_index)


@dataclass
class Result:
    """What one training run measured."""

    first_epoch_s: float
    epochs_per_s: float  # from the median epoch after the warm-up
    # allocated by torch on a GPU; growth of the process on a CPU; None where unknown
    peak_bytes: int | None
    loss: float
    train: float  # accuracies, between 0 and 1
    val: float
    test: float


def train_epoch(model: GAT, optimizer: torch.optim.Optimizer, data: Data) -> float:
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return float(loss.detach())  # waits for the GPU, so wall-clock time is the epoch's time


@torch.no_grad()
def evaluate(model: GAT, data: Data) -> dict[str, float]:
    model.eval()
    right = model(data.x, data.edge_index).argmax(dim=-1) == data.y
    masks = {"train": data.train_mask, "val": data.val_mask, "test": data.test_mask}
    return {name: float(right[mask].float().mean()) for name, mask in masks.items()}


def fit(model: GAT, data: Data, epochs: int, seed: int) -> Result:
    """Full-graph training with Adam."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    memory = PeakMemory(data.x.device)
    seconds, loss = [], math.nan
    for _ in range(epochs):
        start = time.perf_counter()
        loss = train_epoch(model, optimizer, data)
        seconds.append(time.perf_counter() - start)
    steady = seconds[min(WARM_UP, len(seconds) // 2):]
    return Result(seconds[0], 1 / statistics.median(steady), memory.read(), loss,
                  **evaluate(model, data))


# -- what is printed -------------------------------------------------------------------------------

def show_results(console, native: Result, fast: Result, on_gpu: bool, compiled: dict) -> None:
    """``compiled``: gnnaccel's kernels, how many and how long it took."""
    from rich.table import Table

    def mib(value: int | None) -> str:
        return "n/a" if value is None else f"{value / 2**20:,.0f} MiB"

    table = Table("", "native PyG", "with gnnaccel", "")
    table.add_row("first epoch (incl. compiling)", f"{native.first_epoch_s:.2f} s",
                  f"{fast.first_epoch_s:.2f} s")
    if compiled["kernels"]:
        table.add_row(f"compiling or loading {compiled['kernels']} kernels", "",
                      f"{compiled['seconds']:.2f} s")
    table.add_row("epochs/s (median, later epochs)", f"{native.epochs_per_s:.2f}",
                  f"{fast.epochs_per_s:.2f}", f"{fast.epochs_per_s / native.epochs_per_s:.2f}x")
    # A CPU process keeps some memory of the first run, so there the two numbers do not compare
    # exactly.
    ratio = f"{fast.peak_bytes / native.peak_bytes:.2f}x" if on_gpu and native.peak_bytes else ""
    table.add_row("peak GPU memory" if on_gpu else "growth of the process, at peak",
                  mib(native.peak_bytes), mib(fast.peak_bytes), ratio)
    for name in ("train", "val", "test"):
        table.add_row(f"{name} accuracy", f"{getattr(native, name):.3f}",
                      f"{getattr(fast, name):.3f}")
    console.print(table)


def decisions() -> list[dict]:
    """gnnaccel's records, equal ones counted together."""
    found: Counter = Counter()
    for record in gnnaccel.records():
        by_reason: dict[str, list[str]] = {}
        for item in record.get("rejected") or ():
            by_reason.setdefault(f"{item['code']} {item['text']}", []).append(item["candidate"])
        why = tuple(f"{', '.join(candidates)}: {reason}"
                    for reason, candidates in by_reason.items())
        layer = record.get("layer") or "?"
        name = record.get("name")
        found[f"{name} ({layer})" if name else layer, record.get("direction") or "forward",
              record.get("route") or "?", record.get("kernel") or "", why] += 1
    return [{"layer": layer, "direction": direction, "route": route, "kernel": kernel,
             "reasons": list(why), "calls": calls}
            for (layer, direction, route, kernel, why), calls in sorted(found.items())]


def show_decisions(console, rows: list[dict], status: dict) -> None:
    from rich.table import Table

    console.print(f"gnnaccel's backend: {status.get('backend')} "
                  f"({status.get('backend_text', 'no reason given')})")
    if not rows:
        console.print(
            "It recorded no decision: it is switched off, or it knows no layer of this model.")
        return
    table = Table("layer", "pass", "route", "kernel", "what was ruled out, and why", "calls",
                  title="What gnnaccel decided")
    for row in rows:
        reasons = "\n".join(row["reasons"]) or "-"
        table.add_row(row["layer"], row["direction"], row["route"], row["kernel"] or "-", reasons,
                      str(row["calls"]))
    console.print(table)


# -- running ---------------------------------------------------------------------------------------

def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="code",
                        help="code (default), cora, or the path of an .npz file")
    parser.add_argument("--epochs", type=int, help="default: 200 on a GPU, 10 on a CPU")
    parser.add_argument("--hidden", type=int, default=8,
                        help="channels per head of the first layer")
    parser.add_argument("--heads", type=int, default=8, help="heads of the first layer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torch-compile", action="store_true",
                        help="train the native model with torch.compile, too")
    parser.add_argument("--capture", action="store_true",
                        help="train with enable(capture=True), too")
    parser.add_argument("--json", metavar="OUT", help="write the results there too")
    return parser.parse_args()


def introduce(console, data: Data, args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    if device.type == "cuda":
        console.print(f"Device: {torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    else:
        console.print(f"Device: {device.type}, torch {torch.__version__}. No GPU is "
                      "used: gnnaccel's kernels need one. "
                      "On the CPU it runs a layer on its torch backend where that was "
                      "measured to be faster, and natively "
                      "elsewhere.")
    console.print(data.title)
    console.print(f"Graph: {data.x.shape[0]:,} nodes, {data.edge_index.shape[1]:,} edges "
                  "(both directions), "
                  f"{data.x.shape[1]} features, {data.classes} classes. "
                  f"GAT: {args.heads} heads x {args.hidden}, then 1 head; {args.epochs} "
                  "epochs each.")


def others(model: GAT, start: dict, data: Data, args: argparse.Namespace) -> dict[str, Result]:
    """The runs that options ask for beside the two."""
    found = {}
    if args.torch_compile:
        model.load_state_dict(start)
        found["torch.compile"] = fit(torch.compile(model), data, args.epochs, args.seed)
    if args.capture:
        model.load_state_dict(start)
        with gnnaccel.enabled(capture=True, first_use="wait"):
            found["capture"] = fit(model, data, args.epochs, args.seed)
    return found


def main() -> None:
    from rich.console import Console

    args, console = arguments(), Console()
    device = torch.device(args.device)
    args.epochs = args.epochs or (200 if device.type == "cuda" else 10)
    data = load_data(args.data, device)
    introduce(console, data, args)

    torch.manual_seed(args.seed)
    model = GAT(data.x.shape[1], args.hidden, args.heads, data.classes).to(device)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    with console.status("training native PyG"):
        fit(model, data, 1, args.seed)  # thrown away: neither run below pays for starting torch up
        model.load_state_dict(start)
        native = fit(model, data, args.epochs, args.seed)

    model.load_state_dict(start)
    gnnaccel.name_layers(model)  # only so that the table below says "first" and "second"
    with gnnaccel.enabled(records=4 * args.epochs + 16, first_use="wait"), console.status("training with gnnaccel"):
        fast = fit(model, data, args.epochs, args.seed)
        rows, status = decisions(), gnnaccel.status()
    more = others(model, start, data, args)

    show_results(console, native, fast, device.type == "cuda", status["compiled"])
    for name, result in more.items():
        console.print(f"{name}: {result.epochs_per_s:.2f} epochs/s, "
                      f"test accuracy {result.test:.3f}")
    show_decisions(console, rows, status)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"args": vars(args), "backend": status.get("backend"),
                       "native": asdict(native), "gnnaccel": asdict(fast),
                       **{name: asdict(result) for name, result in more.items()},
                       "compiled": status["compiled"], "decisions": rows}, file, indent=2)


if __name__ == "__main__":
    main()
