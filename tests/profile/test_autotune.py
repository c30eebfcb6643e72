"""autotune: every way is timed, the fastest is kept for this environment, and taken under ``decisions=True``."""
from __future__ import annotations

import json

import pytest
import torch

import gnnaccel
from gnnaccel.dispatch import planner, tuned
from gnnaccel.profile.bench import timing

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
    return (GATConv(8, 4, heads=2, **options).to(device), torch.randn(50, 8, device=device, requires_grad=True),
            torch.randint(0, 50, (2, 300), device=device))


def rgcn():
    from torch_geometric.nn import RGCNConv

    return RGCNConv(8, 4, 3), torch.randn(50, 8), torch.randint(0, 50, (2, 300)), torch.randint(0, 3, (300,))


def timed(monkeypatch, **times):
    """As if each way took so long; the ways are run once all the same."""
    def rounds(calls, device, effort):
        for call, context in calls.values():
            with context():
                call()
        return {way: timing.summary([times.get(way.partition(" ")[0], 1.0)], 1.0, 1) for way in calls}

    monkeypatch.setattr(timing, "measure_rounds", rounds)


def route_of(layer, *inputs, **options):
    gnnaccel.clear_records()
    with gnnaccel.enabled(records=10, **options):
        layer(*inputs)
    return gnnaccel.records()[-1]


@pytest.mark.parametrize("make", [gat, rgcn])
def test_the_fastest_is_kept_and_taken(folder, monkeypatch, make):
    layer, *inputs = make()
    timed(monkeypatch, native=2.0, torch=1.0)
    found = gnnaccel.autotune(layer, *inputs)
    assert [t.grad for t in found] == [True, False] and all(t.taken.startswith("torch backend") for t in found)
    assert all(list(t.times)[0] == "native" for t in found) and "training: torch backend" in str(found[0])
    assert route_of(layer, *inputs, decisions=True)["route"] == "torch"
    assert not gnnaccel.status()["enabled"]
    timed(monkeypatch, native=1.0, torch=0.97)  # within the margin
    assert {t.taken for t in gnnaccel.autotune(layer, *inputs)} == {"native"}
    found = route_of(layer, *inputs, decisions=True, when="supported")
    assert found["route"] == "native" and found["rejected"][0]["code"] == "GA105"
    assert route_of(layer, *inputs, when="supported", decisions=False)["route"] == "torch"
    (environment,) = json.loads((folder / "autotune.json").read_text())["environments"].values()
    assert len(environment) == 2


def test_it_really_measures(quick):
    layer, *inputs = gat()
    for found in gnnaccel.autotune(layer, *inputs):
        assert set(found.times) >= {"native", "torch backend"} and all(ms > 0 for ms in found.times.values())
        assert found.taken in found.times


def test_kernels_are_timed_too(device, quick):
    layer, *inputs = gat(device)
    found = gnnaccel.autotune(layer.eval(), *inputs)
    assert [t.grad for t in found] == [False]
    assert {"native", "additive: smmf + split rows", "additive: smmf + pmf", "torch backend"} == set(found[0].times)


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


def test_nothing_of_the_layer_changes(quick):
    layer, *inputs = gat(dropout=0.5)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    state = torch.get_rng_state()
    gnnaccel.autotune(layer, *inputs)
    assert torch.equal(torch.get_rng_state(), state) and layer.training
    assert all(p.grad is None for p in layer.parameters()) and inputs[0].grad is None
    assert all(torch.equal(before[name], t) for name, t in layer.state_dict().items())


def test_another_environment_knows_nothing_of_it(monkeypatch):
    layer, *inputs = gat()
    timed(monkeypatch, native=2.0, torch=1.0)
    gnnaccel.autotune(layer, *inputs)
    monkeypatch.setattr(tuned, "environment", lambda device: "another machine")
    planner.forget()
    assert route_of(layer, *inputs, decisions=True, when="supported")["rejected"][-1]["code"] != "GA105"
    assert tuned.kept("another machine") == {}


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
                         ["{", '{"schema": 2, "environments": {}}', '{"schema": 1, "environments": {"E": [{"layer": 3}]}}'])
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
