"""The formulas of docs/scaling.md, and partitions to hold them against: prints the tables of that
page.

    python -m tests.distributed.scaling                  # counted and by formula, 2 to 64 parts
    python -m tests.distributed.scaling --estimates      # by formula alone, to 1e11 edges
"""
from __future__ import annotations

import argparse
import math

import numpy as np

from gnnaccel.dispatch.distributed import cutting

#: of an H100 with NVLink, on paper: bytes a second of its memory, to a GPU of its host and of
#: another one (a network card of 400 Gbit/s for each GPU), and fp32 operations a second
MEMORY, NVLINK, NETWORK, FLOPS = 3.35e12, 450e9, 50e9, 60e12
GPUS_A_HOST = 8
#: bytes an own edge takes on the GPU: edge_index, and gnnaccel's two sorted forms with edge ids
EDGE_BYTES = 32
#: of the clustered graph: nodes a cluster, and the share of edges that come from anywhere
CLUSTER, OUTSIDE = 1000, 0.05
#: of the power law: node number r sends edges in proportion to r ** -SLOPE
SLOPE = 0.8


# --- halos ----------------------------------------------------------------------------------------

def random_halo(nodes: float, degree: float, parts: int, outside: float = 1.0) -> float:
    """Rows that a part receives, where the sources of a share ``outside`` of the edges are any
    nodes, and all others are the part's own."""
    other = nodes * (1 - 1 / parts)
    return other * -math.expm1(-outside * degree / parts)


def power_halo(nodes: int, degree: float, parts: int) -> float:
    """The same where sources follow a power law."""
    share = shares(nodes)
    return (1 - 1 / parts) * float(-np.expm1(-nodes * degree / parts * share).sum())


def shares(nodes: int) -> np.ndarray:
    """Each node's share of the edges that leave, [nodes], of the power law."""
    found = np.arange(1, nodes + 1) ** -SLOPE
    return found / found.sum()


def formula(kind: str, nodes: int, degree: float, parts: int) -> float:
    if kind == "power law":
        return power_halo(nodes, degree, parts)
    return random_halo(nodes, degree, parts, OUTSIDE if kind == "clustered" else 1.0)


KINDS = ("random", "power law", "clustered")


def graph(kind: str, nodes: int, degree: int, seed: int = 0) -> np.ndarray:
    """int64 [2, nodes * degree]."""
    g = np.random.default_rng(seed)
    count = nodes * degree
    target = g.integers(0, nodes, count)
    if kind == "power law":
        order = g.permutation(nodes)
        source = order[np.searchsorted(shares(nodes).cumsum(), g.random(count)).clip(max=nodes - 1)]
    else:
        source = g.integers(0, nodes, count)
    if kind == "clustered":
        near = (target // CLUSTER * CLUSTER + g.integers(0, CLUSTER, count)).clip(max=nodes - 1)
        source = np.where(g.random(count) < OUTSIDE, source, near)
    return np.stack([source, target])


def halos(edge_index: np.ndarray, nodes: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """(halo, edges) of each part, [parts], cut by method "edges" of `partition`."""
    source, target = edge_index
    owner = cutting.by_edges(cutting.in_degrees(target, nodes), parts)
    to = owner[target].astype(np.int64)
    crossing = owner[source] != to
    pairs = np.unique(to[crossing] * nodes + source[crossing])
    return (np.bincount(pairs // nodes, minlength=parts), np.bincount(to, minlength=parts))


# --- one GPU --------------------------------------------------------------------------------------

def memory(n: float, e: float, h: float, width: int, layers: int, b: int = 4) -> float:
    """Bytes on a GPU with n own nodes, e own edges and h halo rows, in training."""
    return (EDGE_BYTES * e + 24 * (n + h) + layers * (3 * n + h) * width * b
            + (2 * n + h) * width * b)


def exchanged(h: float, width: int, layers: int, b: int = 4) -> float:
    """Bytes that a GPU receives in a step, forward and backward. (It sends as many.)"""
    return 2 * layers * h * width * b


def seconds(n: float, e: float, h: float, width: int, layers: int, parts: int, b: int = 4
            ) -> tuple[float, float]:
    """(computing, exchanging) of a step, on paper."""
    moved = 2 * e * (width * 4 + 4) + (12 * n + 6 * h) * width * 4
    computing = layers * (moved / MEMORY + 6 * n * width * width / FLOPS)
    inside = min(1.0, (GPUS_A_HOST - 1) / max(parts - 1, 1))
    received = exchanged(h, width, layers, b)
    return computing, received * (inside / NVLINK + (1 - inside) / NETWORK)


# --- tables ---------------------------------------------------------------------------------------

def counted(nodes: int, degree: int, width: int, parts: tuple[int, ...]) -> None:
    print("| graph | parts | halo, mean | largest | by formula | largest share of edges | MB a layer "
          "forward, largest part |\n|---|---|---|---|---|---|---|")
    for kind in KINDS:
        edges = graph(kind, nodes, degree)
        for count in parts:
            halo, own = halos(edges, nodes, count)
            by = formula(kind, nodes, degree, count)
            print(f"| {kind} | {count} | {halo.mean() / nodes:.2%} | {halo.max() / nodes:.2%} | "
                  f"{by / nodes:.2%} | {own.max() * count / own.sum():.2f} / P | "
                  f"{halo.max() * width * 4 / 1e6:.1f} |")


def estimates(degree: int, width: int, layers: int) -> None:
    print("| edges | nodes | GPUs | graph | halo / own nodes | GB on a GPU | GB received a step | "
          "computing | exchanging |\n|---|---|---|---|---|---|---|---|---|")
    for edges, counts in ((1e8, (1, 8)), (1e9, (8, 64)), (1e10, (64, 512)), (1e11, (512, 4096))):
        nodes = edges / degree
        for count in counts:
            for kind, outside in (("random", 1.0), ("5 % cross", 0.05)):
                if count == 1 and outside < 1:
                    continue
                n, e = nodes / count, edges / count
                h = random_halo(nodes, degree, count, outside)
                one, other = seconds(n, e, h, width, layers, count)
                print(f"| {edges:.0e} | {nodes:.0e} | {count} | {'-' if count == 1 else kind} | "
                      f"{h / n:.2f} | {memory(n, e, h, width, layers) / 1e9:.0f} | "
                      f"{exchanged(h, width, layers) / 1e9:.1f} | {one * 1e3:.0f} ms | "
                      f"{other * 1e3:.0f} ms |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--estimates", action="store_true")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--degree", type=int, default=20)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args()
    if args.estimates:
        estimates(args.degree, args.width, args.layers)
    else:
        counted(args.nodes, args.degree, args.width, (2, 4, 8, 16, 32, 64))


if __name__ == "__main__":
    main()
