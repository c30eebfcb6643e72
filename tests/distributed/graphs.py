"""Small graphs, and the parts in which tests cut them."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

NODES, FEATURES, CLASSES = 26, 6, 3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def homogeneous(seed: int = 0) -> Any:
    """A graph with copies of edges, self loops, and nodes at the end that have no edge at all."""
    from torch_geometric.data import Data

    g = generator(seed)
    edges = torch.randint(0, NODES - 5, (2, 90), generator=g)
    edges = torch.cat([edges, edges[:, :6], torch.arange(3).repeat(2, 1)], 1)
    count = edges.shape[1]
    return Data(x=torch.randn(NODES, FEATURES, generator=g), edge_index=edges,
                y=torch.randint(0, CLASSES, (NODES,), generator=g),
                train_mask=torch.rand(NODES, generator=g) < 0.7,
                edge_weight=torch.rand(count, generator=g) + 0.1,
                edge_type=torch.randint(0, 3, (count,), generator=g),
                edge_attr=torch.rand(count, 4, generator=g))


def heterogeneous(seed: int = 0) -> Any:
    """Two node types and four relations, one of them without edges."""
    from torch_geometric.data import HeteroData

    g, data = generator(seed), HeteroData()
    counts = {"paper": 18, "author": 9}
    for kind, count in counts.items():
        data[kind].x = torch.randn(count, FEATURES, generator=g)
        data[kind].y = torch.randint(0, CLASSES, (count,), generator=g)
    for source, name, target, edges in (("paper", "cites", "paper", 40),
                                        ("author", "writes", "paper", 30),
                                        ("paper", "by", "author", 25),
                                        ("author", "knows", "author", 0)):
        data[source, name, target].edge_index = torch.stack(
            [torch.randint(0, counts[kind], (edges,), generator=g) for kind in (source, target)])
    return data


def ugly(count: int, parts: int) -> torch.Tensor:
    """An assignment with an empty part; with four, also one of isolated nodes alone, which has no
    halo and sends nothing."""
    found = torch.zeros(count, dtype=torch.long)
    if parts > 2:
        found = 2 * torch.randint(0, 2, (count,), generator=generator(0))
        found[-4:] = 1
    return found


def assignments(data: Any, parts: int) -> dict[str, Any]:
    """Ways to cut a graph, by name."""
    counts = ({kind: data[kind].num_nodes for kind in data.node_types}
              if hasattr(data, "node_types") else {"": data.num_nodes})
    ways: dict[str, Any] = {
        "random": {kind: torch.randint(0, parts, (count,), generator=generator(5))
                   for kind, count in counts.items()},
        "ugly": {kind: ugly(count, parts) for kind, count in counts.items()}}
    if "" in counts:
        ways = {name: way[""] for name, way in ways.items()}
    return {"edges": "edges", **ways}


def cut(data: Any, parts: int, folder: Path) -> dict[str, str]:
    """The graph in all these ways: the folders, by name."""
    import gnnaccel.distributed as distributed

    return {name: str(distributed.partition(data, parts, method, out=folder / name, chunk=17))
            for name, method in assignments(data, parts).items()}
