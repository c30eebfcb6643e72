"""Whole models for the benchmark of reduced precision."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

IN_CHANNELS, CLASSES = 128, 48


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Two layers: 128 features -> ``heads`` x ``width`` -> 48 classes; ``heads`` is 1 for layers
    without any."""

    name: str
    class_name: str
    heads: int
    width: int


MODELS = {spec.name: spec for spec in (
    ModelSpec("GCN 2 layers 128", "GCNConv", 1, 128),
    ModelSpec("SAGE 2 layers 128", "SAGEConv", 1, 128),
    ModelSpec("GAT 2 layers 8x16", "GATConv", 8, 16),
)}


def build(spec: ModelSpec, device: Any, seed: int = 0) -> Any:
    """The model, with its host's defaults and weights fixed by ``seed``; its layers are ``first``
    and ``second``."""
    import torch
    import torch_geometric.nn as nn

    torch.manual_seed(seed)
    cls, heads = getattr(nn, spec.class_name), {"heads": spec.heads} if spec.heads > 1 else {}
    return two_layers(cls(IN_CHANNELS, spec.width, **heads),
                      cls(spec.heads * spec.width, CLASSES)).to(device)


def two_layers(first: Any, second: Any, between: Callable[[Any], Any] | None = None) -> Any:
    """A model of two layers over the same edges, ``between`` them a ReLU unless it is given."""
    import torch

    class TwoLayers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Any, edge_index: Any) -> Any:
            return self.second((between or torch.relu)(self.first(x, edge_index)), edge_index)

    return TwoLayers()
