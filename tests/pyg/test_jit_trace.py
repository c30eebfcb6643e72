"""``torch.jit.trace`` of models that have run before: the host's own code is written down, as without
gnnaccel. A tracer runs a model twice and compares what it wrote down, so nothing that is remembered
may show in it."""
from __future__ import annotations

import warnings

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

from tests.pyg import graphs
from tests.pyg.graphs import F


class Tanh(MessagePassing):
    """A message that kernels are written for."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return torch.tanh(x_j - x_i)


class Extremes(MessagePassing):
    """An ``aggregate`` of the user's own."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, dim_size):
        low, high = [scatter(inputs, index, 0, dim_size, reduce=name) for name in ("min", "max")]
        return high - low


class Attention(MessagePassing):
    """A softmax in the message."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j, index, ptr, size_i):
        return x_j * softmax((x_i * x_j).sum(-1), index, ptr, size_i).unsqueeze(-1)


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.RGCNConv(F, 6, 3)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index, torch.arange(edge_index.shape[1], device=x.device) % 3)


class Pooled(nn.Module):
    """Functions of the host's, without a layer."""

    def forward(self, x, edge_index):
        rows = scatter(x[edge_index[0]], edge_index[1], 0, x.shape[0], reduce="max")
        rows = rows * softmax(rows, edge_index[1, :1].expand(x.shape[0]), num_nodes=x.shape[0])
        return pyg.global_mean_pool(rows, torch.arange(x.shape[0], device=x.device) // 4, 30)


MODELS = {
    "GCN": lambda: pyg.GCNConv(F, 6), "SAGE": lambda: pyg.SAGEConv(F, 6),
    "SAGE max": lambda: pyg.SAGEConv(F, 6, "max"), "GIN": lambda: pyg.GINConv(nn.Linear(F, 6)),
    "GAT": lambda: pyg.GATConv(F, 6, 2), "Transformer": lambda: pyg.TransformerConv(F, 6),
    "PNA": lambda: pyg.PNAConv(F, 6, ["mean", "max"], ["identity", "amplification"],
                               torch.tensor([0, 5, 9, 20])),
    "TAG": lambda: pyg.TAGConv(F, 6), "GEN": lambda: pyg.GENConv(F, 6), "RGCN": Typed,
    "model": lambda: pyg.models.GraphSAGE(F, 6, 2, 4), "functions": Pooled,
    "own message": Tanh, "own aggregate": Extremes, "own softmax": Attention,
}


@pytest.mark.parametrize("when", ["supported", "profitable"])
@pytest.mark.parametrize("calls", [1, 3, 20])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_has_run_before(kernels, name, calls, when):
    model = MODELS[name]().to(kernels.device).eval()
    one, other = [[graphs.features(nodes).to(kernels.device),
                   graphs.square(nodes, edges).to(kernels.device)]
                  for nodes, edges in ((graphs.N, graphs.E), (21, 60))]
    by_host = torch.jit.trace(model, one)
    expected = [by_host(*other), by_host(*one)]
    with kernels.on(on_fallback="native", when=when):
        for same in (True, False):
            for _ in range(calls):
                model(one[0], one[1] if same else one[1].clone())
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                traced = torch.jit.trace(model, one)
            assert not [one for one in told if "gnnaccel" in one.filename]
            found = [traced(*other), traced(*one)]
            for a, b in zip(found, expected):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("when", ["supported", "profitable"])
@pytest.mark.parametrize("options", [{}, {"num_bases": 2}], ids=str)
def test_rgcn_is_compiled_after_a_call(kernels, options, when):
    """The host's forward leaves an attribute without which torch.jit.script fails."""
    conv = pyg.RGCNConv(F, 6, 3, **options).to(kernels.device)
    x, edges = graphs.features().to(kernels.device), graphs.square().to(kernels.device)
    types = torch.arange(graphs.E, device=kernels.device) % 3
    expected = conv(x, edges, types)
    fresh = pyg.RGCNConv(F, 6, 3, **options).to(kernels.device)
    fresh.load_state_dict(conv.state_dict())
    with kernels.on(on_fallback="native", when=when):
        for _ in range(3):
            fresh(x, edges, types)
        compiled = torch.jit.script(fresh)
        torch.testing.assert_close(compiled(x, edges, types), expected)
    torch.testing.assert_close(compiled(x, edges, types), expected)
