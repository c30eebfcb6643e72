"""PyG layers for the benchmark: the only place of it that imports torch_geometric."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from gnnaccel.adapters.pyg.bench.models import two_layers

IN_CHANNELS = 64
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """An attention layer: ``heads`` heads of ``width`` features each, concatenated."""

    name: str
    class_name: str
    heads: int
    width: int

    @property
    def out_channels(self) -> int:
        return self.heads * self.width


LAYERS = {spec.name: spec for spec in (
    LayerSpec("GAT 8x8", "GATConv", 8, 8),
    LayerSpec("GATv2 4x16", "GATv2Conv", 4, 16),
    LayerSpec("GATv2 1x64", "GATv2Conv", 1, 64),
    LayerSpec("Transformer 1x64", "TransformerConv", 1, 64),
    LayerSpec("GAT 1x128", "GATConv", 1, 128),
)}


def resolve(name: str) -> LayerSpec:
    """The layer called ``name``, see `named`."""
    return named(name, LAYERS)


def named(name: str, known: Mapping[str, T], what: str = "layer") -> T:
    """The one of ``known`` by this name; case, spaces, "_" and "-" do not matter. Raises
    ValueError."""
    def plain(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    for key, value in known.items():
        if plain(key) == plain(name):
            return value
    raise ValueError(f"no {what} {name!r}; known: {', '.join(known)}")


def build_layer(spec: LayerSpec, device, seed: int = 0):
    """The layer with its host's defaults (self loops and bias included) and weights fixed by
    ``seed``."""
    import torch
    import torch_geometric.nn

    torch.manual_seed(seed)
    layer = getattr(torch_geometric.nn, spec.class_name)(IN_CHANNELS, spec.width, heads=spec.heads)
    return layer.to(device)


def build_two_layer_gat(device, seed: int = 0, classes: int = 16):
    """A two-layer GAT as in sampled training: 64 -> 8x8 -> ``classes``."""
    import torch
    from torch_geometric.nn import GATConv

    torch.manual_seed(seed)
    return two_layers(GATConv(IN_CHANNELS, 8, heads=8), GATConv(64, classes, heads=1),
                      torch.nn.functional.elu).to(device)


def build_structure(edge_index, num_nodes: int, csr: bool) -> None:
    """Build gnnaccel's CSC of ``edge_index`` (and the CSR when ``csr``) anew, past any cache, and
    drop it.

    Without edge ids, as in layers that have neither edge features nor dropout.
    """
    from gnnaccel.dispatch.graph.view import GraphView

    view = GraphView(edge_index, num_nodes, num_nodes)
    view.csc(places=False)
    if csr:
        view.csr(places=False)
