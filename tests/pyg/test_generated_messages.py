"""Messages that kernels are written for, against PyG's own message passing."""
from __future__ import annotations

import copy
import math
import shutil

import pytest
import torch
from torch import nn
from torch_geometric.nn import CGConv, EdgeConv, ResGatedGraphConv

import gnnaccel
from gnnaccel.adapters.pyg.propagate import reading
from gnnaccel.cuda.runtime.driver import using
from gnnaccel.dispatch.ops import aggregation_cost
from gnnaccel.dispatch.ops.graph import OpGraph
from tests.emulation.emulator import EmulatedDriver
from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, both, compare_second, hub, repeats, routes, to
from tests.pyg.generated_layers import (FORMS, WIDTH, Channels, Crystal, Difference, DistMult,
                                        Gate, Gaussian, Heads, Mapped, MeanNetwork, Message,
                                        Network, NormedEdge, Product, Scalars, Stacked)
from tests.pyg.graphs import E, M, N
from tests.pyg.judge import close, compare


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(kernels, form):
    compare(kernels, form(), *arguments(form))


def edge_conv() -> EdgeConv:
    return EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 5)), aggr="mean")


@pytest.mark.parametrize("make, edges", [(lambda: CGConv(WIDTH, 4), True),
                                         (lambda: CGConv(WIDTH, aggr="mean"), False),
                                         (edge_conv, False),
                                         (lambda: ResGatedGraphConv(WIDTH, 8, act=nn.Tanh()),
                                          False)])
def test_layers_of_the_host(kernels, make, edges):
    x, ei, edge = arguments(Message)
    compare(kernels, make(), x, ei, *([edge] if edges else []))


# --- graphs ---------------------------------------------------------------------------------------

@pytest.mark.long
@pytest.mark.parametrize("form", [Crystal, Channels, Heads, Gaussian])
def test_a_hub(kernels, form):
    compare(kernels, form(), graphs.features(), hub(), graphs.edge_features(10100, form.edge))


@pytest.mark.parametrize("form", [Crystal, Scalars])
@pytest.mark.parametrize("edges", [[], [(3, 3)], [(3, 5), (3, 5), (3, 5), (5, 3)]])
def test_degenerate_graphs(kernels, form, edges):
    """No edges, a loop alone, duplicates; nodes without edges in each."""
    ei = torch.tensor(edges, dtype=torch.long).view(-1, 2).t().contiguous()
    layer, x, edge = form(), graphs.features(), graphs.edge_features(len(edges), form.edge)
    if edges:
        compare(kernels, layer, x, ei, edge)
    else:  # nothing for kernels to do
        both(kernels, layer, x, ei, edge, on_fallback="native")


@pytest.mark.long
def test_two_kinds_of_nodes(kernels):
    for layer in (Gate(), Product()):
        left, right = graphs.features(), graphs.features(M)
        compare(kernels, layer, (left, right), graphs.bipartite(), None, (N, M),
                positions=("x", "edge_index", "edge_attr", "size"))


def test_against_the_flow(kernels):
    layer = DistMult()
    layer.flow = "target_to_source"
    compare(kernels, layer, *arguments(DistMult))


@pytest.mark.parametrize("form, width", [(Scalars, 7), (Scalars, 600), (Difference, 1),
                                         (Difference, 600), (Gaussian, 1), (Gaussian, 7),
                                         (Gaussian, 600), (Heads, 48), (Heads, 150),
                                         (Heads, 1200)])
def test_widths(kernels, form, width):
    """One channel, odd numbers, heads in several lanes, and more than one tile of a warp."""
    compare(kernels, form(), graphs.features(width=width), graphs.square(),
            graphs.edge_features(E, form.edge))


@pytest.mark.parametrize("order", ["reversed", "uneven"])
@pytest.mark.parametrize("form", [Crystal, Heads, Channels])
def test_in_any_order_of_threads(order, form):
    """The same bits, however warps and lanes take turns."""
    if shutil.which("g++") is None:
        pytest.skip("the CPU emulation of kernels needs g++")
    layer, ei = form(), hub()[:, :3000]
    x, edge = graphs.features(), graphs.edge_features(3000, form.edge)
    found = []
    for driver in (EmulatedDriver(), EmulatedDriver(order, 3)):
        given = [x.clone().requires_grad_(), edge.clone().requires_grad_()]
        with using(driver), gnnaccel.enabled(backend="cuda", when="supported"):
            out = layer(given[0], ei, given[1])
            out.sin().sum().backward()
        found.append([out, given[0].grad])
    assert all(torch.equal(a, b) for a, b in zip(*found))


# --- gradients ------------------------------------------------------------------------------------

def test_some_inputs_without_gradients(kernels):
    x, ei, edge = to(kernels.device, *arguments(Crystal))
    layer = Crystal().to(kernels.device)
    layer.lin_f.requires_grad_(False)
    for wants in ((False, True), (True, False), (False, False)):
        found = []
        for accelerated in (False, True):
            given = [t.clone().requires_grad_(w) for t, w in zip((x, edge), wants)]
            layer.zero_grad()
            with kernels.on() if accelerated else gnnaccel.disabled():
                layer(given[0], ei, given[1]).square().sum().backward()
            found.append([*(t.grad for t in given), layer.lin_s.weight.grad.clone()])
        for a, b in zip(*found):
            assert (a is None) == (b is None) and (a is None or close(a, b, 1e-4))


def test_without_gradients(kernels):
    with torch.no_grad():
        both(kernels, Crystal(), *arguments(Crystal))


@pytest.mark.parametrize("form", [Crystal, Scalars, Heads, Mapped])
def test_a_result_that_is_changed_in_place(kernels, form):
    """Many layers go on with ``out += x``."""
    layer, (x, ei, edge) = form(), to(kernels.device, *arguments(form))
    layer = layer.to(kernels.device)
    found = []
    for block in (gnnaccel.disabled(), kernels.on()):
        given = [x.clone().requires_grad_(), edge.clone().requires_grad_()]
        with block:
            out = layer(given[0], ei, given[1])
            out += 2.0 * given[0].mean()
            out.sin().sum().backward()
        found.append([out, given[0].grad])
    assert routes(layer) == {"cuda": 1}
    assert all(close(*pair) for pair in zip(*found))


@pytest.mark.parametrize("form", [Crystal, Channels, Heads, Mapped])
def test_second_derivatives(kernels, form):
    layer = form().to(kernels.device)
    compare_second(kernels, layer, *to(kernels.device, *arguments(form)))


@pytest.mark.parametrize("form", [Network, MeanNetwork, Stacked, Heads])
def test_on_torch_operations(kernels, form):
    both(kernels, form(), *arguments(form), backend="torch")


def test_results_repeat(kernels):
    repeats(kernels, Crystal(), 4)


# --- what stays native ----------------------------------------------------------------------------

class InPlace(Message):
    edge = WIDTH

    def message(self, x_j, x_i, edge_attr):
        edge_attr *= 2
        return x_j * edge_attr - x_i


class Rows(Message):
    """Counts edges."""

    def message(self, x_i, x_j):
        return (x_j - x_i) / x_j.shape[0]


class CountedParameter(Message):
    """Counts edges where a parameter is, and no features."""

    def __init__(self):
        super().__init__()
        self.att = nn.Parameter(torch.randn(WIDTH))

    def message(self, x_i, x_j):
        return (x_j - x_i).tanh() * (self.att / x_j.shape[0])


class CountedNumber(Message):
    """Calculates with Python's numbers."""

    def message(self, x_i, x_j):
        return (x_j - x_i).tanh() * math.log(x_j.shape[0])


class CountedInt(Message):
    def message(self, x_i, x_j):
        return (x_j - x_i).tanh() / int(x_j.size(0))


class CountedPiece(Message):
    """All channels, where there are enough edges."""

    def message(self, x_i, x_j):
        return (x_j - x_i).tanh()[:, :x_j.shape[0]]


class Caught(Message):
    """What a stand-in refuses would be caught."""

    def message(self, x_i, x_j):
        try:
            return (x_j - x_i).cumsum(-1)
        except:  # noqa: E722
            return x_j - x_i


@pytest.mark.parametrize("cls", [InPlace, Rows, Caught, CountedParameter, CountedNumber,
                                 CountedInt, CountedPiece])
def test_messages_that_stay_native(kernels, cls):
    layer, args = cls().to(kernels.device), to(kernels.device, *arguments(cls))
    expected = layer(*copy.deepcopy(args))
    gnnaccel.reset_stats()
    with kernels.on(on_fallback="native"):
        got = layer(*copy.deepcopy(args))
    assert close(got, expected)
    found = gnnaccel.stats()[cls.__name__]
    assert found["routes"] == {"native": 1} and set(found["reasons"]) == {"GA211"}


@pytest.mark.parametrize("shape", [(), (8,), (2, 4, 1)])
def test_edges_of_another_shape(kernels, shape):
    """Are the host's error, whatever came before."""
    layer, args = Difference().to(kernels.device), to(kernels.device, *arguments(Difference))
    wrong = torch.zeros(shape, dtype=torch.long, device=kernels.device)
    for _ in range(2):
        with kernels.on(on_fallback="native"), pytest.raises(ValueError, match="two-dimensional"):
            layer(args[0], wrong, *args[2:])
        with kernels.on():
            layer(*args)


@pytest.mark.parametrize("case, code", [("double", "GA203"), ("powermean", "GA201"),
                                        ("autocast", "GA203")])
def test_calls_that_stay_native(kernels, case, code):
    layer = Difference("powermean" if case == "powermean" else "add").to(kernels.device)
    args = to(kernels.device, *arguments(Difference))
    if case == "double":
        args = [t.double() if t.is_floating_point() else t for t in args]
    autocast = torch.autocast(kernels.device.type, enabled=case == "autocast", dtype=torch.bfloat16)
    with autocast:
        expected = layer(*args)
        gnnaccel.reset_stats()
        with kernels.on(on_fallback="native"):
            got = layer(*args)
    assert close(got, expected)
    found = gnnaccel.stats()["Difference"]
    assert found["routes"] == {"native": 1} and set(found["reasons"]) == {code}


def test_a_cpu_without_kernels():
    layer, args = Difference(), arguments(Difference)
    expected = layer(*args)
    with gnnaccel.enabled(when="supported"):
        assert torch.equal(layer(*args), expected)
    assert gnnaccel.stats()["Difference"]["reasons"].keys() == {"GA211"}


# --- decisions ------------------------------------------------------------------------------------

def test_what_is_recorded(kernels, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # of the table that is printed
    layer, args = NormedEdge().to(kernels.device), to(kernels.device, *arguments(NormedEdge))
    with kernels.on():
        layer(*args)
        text = str(gnnaccel.explain(layer, *args))
    assert "generated message kernel" in text and "relu" in text


def test_rules(kernels):
    layer, args = Difference(), arguments(Difference)
    both(kernels, layer, *args, exclude=[Difference], on_fallback="native")
    assert routes(layer) == {"native": 1}
    assert all(code.startswith("GA1") for code in gnnaccel.stats()["Difference"]["reasons"])


def test_small_graphs_stay_native(kernels):
    layer, args = Difference(), arguments(Difference)
    both(kernels, layer, *args, when="profitable", on_fallback="native")
    assert routes(layer) == {"native": 1}


def test_rows_that_are_written_for_each_edge_have_a_price(emulated):
    """On a GPU passes over them decide where there are many edges: more than launches do."""
    layer = EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, 64), nn.ReLU(), nn.Linear(64, 32),
                                   nn.ReLU(), nn.Linear(32, 5)),
                     aggr="add")
    with emulated.on():
        x, ei = graphs.features(width=WIDTH), graphs.square()
        found = reading.read(layer, ei, dict(x=(x, x)))
    more = found.given.more
    assert more.written == 4 * 64 and more._replace(before=()).written == 0
    graph = OpGraph(ei[:, :1].expand(2, 4_000_000), N, N)
    for mode, passes in (("forward", 7), ("training", 24)):
        dear, cheap = (aggregation_cost._on_cuda(graph, found.given._replace(more=one), mode).ours
                       for one in (more, more._replace(before=())))
        bandwidth = aggregation_cost.constants()["cuda"]["native_bandwidth"]
        assert dear - cheap >= 0.9 * passes * 4_000_000 * 4 * 64 / bandwidth
