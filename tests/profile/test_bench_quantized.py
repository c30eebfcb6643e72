"""The quantized suite: that all formats compute the same, and what is written down."""
from __future__ import annotations

import argparse
import shutil

import pytest
import torch

pytest.importorskip("torch_geometric")

from gnnaccel.__main__ import main
from gnnaccel.cuda.runtime import driver
from gnnaccel.profile.bench import result, shapes, suite_quantized, table, targets, timing
from gnnaccel.profile.bench.guard import Budget
from gnnaccel.profile.bench.result import Record, Result
from tests.emulation.emulator import EmulatedDriver

emulated = pytest.mark.skipif(shutil.which("g++") is None,
                              reason="the CPU emulation of kernels needs g++")


@pytest.mark.long
@emulated
@pytest.mark.parametrize("layer", suite_quantized.LAYERS)
def test_formats_compute_the_same(layer):
    make, heads, width = suite_quantized.LAYERS[layer]
    graph = shapes.make(shapes.Shape("few", 40, 200, 20), "cpu")
    with driver.using(EmulatedDriver()):
        found = suite_quantized.case(graph, heads, width)
        results = {}
        for name, dtype in suite_quantized.FORMATS.items():
            torch.manual_seed(1)
            forward, training = make(found, dtype)
            results[name] = (forward(), *training())
    for name, limit in (("bf16", 0.01), ("int8", 0.03)):
        for got, expected in zip(results[name], results["fp32"]):
            assert (got - expected).norm() < limit * expected.norm() and expected.norm() > 0
            assert not torch.equal(got, expected)


@emulated
def test_the_mean_is_the_mean():
    graph = shapes.make(shapes.Shape("few", 40, 200, 20), "cpu")
    with driver.using(EmulatedDriver()):
        found = suite_quantized.case(graph, 1, 8)
        out, grad = suite_quantized.sage(found, torch.float32)[1]()
    x = found.x.clone().requires_grad_()
    src, dst = graph.edge_index
    count = torch.bincount(dst, minlength=40).clamp(min=1).view(-1, 1, 1)
    expected = torch.zeros_like(x).index_add(0, dst, x[src]) / count
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, x, found.grad)[0])


@pytest.mark.long
@emulated
def test_a_run_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "quantized.json"
    with driver.using(EmulatedDriver()):
        assert main(["bench", "--suite", "quantized", "--quick", "--device", "cpu", "--layers",
                     "gcn64", "--out", str(out), "--table", "markdown"]) == 0
    made = result.load(out)
    found = [r for r in made.records if r.kind == "quantized"]
    assert [(r.impl, r.mode) for r in found] == [(f, m) for f in ("fp32", "bf16", "int8")
                                                 for m in ("forward", "training")]
    assert all(r.timing and not r.error for r in found)
    assert all(("rel_l2" in r.values) == (r.impl != "fp32") for r in found)
    assert "Rows in bf16 and int8" in capsys.readouterr().out


@pytest.mark.long
def test_models_train_in_every_format():
    graph = shapes.make(shapes.Shape("few", 40, 200, 20), "cpu")
    found = list(suite_quantized.model_records(graph, ("SAGE 2 layers 128",), timing.QUICK, Budget(60)))
    assert [r.impl for r in found] == ["fp32", "bf16", "int8", "int8 all"]
    assert all(r.timing and not r.error and r.layer == "SAGE 2 layers 128" and r.mode == "training"
               for r in found)
    assert "calls" not in found[0].values and set(found[2].values["calls"]) == {"first",
                                                                                "first.lin_l",
                                                                                "first.lin_r",
                                                                                "second"}
    assert found[3].values["calls"]["second"][
        1] > 0, "so small a graph runs natively, and the record says so"
    assert "| few | SAGE 2 layers 128 |" in table.markdown(Result(records=found))


def test_parts(capsys):
    with driver.using(EmulatedDriver()):
        options = {"device": "cpu", "quick": True, "shapes": None, "repeat": None, "seed": 0,
                   "native": True, "compile_limit": 0.0, "order": "random"}
        for parts, layers, kernels, models in (([["models"]], None, 0, 3),
                                               ([["kernels"]], None, 6, 0), (None, None, 6, 3),
                                               (None, [["gcn64", "gat2layers8x16"]], 1, 1)):
            plan = suite_quantized.from_options(argparse.Namespace(**options, parts=parts,
                                                                   layers=layers))
            [(shape, wanted)] = plan.jobs
            found = [name in suite_quantized.LAYERS for name in wanted]
            assert (sum(found), len(found) - sum(found)) == (kernels, models)
        assert main(["bench", "--suite", "quantized", "--parts", "model", "--quick", "--device",
                     "cpu"]) == 2
    assert "no part model; known: kernels, models" in capsys.readouterr().err


def test_it_needs_a_gpu(capsys):
    assert main(["bench", "--suite", "quantized", "--quick", "--device", "cpu"]) == 2
    assert "need a GPU" in capsys.readouterr().err


def test_gains_are_judged():
    made = Result(records=[Record("quantized", "reddit", "GCN 128", mode, impl, "cuda", {"ms": ms})
                           for mode in ("forward", "training")
                           for impl, ms in (("fp32", 9.0), ("bf16", 5.0), ("int8", 4.5))])
    verdicts = {v.target.text(): v.met for v in targets.judge(made, targets.QUANTIZED)
                if v.value is not None}
    assert verdicts == {"quantized reddit GCN 128 forward: int8_gain >= 2.2": False,
                        "quantized reddit GCN 128 training: int8_gain >= 1.6": True,
                        "quantized reddit GCN 128 forward: bf16_gain >= 1.5": True,
                        "quantized reddit GCN 128 training: bf16_gain >= 1.3": True}
    assert "| reddit | GCN 128 | forward | 9 | 5 | 4.5 | 1.8x | 2x |" in table.markdown(made)
