"""PyG layers of given sizes with inputs to run them on, for compiling their kernels ahead."""
from __future__ import annotations

import re
from dataclasses import dataclass

from gnnaccel.suggest import did_you_mean

#: class -> "attention" (heads times width) or "relational" (output channels)
LAYERS = {"GATConv": "attention", "GATv2Conv": "attention", "TransformerConv": "attention",
          "SuperGATConv": "attention", "RGCNConv": "relational", "FastRGCNConv": "relational",
          "RGATConv": "relational"}
_NODES, _EDGES = 2000, 20_000


@dataclass(frozen=True)
class Sample:
    """A layer: ``heads`` of ``width`` channels each, from ``inputs`` channels."""

    name: str
    heads: int
    width: int
    inputs: int
    relations: int

    def __str__(self) -> str:
        return (f"{self.name}:{self.width}"
                if LAYERS[self.name] == "relational" else f"{self.name}:{self.heads}x{self.width}")


def parse(text: str, inputs: int, relations: int) -> Sample:
    """``GATConv:8x8`` or ``RGCNConv:64``. ValueError, which lists the choices, for anything
    else."""
    name, _, size = text.partition(":")
    if name not in LAYERS:
        raise ValueError(f"{text!r} names no class that is known here: "
                         f"{', '.join(LAYERS)}.{did_you_mean(name, LAYERS)}")
    pattern = r"(\d+)x(\d+)" if LAYERS[name] == "attention" else r"()(\d+)"
    match = re.fullmatch(pattern, size)
    if match is None or "0" in match.groups() or min(inputs, relations) < 1:
        form = (f"{name}:8x8, heads times width"
                if LAYERS[name] == "attention" else f"{name}:64, output channels")
        raise ValueError(f"{text!r} with {inputs} inputs and {relations} relations: write "
                         f"{form}, all of them at least 1")
    return Sample(name, int(match[1] or 1), int(match[2]), inputs, relations)


def build(sample: Sample, dtype, device):
    """(layer, inputs): weights and inputs in ``dtype`` on ``device``, over a random graph."""
    import torch
    from torch_geometric import nn

    cls = getattr(nn, sample.name)
    x = torch.randn(_NODES, sample.inputs, device=device, dtype=dtype, requires_grad=True)
    edge_index = torch.randint(0, _NODES, (2, _EDGES), device=device)
    extra: tuple[torch.Tensor, ...]
    with torch.device(device):  # weights too, whatever the default device is
        if LAYERS[sample.name] == "attention":
            layer, extra = cls(sample.inputs, sample.width, heads=sample.heads), ()
        else:
            edge_type = torch.arange(_EDGES, device=device) % sample.relations
            layer, extra = cls(sample.inputs, sample.width, sample.relations), (edge_type,)
    return layer.to(dtype), (x, edge_index, *extra)
