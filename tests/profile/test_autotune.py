"""autotune: every way is timed, the fastest is kept for this environment, and taken under
``decisions=True``."""
from __future__ import annotations

import json
import os
import sys

import pytest
import torch

import gnnaccel
from gnnaccel import runner, store
from gnnaccel.__main__ import main
from gnnaccel.dispatch.observe import records, watch
from gnnaccel.dispatch.plan import planner
from gnnaccel.dispatch.policy import pins, tuned
from gnnaccel.profile import observe
from gnnaccel.profile.bench import timing
from gnnaccel.profile.autotune import Tuner

pytest.importorskip("torch_geometric")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GNNACCEL_CACHE_DIR", str(tmp_path))
    tuned.kept.cache_clear()
    planner.forget()
    yield tmp_path
    gnnaccel.disable()
    gnnaccel.clear_records()
    tuned.kept.cache_clear()
    planner.forget()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(timing, "Effort", lambda **_: timing.QUICK)


def gat(device="cpu", **options):
    from torch_geometric.nn import GATConv

    torch.manual_seed(0)
    return (GATConv(8, 4, heads=2, **options).to(device),
            torch.randn(50, 8, device=device, requires_grad=True),
            torch.randint(0, 50, (2, 300), device=device))


def rgcn():
    from torch_geometric.nn import RGCNConv

    return RGCNConv(8, 4, 3), torch.randn(50,
                                          8), torch.randint(0, 50,
                                                            (2, 300)), torch.randint(0, 3, (300,))


def timed(monkeypatch, **times):
    """As if each way took so long; the ways are run once all the same."""
    def rounds(calls, device, effort):
        for call, context in calls.values():
            with context():
                call()
        return {way: timing.summary([times.get(way.partition(" ")[0], 1.0)], 1.0, 1)
                for way in calls}

    monkeypatch.setattr(timing, "measure_rounds", rounds)


def route_of(layer, *inputs, **options):
    gnnaccel.clear_records()
    with gnnaccel.enabled(records=10, **options):
        layer(*inputs)
    return gnnaccel.records()[-1]


@pytest.mark.long
@pytest.mark.parametrize("make", [gat, rgcn])
def test_the_fastest_is_kept_and_taken(folder, monkeypatch, make):
    layer, *inputs = make()
    timed(monkeypatch, native=2.0, torch=1.0)
    found = gnnaccel.autotune(layer, *inputs)
    assert [t.grad for t in found] == [True,
                                       False] and all(t.taken.startswith("torch backend")
                                                      for t in found)
    assert all(list(t.times)[0] == "native"
               for t in found) and "training: torch backend" in str(found[0])
    assert route_of(layer, *inputs, decisions=True)["route"] == "torch"
    assert not gnnaccel.status()["enabled"]
    timed(monkeypatch, native=1.0, torch=0.97)  # within the margin
    assert {t.taken for t in gnnaccel.autotune(layer, *inputs)} == {"native"}
    found = route_of(layer, *inputs, decisions=True, when="supported")
    assert found["route"] == "native" and found["rejected"][0]["code"] == "GA105"
    assert route_of(layer, *inputs, when="supported", decisions=False)["route"] == "torch"
    (environment,) = json.loads((folder / "autotune.json").read_text())["environments"].values()
    assert len(environment) == 2


@pytest.mark.long
def test_kernels_are_timed_too(device, quick):
    layer, *inputs = gat(device)
    found = gnnaccel.autotune(layer.eval(), *inputs)
    assert [t.grad for t in found] == [False]
    assert {"native", "fused attention, long rows split", "fused attention, long rows scored first",
            "torch backend"} == set(found[0].times)


def test_each_way_runs_the_way_it_says(monkeypatch):
    layer, *inputs = gat()
    seen = {}

    def rounds(calls, device, effort):
        for way, (call, context) in calls.items():
            gnnaccel.clear_records()
            with context(), gnnaccel.enabled(records=10):
                call()
            seen[way] = gnnaccel.records()[0]["kernel"] or "native"
        return {way: timing.summary([1.0], 1.0, 1) for way in calls}

    monkeypatch.setattr(timing, "measure_rounds", rounds)
    gnnaccel.autotune(layer, *inputs)
    assert seen == {way: way for way in seen} and len(seen) == 2


def test_it_really_measures_and_nothing_of_the_layer_changes(quick):
    layer, *inputs = gat(dropout=0.5)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    state, counts = torch.get_rng_state(), gnnaccel.stats()
    for found in gnnaccel.autotune(layer, *inputs):
        assert set(found.times) >= {"native",
                                    "torch backend"} and all(ms > 0 for ms in found.times.values())
        assert found.taken in found.times
    assert gnnaccel.stats() == counts
    assert torch.equal(torch.get_rng_state(), state) and layer.training
    assert all(p.grad is None for p in layer.parameters()) and inputs[0].grad is None
    assert all(torch.equal(before[name], t) for name, t in layer.state_dict().items())


def test_another_environment_knows_nothing_of_it(monkeypatch):
    layer, *inputs = gat()
    timed(monkeypatch, native=2.0, torch=1.0)
    gnnaccel.autotune(layer, *inputs)
    monkeypatch.setattr(tuned, "environment", lambda device: "another machine")
    planner.forget()
    assert route_of(layer, *inputs, decisions=True,
                    when="supported")["rejected"][-1]["code"] != "GA105"
    assert tuned.kept("another machine") == {}


@pytest.mark.long
def test_a_new_graph_is_decided_as_usual(monkeypatch):
    layer, x, edges = gat()
    timed(monkeypatch, native=1.0, torch=2.0)
    gnnaccel.autotune(layer, x, edges)
    new = torch.randint(0, 50, (2, 300))
    first, second = (route_of(layer, x, new, decisions=True, when="supported") for _ in range(2))
    assert (first["route"], second["route"]) == ("torch", "native")
    assert second["rejected"][0]["code"] == "GA105"


def test_the_environment_names_what_times_depend_on():
    text = tuned.environment("cpu")
    assert f"torch {torch.__version__}" in text and f"gnnaccel {gnnaccel.__version__}" in text
    assert f"{torch.get_num_threads()} threads" in text


@pytest.mark.parametrize("text",
                         ["{", '{"schema": 1, "environments": {}}',
                          '{"schema": 2, "environments": {"E": {"k": {"layer": 3}}}}',
                          '{"schema": 2, "environments": {"E": []}}'])
@pytest.mark.filterwarnings("ignore:.*cannot be read:RuntimeWarning")
def test_a_spoilt_file_counts_as_none(folder, text):
    (folder / "autotune.json").write_text(text)
    assert tuned.kept("E") == {}


def test_what_cannot_be_tuned():
    layer, *inputs = gat(aggr="mean")
    with pytest.raises(ValueError, match="runs natively here whatever it takes: GA201"):
        gnnaccel.autotune(layer, *inputs)
    with pytest.raises(TypeError, match="Linear is no layer that gnnaccel knows"):
        gnnaccel.autotune(torch.nn.Linear(2, 2), torch.ones(1, 2))


def test_the_variable(monkeypatch):
    from gnnaccel import env

    monkeypatch.setenv("GNNACCEL_DECISIONS", "1")
    assert env.options()["decisions"] is True
    layer, *inputs = gat()
    timed(monkeypatch, native=2.0, torch=1.0)
    gnnaccel.autotune(layer, *inputs)
    assert route_of(layer, *inputs)["kernel"] == "torch backend"


# --- layers that share a class; plain ones --------------------------------------------------------

@pytest.mark.long
def test_layers_that_compute_something_else_are_kept_apart(monkeypatch):
    from torch_geometric.nn import GATConv

    layer, x, edges = gat()
    wide = GATConv(8, 16, heads=2)
    timed(monkeypatch, native=2.0, torch=1.0)
    gnnaccel.autotune(layer, x, edges)
    timed(monkeypatch, native=1.0, torch=2.0)
    gnnaccel.autotune(wide, x, edges)
    assert [route_of(each, x, edges, decisions=True, when="supported")["route"]
            for each in (layer, wide)] == ["torch", "native"]


@pytest.mark.long
def test_dgl_layers(monkeypatch, tmp_path):
    dgl = pytest.importorskip("dgl")
    from dgl.nn import GATConv, GraphConv

    graph = dgl.add_self_loop(dgl.rand_graph(40, 200))
    timed(monkeypatch, native=2.0, torch=1.0)
    gnnaccel.autotune(GATConv(6, 3, 2), graph, torch.randn(40, 6))
    assert route_of(GATConv(6, 3, 2), graph, torch.randn(40, 6), decisions=True)["route"] == "torch"
    for decisions in (True, pins.Decisions("none", {})):  # of a layer without estimates, too
        with gnnaccel.enabled(decisions=decisions, when="supported"):
            GraphConv(6, 3)(graph, torch.randn(40, 6))


PLAIN = ["native", "fused aggregation", "torch operations"]


@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_plain_layers_by_kernels(device, monkeypatch):
    dgl = pytest.importorskip("dgl")
    from dgl.nn import GraphConv

    graph, x, layer = dgl.add_self_loop(dgl.rand_graph(40,
                                                       200)), torch.randn(40, 6), GraphConv(6, 3)
    timed(monkeypatch, native=1.0, plain=2.0)
    found = gnnaccel.autotune(layer, graph, x)
    assert all(list(t.times) == PLAIN and t.taken == "native" for t in found)
    assert route_of(layer, graph, x, when="supported")["route"] == "cuda"
    held = route_of(layer, graph, x, decisions=True, when="supported")
    assert (held["route"], held["rejected"][0]["code"]) == ("native", "GA105")


def test_message_passing_without_an_adapter_cannot_be_tuned():
    from torch_geometric.nn import GCNConv

    with pytest.raises((TypeError, ValueError), match="GCNConv"):
        gnnaccel.autotune(GCNConv(8, 4), torch.randn(50, 8), torch.randint(0, 50, (2, 300)))


# --- along a script -------------------------------------------------------------------------------

def train(net, x, edges, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        out = x
        for layer in net:
            out = layer(out, edges)
        out.square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


def tuned_run(net, x, edges):
    """As ``--autotune`` runs a script."""
    observer = observe.start(False, False, None, autotune=True)
    with gnnaccel.enabled(decisions=True):
        grads = train(net, x, edges)
        routes = {name: entry["routes"] for name, entry in gnnaccel.stats().items()}
    observe.finish(observer)
    return observer.tuner, grads, routes


def make_net():
    from torch_geometric.nn import GATConv

    torch.manual_seed(0)
    return torch.nn.ModuleList([GATConv(8, 4, heads=2, dropout=0.3), GATConv(8, 3), GATConv(3, 8),
                                GATConv(8, 3)])


def test_a_script_is_timed_once_and_reused(monkeypatch, capsys):
    x, edges = torch.randn(50, 8), torch.randint(0, 50, (2, 300))
    with gnnaccel.disabled():
        native = train(make_net(), x, edges)
    timed(monkeypatch, native=1.0, torch=2.0)
    gnnaccel.reset_stats()
    tuner, grads, routes = tuned_run(make_net(), x, edges)
    # the fourth is as the second
    assert [one.layer for one in tuner.found] == ["GATConv #1", "GATConv #2", "GATConv #3"]
    assert all(one.grad and one.taken == "native" for one in tuner.found) and tuner.known == 0
    assert all(map(torch.equal, native, grads)) and sum(routes["GATConv"].values()) == 12
    said = capsys.readouterr().err
    assert said.startswith("autotune: GATConv #1, training: native (native 1 ms, torch backend "
                           "2 ms)") and "kept in" in said
    monkeypatch.setattr(timing, "measure_rounds", None)  # nothing is timed again
    tuner, grads, _ = tuned_run(make_net(), x, edges)
    assert (tuner.found, tuner.known) == ([], 3) and all(map(torch.equal, native, grads))
    assert "3 kinds of calls go as an earlier run has timed" in capsys.readouterr().err
    assert not watch._watchers and not records.listening()


def test_graphs_that_come_once_are_not_timed(monkeypatch, capsys):
    from torch_geometric.nn import GATConv

    monkeypatch.setattr(timing, "measure_rounds", None)
    layer, x = GATConv(8, 4), torch.randn(50, 8)
    with Tuner() as tuner, gnnaccel.enabled(decisions=True):
        for _ in range(3):
            layer(x, torch.randint(0, 50, (2, 300)))
        edges = torch.randint(0, 50, (2, 300))
        layer(x, edges)
        with gnnaccel.enabled(exclude=["GATConv"]):
            layer(x, edges)
    assert not tuner.found and "nothing was timed" in str(tuner)


def test_a_way_that_does_not_fit_is_told(monkeypatch):
    def rounds(calls, device, effort):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(timing, "measure_rounds", rounds)
    layer, x, edges = gat()
    with Tuner() as tuner, gnnaccel.enabled(decisions=True):
        out = [layer(x, edges) for _ in range(3)]
    assert len(out) == 3
    assert tuner.notes == [
        "GATConv #1: not timed, as one of the ways ran out of memory; it is decided as usual"]


SCRIPT = """
import sys, torch
from torch_geometric.nn import GATConv
layer, x, edges = GATConv(8, 4), torch.randn(30, 8), torch.randint(0, 30, (2, 90))
with torch.no_grad():
    [layer(x, edges) for _ in range(3)]
sys.exit(5)
"""


def test_the_command_line(quick, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gnnaccel"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(runner, "_carry", lambda given: None)
    with pytest.raises(SystemExit, match="5"):
        main(["autotune", "-c", SCRIPT])
    assert "autotune: GATConv #1, forward: " in capsys.readouterr().err and gnnaccel.status()[
        "config"]["decisions"] is not None
    assert main(["autotune", "--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "torch" in shown[0] and shown[1].startswith(
        "  GATConv 1x4, 30->30 nodes, 90 edges, float32, forward: ")


def test_a_script_runs_untimed_where_nothing_can_be_kept(monkeypatch, capsys):
    monkeypatch.setattr(timing, "measure_rounds", None)
    monkeypatch.setenv("GNNACCEL_CACHE_DIR", os.devnull)
    gnnaccel.reset_stats()
    x, edges = torch.randn(50, 8), torch.randint(0, 50, (2, 300))
    tuner, grads, routes = tuned_run(make_net(), x, edges)
    assert tuner is None and len(grads) and sum(routes["GATConv"].values()) == 12
    said = capsys.readouterr().err
    assert said.startswith(
        "autotune: nothing is timed") and os.devnull in said and "GNNACCEL_CACHE_DIR" in said


def test_a_file_that_cannot_be_written_any_more_does_not_end_the_script(monkeypatch, capsys):
    def full(name, change):
        raise OSError(28, "No space left on device")

    timed(monkeypatch, native=1.0, torch=2.0)
    monkeypatch.setattr(store, "update", full)
    tuner, grads, _ = tuned_run(make_net(), torch.randn(50, 8), torch.randint(0, 50, (2, 300)))
    assert tuner.found == [] and len(grads)
    assert "GATConv #1: timed, but not kept ([Errno 28] No space left on device)" in capsys.readouterr().err


def test_what_is_kept_is_listed_and_what_contradicts_it_refused(folder, capsys):
    assert main(["autotune", "--list"]) == 0 and "nothing yet" in capsys.readouterr().out
    assert main(["--autotune", "--decisions", "x.json",
                 "script.py"]) == 2 and "leave --decisions out" in capsys.readouterr().err
