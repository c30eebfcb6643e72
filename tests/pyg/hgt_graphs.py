"""Graphs with node types and edge types, and HGT layers over them, all on the CPU and from torch's
generator."""
from __future__ import annotations

import torch
from torch_geometric.nn import HGTConv

NODES = {"paper": 20, "author": 13, "field": 6, "lonely": 4}
WIDTHS = {"paper": 12, "author": 7, "field": 5, "lonely": 3}
RELATIONS = [("author", "writes", "paper"), ("paper", "written", "author"),
             ("paper", "cites", "paper"), ("paper", "about", "field"),
             ("author", "knows", "author")]
METADATA = (list(NODES), RELATIONS)


def features(widths=WIDTHS, **counts):
    return {name: torch.randn(counts.get(name, n),
                              widths[name] if isinstance(widths, dict) else widths)
            for name, n in NODES.items()}


def edges(relations=RELATIONS, empty=(), count=40, **counts):
    """Random edges of each type, with a hub; the last node of each type receives nothing."""
    sizes, found = {**NODES, **counts}, {}
    for name in relations:
        ids = torch.stack([torch.randint(0, sizes[name[0]], (count,)),
                           torch.randint(0, sizes[name[2]] - 1, (count,))])
        ids[1, :count // 4] = 1
        found[name] = ids[:, :0] if name in empty else ids
    return found


def layer(channels=WIDTHS, out=16, heads=2, metadata=METADATA):
    return HGTConv(channels, out, metadata, heads)


def on(device, *dicts):
    return [{k: t.to(device) for k, t in d.items()} for d in dicts]
