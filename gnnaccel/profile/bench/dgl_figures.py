"""What DGL's own CUDA build took, for the layers and graph sizes of ``--suite dgl``: constants,
measured once.

One NVIDIA H200, fp32, a CUDA build of DGL 2.x, random power-law graphs of the named sizes, forward
/ forward and backward. There is no such build for a current torch, so it cannot be measured next to
gnnaccel; on another GPU the comparison means nothing.
"""
from __future__ import annotations

from typing import NamedTuple

GPU = "H200"


class Figure(NamedTuple):
    """Milliseconds; ``peak_gib``: memory of a training step, None where nobody noted it."""

    forward: float
    training: float
    peak_gib: float | None = None


CUDA = {
    ("cora", "GAT 8x8"): Figure(0.74, 2.41),
    ("arxiv", "GAT 8x8"): Figure(7.1, 11.0),
    ("arxiv", "GATv2 4x16"): Figure(8.5, 14.0),
    ("arxiv", "DotGat 1x64"): Figure(2.7, 4.7),
    ("arxiv", "SAGE 64"): Figure(0.78, 1.78),
    ("proteins", "GAT 8x8"): Figure(29.6, 65.8, 14),
    ("proteins", "GATv2 4x16"): Figure(97, 191, 77),
    ("proteins", "DotGat 1x64"): Figure(29, 67),
    ("proteins", "GraphConv 64"): Figure(5.3, 10.4),
    ("proteins", "SAGE 64"): Figure(5.1, 10.0),
    ("proteins", "GCN 64"): Figure(5.3, 10.4),  # GraphConv, under PyG's name
    ("reddit", "GAT 8x8"): Figure(273, 412, 21),
    ("reddit", "SAGE 64"): Figure(9.2, 17.3),
    ("fb15k-size", "RelGraphConv 64"): Figure(9.4, 20.4),
    ("fb15k-size", "HGT 4x16"): Figure(79, 160),
    ("am-size", "RelGraphConv 64"): Figure(10.8, 21.5),
    ("mag-size", "RelGraphConv 64"): Figure(34, 61, 17),
    ("wikikg2-size", "RelGraphConv 64"): Figure(30, 60),
    ("mag-inverse-size", "HGT 4x16"): Figure(373, 5454),
}


def cuda_ms(shape: str, layer: str, mode: str) -> float | None:
    """Milliseconds of DGL's CUDA build; None where there is no figure."""
    figure = CUDA.get((shape, layer))
    return getattr(figure, mode, None)


def cuda_peak_mib(shape: str, layer: str) -> float | None:
    """MiB that a training step took with DGL's CUDA build; None where there is no figure."""
    figure = CUDA.get((shape, layer))
    return figure.peak_gib * 1024 if figure and figure.peak_gib else None
