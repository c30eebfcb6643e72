"""Native calls of DGL's layers are not read again; what may change their route has to be seen."""
from __future__ import annotations

import dgl
import pytest
import torch
from dgl.nn.pytorch import GATConv, HeteroGraphConv, HGTConv, RelGraphConv, SAGEConv

import gnnaccel
from tests import probes

NODES, EDGES, WIDTH, TYPES = 30, 120, 8, 3
LAYERS = {"GATConv": lambda: GATConv(WIDTH, 4, 2, allow_zero_in_degree=True),
          "HGTConv": lambda: HGTConv(WIDTH, 4, 2, 1, TYPES, dropout=0.0),
          "RelGraphConv": lambda: RelGraphConv(WIDTH, WIDTH, TYPES)}

NODE_TYPES = torch.zeros(NODES, dtype=torch.int64)


def graph(edges: int = EDGES) -> dgl.DGLGraph:
    g = dgl.graph(tuple(torch.randint(NODES, (2, edges))), num_nodes=NODES)
    g.edata["type"] = torch.randint(TYPES, (edges,))
    return g


def call(name: str, layer, g: dgl.DGLGraph, x: torch.Tensor, **more):
    if name == "HGTConv":
        return layer(g, x, NODE_TYPES, g.edata["type"], **more)
    return layer(g, x, g.edata["type"], **more) if name == "RelGraphConv" else layer(g, x, **more)


@pytest.fixture
def read(monkeypatch):
    """The layers that were read, by class. Every call stays native."""
    found = probes.decided(monkeypatch)
    with torch.no_grad(), gnnaccel.enabled(backend="cuda"):
        yield found


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("new", [False, True])
def test_like_calls_are_not_read_and_give_the_hosts_results(read, name, new):
    layer, one = LAYERS[name](), graph()
    graphs, x = [graph() if new else one for _ in range(12)], torch.randn(NODES, WIDTH)
    for g in graphs[:8]:
        call(name, layer, g, x)
    read.clear()
    got = [call(name, layer, g, x) for g in graphs[8:]]
    assert not read, "neither the layer nor the linear maps inside it"
    with gnnaccel.disabled():
        assert all(torch.equal(a, call(name, layer, g, x)) for a, g in zip(got, graphs[8:]))


def test_every_call_is_counted(read):
    layer, g, x = LAYERS["HGTConv"](), graph(), torch.randn(NODES, WIDTH)
    gnnaccel.reset_stats()
    for _ in range(10):
        call("HGTConv", layer, g, x)
    found = gnnaccel.stats()
    assert found["HGTConv"]["calls"] == 10 and found["TypedLinear"]["calls"] == 80


CHANGES = {
    "more edges": lambda g, x: (graph(3 * EDGES), x, {}),
    "edges added in place": lambda g,
    x: (g.add_edges(torch.zeros(EDGES).long(), torch.ones(EDGES).long()), (g, x, {}))[1],
    "wider features": lambda g, x: (g, torch.randn(NODES, 9, WIDTH), {}),
    "a flag": lambda g, x: (g, x, dict(get_attention=True)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(read, change):
    layer, g, x = LAYERS["GATConv"](), graph(), torch.randn(NODES, WIDTH)
    for _ in range(6):
        layer(g, x)
    g, x, more = CHANGES[change](g, x)
    read.clear()
    got = layer(g, x, **more)
    assert read == ["GATConv"]
    with gnnaccel.disabled():
        expected = layer(g, x, **more)
    assert all(map(torch.equal, got, expected)) if more else torch.equal(got, expected)


def test_another_value_of_a_flag_is_seen(read):
    layer, g, x = LAYERS["HGTConv"](), graph(), torch.randn(NODES, WIDTH)
    g.edata["type"] = g.edata["type"].sort().values
    for _ in range(6):
        call("HGTConv", layer, g, x, presorted=False)
    read.clear()
    call("HGTConv", layer, g, x, presorted=False)
    assert not read
    call("HGTConv", layer, g, x, presorted=True)
    assert "HGTConv" in read


@pytest.mark.parametrize("name", ["GATConv", "RelGraphConv"])
def test_a_graph_that_comes_again_gets_the_faster_way(name):
    layer, x = LAYERS[name](), torch.randn(NODES, WIDTH)
    gnnaccel.reset_stats()
    g = graph()
    with torch.no_grad(), gnnaccel.enabled():
        for _ in range(6):
            call(name, layer, g, x)
    assert gnnaccel.stats()[name]["routes"].get("torch", 0) >= 3


def test_graphs_that_come_again_in_turn_get_the_faster_way():
    layer, x, graphs = LAYERS["GATConv"](), torch.randn(NODES, WIDTH), [graph() for _ in range(40)]
    with torch.no_grad(), gnnaccel.enabled():
        for _ in range(8):
            gnnaccel.reset_stats()
            for g in graphs:
                layer(g, x)
    assert gnnaccel.stats()["GATConv"]["routes"].get("torch", 0) > 30


def test_a_users_module_inside_is_asked(read):
    """What a user's own module calls may find a faster way another time."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = LAYERS["GATConv"]()

        def forward(self, g, x):
            return self.inner(g, x[0] if isinstance(x, tuple) else x).flatten(1)

    g = dgl.heterograph({("a", "likes", "a"): tuple(torch.randint(NODES, (2, EDGES)))},
                        {"a": NODES})
    layer, x = HeteroGraphConv({"likes": Own()}), {"a": torch.randn(NODES, WIDTH)}
    gnnaccel.reset_stats()
    for _ in range(8):
        layer(g, x)
    assert gnnaccel.stats()["GATConv"]["calls"] == 8


@pytest.mark.parametrize("name", LAYERS)
def test_known_graphs_in_turn_that_stay_native_are_not_read(read, name):
    layer, x, graphs = LAYERS[name](), torch.randn(NODES, WIDTH), [graph() for _ in range(3)]
    for _ in range(6):
        for g in graphs:
            call(name, layer, g, x)
    read.clear()
    for g in graphs:
        call(name, layer, g, x)
    assert not read


@pytest.mark.parametrize("cls", [GATConv, SAGEConv])
def test_a_pair_of_dictionaries_of_features(cls):
    g = dgl.heterograph({("a", "into", "b"): tuple(torch.randint(5, (2, 12)))}, {"a": 5, "b": 5})
    more = dict(allow_zero_in_degree=True) if cls is GATConv else {}
    last = 2 if cls is GATConv else "mean"
    layer = HeteroGraphConv({"into": cls(WIDTH, 4, last, **more)})
    x = {"a": torch.randn(5, WIDTH)}, {"b": torch.randn(5, WIDTH)}
    expected = layer(g, x)["b"]
    for when in ("profitable", "supported"):
        with gnnaccel.enabled(when=when):
            for _ in range(4):
                torch.testing.assert_close(layer(g, x)["b"], expected)
