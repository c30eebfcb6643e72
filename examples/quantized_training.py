"""Trains unmodified PyG models with rows in fp32, fp32 again, bf16 and int8, ten seeds each, and compares test accuracy.

    python examples/quantized_training.py --data DIR --out results.json           # on a GPU; DIR holds cora.npz and the others
    python examples/quantized_training.py --data DIR --device cpu --datasets cora citeseer --epochs 40
    python examples/quantized_training.py --stress --out stress.json              # where the guard steps in; needs no data

Precisions of one seed have the same initial weights, split and dropout; "fp32 again" has other dropout, and shows how far
apart two
runs of fp32 are. Accuracy is that on the test nodes, averaged over the last third of the epochs: none is chosen. Graphs as
small as these gain no time from fewer bytes, so quantizing is forced by ``when="supported"``; calls that ran in fp32 all the same
count as fp32, and their share is in the table. The layer before the softmax stays fp32: two of three layers are quantized.
"""
from __future__ import annotations

import argparse
import copy
import functools
import json
import platform
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F

import gnnaccel
import quantized_data
import quantized_models
import quantized_report
import quantized_stress

SIDES = ("fp32", "fp32 again", "bf16", "int8")
CHECK = 3  # epochs between two looks at the test nodes


# -- training --------------------------------------------------------------------------------------------------------

def fit(model: torch.nn.Module, task: quantized_data.Task, masks: tuple, epochs: int, seed: int) -> float:
    """Mean test accuracy over the last third of the epochs. Waits for the device at the end only. ``seed``: of the first epoch's
    dropout; rounding draws too, but in backward, so each epoch begins anew."""
    (train, test), found = masks, []
    train = train.nonzero().view(-1)  # indices: a mask would wait for the device at each use
    labels = task.y[train]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        torch.manual_seed(seed + epoch)
        F.cross_entropy(model(task.x, task.edge_index)[train], labels).backward()
        optimizer.step()
        left = epochs - 1 - epoch
        if left % CHECK == 0 and 3 * left < epochs:
            found.append(_right(model, task, test))
    return float(torch.stack(found).mean())


@torch.no_grad()
def _right(model: torch.nn.Module, task: quantized_data.Task, mask: torch.Tensor) -> torch.Tensor:
    """The share of the nodes in ``mask`` whose class is right, on the device."""
    model.eval()
    right = (model(task.x, task.edge_index).argmax(1) == task.y).double()
    return (right * mask).sum() / mask.sum()


def run(side: str, model: torch.nn.Module, task: quantized_data.Task, seed: int, epochs: int) -> dict:
    """One run of a copy of ``model`` in a precision."""
    mine, start = copy.deepcopy(model), time.perf_counter()
    form = side.split()[0]
    if form != "fp32":
        gnnaccel.quantize(mine, form)
    accuracy = fit(mine, task, task.masks(seed), epochs, 100_000 * (2 * seed + (side == "fp32 again")))
    report = gnnaccel.quant_report(mine)
    return {"accuracy": accuracy, "seconds": time.perf_counter() - start, "share_in_fp32": report.share_in_fp32(),
            "guard": {row.name: row.guard for row in report.rows if row.asked != "fp32"},
            "worst_error": max((row.worst_error or 0.0 for row in report.rows), default=None) if report.rows else None}


def cell(folder: Path, name: str, kind: str, device: str, seeds: int, epochs: int, sides: tuple[str, ...]) -> dict:
    """All runs of one model over one graph. At odd seeds the precisions come in reverse order."""
    torch.set_num_threads(1)
    task = quantized_data.load(folder, name).to(torch.device(device))
    runs: dict[str, list[dict]] = {side: [] for side in sides}
    with gnnaccel.enabled(when="supported"):
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = quantized_models.Net(kind, task.x[0].shape[1], task.classes).to(task.y.device)
            for side in reversed(sides) if seed % 2 else sides:
                runs[side].append(run(side, model, task, seed, epochs))
    return {"graph": name, "model": kind, "sides": {side: _side(side, runs, task.margin) for side in sides}}


def _side(side: str, runs: dict[str, list[dict]], margin: float) -> dict:
    shares = [run["share_in_fp32"] for run in runs[side] if run["share_in_fp32"] is not None]
    found = {"runs": runs[side], "share_in_fp32": sum(shares) / len(shares) if shares else None}
    if side != "fp32" and "fp32" in runs:
        reference, other = ([run["accuracy"] for run in runs[which]] for which in ("fp32", side))
        found["against_fp32"] = quantized_report.against(reference, other, margin)
    return found


# -- the study -------------------------------------------------------------------------------------------------------

def study(args: argparse.Namespace, say, save) -> list[dict]:
    """Every cell, on ``args.workers`` processes side by side; none is begun after ``args.limit`` seconds. ``save(cells)``
    after each."""
    jobs = [(name, kind) for name in args.datasets for kind in args.models]
    todo = functools.partial(cell, args.data, device=args.device, seeds=args.seeds, epochs=args.epochs, sides=SIDES)
    start, done = time.perf_counter(), []

    def ordered() -> list[dict]:
        return sorted(done, key=lambda found: jobs.index((found["graph"], found["model"])))

    def finished(found: dict) -> None:
        done.append(found)
        numbers = ", ".join(f"{side} {100 * sum(r['accuracy'] for r in found['sides'][side]['runs']) / args.seeds:.2f}"
                            for side in SIDES)
        say(f"{time.perf_counter() - start:6.1f} s  {len(done)} of {len(jobs)}: {found['graph']}, {found['model']}: {numbers}")
        save(ordered())

    if args.workers < 2:
        for name, kind in jobs:
            if time.perf_counter() - start > args.limit:
                break
            finished(todo(name, kind))
    else:
        with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
            waiting = [pool.submit(todo, *job) for job in reversed(jobs)]  # the largest graphs first
            for future in as_completed(waiting):
                if not future.cancelled():
                    finished(future.result())
                if time.perf_counter() - start > args.limit:
                    for other in waiting:
                        other.cancel()  # those that have begun go on
    return ordered()


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{platform.machine()}, torch {torch.__version__}"


def parsed(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with the graphs as .npz")
    parser.add_argument("--datasets", nargs="+", default=list(quantized_data.NAMES), choices=quantized_data.NAMES)
    parser.add_argument("--models", nargs="+", default=list(quantized_models.NAMES), choices=quantized_models.NAMES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no further model is begun")
    parser.add_argument("--stress", action="store_true", help="the table of hard inputs instead")
    parser.add_argument("--out", type=Path, help="a file for the results as JSON")
    args = parser.parse_args(given)
    if args.data is None and not args.stress:
        parser.error("--data is needed, unless --stress is given")
    return args


def main(given: list[str] | None = None) -> dict:
    args = parsed(given)
    about = {"device": device_name(args.device), "torch": torch.__version__, "gnnaccel": gnnaccel.__version__}
    say = functools.partial(print, flush=True)
    found: dict = {"about": about}

    def save(part: dict) -> None:
        found.update(part)
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    if args.stress:
        save({"rows": quantized_stress.rows(args.device, say)})
        say(quantized_stress.table(found["rows"]))
    else:
        about.update(seeds=args.seeds, epochs=args.epochs)
        save({"cells": study(args, say, lambda cells: save({"cells": cells}))})
        say(quantized_report.table(found["cells"], SIDES))
    return found


if __name__ == "__main__":
    main()
