"""``torch.compile(model, backend="gnnaccel")``."""
from __future__ import annotations

import copy
import importlib.metadata

import pytest
import torch
from torch import nn

import gnnaccel
from gnnaccel.adapters.captured import modules
from gnnaccel.adapters.captured.backend import backend
from tests.pyg import test_captured as captured
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import given, same, step


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(request):
    torch.compiler.reset()
    if request.param == "cpu":
        request.getfixturevalue("recorded")
    captured.PLACE[0] = request.param
    modules.reset()
    # the stand-in for CUDA graphs does not see operators
    with gnnaccel.enabled(compile=request.param == "cuda", when="supported"):
        yield
    captured.PLACE[0] = "cpu"
    torch.compiler.reset()


def replays() -> int:
    return captured.replays("torch.compile")


@pytest.mark.long
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_training(on, p):
    model, args = captured.Net(p), given()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (model, twin)]
    for number in range(10):
        for m in (model, twin):
            m.zero_grad()
        torch.manual_seed(number)
        out = compiled(*args)
        out.pow(2).sum().backward()
        torch.manual_seed(number)
        with gnnaccel.disabled():
            expected = step(twin, *args)
        assert same([out.detach(), *[p.grad for p in model.parameters()], *model.buffers()],
                    expected), number
        for one in optimizers:
            one.step()
    assert replays() > 4 and captured.refused("torch.compile") == []


@pytest.mark.long
def test_other_graphs_features_and_options(on):
    model, (x, edge_index) = captured.Net().eval(), given()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for number in range(16):
            edges = edge_index if number < 8 else edge_index.flip(0).contiguous()
            if number == 12:
                model.slope = 0.9
            if number == 14:
                edge_index[0].fill_(3)
                edges = edge_index
            found = compiled(x + number, edges)
            with gnnaccel.disabled():
                assert same([found], [model(x + number, edges)]), number
    assert replays() > 3


@pytest.mark.long
def test_autocast_runs_as_ever(on):
    model, args = captured.Net(), given()
    compiled = torch.compile(model, backend=backend)
    for _ in range(6):
        with torch.autocast(captured.PLACE[0], torch.bfloat16):
            compiled(*args)
    assert replays() == 0


@pytest.mark.long
def test_results_may_be_kept(on):
    model, args = captured.Net().eval(), given()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        outs = [compiled(*args) for _ in range(8)]
        outs[-1].add_(1)
    assert torch.allclose(outs[-2] + 1, outs[-1]) and replays() > 2


@pytest.mark.long
def test_a_buffer_put_in_the_place_of_another(on):
    """What a call writes has to reach the module's own buffer."""
    model, args = captured.Net(), given()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for number in range(12):
        found = compiled(*args)
        with gnnaccel.disabled():
            expected = twin(*args)
        assert same([found, *model.buffers()], [expected, *twin.buffers()]), number
        if number == 6:
            for m in (model, twin):
                m.norm.running_mean = m.norm.running_mean.clone()


def test_without_gnnaccel_it_runs_what_was_traced(recorded):
    model, args = nn.Linear(6, 2), given()[:1]
    compiled = torch.compile(model, backend=backend)
    for _ in range(6):
        assert torch.equal(compiled(*args), model(*args))
    assert replays() == 0


def test_it_is_found_by_its_name():
    """By torch, once gnnaccel is installed."""
    names = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if "gnnaccel" not in names.names:
        pytest.skip("gnnaccel is not installed here")
    assert names["gnnaccel"].load() is backend
