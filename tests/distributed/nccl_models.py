"""Models and graphs of `nccl_run`."""
from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

#: width of features and hidden rows in timings; classes of nodes
FEATURES, CLASSES = 128, 16
#: width of features and hidden rows where results are compared
_WIDTH = 32
HOMOGENEOUS = ("gcn", "gat", "sage", "rgcn", "batchnorm", "dropout")
HETERO = ("heteroconv",)
TIMED = ("gcn", "gcn-cached", "gat")
_KINDS = {"paper": 1.0, "author": 0.5}
_RELATIONS = (("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author"))


def device() -> torch.device:
    """The GPU of this process, or the CPU."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    found = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(found)
    return found


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of this host that all ranks know; deleted at the end."""
    name = [tempfile.mkdtemp(prefix="nccl_run-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    try:
        yield Path(name[0])
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(name[0])


# --- where results are compared -------------------------------------------------------------------

def homogeneous(nodes: int) -> Any:
    from torch_geometric.data import Data

    g = torch.Generator().manual_seed(0)
    edges = torch.randint(0, nodes, (2, 10 * nodes), generator=g)
    x = torch.randn(nodes, _WIDTH, generator=g)
    return Data(x=x, edge_index=edges, y=x[:, :CLASSES].argmax(1),
                edge_type=torch.randint(0, 3, (edges.shape[1],), generator=g))


def heterogeneous(nodes: int) -> Any:
    from torch_geometric.data import HeteroData

    g, data = torch.Generator().manual_seed(1), HeteroData()
    counts = {kind: int(nodes * share) for kind, share in _KINDS.items()}
    for kind, count in counts.items():
        data[kind].x = torch.randn(count, _WIDTH, generator=g)
        data[kind].y = data[kind].x[:, :CLASSES].argmax(1)
    for relation in _RELATIONS:
        data[relation].edge_index = torch.stack([
            torch.randint(0, counts[kind], (5 * nodes,), generator=g) for kind in relation[::2]])
    return data


def random_parts(data: Any, parts: int) -> Any:
    """Each node's part, at random: the cut with the largest halos."""
    g = torch.Generator().manual_seed(2)
    if hasattr(data, "node_types"):
        return {kind: torch.randint(0, parts, (data[kind].num_nodes,), generator=g)
                for kind in data.node_types}
    return torch.randint(0, parts, (data.num_nodes,), generator=g)


class SharedDropout(nn.Module):
    """Dropout whose mask is drawn for all nodes, from the number of the step, so that it is the
    same for any number of parts. `torch.nn.Dropout` draws from each process's own generator."""

    def forward(self, x: Tensor, rows: Tensor, total: int, step: int) -> Tensor:
        g = torch.Generator().manual_seed(step)
        mask = torch.rand(total, x.shape[1], generator=g) < 0.5
        return 2 * x * mask.to(x.device)[rows]


class Plain(nn.Module):
    """Two layers, with ``between`` after the first."""

    def __init__(self, first: nn.Module, second: nn.Module, between: nn.Module | None = None,
                 typed: bool = False):
        super().__init__()
        self.first, self.second, self.between, self.typed = first, second, between, typed

    def forward(self, data: Any, rows: Tensor, total: int, step: int) -> Tensor:
        more = (data.edge_type,) if self.typed else ()
        x = self.first(data.x, data.edge_index, *more)
        if isinstance(self.between, SharedDropout):
            x = self.between(x, rows, total, step)
        elif self.between is not None:
            x = self.between(x)
        return self.second(F.elu(x), data.edge_index, *more)


class Typed(nn.Module):
    """HeteroConv of three classes of layers."""

    def __init__(self) -> None:
        from torch_geometric.nn import GATConv, GCNConv, HeteroConv, SAGEConv

        super().__init__()
        cites, writes, by = _RELATIONS
        self.layers = nn.ModuleList(HeteroConv({
            cites: GCNConv(_WIDTH, out), writes: SAGEConv((_WIDTH, _WIDTH), out),
            by: GATConv((_WIDTH, _WIDTH), out, add_self_loops=False)})
            for out in (_WIDTH, CLASSES))

    def forward(self, data: Any, *_: Any) -> dict[str, Tensor]:
        found = data.x_dict
        for layer in self.layers:
            found = {kind: x.tanh() for kind, x in layer(found, data.edge_index_dict).items()}
        return found


def make(name: str) -> nn.Module:
    """A model of `HOMOGENEOUS` or `HETERO`, its weights always the same."""
    from torch_geometric import nn as pyg

    torch.manual_seed(3)
    if name == "gat":
        return Plain(pyg.GATConv(_WIDTH, 8, heads=4), pyg.GATConv(_WIDTH, CLASSES))
    if name == "rgcn":
        return Plain(pyg.RGCNConv(_WIDTH, _WIDTH, 3, num_bases=2),
                     pyg.RGCNConv(_WIDTH, CLASSES, 3), typed=True)
    if name == "heteroconv":
        return Typed()
    layer = pyg.SAGEConv if name in ("sage", "dropout") else pyg.GCNConv
    between = {"batchnorm": lambda: nn.BatchNorm1d(_WIDTH), "dropout": SharedDropout}.get(name)
    return Plain(layer(_WIDTH, _WIDTH), layer(_WIDTH, CLASSES), between and between())


def losses(data: Any, rows: Tensor, total: int) -> Callable[[nn.Module, int], Tensor]:
    """What gives each node's loss, of a model and the number of the step. ``rows``: the numbers of
    the data's nodes in a graph of ``total``, where nodes have no types."""
    def found(model: nn.Module, step: int) -> Tensor:
        out = model(data, rows, total, step)
        if isinstance(out, dict):
            return torch.cat([F.cross_entropy(out[kind], data[kind].y, reduction="none")
                              for kind in sorted(out)])
        return F.cross_entropy(out, data.y, reduction="none")

    return found


# --- what is timed --------------------------------------------------------------------------------

def edges(kind: str, nodes: int, count: int, device: torch.device) -> Tensor:
    """int64 [2, count]. "random": any two nodes; "clustered": clusters of consecutive nodes, about
    one in 5,000, in which 95 % of the edges stay. The same on every rank."""
    g = torch.Generator(device).manual_seed(4)

    def numbers(high: int) -> Tensor:
        return torch.randint(0, high, (count,), generator=g, device=device)

    source, target = numbers(nodes), numbers(nodes)
    if kind == "clustered":
        size = min(5_000, max(nodes // 8, 1))
        near = (target // size * size + numbers(size)).clamp(max=nodes - 1)
        inside = torch.rand(count, generator=g, device=device) < 0.95
        source = torch.where(inside, near, source)
    return torch.stack([source, target])


def rows(nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features [nodes, FEATURES] and classes [nodes], the same on every rank."""
    g = torch.Generator(device).manual_seed(5)
    return (torch.randn(nodes, FEATURES, generator=g, device=device),
            torch.randint(0, CLASSES, (nodes,), generator=g, device=device))


class Three(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.elu(layer(x, edges))
        return self.layers[-1](x, edges)


def timed(name: str) -> nn.Module:
    """Three layers, of `TIMED`: GCN of width 128, or GAT of 8 heads of 16."""
    from torch_geometric.nn import GATConv, GCNConv

    torch.manual_seed(6)
    if name == "gat":
        return Three(GATConv(FEATURES, 16, heads=8), GATConv(FEATURES, 16, heads=8),
                     GATConv(FEATURES, CLASSES, heads=1))
    cached = name == "gcn-cached"
    return Three(*(GCNConv(FEATURES, out, cached=cached) for out in (FEATURES, FEATURES, CLASSES)))
