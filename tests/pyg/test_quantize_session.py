"""PyG's linear maps are replaced only while a quantized layer has some."""
from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch_geometric.nn import Linear

import gnnaccel
from tests.pyg.quantized_nets import Net, forced, graph, step  # noqa: F401

NATIVE = vars(Linear)["forward"]


def replaced() -> bool:
    return vars(Linear)["forward"] is not NATIVE


def run(model, given):
    model(*given)
    return [row.quantized for row in gnnaccel.quant_report(model).maps]


@pytest.fixture(autouse=True)
def put_back():
    assert not replaced()
    yield
    gnnaccel.disable()
    assert not replaced()


@pytest.mark.parametrize("how", ["nothing", "block", "environment", "bf16"])
def test_where_no_map_is_quantized_the_class_is_as_it_was(graph, how, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("GNNACCEL_PRECISION", "int8")
    model = Net("sage")
    with forced(on_fallback="native"):
        if how == "bf16":
            gnnaccel.quantize(model, "bf16")
        if how == "block":
            with gnnaccel.precision("int8"):
                step(model, *graph)
        step(model, *graph)
        assert not replaced()


def test_while_a_model_is_quantized(graph):
    gnnaccel.enable(backend="torch", when="supported")
    first, second = Net("sage"), Net("gcn")
    gnnaccel.quantize(first)
    gnnaccel.quantize(second)
    assert replaced() and all(run(first, graph))
    gnnaccel.dequantize(first)
    assert replaced() and all(run(second, graph))
    gnnaccel.dequantize(second)
    assert not replaced()
    gnnaccel.quantize(first)
    assert replaced() and all(run(first, graph))
    gnnaccel.disable()
    assert not replaced()


@pytest.mark.long
def test_quantized_before_gnnaccel_is_enabled_and_enabled_again(graph):
    model = Net("sage")
    with pytest.warns(RuntimeWarning, match="takes effect from"):
        gnnaccel.quantize(model)
    assert not replaced()
    for _ in range(2):
        with forced():
            assert replaced()
            counts = run(model, graph)
            assert counts and all(counts)
        assert not replaced()


def test_the_first_call_after_the_last_quantized_model_puts_the_class_back(graph):
    gnnaccel.enable(backend="torch", when="supported")
    model, other = Net("sage"), Linear(3, 4)
    gnnaccel.quantize(model)
    model(*graph)
    del model
    gc.collect()
    assert replaced()
    x = torch.randn(5, 3)
    assert torch.equal(other(x),
                       torch.nn.functional.linear(x, other.weight, other.bias)) and not replaced()


def test_a_wrapper_of_somebody_else_is_kept():
    gnnaccel.enable(backend="torch", when="supported")
    model = Net("sage")
    gnnaccel.quantize(model)
    ours = vars(Linear)["forward"]
    Linear.forward = theirs = lambda self, x: ours(self, x)
    try:
        gnnaccel.dequantize(model)
        gnnaccel.quantize(model)
        assert vars(Linear)["forward"] is theirs
        with pytest.warns(RuntimeWarning, match="Linear.forward alone"):
            gnnaccel.disable()
    finally:
        Linear.forward = NATIVE


def test_scripts_see_the_hosts_own():
    gnnaccel.enable(backend="torch", when="supported")
    model, layer, x = Net("sage"), Linear(3, 4), torch.randn(5, 3)
    gnnaccel.quantize(model)
    assert torch.equal(torch.jit.script(layer)(x), layer(x)) and replaced()


@pytest.mark.long
def test_threads_that_quantize_and_undo_it_leave_the_class_as_the_last_says(graph):
    gnnaccel.enable(backend="torch", when="supported")
    models, kept, plain, failed = [Net("sage", 2) for _ in range(4)], Net("sage"), Linear(16, 4), []

    def work(model):
        try:
            for _ in range(20):
                gnnaccel.quantize(model)
                plain(graph[0])
                gnnaccel.dequantize(model)
                plain(graph[0])
        except BaseException as error:
            failed.append(error)

    for last in (None, kept):
        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        if last is not None:
            gnnaccel.quantize(last)
        for thread in threads:
            thread.join()
        plain(graph[0])
        assert not failed and replaced() == (last is not None)
    assert all(run(kept, graph))
