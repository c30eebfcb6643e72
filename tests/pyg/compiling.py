"""Layers and steps for the tests of compiled models."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch_geometric import nn

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, F
from tests.routes import opened


@pytest.fixture(params=["torch", pytest.param("emulated", marks=pytest.mark.long),
                        pytest.param("cuda", marks=pytest.mark.gpu)])
def route(request):
    """As of all tests of PyG's; compiling takes seconds."""
    with opened(request.param) as found:
        yield found


#: label -> (layer, arguments after x and the edges)
CASES: dict[str, Callable] = {
    "GATConv": lambda: (nn.GATConv(F, 8, 2), ()),
    "GATConv without loops": lambda: (nn.GATConv(F, 8, 2, add_self_loops=False), ()),
    "GATConv averaged": lambda: (nn.GATConv(F, 8, 2, concat=False, bias=False), ()),
    "GATConv with edges": lambda: (nn.GATConv(F, 8, 2, edge_dim=EDGE, fill_value=0.5),
                                   (graphs.edge_features(),)),
    "GATConv of means": lambda: (nn.GATConv(F, 8, 2, aggr="mean"), ()),
    "GATConv residual": lambda: (nn.GATConv(F, 8, 2, residual=True), ()),
    "GATv2Conv": lambda: (nn.GATv2Conv(F, 8, 2), ()),
    "GATv2Conv shared": lambda: (nn.GATv2Conv(F, 8, 2, share_weights=True, edge_dim=EDGE),
                                 (graphs.edge_features(),)),
    "TransformerConv": lambda: (nn.TransformerConv(F, 8, 2), ()),
    "TransformerConv beta": lambda: (nn.TransformerConv(F, 8, 2, concat=False, beta=True,
                                                        edge_dim=EDGE), (graphs.edge_features(),)),
    "GCNConv": lambda: (nn.GCNConv(F, 8), ()),
    "GCNConv weighted": lambda: (nn.GCNConv(F, 8, improved=True, bias=False),
                                 (graphs.edge_features(width=None).abs(),)),
    "GCNConv plain": lambda: (nn.GCNConv(F, 8, normalize=False), ()),
    "SAGEConv": lambda: (nn.SAGEConv(F, 8), ()),
    "SAGEConv max": lambda: (nn.SAGEConv(F, 8, "max", normalize=True, project=True,
                                         root_weight=False), ()),
    "GINConv": lambda: (nn.GINConv(torch.nn.Linear(F, 8)), ()),
    "GINConv trained": lambda: (nn.GINConv(torch.nn.Sequential(
        torch.nn.Linear(F, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)), train_eps=True), ()),
}

def _typed(name: str, **options):
    types = torch.randint(0, 3, (graphs.E,))
    return lambda: (getattr(nn, name)(F, 8, 3, **options), (types,))


CASES |= {
    "RGCNConv": _typed("RGCNConv"), "RGCNConv bases": _typed("RGCNConv", num_bases=2, aggr="add"),
    "RGCNConv blocks": _typed("RGCNConv", num_blocks=2, root_weight=False, bias=False),
    "FastRGCNConv fast": _typed("FastRGCNConv"),
    "RGATConv": _typed("RGATConv", heads=2),
    "RGATConv bases": _typed("RGATConv", heads=2, num_bases=2, mod="additive", concat=False,
                             attention_mechanism="within-relation"),
    "RGATConv products": _typed("RGATConv", heads=2, dim=2, bias=False,
                                attention_mode="multiplicative-self-attention"),
    "RGATConv scaled": lambda: rgat(mod="scaled", num_blocks=2),
    "AGNNConv": lambda: (nn.AGNNConv(), ()),
    "AGNNConv fixed": lambda: (nn.AGNNConv(requires_grad=False, add_self_loops=False), ()),
    "SuperGATConv": lambda: (nn.SuperGATConv(F, 8, 2, dropout=0.5).eval(), ()),
    "SuperGATConv SD": lambda: (nn.SuperGATConv(F, 8, 2, concat=False, attention_type="SD").eval(),
                                ()),
    "PNAConv": lambda: (pna(), ()),
    "PNAConv towers": lambda: (pna(["sum", "min", "var"], ["linear", "inverse_linear"], towers=4,
                                   divide_input=True, train_norm=True), ()),
    "PNAConv deep": lambda: (pna(["std"], ["attenuation"], pre_layers=2, post_layers=2), ()),
    "PNAConv with edges": lambda: (pna(edge_dim=EDGE), (graphs.edge_features(),)),
    "GraphConv": lambda: (nn.GraphConv(F, 8), ()),
    "GraphConv weighted": lambda: (nn.GraphConv(F, 8, "mean", bias=False),
                                   (graphs.edge_features(width=None),)),
    "GINEConv": lambda: (nn.GINEConv(torch.nn.Linear(F, 8)), (graphs.edge_features(width=F),)),
    "GINEConv trained": lambda: (nn.GINEConv(torch.nn.Linear(F, 8), train_eps=True, edge_dim=EDGE),
                                 (graphs.edge_features(),)),
    "SGConv": lambda: (nn.SGConv(F, 8), ()),
    "SGConv thrice": lambda: (nn.SGConv(F, 8, 3, add_self_loops=False, bias=False),
                              (graphs.edge_features(width=None).abs(),)),
    "TAGConv": lambda: (nn.TAGConv(F, 8, 2), ()),
    "TAGConv plain": lambda: (nn.TAGConv(F, 8, 1, normalize=False, bias=False), ()),
    "APPNP": lambda: (nn.APPNP(2, 0.1), ()),
}


def rgat(**options):
    """RGATConv, of whose parameters the host leaves one as memory is."""
    layer, more = _typed("RGATConv", **options)()
    with torch.no_grad():
        layer.l2.fill_(0.1)
    return layer, more


def pna(aggregators=("mean", "max", "std"), scalers=("identity", "amplification"), **options):
    """PNAConv for degrees of about five."""
    return nn.PNAConv(F, 8, list(aggregators), list(scalers), torch.tensor([0, 1, 3, 5, 9, 5, 2]),
                      **options)


def reset() -> None:
    """Nothing compiled, nothing counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gnnaccel.reset_stats()


def compiles() -> int:
    """Graphs compiled since `reset`."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def on(route, **options) -> None:
    gnnaccel.enable(**{"backend": route.backend, "when": "supported", "compile": True, **options})
    reset()


def step(model, *inputs, seed=3):
    """(result, gradients of the floating inputs and of the parameters) of a step that is random by
    ``seed``. What does not take part has None."""
    inputs = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    torch.manual_seed(seed)
    out = model(*inputs)
    known = (*(t for t in inputs if t.is_floating_point()), *model.parameters())
    return out.detach(), torch.autograd.grad(out.square().sum(), known, allow_unused=True)


def truth(layer, *inputs):
    """`step` of the host's own layer in fp64, as fp32."""
    inputs = [t.double() if t.is_floating_point() else t for t in inputs]
    with gnnaccel.disabled():
        out, grads = step(copy.deepcopy(layer).double(), *inputs)
    return out.float(), [t if t is None else t.float() for t in grads]


def same(got, expected) -> None:
    """Two results of `step` are equal but for rounding; some gradients are zero but for that."""
    every = [b for b in (expected[0], *expected[1]) if b is not None and b.numel()]
    size = max((float(b.abs().max()) for b in every), default=0.0)
    for a, b in zip((got[0], *got[1]), (expected[0], *expected[1])):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-5 + 1e-6 * size)


class Net(torch.nn.Module):
    """Three layers with torch's operations around."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first = nn.GATConv(F, 8, 2, dropout=dropout)
        self.norm = torch.nn.LayerNorm(16)
        self.second, self.last = nn.GCNConv(16, 8), nn.SAGEConv(8, 4)

    def forward(self, x, edge_index):
        x = (x * 1.5).sin()
        x = self.norm(self.first(x, edge_index)).relu() + 1
        x = self.second(x, edge_index).relu()
        return self.last(x, edge_index).log_softmax(-1)


class Pair(torch.nn.Module):
    """A layer over a pair of features, which are arguments of their own."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, y, *more):
        return self.layer((x, y), *more)
