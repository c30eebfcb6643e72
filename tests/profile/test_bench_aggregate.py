"""The suite over plain aggregation: end to end on a tiny graph on the CPU, its reports on made-up
records, its plan for a GPU."""
from __future__ import annotations

import argparse
import importlib.util

import pytest
import torch

from gnnaccel.__main__ import main
from gnnaccel.adapters.pyg.bench.plain import LAYERS
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.profile.bench import (compiled, guard, metrics, plan, result, shapes, suite_aggregate,
                                    table, targets, timing)
from gnnaccel.profile.bench.result import Record

needs_pyg = pytest.mark.skipif(importlib.util.find_spec("torch_geometric") is None,
                               reason="PyG is not installed")
QUICK = ["bench", "--suite", "aggregate", "--quick", "--device", "cpu"]
TIMED = dict(p10_ms=1.0, p90_ms=2.0, min_ms=1.0, first_ms=9.0, calls=1, batches=20)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "bench.json"


@pytest.fixture
def tiny():
    return shapes.make(shapes.SHAPES["tiny"], CPU)


def options(**given) -> argparse.Namespace:
    """The command line's, nothing being asked for."""
    nothing = dict(shapes=None, layers=None, parts=None, quick=False, device="cpu", repeat=None,
                   patience=20.0, native=True, compile=None, compile_limit=5.0, seed=0,
                   order="random")
    return argparse.Namespace(**{**nothing, **given})


def cell(kind: str, shape: str, layer: str, mode: str, impl: str, ms: float, device: str = "cuda",
         **values) -> Record:
    return Record(kind, shape, layer, mode, impl, device, {**TIMED, "ms": ms}, values)


@pytest.mark.long
@needs_pyg
def test_quick_run_measures_and_compares_everything(out, capsys):
    assert main([*QUICK, "--out", str(out), "--table", "markdown"]) == 0
    made = result.load(out)
    for name in LAYERS:
        for mode in ("forward", "training"):
            for impl in ("native", "gnnaccel"):
                record = made.one(kind="aggregate", shape="tiny", layer=name, mode=mode, impl=impl)
                assert record.error is None and record.ms > 0
        check = made.one(kind="check", layer=name, mode="training").values
        assert all(value < 1e-4 for key, value in check.items() if key.endswith("rel_l2")) and check
    for record in (*made.find(kind="spmm"), *made.find(kind="operation"),
                   *made.find(kind="fresh-plain")):
        assert record.error is None and record.ms > 0, record
    assert len(made.find(kind="spmm")) == 8 and len(made.find(kind="operation")) == 14 and len(
        made.find(kind="fresh-plain")) == 8
    shown = capsys.readouterr().out
    assert "| tiny (cpu) | PNA 64 | training |" in shown and "| tiny | mean min max std 64 | training |" in shown
    assert "aggregate-cpu: vs_native >= 0.95" in shown


@pytest.mark.long
@needs_pyg
def test_parts_and_layers_can_be_chosen(out):
    assert main([*QUICK, "--parts", "layers", "--layers", "gin64", "--out", str(out)]) == 0
    kinds = {(r.kind, r.layer) for r in result.load(out).records}
    assert kinds == {("shape", ""), ("aggregate", "GIN 64"), ("check", "GIN 64")}


@pytest.mark.parametrize("wrong",
                         [["--parts", "layer"], ["--layers", "gat8x8"], ["--shapes", "corra"]])
def test_names_that_do_not_exist(wrong):
    assert main([*QUICK, *wrong]) == 2


@needs_pyg
@pytest.mark.parametrize("name", LAYERS)
def test_equal_arguments_give_equal_steps(tiny, name):
    first, again = (suite_aggregate.layer_step(LAYERS[name], tiny, "training").results()
                    for _ in range(2))
    assert all(torch.allclose(first[key], again[key], rtol=1e-4, atol=1e-5) for key in first)
    assert first["output"].shape == (tiny.num_nodes, LAYERS[name].width)


def test_both_ways_sum_the_same(tiny):
    """Or the comparison with cuSPARSE would mean nothing."""
    x, grad, weight = torch.randn(tiny.num_nodes,
                                  8), torch.randn(tiny.num_nodes, 8), torch.rand(tiny.num_edges)
    mine, theirs = (way(tiny, x, grad, weight)
                    for way in (suite_aggregate.ours, suite_aggregate.cusparse))
    assert torch.allclose(mine[0](), theirs[0](), atol=1e-4)
    assert torch.allclose(mine[1]()[0], theirs[1]()[1], atol=1e-4)


@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_all_operations_have_kernels(device, tiny):
    from gnnaccel.dispatch.ops.call import Kernel

    edges = OpGraph(tiny.edge_index, tiny.num_nodes, tiny.num_nodes)
    for name, operation in suite_aggregate.operations(edges).items():
        call = operation.call(*operation.tensors())
        assert type(call.kernel) is Kernel, name
        assert torch.allclose(call.kernel.run(), call.plain(), rtol=1e-3, atol=1e-3), name


def test_the_plan_for_a_gpu(monkeypatch):
    monkeypatch.setattr(plan, "device", lambda options: CUDA)
    made = suite_aggregate.from_options(options(device="cuda"))
    assert made.parts == suite_aggregate.PARTS and made.operations.name == "proteins"
    measured = {(shape.name, layer.name) for shape, layers in made.jobs for layer in layers}
    for target in targets.AGGREGATE:
        if target.kind == "aggregate" and target.shape != "*":
            assert (target.shape, target.layer) in measured
    assert {"hub", "uniform"} <= {shape.name for shape, _ in made.jobs}
    assert "compiled" not in suite_aggregate.from_options(options(device="cuda",
                                                                 compile=False)).parts


def test_what_would_not_fit_is_not_tried(monkeypatch):
    graph = argparse.Namespace(device=CUDA, num_edges=10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**37, 2**37))
    assert suite_aggregate.too_large(LAYERS["GCN 64"], graph,
                                     "forward") == "skipped: 476 GiB of messages"
    graph.num_edges = 10**6
    assert suite_aggregate.too_large(LAYERS["GCN 64"], graph, "training") is None


def test_the_budget_is_kept():
    made = suite_aggregate.from_options(options(quick=True,
                                               parts=[["layers", "spmm", "operations", "fresh"]]))
    assert list(suite_aggregate.aggregate(made, guard.Budget(-1))) == []


def test_verdicts_on_a_gpus_figures():
    records = [cell("aggregate", "proteins", "GCN 64", "forward", "native", 84),
               cell("floor", "uniform", "64", "", "uniform", 1.0),
               cell("aggregate", "proteins", "GCN 64", "forward", "gnnaccel", 3.0),
               cell("spmm", "hub", "weighted 64", "forward", "cusparse", 3.0),
               cell("spmm", "hub", "weighted 64", "forward", "gnnaccel", 1.0),
               cell("spmm", "uniform", "weighted 64", "forward", "cusparse", 1.0),
               cell("spmm", "uniform", "weighted 64", "forward", "gnnaccel", 2.0, width=64),
               cell("spmm", "tiny", "weighted 64", "forward", "cusparse", 1.0, "cpu"),
               cell("spmm", "tiny", "weighted 64", "forward", "gnnaccel", 9.0, "cpu")]
    found = result.Result({"gpu": "NVIDIA H200"}, {}, records)
    verdicts = {v.target.text(): (v.value, v.met) for v in targets.judge(found, targets.AGGREGATE)}
    assert verdicts["aggregate proteins GCN 64 forward: vs_native >= 25"] == (28.0, True)
    assert verdicts["aggregate proteins GCN 64 forward: vs_dgl_cuda >= 1.6"] == (
        pytest.approx(5.3 / 3), True)
    assert verdicts["spmm hub: vs_cusparse >= 1.5"] == (3.0, True)
    assert verdicts["spmm: vs_cusparse >= 1"] == (0.5, False), "the CPU is held against nobody"
    assert verdicts["spmm uniform forward: vs_floor <= 1.5"] == (2.0, False)
    shown = table.markdown(found)
    assert "| hub | weighted 64 | forward | 3 | 1 | 3x |" in shown and "| proteins | GCN 64 | forward | 84 | - | 3 |" in shown


def test_operations_are_held_against_their_bytes():
    made = result.Result({}, {},
                         [cell("operation", "proteins", "u_max 64", "forward", "gnnaccel", 4.0,
                               floor_ms=2.0)])
    assert "| proteins | u_max 64 | forward | 4 | 2 | 2x |" in table.markdown(made)
    assert metrics.cells(made)[0].kind == "operation"


@needs_pyg
def test_compiled_layers_are_the_suites_own(tiny, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, dynamic: module)
    step = compiled._compiled_step("aggregate", "GIN 64", tiny, "forward")
    assert type(step.module).__name__ == "GINConv" and timing.measure(step, CPU,
                                                                      timing.QUICK).ms > 0
