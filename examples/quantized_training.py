"""Trains unmodified PyG models with rows in fp32, fp32 again, bf16 and int8, with ten or twenty
seeds, and compares accuracy.

    python examples/quantized_training.py --data DIR --out results.json           # on a GPU; DIR
    holds cora.npz and the others
    python examples/quantized_training.py --data DIR --device cpu --datasets cora citeseer --epochs
    40
    python examples/quantized_training.py --stress --out stress.json              # where the guard
    steps in; needs no data

Precisions of one seed have the same initial weights, split and dropout; "fp32 again" has other
dropout, and shows how far apart two runs of fp32 are. Accuracy is that on the test nodes, averaged
over the last fifth of the epochs: none is chosen. Graphs as small as these gain no time from fewer
bytes, so quantizing is forced by ``when="supported"``; calls that ran in fp32 all the same count as
fp32, and their share is in the table. The layer before the softmax stays fp32: two of three layers
are quantized, and with int8 the linear maps of GCN's and SAGE's.

Processes share the GPU, and small graphs keep none of them busy: some 15 at once are fastest.
"""
from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import platform
import statistics
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
CHECK = 5  # epochs between two looks at the test nodes
RATE = 0.01  # of learning; it falls to nothing by a cosine
CHUNK = 5  # seeds that a process takes at once


# -- training --------------------------------------------------------------------------------------

def fit(model: torch.nn.Module, task: quantized_data.Task, masks: tuple, epochs: int,
        seed: int) -> float:
    """Mean test accuracy over the last fifth of the epochs. Waits for the device at the end only.
    ``seed``: of the first epoch's dropout; rounding draws too, but in backward, so each epoch
    begins anew."""
    (train, test), found = masks, []
    train = train.nonzero().view(-1)  # indices: a mask would wait for the device at each use
    labels = task.y[train]
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, weight_decay=5e-4,
                                 fused=task.y.is_cuda)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * epoch / epochs)) / 2
        model.train()
        optimizer.zero_grad()
        torch.manual_seed(seed + epoch)
        F.cross_entropy(model(task.x, task.edge_index)[train], labels).backward()
        optimizer.step()
        left = epochs - 1 - epoch
        if left % CHECK == 0 and 5 * left < epochs:
            found.append(_right(model, task, test))
    return float(torch.stack(found).mean())


@torch.no_grad()
def _right(model: torch.nn.Module, task: quantized_data.Task, mask: torch.Tensor) -> torch.Tensor:
    """The share of the nodes in ``mask`` whose class is right, on the device."""
    model.eval()
    right = (model(task.x, task.edge_index).argmax(1) == task.y).double()
    return (right * mask).sum() / mask.sum()


def run(side: str, model: torch.nn.Module, task: quantized_data.Task, seed: int,
        epochs: int) -> dict:
    """One run of a copy of ``model`` in a precision."""
    mine, start = copy.deepcopy(model), time.perf_counter()
    form = side.split()[0]
    if form != "fp32":
        gnnaccel.quantize(mine, form)
    accuracy = fit(mine, task, task.masks(seed), epochs,
                   100_000 * (2 * seed + (side == "fp32 again")))
    report = gnnaccel.quant_report(mine)
    asked = [row for row in (*report.rows, *report.maps) if row.asked != "fp32"]
    return {"accuracy": accuracy, "seconds": time.perf_counter() - start,
            "share_in_fp32": report.share_in_fp32(),
            "maps_in_fp32": report.share_in_fp32(maps=True),
            "guard": {row.name: row.guard for row in asked},
            "worst_error": max((row.worst_error or 0.0 for row in asked), default=None)}


@functools.lru_cache(maxsize=1)
def loaded(folder: Path, name: str, device: str) -> quantized_data.Task:
    """A process keeps the last graph on the device."""
    return quantized_data.load(folder, name).to(torch.device(device))


def runs_of(folder: Path, name: str, kind: str, seeds: range, device: str,
            epochs: int) -> dict[str, list[dict]]:
    """Runs of one model over one graph, by precision. At odd seeds the precisions come in reverse
    order."""
    torch.set_num_threads(1)
    task, runs = loaded(folder, name, device), {side: [] for side in SIDES}
    with gnnaccel.enabled(when="supported"):
        for seed in seeds:
            torch.manual_seed(seed)
            model = quantized_models.Net(kind, task.features, task.classes).to(task.y.device)
            for side in reversed(SIDES) if seed % 2 else SIDES:
                runs[side].append(run(side, model, task, seed, epochs))
    return runs


def cell(name: str, kind: str, parts: list[dict[str, list[dict]]]) -> dict:
    """What the runs of all seeds say."""
    runs = {side: [run for part in parts for run in part[side]] for side in SIDES}
    margin = quantized_data.margin(name)
    return {"graph": name, "model": kind,
            "sides": {side: _side(side, runs, margin) for side in SIDES}}


def _side(side: str, runs: dict[str, list[dict]], margin: float) -> dict:
    found = {"runs": runs[side]}
    for name in ("share_in_fp32", "maps_in_fp32"):
        shares = [run[name] for run in runs[side] if run[name] is not None]
        found[name] = sum(shares) / len(shares) if shares else None
    if side != "fp32":
        reference, other = ([run["accuracy"] for run in runs[which]] for which in ("fp32", side))
        found["against_fp32"] = quantized_report.against(reference, other, margin)
    return found


# -- the study -------------------------------------------------------------------------------------

def study(args: argparse.Namespace, say, save) -> list[dict]:
    """Every cell, on ``args.workers`` processes side by side; nothing is begun after ``args.limit``
    seconds. ``save(cells)`` after each. A cell counts when all its seeds are there."""
    order = [(name, kind) for name in args.datasets for kind in args.models]
    todo = functools.partial(runs_of, args.data, device=args.device, epochs=args.epochs)
    start, parts, done = time.perf_counter(), {job: {} for job in order}, {}
    jobs = [(*job, part) for job in reversed(order) for part in chunks(job[0], args)]
    for (*job, seeds), made in _results(args, todo, jobs, start):
        job = tuple(job)
        parts[job][seeds.start] = made
        if len(parts[job]) < len(chunks(job[0], args)):
            continue
        done[job] = cell(*job, [parts[job][first] for first in sorted(parts[job])])
        sides = done[job]["sides"]
        numbers = ", ".join(
            f"{side} {100 * statistics.fmean(r['accuracy'] for r in sides[side]['runs']):.2f}"
            for side in SIDES)
        say(f"{time.perf_counter() - start:6.1f} s  {len(done)} of "
            f"{len(order)}: {', '.join(job)}: {numbers}")
        save([done[job] for job in order if job in done])
    return [done[job] for job in order if job in done]


def chunks(name: str, args: argparse.Namespace) -> list[range]:
    """The seeds of a model over a graph, in parts: twice as many where accuracy varies more."""
    seeds = args.seeds * (2 if name in quantized_data.SMALL else 1)
    return [range(first, min(first + CHUNK, seeds)) for first in range(0, seeds, CHUNK)]


def _results(args: argparse.Namespace, todo, jobs: list[tuple], start: float):
    """(job, its runs) as they come, of ``jobs``, which are begun in their order: the largest graphs
    first."""
    if args.workers < 2:
        for job in jobs:
            if time.perf_counter() - start > args.limit:
                return
            yield job, todo(*job)
        return
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(todo, *job): job for job in jobs}
        for future in as_completed(waiting):
            if not future.cancelled():
                yield waiting[future], future.result()
            if time.perf_counter() - start > args.limit:
                for other in waiting:
                    other.cancel()  # those that have begun go on


def device_name(device: str) -> str:
    return (torch.cuda.get_device_name(device)
            if device.startswith("cuda") else f"{platform.machine()}, torch {torch.__version__}")


def parsed(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with the graphs as .npz")
    parser.add_argument("--datasets", nargs="+", default=list(quantized_data.NAMES),
                        choices=quantized_data.NAMES)
    parser.add_argument("--models", nargs="+", default=list(quantized_models.NAMES),
                        choices=quantized_models.NAMES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=10,
                        help="of each graph; the small ones get twice as many")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--limit", type=float, default=float("inf"),
                        help="seconds after which no further model is begun")
    parser.add_argument("--stress", action="store_true", help="the table of hard inputs instead")
    parser.add_argument("--out", type=Path, help="a file for the results as JSON")
    args = parser.parse_args(given)
    if args.data is None and not args.stress:
        parser.error("--data is needed, unless --stress is given")
    return args


def main(given: list[str] | None = None) -> dict:
    args = parsed(given)
    about = {"device": device_name(args.device), "torch": torch.__version__,
             "gnnaccel": gnnaccel.__version__}
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
