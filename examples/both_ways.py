"""A training run as it is and with gnnaccel enabled, from the same seed: what sage_sampling.py and
molecules.py print."""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import gnnaccel

Train = Callable[[], float]  # builds a model, trains it and returns its accuracy on held-out data


def both_ways(train: Train, seed: int) -> dict:
    """Runs ``train`` natively and accelerated, prints a line for each and what gnnaccel did, and
    returns it all."""
    found: dict = {}
    for side in ("native", "gnnaccel"):
        torch.manual_seed(seed)
        gnnaccel.reset_stats()
        start = time.perf_counter()
        if side == "native":
            accuracy = train()
        else:
            # in a script of yours: gnnaccel.enable(); to be timed, no step may begin without kernels
            with gnnaccel.enabled(first_use="wait"):
                accuracy = train()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        found[side] = {"accuracy": accuracy, "seconds": time.perf_counter() - start}
        print(f"{side:9}  accuracy {accuracy:.4f}  {found[side]['seconds']:.2f} s")
    found["decisions"] = gnnaccel.stats()
    for layer, counts in found["decisions"].items():
        routes = ", ".join(f"{number} {route}" for route, number in counts["routes"].items())
        why = ", ".join(f"{code} {number}" for code, number in counts["reasons"].items())
        print(f"{layer}: {routes}" + (f" (ruled out: {why})" if why else ""))
    return found


def options(description: str, epochs: int, **sizes: int) -> argparse.ArgumentParser:
    """A parser with what both examples take, and an option for each of ``sizes``."""
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=epochs)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser
