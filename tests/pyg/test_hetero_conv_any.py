"""HeteroConv of any layers, over any graph with types, as the host's own loop has it."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, HeteroConv, SAGEConv

pytestmark = pytest.mark.filterwarnings("ignore:There exist node types")

W, TYPES = 5, ("a", "b", "c")
KINDS = {
    "sage": lambda: SAGEConv((W, W), 6),
    "sums": lambda: SAGEConv((W, W), 6, aggr="sum", bias=False),
    "graph": lambda: GraphConv((W, W), 6),
    "gat": lambda: GATConv((W, W), 3, 2, add_self_loops=False),
    "gatv2": lambda: GATv2Conv((W, W), 3, 2, add_self_loops=False),
    "gin": lambda: GINConv(torch.nn.Linear(W, 6)),
    "gcn": lambda: GCNConv(W, 6),
}


@st.composite
def cases(draw):
    """(kinds by edge type, nodes by type, edges by edge type, aggregation)."""
    nodes = {t: draw(st.sampled_from([0, 1, 2, 9])) for t in TYPES}
    kinds, edges = {}, {}
    for at in range(draw(st.integers(2, 7))):
        kind = draw(st.sampled_from(sorted(KINDS)))
        src = draw(st.sampled_from(TYPES))
        name = (src, f"r{at}", src if kind == "gcn" else draw(st.sampled_from(TYPES)))
        ends = nodes[name[0]], nodes[name[2]]
        count = draw(st.sampled_from([0, 1, 7, 70])) if all(ends) else 0
        kinds[name] = kind
        edges[name] = torch.stack([torch.randint(0, max(1, n), (count,)) for n in ends])
    return kinds, nodes, edges, draw(st.sampled_from(["sum", "mean", "min", "max", "cat", None]))


@pytest.mark.long
@settings(max_examples=12, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_any_layers_on_any_graph(route, case):
    kinds, nodes, edges, aggr = case
    made = HeteroConv({name: KINDS[kind]() for name, kind in kinds.items()}, aggr).to(route.device)
    x = {t: torch.randn(n, W, device=route.device, requires_grad=True) for t, n in nodes.items()}
    ei = {name: t.to(route.device) for name, t in edges.items()}

    def results() -> dict:
        for t in (*x.values(), *made.parameters()):
            t.grad = None
        out = made(x, ei)
        total = sum((t * torch.linspace(-1, 1, t.numel(), device=t.device).view(t.shape)).sum()
                    for t in out.values())
        total.backward()
        grads = {k: t.grad for k, t in {**x, **dict(made.named_parameters())}.items()}
        return {**{f"out {k}": t.detach() for k, t in out.items()}, **grads}

    native = results()
    with route.on(on_fallback="native"):
        got = results()
    for k, t in native.items():
        assert (got[k] is None) == (t is None), k
        assert t is None or not t.numel() or torch.allclose(got[k], t, rtol=1e-4,
                                                            atol=2e-5
                                                            * max(1.0, t.abs().max().item())), k
    assert list(got) == list(native)
