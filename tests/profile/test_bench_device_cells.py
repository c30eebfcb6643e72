"""The cells that launch kernels, run under the CPU emulation: that they measure something, not how
fast."""
from __future__ import annotations

import shutil

import pytest
import torch

from gnnaccel.adapters.pyg.bench import layers as pyg
from gnnaccel.profile.bench import cells, shapes, steps, suite_attention, timing

pytest.importorskip("torch_geometric")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")


@pytest.fixture(autouse=True)
def emulated():
    from gnnaccel.cuda.runtime import driver
    from tests.emulation.emulator import EmulatedDriver

    with driver.using(EmulatedDriver()):
        yield


@pytest.fixture
def graph():
    return shapes.make(shapes.SHAPES["tiny"], "cpu")


@pytest.mark.long
def test_floor_by_width_and_degree_law(graph):
    records = cells.floor_records(graph, [64, 128], timing.QUICK)
    assert [(record.impl, record.layer) for record in records] == [
        ("uniform", "64"), ("uniform", "128"), ("actual", "64"), ("actual", "128")]
    assert [record.error for record in records] == [None] * 4


@pytest.mark.long
def test_structure_alone_and_with_the_transpose(graph):
    records = suite_attention.structure_records(graph, timing.QUICK)
    assert [(record.layer, record.error)
            for record in records] == [("csc", None), ("csc+csr", None)]


@pytest.mark.long
@pytest.mark.parametrize("make, score",
                         [(suite_attention.additive, "additive"), (suite_attention.dot, "dot")])
def test_suite_attention_compute_attention(graph, make, score, monkeypatch):
    inputs = {}
    original = suite_attention._pair

    def spy(graph, program, tensors, heads, width):
        inputs.update(tensors)
        return original(graph, program, tensors, heads, width)

    monkeypatch.setattr(suite_attention, "_pair", spy)
    forward, training = make(graph, 1, 64)
    out = forward()
    assert torch.allclose(out, attention(graph, inputs, score), atol=1e-5)
    assert torch.allclose(training(), out, atol=1e-6)


def test_bare_layer_computes_what_the_layer_does(graph):
    spec = pyg.resolve("GAT 8x8")
    step = steps.layer_step(spec, graph, "forward")
    assert torch.allclose(suite_attention.bare_gat(step, graph)(), step(), atol=1e-5)


def attention(graph, tensors, score):
    """One head of attention over the edges, straight from its definition."""
    source, destination = graph.edge_index
    if score == "additive":
        values = tensors["x"][:, 0]
        terms = (values @ tensors["att_src"][0])[source] + (values
                                                            @ tensors["att_dst"][0])[destination]
        scores = torch.nn.functional.leaky_relu(terms, 0.2)
    else:
        values = tensors["values"][:, 0]
        scores = (tensors["queries"][destination, 0] * tensors["keys"][source, 0]).sum(1) / 8
    weights = (scores - scores.max()).exp()
    total = torch.zeros(graph.num_nodes).index_add_(0, destination, weights)
    sums = torch.zeros_like(values).index_add_(0, destination, weights[:, None] * values[source])
    return (sums / total.clamp_min(1e-30)[:, None])[:, None]
