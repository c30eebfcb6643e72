"""The relational suite on a tiny graph on the CPU: that each cell measures what it says, not how
fast."""
from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")

from gnnaccel.__main__ import main
from gnnaccel.adapters.pyg.bench import relational as pyg
from gnnaccel.profile.bench import (accel, relation_graph, result, steps, suite_relational,
                                    timing)

QUICK = ["bench", "--suite", "relational", "--quick", "--device", "cpu"]
CPU = torch.device("cpu")
RGAT = pyg.resolve("rgat64")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "bench.json"


@pytest.fixture
def graph():
    return relation_graph.make(relation_graph.SHAPES["tiny-typed"], "cpu")


def untouched(monkeypatch):
    """gnnaccel's context does nothing: what is tested is the suite."""
    monkeypatch.setitem(accel.CONTEXTS, "gnnaccel", contextlib.nullcontext)
    monkeypatch.setattr(accel, "accelerated", lambda **options: contextlib.nullcontext())


@pytest.mark.long
@pytest.mark.parametrize("name", pyg.LAYERS)
def test_quick_run_measures_and_compares_each_layer(name, out, capsys, monkeypatch):
    untouched(monkeypatch)
    assert main([*QUICK, "--layers", name, "--parts", "layers", "--out", str(out), "--table",
                 "markdown"]) == 0
    made = result.load(out)
    for mode in ("forward", "training"):
        for impl in ("native", "gnnaccel"):
            record = made.one(kind="relation", shape="tiny-typed", layer=name, mode=mode, impl=impl)
            assert record.error is None and record.ms > 0
    check = made.one(kind="check", layer=name, mode="training").values
    assert {"output rel_l2", "x.grad rel_l2", "weights.grad rel_l2"} <= check.keys()
    assert all(value < 1e-4 for key, value in check.items() if key.endswith("rel_l2"))
    shown = capsys.readouterr().out
    assert f"| tiny-typed (cpu) | {name} | training |" in shown
    assert "relation-cpu: vs_native >= 0.95" in shown and "arxiv" not in shown


@pytest.mark.long
def test_cells_without_turns_record_routes_and_a_check(graph):
    records = suite_relational.layer_records(pyg.resolve("rgcn64"), graph, "forward", timing.QUICK)
    assert [(record.kind, record.impl, record.error) for record in records] == [
        ("relation", "native", None), ("relation", "gnnaccel", None), ("check", "", None)]
    assert "routes" in records[1].values


@pytest.mark.parametrize("name", pyg.LAYERS)
def test_training_reaches_inputs_and_weights(name, graph):
    step = steps.relation_step(pyg.resolve(name), graph, "training")
    first = step.results()
    again = steps.relation_step(pyg.resolve(name), graph, "training").results()
    for key in ("output", "x.grad", "weights.grad"):
        assert float(first[key].abs().max()) > 0
        assert torch.allclose(first[key], again[key], rtol=1e-4, atol=1e-5)
    assert len(first["output"]) == len(
        first["x.grad"]) == graph.num_nodes * 64, "some node types were left out"
    assert all(tensor.grad is None for tensor in (*step.inputs.values(), *step.module.parameters()))


def test_wrong_gradients_show_in_the_check(graph, monkeypatch):
    @contextlib.contextmanager
    def wrong():
        with pytest.MonkeyPatch.context() as patch:
            original = steps._grad
            patch.setattr(steps, "_grad", lambda tensor: 2 * original(tensor))
            yield

    monkeypatch.setitem(accel.CONTEXTS, "gnnaccel", wrong)
    check = suite_relational.layer_records(pyg.resolve("rgcn64"), graph, "training", timing.QUICK)[-1]
    assert check.values["weights.grad rel_l2"] == pytest.approx(1, rel=1e-3)
    assert check.values["output rel_l2"] < 1e-6


def test_native_that_does_not_fit_is_said_and_not_run(graph, monkeypatch):
    monkeypatch.setattr(suite_relational, "_free_bytes", lambda device: 1)
    monkeypatch.setattr(suite_relational, "_taken_over", lambda *_: False)
    monkeypatch.setattr(suite_relational, "relation_step", lambda *_: pytest.fail("it was run"))
    records = suite_relational.layer_records(RGAT, graph, "training", timing.QUICK)
    assert [record.impl for record in records] == ["native", "gnnaccel"]
    assert records[0].error.startswith(
        "not run: needs about") and "does not take RGATConv over" in records[1].error


def test_where_native_does_not_fit_gnnaccel_may_not_fall_back(graph, monkeypatch):
    given = []
    monkeypatch.setattr(suite_relational, "_free_bytes", lambda device: 1)
    monkeypatch.setattr(suite_relational, "_taken_over", lambda *_: True)
    monkeypatch.setattr(accel, "accelerated",
                        lambda **options: given.append(options) or contextlib.nullcontext())
    native, ours = suite_relational.layer_records(RGAT, graph, "forward", timing.QUICK)
    assert native.timing is None and ours.ms > 0
    assert given == [{"on_fallback": "raise"}]


def test_layers_nobody_takes_over_are_told_from_others(monkeypatch):
    untouched(monkeypatch)
    assert not suite_relational._taken_over(RGAT, "forward", CPU)
    monkeypatch.setattr(accel, "routes", lambda: {"routes": {"torch": 1}, "reasons": {}})
    assert suite_relational._taken_over(RGAT, "forward", CPU)


@pytest.mark.parametrize("layer, mode, gib", [
    ("RGAT 64", "training", 29), ("FastRGCN 64", "forward", 13), ("RGCN 64", "training", 2)])
def test_native_memory_is_what_was_measured_on_fb15k(layer, mode, gib):
    """29 GiB for RGAT on an H200; the others follow from their formulas."""
    shape = relation_graph.SHAPES["fb15k-size"]
    graph = relation_graph.RelationGraph(shape, torch.zeros(2, shape.num_edges, dtype=torch.int8),
                                         torch.zeros(shape.num_edges, dtype=torch.int8))
    assert suite_relational.needed_bytes(pyg.resolve(layer), graph,
                                        mode) / 2**30 == pytest.approx(gib, rel=0.15)


@pytest.mark.long
def test_a_slow_call_is_timed_once(graph):
    effort = timing.Effort(patience_s=0.0)
    native = suite_relational.layer_records(pyg.resolve("rgcn64"), graph, "forward", effort)[0]
    assert (native.timing["batches"], native.timing["calls"]) == (1, 1)
    assert native.timing["ms"] == native.timing["first_ms"] > 0


def test_memory_counts_the_first_step(graph, monkeypatch):
    asked = []
    monkeypatch.setattr(timing, "peak_extra_bytes", lambda call,
                        device: asked.append(call()) or 3 * 2**20)
    records = suite_relational.memory_records(pyg.resolve("rgcn64"), graph, ("native", "gnnaccel"))
    assert [(record.kind, record.impl, record.values) for record in records] == [
        ("memory", "native", {"peak_mib": 3.0}), ("memory", "gnnaccel", {"peak_mib": 3.0})]
    assert len(asked) == 2


@pytest.mark.long
def test_passes_are_switched_and_compared(graph, monkeypatch):
    given = []

    @contextlib.contextmanager
    def doubling_when_compacting(**options):
        given.append(options)
        with pytest.MonkeyPatch.context() as patch:
            if options.get("passes") == ("compaction",):
                original = steps._grad
                patch.setattr(steps, "_grad", lambda tensor: 2 * original(tensor))
            yield

    monkeypatch.setattr(accel, "accelerated", doubling_when_compacting)
    monkeypatch.setitem(accel.CONTEXTS, "gnnaccel", accel.accelerated)
    records = suite_relational.passes_records(pyg.resolve("rgcn64"), graph, "training", timing.QUICK)
    assert given == [{"passes": ()}, {"passes": ("compaction",)}, {"passes": ("reordering",)}, {}]
    assert [record.impl for record in records] == ["none", "compaction", "reordering", "all"]
    assert all(record.error is None and record.ms > 0 for record in records)
    assert records[1].values["x.grad rel_l2"] == pytest.approx(1, rel=1e-3)
    assert records[3].values["x.grad rel_l2"] < 1e-4 and "x.grad rel_l2" not in records[0].values


def test_real_graphs_take_the_place_of_synthetic_ones(tmp_path, out, monkeypatch):
    untouched(monkeypatch)
    np.savez(tmp_path / "aifb.npz", edge_index=np.array([[0, 1, 2], [1, 2, 3]]),
             edge_type=np.array([0, 1, 0]), num_nodes=4, num_relations=2)
    assert main([*QUICK[:3], *QUICK[4:], "--data", str(tmp_path), "--layers", "rgcn64", "--parts",
                 "layers", "--shapes", "aifb", "--repeat", "1", "--out", str(out)]) == 0
    made = result.load(out)
    assert made.one(kind="shape", shape="aifb").values["num_edges"] == 6
    assert str(tmp_path) not in out.read_text()


def test_default_shapes_with_and_without_data(tmp_path):
    import argparse

    (tmp_path / "fb15k_237.npz").touch()
    options = argparse.Namespace(quick=False, data=None)
    assert suite_relational.default_shapes(options, relation_graph.DEFAULT,
                                  every=True) == list(relation_graph.DEFAULT)
    options.data = str(tmp_path)
    names = suite_relational.default_shapes(options, relation_graph.DEFAULT, every=True)
    assert names[0] == "fb15k_237" and "fb15k-size" not in names and "am-size" in names
    assert suite_relational.default_shapes(options, relation_graph.CPU,
                                  every=False) == list(relation_graph.CPU)


@pytest.mark.parametrize("options",
                         [["--shapes", "nosuch"], ["--layers", "nosuch"], ["--parts", "nosuch"],
                          ["--data", "nosuch", "--shapes", "aifb"]])
def test_unknown_names_are_an_error_not_a_trace(options, capsys):
    assert main([*QUICK, *options]) == 2
    said = capsys.readouterr().err
    assert "nosuch" in said or "aifb.npz" in said


def test_data_belongs_to_this_suite(capsys):
    assert main(["bench", "--quick", "--device", "cpu", "--data", "somewhere"]) == 2
    assert "--suite relational" in capsys.readouterr().err
