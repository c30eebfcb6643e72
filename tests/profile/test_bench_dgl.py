"""The suite over DGL: end to end on tiny graphs on the CPU, its reports on made-up records, and its
plan for a GPU."""
from __future__ import annotations

import argparse
import importlib.util

import pytest
import torch

import gnnaccel
from gnnaccel.__main__ import main
from gnnaccel.adapters.dgl import bench as dgl
from gnnaccel.profile.bench import (
    accel, guard, metrics, plan, relation_graph, result, steps, suite_dgl, table,
    targets, timing)
from gnnaccel.profile.bench.result import Record

needs_dgl = pytest.mark.skipif(importlib.util.find_spec("dgl") is None,
                               reason="DGL is not installed")
QUICK = ["bench", "--suite", "dgl", "--quick", "--device", "cpu"]
CPU = torch.device("cpu")
TIMED = dict(p10_ms=1.0, p90_ms=2.0, min_ms=1.0, first_ms=9.0, calls=1, batches=20)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "bench.json"


def options(**given) -> argparse.Namespace:
    """The command line's, nothing being asked for."""
    return argparse.Namespace(**{**dict(shapes=None, layers=None, parts=None, quick=False),
                                 **given})


def cell(shape: str, layer: str, mode: str, ms: float, peak: float | None = None) -> Record:
    return Record("dgl", shape, layer, mode, "gnnaccel", "cuda", {**TIMED, "ms": ms},
                  {} if peak is None else {"peak_mib": peak})


@pytest.mark.long
@needs_dgl
def test_quick_run_measures_and_compares_each_layer(out, capsys):
    assert main([*QUICK, "--out", str(out), "--table", "markdown"]) == 0
    made = result.load(out)
    for layer in dgl.LAYERS.values():
        shape = "tiny-typed" if layer.typed else "tiny"
        for mode in ("forward", "training"):
            for impl in ("native", "gnnaccel"):
                record = made.one(kind="dgl", shape=shape, layer=layer.name, mode=mode, impl=impl)
                assert record.error is None and record.ms > 0
            assert made.one(kind="dgl", layer=layer.name, mode=mode,
                            impl="gnnaccel").values["routes"]
        check = made.one(kind="check", layer=layer.name, mode="training").values
        assert {"output rel_l2", "x.grad rel_l2", "weights.grad rel_l2"} <= check.keys()
        assert all(value < 1e-4 for key, value in check.items()
                   if key.endswith("rel_l2")), layer.name
    assert made.provenance["dgl"]
    shown = capsys.readouterr().out
    assert "| tiny (cpu) | GAT 8x8 | training |" in shown and "dgl-cpu: vs_native >= 0.95" in shown
    assert "dgl-cpu HGT 4x16: vs_native >= 1 (relational layers gain)" in shown


@needs_dgl
@pytest.mark.parametrize("name", [name for name, layer in dgl.LAYERS.items() if layer.typed])
def test_typed_graphs_lie_sorted_and_count_all_types(name):
    shape = relation_graph.SHAPES["tiny-typed"]
    graph = suite_dgl.make(shape, CPU, 0, "random")
    assert torch.equal(graph.edge_type,
                       graph.edge_type.sort().values) and len(graph.edge_type) == shape.num_edges
    assert torch.equal(graph.node_type.bincount(), torch.tensor(shape.nodes))
    assert graph.facts()["num_relations"] == shape.num_relations
    src, dst = graph.graph.edges()
    ends = torch.stack((graph.node_type[src], graph.node_type[dst]), 1)
    assert torch.equal(ends,
                       torch.tensor(shape.ends)[
                           graph.edge_type]), "edges and their types went apart"
    first, again = (suite_dgl.dgl_step(dgl.LAYERS[name], graph, "training").results()
                    for _ in range(2))
    assert all(torch.allclose(first[key], again[key], rtol=1e-4, atol=1e-5) for key in first)


@pytest.mark.long
@needs_dgl
def test_on_a_device_graphs_go_over_the_bridge(monkeypatch):
    from tests.dgl import simulated

    host = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: host())
    for name, replaced in dict(synchronize=lambda device: None, release=lambda device: None,
                               live_bytes=lambda device: 0, peak_extra_bytes=lambda call,
                               device: 2**20, _batch_events=timing._batch_clock).items():
        monkeypatch.setattr(timing, name, replaced)
    monkeypatch.setattr(accel, "accelerated", lambda: gnnaccel.enabled(backend="torch"))
    monkeypatch.setitem(accel.CONTEXTS, "gnnaccel", accel.accelerated)
    jobs = suite_dgl.jobs(options(quick=True), simulated.DEVICE)
    with simulated.device(monkeypatch) as device:
        planned = plan.Plan(jobs, device=device, effort=timing.QUICK)
        records = [record for record in suite_dgl.dgl(planned, guard.Budget(100))
                   if record.kind == "dgl"]
    ours, twins = ([record for record in records if record.impl == impl]
                   for impl in ("gnnaccel", "pyg"))
    assert len(ours) == 2 * len(dgl.LAYERS) and [(r.layer, r.mode) for r in twins] == [
        (layer, mode)
        for layer in ("GAT 8x8", "GATv2 4x16", "DotGat 1x64", "RelGraphConv 64", "HGT 4x16")
        for mode in steps.MODES]
    for record in ours:
        assert (record.impl, record.device, record.error) == ("gnnaccel", "cuda", None)
        assert record.ms > 0 and record.values["peak_mib"] == 1 and record.values["routes"]
    assert not gnnaccel.status()["bridge"]["active"]


@pytest.mark.long
@needs_dgl
def test_gnnaccel_alone(out):
    assert main([*QUICK, "--no-native", "--layers", "hgt4x16", "--out", str(out)]) == 0
    made = result.load(out)
    assert [(record.kind, record.impl, record.error) for record in made.records] == [
        ("shape", "", None), ("dgl", "gnnaccel", None), ("dgl", "gnnaccel", None)]


@pytest.mark.parametrize("asked",
                         [["--shapes", "nosuch"], ["--layers", "nosuch"], ["--parts", "nosuch"]])
def test_unknown_names_are_an_error_not_a_trace(asked, capsys):
    assert main([*QUICK, *asked]) == 2
    assert "nosuch" in capsys.readouterr().err


def test_without_dgl_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(dgl, "problem", lambda: "ModuleNotFoundError: No module named 'dgl'")
    assert main(QUICK) == 2
    assert "--suite dgl needs DGL: ModuleNotFoundError" in capsys.readouterr().err


def test_what_matters_most_comes_first_on_a_gpu():
    jobs = suite_dgl.jobs(options(), torch.device("cuda"))
    order = [(shape.name, layer.name) for shape, layers in jobs for layer in layers]
    assert order[:6] == [("proteins", "GAT 8x8"), ("reddit", "GAT 8x8"), ("arxiv", "GAT 8x8"),
                         ("mag-inverse-size", "HGT 4x16"), ("fb15k-size", "RelGraphConv 64"),
                         ("proteins", "GATv2 4x16")]
    assert len(order) == len(set(order))


def test_layers_go_with_their_kind_of_graph():
    named = suite_dgl.jobs(options(shapes=[["cora", "aifb-size"]]), CPU)
    assert [[layer.typed for layer in layers] for _, layers in named] == [[False] * 5, [True] * 2]
    asked = suite_dgl.jobs(options(layers=[["hgt4x16"]]), torch.device("cuda"))
    assert [(shape.name, [layer.name for layer in layers])
            for shape, layers in asked] == [("mag-inverse-size", ["HGT 4x16"])]
    with pytest.raises(ValueError, match="none of the layers"):
        suite_dgl.jobs(options(shapes=[["cora"]], layers=[["hgt4x16"]]), CPU)


def test_dgls_own_figures_are_compared_and_judged():
    made = result.Result(records=[
        cell("proteins", "GAT 8x8", "forward", 4.0, 500),
        cell("proteins", "GAT 8x8", "training", 20.0, 900),
        cell("cora", "GAT 8x8", "forward", 0.1), cell("cora", "SAGE 64", "forward", 5.0)])
    ratios = [found.metric("vs_dgl_cuda") for found in metrics.cells(made)]
    assert ratios == [pytest.approx(7.4), pytest.approx(3.29), pytest.approx(7.4), None]
    met = {verdict.target.text(): verdict.met for verdict in targets.judge(made, targets.DGL)}
    assert met["dgl proteins GAT 8x8 forward: vs_dgl_cuda >= 6"] is True
    assert met["dgl proteins GAT 8x8 training: vs_dgl_cuda >= 4"] is False
    assert met["dgl proteins GAT 8x8: peak_mib <= 1024"] is True
    assert met["dgl cora: vs_dgl_cuda >= 1"] is True and met["dgl-cpu: vs_native >= 0.95"] is None
    shown = table.markdown(made)
    assert "| proteins | GAT 8x8 | training | - | 20 | 1 to 2 | - | 65.8 | 3.29x | - | - | 14336 | 900 | - | - | - |" in shown


def test_pygs_layer_stands_beside_dgls():
    twin = cell("proteins", "GAT 8x8", "forward", 284.0)
    twin.impl = metrics.TWIN
    made = result.Result(records=[cell("proteins", "GAT 8x8", "forward", 4.0, 500), twin])
    [found] = metrics.cells(made)
    assert found.metric("vs_pyg") == pytest.approx(71)
    assert "| proteins | GAT 8x8 | forward | - | 4 | 1 to 2 | - | 29.6 | 7.4x | 284 | 71x | - | 500 | - | - | - |" in table.markdown(made)


def test_every_target_has_its_figure():
    for target in targets.DGL:
        if target.metric == "vs_dgl_cuda" and target.layer != "*":
            assert metrics.cuda_ms(target.shape, target.layer, target.mode), target


def test_nothing_of_a_cpu_is_held_against_a_gpu():
    record = cell("cora", "GAT 8x8", "forward", 0.1)
    record.device = "cpu"
    [found] = metrics.cells(result.Result(records=[record]))
    assert found.kind == "dgl-cpu" and found.metric("vs_dgl_cuda") is None


@pytest.mark.long
def test_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    from gnnaccel.profile.bench import plot

    made = result.Result(records=[cell("cora", "GAT 8x8", "forward", 0.1),
                                  cell("cora", "SAGE 64", "forward", 5.0)])
    plot.draw(made, str(tmp_path / "bench.png"))
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
