"""What PyG asks anew in each call, by the shorter way: the same answers, and its own functions
afterwards."""
from __future__ import annotations

import sys

import pytest
import torch
import torch_geometric
from torch_geometric.nn import DirGNNConv, GraphConv, SAGEConv
from torch_geometric.nn.module_dict import ModuleDict

import gnnaccel
from gnnaccel.adapters.pyg import shortcuts
from gnnaccel.adapters.pyg.propagate import kept_results
from tests.pyg.hetero_graphs import edges, features, hetero, same

KEYS = [("a", "to", "b"), "a", "a.b", ("a.b", "to", "c"), "keys", "forward", ("a", "b")]


@pytest.mark.long
def test_keys_are_those_of_the_host():
    made = ModuleDict({key: torch.nn.Linear(1, 1) for key in KEYS})
    expected = list(made.keys())
    assert expected == KEYS
    with gnnaccel.enabled():
        assert [list(made.keys()) for _ in range(3)] == [expected] * 3
        assert [key for key, _ in made.items()] == expected
        assert ModuleDict.to_external_key("<a___b>") == ("a", "b")


def test_a_class_with_other_names_is_asked_itself():
    class Other(ModuleDict):
        CLASS_ATTRS = ("x",)

    with gnnaccel.enabled():
        for _ in range(2):
            assert ModuleDict.to_external_key("<x>") == "<x>" and Other.to_external_key(
                "<x>") == "x"


def test_keys_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(shortcuts, "_MANY", 2)
    asked = []
    translated = shortcuts.remembering(lambda cls, key: asked.append(key) or key.upper())
    assert [translated(int, key) for key in "aabca"] == list("AABCA")
    assert asked == ["a", "b", "c", "a"]


@pytest.fixture
def compiling():
    """The names under which PyG's modules have the question whether something compiles."""
    GraphConv(2, 2)
    return [m for name, m in list(sys.modules.items()) if name.startswith("torch_geometric")
            and hasattr(m, "is_compiling")]


@pytest.mark.long
def test_whether_something_compiles_is_asked_of_torch(compiling):
    native = [module.is_compiling for module in compiling]
    assert len(native) > 5 and torch_geometric.is_compiling in native
    with gnnaccel.enabled():
        assert all(module.is_compiling is torch.compiler.is_compiling for module in compiling)
    assert [module.is_compiling for module in compiling] == native
    assert torch_geometric.is_compiling is not torch.compiler.is_compiling


def test_native_layers_give_the_hosts_results():
    layer, x, ei = hetero(GraphConv), features(), edges()
    expected = layer(x, ei)
    with gnnaccel.enabled():
        for _ in range(4):
            same(layer(x, ei), expected, 0.0)


# --- edges against their direction ----------------------------------------------------------------

@pytest.mark.parametrize("root", [True, False])
def test_edges_are_turned_around_once(route, root, monkeypatch):
    seen, turned = [], shortcuts._turned
    monkeypatch.setattr(shortcuts, "_turned", lambda e: seen.append(e.shape[1]) or turned(e))
    layers = [DirGNNConv(SAGEConv(6, 6), 0.3, root).to(route.device) for _ in range(2)]
    x = torch.randn(9, 6, device=route.device)
    edge_index = torch.randint(0, 9, (2, 30), device=route.device)

    def run():
        out = x
        for layer in layers:
            out = layer(out, edge_index)
        return out

    with route.on():
        for write in (lambda: None, lambda: edge_index[0].fill_(3), lambda: edge_index.fill_(1)):
            write()
            for _ in range(3):
                found = run()
                with gnnaccel.disabled():
                    torch.testing.assert_close(found, run(), rtol=1e-5, atol=1e-5)
    assert seen == [30] * 3


@pytest.mark.long
@pytest.mark.parametrize("at", ["conv_in", "conv_out"])
def test_turned_edges_that_somebody_wrote_to(route, at, monkeypatch):
    # as of edges on a GPU, from the first call
    monkeypatch.setattr(kept_results, "_worth_keeping", lambda *args: True)
    layer = DirGNNConv(SAGEConv(6, 6)).to(route.device)
    x = torch.randn(9, 6, device=route.device)
    edges = torch.randint(0, 9, (2, 30), device=route.device)

    class Writes(SAGEConv):
        def forward(self, x, edge_index):
            out = super().forward(x, edge_index)
            edge_index[1].fill_(0)
            return out

    setattr(layer, at, Writes(6, 6).to(route.device))
    with gnnaccel.disabled():
        wanted = layer(x, edges.clone())
    edge_index = edges.clone()
    with route.on(on_fallback="native"):
        for _ in range(4):
            torch.testing.assert_close(layer(x, edge_index), wanted, rtol=1e-5, atol=1e-5)
            edge_index.copy_(edges)
