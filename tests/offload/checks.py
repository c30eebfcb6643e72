"""Layers and models in bands on any device, held against the whole graph on the CPU."""
from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnnaccel
from gnnaccel.dispatch.offload import rowwise
from tests.distributed import graphs, layer_cases


#: a few layers, by different ways
FEW = ("GATConv", "GCNConv", "GINConv", "RGCNConv", "SAGEConv", "TransformerConv")


class Net(nn.Module):
    """Layers, and what stands between them."""

    def __init__(self, width: int, dropout: float = 0.5):
        from torch_geometric.nn import (BatchNorm, GATConv, GCNConv, JumpingKnowledge, LayerNorm,
                                        SAGEConv)

        super().__init__()
        self.lin, self.first, self.norm = nn.Linear(width, 8), GCNConv(8, 8), BatchNorm(8)
        self.second, self.layer_norm = SAGEConv(8, 8), LayerNorm(8, mode="node")
        self.third, self.jump = GATConv(8, 4, heads=2), JumpingKnowledge("cat")
        self.head, self.dropout = nn.Linear(24, 3), dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x).relu()
        a = F.relu(self.norm(self.first(x, edge_index)))
        b = F.elu(self.layer_norm(self.second(a, edge_index)) + a)
        c = self.third(F.dropout(b, self.dropout, self.training), edge_index)
        return F.log_softmax(self.head(self.jump([a, b, c])), dim=-1)


def trained(device: str, nodes: int, width: int, edges: int) -> list[Tensor]:
    """A model's results, loss, gradients and buffers. Its data are on the CPU; ``device``: where
    the model is."""
    torch.manual_seed(0)
    g = graphs.generator(3)
    model = Net(width, dropout=0.0)
    x = torch.randn(nodes, width, generator=g).requires_grad_()
    edge_index = torch.randint(0, nodes, (2, edges), generator=g)
    mask = torch.rand(nodes, generator=g) < 0.5
    y = torch.randint(0, 3, (nodes,), generator=g)
    model.to(device)
    out = model(x, edge_index)
    loss = F.nll_loss(out[mask], y[mask])
    loss.backward()
    return [t.detach().cpu() for t in (out, loss, *(p.grad for p in model.parameters()), x.grad,
                                       *model.buffers())]


def difference(found: Tensor, right: Tensor) -> float:
    """The largest one, as a part of the largest number if that is above 1."""
    scale = max(1.0, right.abs().max().item()) if right.numel() else 1.0
    return (found.double() - right.double()).abs().max().item() / scale if right.numel() else 0.0


@contextlib.contextmanager
def small_bands() -> Iterator[None]:
    """A block in which small tensors run in bands, too."""
    held = rowwise._SMALL, rowwise._BAND
    rowwise._SMALL, rowwise._BAND = 0, 500
    try:
        yield
    finally:
        rowwise._SMALL, rowwise._BAND = held


def layers(device: str, limit: int, pinned: bool, names: Iterable[str] = ()
           ) -> Iterator[tuple[str, float]]:
    """By layer, of ``names`` or all, the largest difference of results and gradients."""
    warnings.simplefilter("ignore")
    for name in sorted(names or layer_cases.CASES):
        out, gradients = layer_cases.run(name, layer_cases.data())
        with gnnaccel.offload(limit, device=device):
            found, shares = layer_cases.run(name, layer_cases.data(), device=device, pinned=pinned)
        assert found.device.type == "cpu" and shares.keys() == gradients.keys(), name
        yield name, max(difference(found, out),
                        *(difference(shares[key], gradients[key]) for key in gradients))
