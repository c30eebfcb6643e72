"""The guard and blocks of `gnnaccel.precision` on PyG's layers."""
from __future__ import annotations

import logging

import pytest
import torch

import gnnaccel
from tests.pyg.quantized_nets import Net, forced, graph, quantized_calls, step  # noqa: F401

# ---- block and environment ----

def ran(model):
    return [row.ran for row in gnnaccel.quant_report(model).rows]


def test_precedence(graph):
    """overrides, then what keeps a layer fp32, then the block, then the format given."""
    model = Net("gcn", 4)
    with forced():
        gnnaccel.quantize(model, "int8", overrides={"convs.0": "int8"})
        with gnnaccel.precision("bf16"):
            model(*graph)
        assert ran(model) == ["int8", "bf16", "bf16", None]
        model(*graph)
        assert ran(model) == ["int8", "int8", "int8", None]
        plain = gnnaccel.quant_report(model).rows[0].quantized
        with gnnaccel.precision("fp32"):
            model(*graph)
        row = gnnaccel.quant_report(model).rows[0]
        assert row.quantized == plain and row.reasons == {"GA601": 1}


def test_a_block_quantizes_models_that_nobody_named(graph):
    model = Net()
    with forced():
        plain = model(*graph)
        with gnnaccel.precision("int8"):
            assert torch.equal(model(*graph),
                               plain), "the first pass finds out which layer comes last"
            assert not torch.equal(model(*graph), plain)
            rows = gnnaccel.quant_report(model).rows
            assert [row.quantized for row in rows] == [1, 1,
                                                       0] and list(rows[2].reasons) == ["GA606",
                                                                                        "GA602"]
        assert torch.equal(model(*graph), plain)


def test_the_environment(graph, monkeypatch):
    model = Net()
    monkeypatch.setenv("GNNACCEL_PRECISION", "bf16")
    with forced():
        for _ in range(2):
            model(*graph)
        assert ran(model) == ["bf16", "bf16", None]
        gnnaccel.quantize(model, "int8")
        model(*graph)
        assert ran(model) == ["int8", "int8", None], "what was said of the model comes first"
    monkeypatch.setenv("GNNACCEL_PRECISION", "fp32")
    with forced():
        before = quantized_calls(model)
        model(*graph)
        assert quantized_calls(model) == before, "the environment may switch all of it off"
    monkeypatch.setenv("GNNACCEL_PRECISION", "int4")
    with pytest.raises(ValueError, match="GNNACCEL_PRECISION='int4'"):
        forced().__enter__()


def test_a_block_where_gnnaccel_is_off_warns(graph):
    model = Net()
    with pytest.warns(RuntimeWarning, match="not enabled"), gnnaccel.precision("int8"):
        model(*graph)


# ---- the guard ----

def test_the_guard_sends_a_layer_back_and_says_so(graph, caplog):
    x, ei = graph
    x[:, 0] = 1e4  # takes the scale of every row
    model = Net()
    with forced():
        plain = model(x, ei)
        with caplog.at_level(logging.WARNING, "gnnaccel"):
            gnnaccel.quantize(model, overrides={"convs.0": "int8"},
                              guard={"every": 1, "outliers": 0.1})
            model.convs[0].lin.weight.data[0] *= 1e6
            for _ in range(3):
                model(x, ei)
    row = gnnaccel.quant_report(model).rows[0]
    assert row.guard == "failed" and row.reason.startswith(
        "GA605") and row.quantized == 1 and row.reasons == {"GA605": 2}
    assert "convs.0 goes back to fp32" in caplog.text and plain is not None


def test_numbers_that_are_not_finite_reach_the_guard(route, graph):
    x, ei = (t.to(route.device) for t in graph)
    model = Net("sage").to(route.device)
    with route.on():
        gnnaccel.quantize(model, guard={"every": 1})
        x[4, 2] = float("nan")
        for _ in range(4):
            model(x, ei)
            if route.name == "cuda":
                torch.cuda.synchronize()
    rows = gnnaccel.quant_report(model).rows
    assert rows[0].guard == "failed" and "not finite" in rows[0].reason


def test_quantizing_again_gives_a_failed_layer_another_chance(graph):
    x, ei = graph
    model = Net("sage")
    with forced():
        gnnaccel.quantize(model, guard={"every": 1, "error": 1e-9})
        for _ in range(2):
            model(x, ei)
        assert gnnaccel.quant_report(model).rows[0].guard == "failed"
        gnnaccel.quantize(model)
        model(x, ei)
        assert gnnaccel.quant_report(model).rows[0].guard == "passed" and quantized_calls(model)[
            0] == 1


def test_a_guard_changes_no_number(graph):
    """It draws nothing from the generator that dropout and rounding have."""
    found = []
    for guard in (False, {"every": 1}):
        torch.manual_seed(0)
        model = Net("gcn")
        with forced():
            gnnaccel.quantize(model, guard=guard)
            for _ in range(3):
                result = step(model, *graph)
        found.append(result)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_checkpoints_find_the_same_route_again(graph):
    from torch.utils.checkpoint import checkpoint

    x, ei = graph
    model = Net("gat")
    with forced():
        gnnaccel.quantize(model, guard={"every": 1, "error": 1e-9})
        for _ in range(3):
            x_ = x.clone().requires_grad_()
            checkpoint(model, x_, ei, use_reentrant=False).sum().backward()
            assert x_.grad.isfinite().all()


@pytest.mark.gpu
def test_steady_state_never_waits_for_the_device(gpu, graph):
    """A step with the guard's check in it, and one after, while waiting is forbidden."""
    x, ei = (t.to(gpu.device) for t in graph)
    model = Net("sage").to(gpu.device)
    with gpu.on():
        gnnaccel.quantize(model, guard={"every": 2})
        for _ in range(12):
            step_on_device(model, x, ei)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(6):
                step_on_device(model, x, ei)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert gnnaccel.quant_report(model).rows[0].checks >= 3


def step_on_device(model, x, ei):
    model.zero_grad()
    model(x, ei).sum().backward()
