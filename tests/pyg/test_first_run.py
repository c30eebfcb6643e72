"""The first run on a machine: which texts are compiled for models like those of PyG's examples, and
that all of them are asked for before a call runs, so that they are compiled side by side."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (GATConv, GCNConv, HANConv, HeteroConv, HGTConv, RGCNConv, SAGEConv,
                                SuperGATConv, TransformerConv)

import gnnaccel
from gnnaccel.cuda.runtime import driver, make_ready
from gnnaccel.cuda.segment import segment_plan
from gnnaccel.cuda.structures import pairs, structure
from gnnaccel.dispatch.distributed import state
from gnnaccel.dispatch.graph import joining
from gnnaccel.dispatch.ir import attention_programs
from gnnaccel.dispatch.plan import compiling, planner
from gnnaccel.dispatch.plan.request import CallSpec
from gnnaccel.dispatch.policy import config
from gnnaccel.dispatch.policy.reasons import reason
from gnnaccel.dispatch.run import attention
from tests.emulation.emulator import EmulatedDriver

NODES, EDGES = 90, 600
SIZES = {"author": 40, "paper": 60, "term": 50, "conference": 20}
RELATIONS = [("author", "to", "paper"), ("paper", "to", "author"), ("paper", "to", "term"),
             ("paper", "to", "conference"), ("term", "to", "paper"), ("conference", "to", "paper")]
#: texts of each model, in training and evaluation, with those that build a graph's index arrays.
#: Each takes a tenth of a second of a first run or more: fewer are better.
TEXTS = {"gcn": 7, "gat": 12, "rgcn": 12, "hetero_conv": 10, "hgt": 16, "unimp": 12,
         "super_gat": 11, "han": 6}


class Layers(nn.Module):
    """Layers one after the other, with an activation between them."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *graph):
        for at, layer in enumerate(self.layers):
            x = layer(_each(x, F.elu) if at else x, *graph)
        return x


class ByType(Layers):
    """Maps of each type's features to one width, then layers."""

    def __init__(self, widths: dict[str, int], out: int, *layers: nn.Module):
        super().__init__(*layers)
        self.maps = nn.ModuleDict({name: nn.Linear(width, out) for name, width in widths.items()})

    def forward(self, x, *graph):
        return super().forward({name: self.maps[name](t).relu() for name, t in x.items()}, *graph)


def _each(x, function):
    if isinstance(x, dict):
        return {name: function(t) for name, t in x.items()}
    return None if x is None else function(x)


def _over_edges(model: nn.Module, width: int | None, *more: torch.Tensor) -> tuple:
    x = None if width is None else torch.randn(NODES, width)
    return model, (x, torch.randint(0, NODES, (2, EDGES)), *more)


def _over_types(model: nn.Module, widths: dict[str, int]) -> tuple:
    x = {name: torch.randn(SIZES[name], width) for name, width in widths.items()}
    edges = {name: torch.stack([torch.randint(0, SIZES[name[0]], (200,)),
                                torch.randint(0, SIZES[name[2]], (200,))]) for name in RELATIONS}
    return model, (x, edges)


def _transformers() -> list[nn.Module]:
    return [TransformerConv(16, 32, 2, beta=True, dropout=0.3),
            TransformerConv(64, 32, 2, beta=True, dropout=0.3),
            TransformerConv(64, 40, 2, concat=False, beta=True, dropout=0.3)]


def _sages(width: int) -> HeteroConv:
    return HeteroConv({name: SAGEConv((width, width), 64) for name in RELATIONS})


def _han() -> tuple:
    names = [("movie", name, "movie") for name in ("first", "second")]
    layer = HANConv(16, 128, heads=8, dropout=0.6, metadata=(["movie"], names))
    edges = {name: torch.randint(0, NODES, (2, 200)) for name in names}
    return Layers(layer), ({"movie": torch.randn(NODES, 16)}, edges)


def _super_gat() -> tuple:
    options = dict(heads=8, dropout=0.6, attention_type="MX", edge_sample_ratio=0.8)
    return _over_edges(Layers(SuperGATConv(16, 8, **options),
                              SuperGATConv(64, 7, concat=False, **options)), 16)


def _wide(width: int) -> dict[str, int]:
    return dict.fromkeys(SIZES, width)


MODELS = {
    "gcn": lambda: _over_edges(Layers(GCNConv(16, 16), GCNConv(16, 7)), 16),
    "gat": lambda: _over_edges(Layers(GATConv(16, 8, heads=8, dropout=0.6),
                                      GATConv(64, 7, concat=False, dropout=0.6)), 16),
    "rgcn": lambda: _over_edges(Layers(RGCNConv(NODES, 16, 5, num_bases=30),
                                       RGCNConv(16, 4, 5, num_bases=30)), None,
                                torch.randint(0, 5, (EDGES,))),
    "hetero_conv": lambda: _over_types(Layers(_sages(128), _sages(64)), _wide(128)),
    "hgt": lambda: _over_types(ByType(_wide(16), 64, HGTConv(64, 64, (list(SIZES), RELATIONS), 2)),
                               _wide(16)),
    "unimp": lambda: _over_edges(Layers(*_transformers()), 16),
    "super_gat": _super_gat,
    "han": _han,
}


class Asked(EmulatedDriver):
    """Notes which texts are asked for ``within`` a preparation, which without one, and which are
    used."""

    def __init__(self):
        super().__init__()
        self.prepared, self.late, self.used = set(), set(), set()
        self.preparing = 0

    def kernel(self, family, entry, defines=()):
        text, kernel = (family, defines), super().kernel(family, entry, defines)
        if self.preparing:
            self.prepared.add(text)
        elif text not in self.prepared:
            self.late.add(text)

        def launch(*args):
            self.used.add(text)
            return kernel(*args)

        return launch

    def within(self, function):
        def run(*args, **kwargs):
            self.preparing += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.preparing -= 1

        return run


@pytest.fixture
def asked(monkeypatch):
    """A driver in place, with what a call prepares on a machine that has no kernels yet.

    Graphs are built as those that are not small: what these need is prepared with any graph."""
    one, compiled = Asked(), compiling._compiled
    monkeypatch.setattr(structure, "_SMALL_EDGES", -1)

    def first(whole, key, compile_, later):
        structure.prepare()
        found = compiled(whole, key, compile_, later)
        if later is not None:
            later()
        return found

    monkeypatch.setattr(compiling, "_compiled", one.within(first))
    monkeypatch.setattr(joining, "_compiles", one.within(joining._compiles.__wrapped__))
    with driver.using(one):
        planner.forget()
        yield one
    planner.forget()


def _run(model: nn.Module, args: tuple) -> None:
    for train in (True, True, False, False):
        model.train(train)
        with torch.set_grad_enabled(train):
            out = model(*args)
            if train:
                sum(t.sum() for t in (out.values() if isinstance(out, dict) else [out])).backward()


@pytest.mark.parametrize("name", MODELS)
def test_all_kernels_are_prepared(asked, name):
    """None is compiled at its first launch, and none for nothing."""
    torch.manual_seed(0)
    model, args = MODELS[name]()
    with gnnaccel.enabled(backend="cuda", when="supported"):
        _run(model, args)
    assert not asked.late
    assert not asked.prepared - asked.used
    assert len(asked.prepared) == TEXTS[name]
    # else: python -m tests.record_ready
    assert asked.prepared <= {(family, defines) for family, defines, arch in make_ready.builds()
                              if arch == segment_plan.EMULATED}


@pytest.mark.long
@pytest.mark.parametrize("own", [4, 12])
@pytest.mark.parametrize("width", [64, 16])
@pytest.mark.parametrize("frozen", [False, True])
def test_kernels_over_own_and_halo_rows_are_prepared(asked, monkeypatch, own, width, frozen):
    """HGTConv over a part, of which so many rows of each type are own."""
    monkeypatch.setattr(state, "own_rows", dict.fromkeys(SIZES, own))
    layer = HGTConv(width, 64, (list(SIZES), RELATIONS), 2)
    _, (x, edges) = _over_types(layer, _wide(width))
    edges = {name: ids % torch.tensor([[SIZES[name[0]]], [own]]) for name, ids in edges.items()}
    x = {name: rows.requires_grad_(not frozen) for name, rows in x.items()}
    with gnnaccel.enabled(backend="cuda", when="supported"):
        _run(layer, (x, edges))
    assert gnnaccel.stats()["HGTConv"]["routes"] == {"cuda": 4}
    assert not asked.late
    assert not asked.prepared - asked.used


def test_what_the_graph_shows_is_prepared_too(asked, monkeypatch):
    """Whatever was estimated: the kernels of the ordering taken are asked for before it runs."""
    monkeypatch.setattr(planner.relational, "prepare", lambda request: pairs.prepare())
    torch.manual_seed(0)
    layer = RGCNConv(16, 24, 5, root_weight=False, bias=False)
    model, args = _over_edges(Layers(layer), 16, torch.randint(0, 5, (EDGES,)))
    with gnnaccel.enabled(backend="cuda", when="supported"):
        _run(model, args)
    assert {"aggregate", "segment_gemm_grad"} <= {family for family, _ in asked.prepared}
    assert not asked.late


@pytest.mark.parametrize("code,calls", [("GA408", 3), ("GA403", 3)])
def test_calls_are_native_until_the_graphs_ordering_is_compiled(asked, monkeypatch, code, calls):
    """Which ordering is the cheapest, the graph shows; no call waits for its kernels."""
    pending, asks = ["ordering"], compiling.problem
    monkeypatch.setattr(compiling, "problem", lambda key, *args: (
        reason(code) if key[0] in pending else asks(key, *args)))
    torch.manual_seed(0)
    model, args = _over_edges(Layers(RGCNConv(16, 24, 5)), 16, torch.randint(0, 5, (EDGES,)))
    expected = model(*args)
    gnnaccel.reset_stats()
    with gnnaccel.enabled(backend="cuda", when="supported"):
        for _ in range(calls):
            assert torch.equal(model(*args), expected)
        assert gnnaccel.stats()["RGCNConv"]["reasons"] == {code: calls}
        pending.clear()
        config.renew()  # as when they are there
        assert torch.allclose(model(*args), expected, atol=1e-5)
    assert gnnaccel.stats()["RGCNConv"]["routes"] == {"native": calls, "cuda": 1}
    assert not asked.late


@pytest.mark.long
def test_a_mixture_of_weights_is_prepared(asked):
    """Of so many relations each edge mixes the rows of the bases, and no weight is made."""
    layer = RGCNConv(NODES, 16, 60, num_bases=30)
    model, args = _over_edges(Layers(layer), None, torch.randint(0, 60, (EDGES,)))
    with gnnaccel.enabled(backend="cuda", when="supported"):
        _run(model, args)
    assert not asked.late
    assert {("aggregate", "30")} <= {(family, dict(defines).get("D")) for family, defines in asked.used}


@pytest.mark.parametrize("edges,texts", [(2_315_598, 3), (3_000_000, 6)])
def test_kernels_in_bands_are_prepared_for_graphs_of_long_rows(asked, edges, texts):
    """Those of ogbn-arxiv are too short for bands."""
    program, form = attention_programs.dot_product(0.5, 0.0, False), (2, 32, *[torch.float32] * 2)
    request = CallSpec(program, "TransformerConv", *form, 169_343, 169_343, edges, 0,
                       False).request("cpu", True, 0)
    asked.within(attention.prepare)(attention_programs.attention(program), *form, True, request.edge_bits,
                                    False, request.long)
    assert len(asked.prepared) == texts


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "checkpoint"])
def test_calls_that_make_the_weights_are_native(asked, wrapped):
    """What they would compile, later calls rarely need. In a checkpoint both calls go one way."""
    model, (x, edges) = _over_edges(SAGEConv(-1, 8), 16)
    edges = edges.repeat(1, 40)  # enough to be looked at
    with gnnaccel.enabled(backend="cuda"):
        if wrapped:
            checkpoint(model, x.requires_grad_(), edges, use_reentrant=False).sum().backward()
        else:
            model(x, edges)
        reasons = gnnaccel.stats()["SAGEConv"]["reasons"]
        assert ("GA209" in reasons) is not wrapped
        assert wrapped or not asked.prepared
        model(x, edges)
    assert gnnaccel.stats()["SAGEConv"]["reasons"].get("GA209", 0) == (not wrapped)
