"""enable() to disable() with the real host: patches, options, rules, counts and records of real
calls."""
from __future__ import annotations

import copy
import inspect
import pickle

import dgl
import pytest
import torch
from dgl.heterograph_index import HeteroGraphIndex
from dgl.nn import pytorch as nn
from dgl.nn import GATConv

import gnnaccel
from gnnaccel.adapters.dgl import LAYERS
from tests.dgl import graphs
from tests.dgl.graphs import E, F, N
from tests.dgl.judge import close, took
from tests.helpers import relative

CLASSES = {name: getattr(nn, name) for name in LAYERS}


@pytest.fixture
def inputs(route):
    return graphs.square().to(route.device), graphs.features().to(route.device)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GATConv(F, 8, 2), GATConv(16, 4, 2)])

    def forward(self, g, x):
        return self.convs[1](g, self.convs[0](g, x).flatten(1).relu())


def test_disable_puts_the_very_functions_back():
    before = {name: cls.__dict__["forward"] for name, cls in CLASSES.items()}
    attributes = {name: set(vars(cls)) for name, cls in CLASSES.items()}
    relation = HeteroGraphIndex.get_relation_graph
    for _ in range(2):
        gnnaccel.enable()
        assert all(cls.__dict__["forward"] is not before[name] for name, cls in CLASSES.items())
        patched = gnnaccel.status()["hosts"]["dgl"]["patched"]
        assert sum(name.endswith(".forward")
                   for name in patched) == len(CLASSES) and len(patched) == len(set(patched))
        gnnaccel.disable()
        assert all(cls.__dict__["forward"] is before[name] for name, cls in CLASSES.items())
        assert HeteroGraphIndex.__dict__["get_relation_graph"] is relation
    assert {name: set(vars(cls)) for name, cls in CLASSES.items()} == attributes


def test_wrappers_look_like_the_originals():
    def looks():
        return {name: (inspect.signature(cls.forward), cls.forward.__doc__,
                       cls.forward.__qualname__) for name, cls in CLASSES.items()}

    before = looks()
    gnnaccel.enable()
    assert looks() == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_before_or_after_the_model(route, inputs, when):
    if when == "before":
        model = Net().to(route.device)
    with route.on():
        if when == "after":
            model = Net().to(route.device)
        got = model(*inputs)
    took(route, 2)
    assert close(got, model(*inputs))


def test_copies_pickles_and_checkpoints(route, inputs):
    model = Net().to(route.device)
    expected = model(*inputs)
    with route.on():
        model(*inputs)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert close(other(*inputs), expected)
        assert list(model.state_dict()) == list(Net().state_dict())


@pytest.mark.long
def test_rules_and_names(route, inputs):
    model = Net().to(route.device)
    gnnaccel.name_layers(model)
    gnnaccel.exclude("convs.1", model=model)
    with route.on(records=10):
        model(*inputs)
    assert [(r["host"], r["name"], r["route"]) for r in gnnaccel.records()] == [
        ("dgl", "convs.0", route.backend), ("dgl", "convs.1", "native")]
    gnnaccel.reset_rules()
    gnnaccel.exclude(GATConv)
    gnnaccel.reset_stats()
    with route.on():
        model(*inputs)
    assert gnnaccel.stats()["GATConv"]["reasons"] == {"GA101": 2}
    gnnaccel.reset_rules()
    with route.on(exclude=[r"re:dgl\..*GATConv"]):
        model(*inputs)
    assert gnnaccel.stats()["GATConv"]["reasons"] == {"GA101": 4}


def test_records_of_forward_and_backward(route, inputs):
    layer = GATConv(F, 8, 2).to(route.device)
    with route.on(records=10):
        for _ in range(2):
            layer(*inputs).sum().backward()
    forward, backward, again, _ = gnnaccel.records()
    assert (forward["direction"], backward["direction"],
            backward["forward_call"]) == ("forward", "backward", forward["call"])
    assert {k: forward["graph"][k]
            for k in ("num_src", "num_dst", "num_edges", "self_loops")} == dict(
        num_src=N, num_dst=N, num_edges=E, self_loops=0)
    assert (forward["cache"], again["cache"], forward["layer"],
            forward["dtype"]) == ("miss", "hit", "GATConv", "float32")


def test_blocks_in_which_it_is_off():
    g, x = graphs.square(), graphs.features()
    layer = GATConv(F, 8, 2)
    with gnnaccel.enabled(when="supported"):
        layer(g, x)
        with gnnaccel.disabled():
            layer(g, x)
    assert gnnaccel.stats()["GATConv"]["calls"] == 1


def test_explain_program():
    text = str(gnnaccel.explain_program(GATConv(F, 8, 2), graphs.square(), graphs.features()))
    assert "GATConv as stated" in text and "additive attention" in text
    text = str(gnnaccel.explain_program(GATConv(F, 8, 2), graphs.square(), graphs.features(),
                                        get_attention=True))
    assert "GA208" in text
    with pytest.raises(TypeError, match="GATConv"):
        gnnaccel.explain_program(dgl.nn.SortPooling(3), graphs.square(), graphs.features())


def test_training_gives_the_same_losses(route, inputs):
    def losses():
        torch.manual_seed(0)
        model = Net().to(route.device)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        found = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(*inputs).pow(2).mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found)

    native = losses()
    with route.on():
        assert torch.allclose(losses(), native, rtol=1e-4)


def test_second_derivatives(route, inputs):
    g, x = inputs
    layer = GATConv(F, 8, 2, bias=False).to(route.device)

    def second(layer, x):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(layer(g, x).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), x)[0]

    exact = copy.deepcopy(layer).double()
    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise"):
        truth = second(exact, x.double())
        assert torch.autograd.gradgradcheck(lambda v: exact(g, v), x.double().requires_grad_(),
                                            fast_mode=True)
    with route.on():
        assert relative(second(layer, x), truth) < 1e-5


def test_batches_from_a_neighbour_sampler(route):
    g, model = graphs.square().to("cpu"), GATConv(F, 8, 2).to(route.device)
    x = graphs.features()
    loader = dgl.dataloading.DataLoader(g, torch.arange(N),
                                        dgl.dataloading.MultiLayerFullNeighborSampler(1),
                                        batch_size=10)
    expected = model(g.to(route.device), x.to(route.device))
    with route.on():
        for into, out, (block,) in loader:
            assert close(model(block.to(route.device), x[into].to(route.device)), expected[out],
                         1e-5)
    took(route, 3)
