"""Maxima and minima of messages that kernels are written for, against PyG's own message passing."""
from __future__ import annotations

import functools
import shutil

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import DynamicEdgeConv, EdgeConv
from torch_geometric.nn.aggr import MaxAggregation, MinAggregation
from torch_geometric.nn.conv import edge_conv as edge_conv_module
from torch_geometric.nn.resolver import aggregation_resolver

import gnnaccel
from gnnaccel.cuda.runtime.driver import using
from tests.emulation.emulator import EmulatedDriver
from tests.pyg import graphs
from tests.pyg.generated_calls import arguments, both, compare_second, hub, routes, to
from tests.pyg.generated_layers import (WIDTH, Bends, Channels, Chosen, Difference, DistMult, Gate,
                                        Gaussian, Halves, Heads, Message, Network, NormedEdge,
                                        Positions, Product, Scalars, Stacked)
from tests.pyg.graphs import E, M, N
from tests.pyg.judge import close, compare

BY = {"max": MaxAggregation, "min": MinAggregation}


def by(reduce: str, form) -> Message:
    """A layer of this form with another aggregation."""
    layer = form()
    layer.aggr_module = BY[reduce]()
    return layer


class Times(Message):
    """Messages that are 0, or equal, at many edges."""

    edge = WIDTH

    def message(self, x_j, x_i, edge_attr):
        return x_j * edge_attr + 0 * x_i


@pytest.mark.parametrize("reduce, form", [
    *(("max", form) for form in (Difference, Gate, DistMult, NormedEdge, Halves, Channels, Gaussian,
                                 Chosen, Bends, Heads, Stacked, Scalars, Product, Positions)),
    *(("min", form) for form in (Difference, Gate, DistMult, Channels, Heads))])
def test_values_and_gradients(kernels, reduce, form):
    compare(kernels, by(reduce, form), *arguments(form))


# --- ties -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("reduce", BY)
def test_equal_messages_share_the_gradient(kernels, reduce):
    """Duplicates, and nodes with the same features."""
    x, ei, edge = arguments(Times)
    ei = ei[:, torch.arange(E) // 3]
    edge = edge[torch.arange(E) // 3]
    x[1::2] = x[:-1:2]
    found = compare(kernels, by(reduce, Times), x, ei, edge)
    grad = found["edge_attr"][:E - E % 3].view(-1, 3, WIDTH)
    assert torch.equal(grad[:, 0], grad[:, 1]) and torch.equal(grad[:, 0], grad[:, 2])


def test_an_extremum_of_0_keeps_a_share(kernels):
    """As where the host scatters into zeros: one of the shares is lost."""
    x, edge = torch.ones(3, WIDTH), -torch.ones(4, WIDTH)
    edge[:2] = 0
    ei = torch.tensor([[0, 1, 2, 0], [1, 1, 1, 2]])
    found = compare(kernels, by("max", Times), x, ei, edge)
    torch.manual_seed(1000)
    share = torch.randn(3, WIDTH)[1] / 3
    assert torch.allclose(found["edge_attr"][:2].cpu(), share.expand(2, -1))
    assert not found["edge_attr"][2].any()


def native_and_found(route, layer, args) -> list[list[torch.Tensor]]:
    """Results and gradients of the features, natively and by the kernels."""
    layer, args, found = layer.to(route.device), to(route.device, *args), []
    for accelerated in (False, True):
        x = args[0].clone().requires_grad_()
        with route.on() if accelerated else gnnaccel.disabled():
            out = layer(x, *args[1:])
            (out * torch.arange(1, out.shape[1] + 1, device=out.device)).sum().backward()
        found.append([out.detach(), x.grad])
    return found


@pytest.mark.parametrize("reduce", BY)
@pytest.mark.parametrize("form", [Difference, Gate])
def test_not_a_number(kernels, reduce, form):
    """NaN wins and makes its row's gradients NaN; infinities are like other numbers."""
    x, ei, edge = arguments(form)
    x[4, 0], x[5, 1], x[6, 2] = float("nan"), float("inf"), -float("inf")
    native, found = native_and_found(kernels, by(reduce, form), (x, ei, edge))
    assert native[0].isnan().any() and not native[0].isnan().all()
    for a, b in zip(found, native):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


# --- graphs ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("reduce, form", [("max", Difference), ("min", DistMult), ("max", Heads),
                                          ("max", Gaussian)])
def test_a_hub(kernels, reduce, form):
    compare(kernels, by(reduce, form), graphs.features(), hub(),
            graphs.edge_features(10100, form.edge))


def test_a_hub_of_equal_messages(kernels):
    """Counts of chunks add up, and a NaN in one of them wins."""
    ei = hub()
    x, edge = graphs.features().fill_(0.5), graphs.edge_features(10100, WIDTH).fill_(2.0)
    found = compare(kernels, by("max", Times), x, ei, edge)
    torch.manual_seed(1000)
    to_hub = ei[1] == 4
    share = 0.5 * torch.randn(N, WIDTH)[4] / to_hub.sum()
    assert torch.allclose(found["edge_attr"].cpu()[to_hub], share)
    edge = edge.detach()
    edge[to_hub.nonzero()[4000]] = float("nan")
    layer, args = by("max", Times).to(kernels.device), to(kernels.device, x, ei, edge)
    with kernels.on(), torch.no_grad():
        assert layer(*args)[4].isnan().all()


@pytest.mark.parametrize("edges", [[(3, 3)], [(3, 5), (3, 5), (3, 5), (5, 3)]])
def test_degenerate_graphs(kernels, edges):
    """Nodes without edges get 0, where all messages are below as well."""
    ei = torch.tensor(edges, dtype=torch.long).t().contiguous()
    found = compare(kernels, by("max", Product), graphs.features(), ei)
    alone = torch.ones(N, dtype=torch.bool)
    alone[ei[1]] = False
    assert not found["out"][alone].any()


@pytest.mark.parametrize("reduce", BY)
def test_two_kinds_of_nodes(kernels, reduce):
    left, right = graphs.features(), graphs.features(M)
    compare(kernels, by(reduce, Gate), (left, right), graphs.bipartite(), None, (N, M),
            positions=("x", "edge_index", "edge_attr", "size"))


@pytest.mark.parametrize("form, width", [(Difference, 1), (Difference, 600), (Heads, 150)])
def test_widths(kernels, form, width):
    compare(kernels, by("max", form), graphs.features(width=width), graphs.square(),
            graphs.edge_features(E, form.edge))


@pytest.mark.parametrize("order", ["reversed", "uneven"])
def test_in_any_order_of_threads(order):
    """The same bits, however warps and lanes take turns."""
    if shutil.which("g++") is None:
        pytest.skip("the CPU emulation of kernels needs g++")
    layer, ei = by("max", Channels), hub()[:, :3000]
    x, found = graphs.features(), []
    for driver in (EmulatedDriver(), EmulatedDriver(order, 3)):
        given = x.clone().requires_grad_()
        layer.zero_grad()
        with using(driver), gnnaccel.enabled(backend="cuda", when="supported"):
            out = layer(given, ei)
            out.sin().sum().backward()
        found.append([out, given.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_results_repeat(kernels):
    layer = by("min", Channels).to(kernels.device)
    x, ei = to(kernels.device, graphs.features(), hub())
    found = []
    for _ in range(2):
        given = x.clone().requires_grad_()
        layer.zero_grad()
        with kernels.on():
            out = layer(given, ei)
            out.sin().sum().backward()
        found.append([out, given.grad, *(p.grad.clone() for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found))


# --- gradients ------------------------------------------------------------------------------------

@pytest.mark.parametrize("wants", [(False, True), (True, False), (False, False)])
def test_some_inputs_without_gradients(kernels, wants):
    layer = by("max", NormedEdge).to(kernels.device)
    x, ei, edge = to(kernels.device, *arguments(NormedEdge))
    found = []
    for accelerated in (False, True):
        given = [t.clone().requires_grad_(w) for t, w in zip((x, edge), wants)]
        with kernels.on() if accelerated else gnnaccel.disabled():
            out = layer(given[0], ei, given[1])
        assert out.requires_grad is any(wants)
        if any(wants):
            out.square().sum().backward()
        found.append([out.detach(), *(t.grad for t in given)])
    for a, b in zip(*found):
        assert (a is None) == (b is None) and (a is None or close(a, b, 1e-4))


def test_without_gradients(kernels):
    with torch.no_grad():
        both(kernels, by("min", Gate), *arguments(Gate))


def test_a_result_that_is_changed_in_place(kernels):
    """Backward reads it, as the host's does: an error, no wrong gradient."""
    x, ei, _ = to(kernels.device, *arguments(Difference))
    for accelerated in (False, True):
        with kernels.on() if accelerated else gnnaccel.disabled():
            out = by("max", Difference)(x.clone().requires_grad_(), ei)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.add_(1).sum().backward()


@pytest.mark.parametrize("form", [Channels, Heads])
def test_second_derivatives(kernels, form):
    layer = by("max", form).to(kernels.device)
    compare_second(kernels, layer, *to(kernels.device, *arguments(form)))


def _noted(sizes: list[int], make, *args, **kwargs) -> torch.Tensor:
    out = make(*args, **kwargs)
    sizes.append(out.numel() * out.element_size())
    return out


def test_memory(kernels, monkeypatch):
    """Nothing that kernels write, or backward keeps, has the size of the edges times the
    channels."""
    layer = by("max", Gate).to(kernels.device)
    x, ei = to(kernels.device, graphs.features(), hub())
    with kernels.on():  # builds the structure
        layer(x.requires_grad_(), ei).sum().backward()
    sizes = []
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, functools.partial(_noted, sizes, getattr(torch, name)))
    with kernels.on():
        out = layer(x, ei)
        sizes += [t.numel() * t.element_size() for t in out.grad_fn.saved_tensors]
        out.sum().backward()
    assert len(sizes) > 6 and max(sizes) < ei.shape[1] * WIDTH * 4 / 4


# --- layers ---------------------------------------------------------------------------------------

class MapLast(Message):
    """A linear map comes last, of what each end has a part in."""

    edge = WIDTH

    def __init__(self):
        super().__init__("max")
        self.lin = nn.Linear(WIDTH, 7)

    def message(self, x_i, x_j, edge_attr):
        return self.lin(x_j + x_i.relu() - edge_attr)


NETWORKS = {"map": lambda: nn.Linear(2 * WIDTH, 5),
            "map, function": lambda: nn.Sequential(nn.Linear(2 * WIDTH, 5), nn.ELU()),
            "map, functions": lambda: nn.Sequential(nn.Linear(2 * WIDTH, 5, bias=False), nn.ReLU(),
                                                    nn.Softplus())}


@pytest.mark.parametrize("network", NETWORKS)
def test_edge_conv(kernels, network):
    layer = EdgeConv(NETWORKS[network]())
    compare(kernels, layer, *arguments(Message)[:2])
    assert routes(layer) == {"cuda": 1}


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_dynamic_edge_conv(kernels, monkeypatch, reduce):
    """Over the graph of each call's own features."""
    def knn(x, y, ptr_x, ptr_y, k, cosine, workers):
        near = torch.cdist(y, x).topk(k, largest=False).indices
        return torch.stack([torch.arange(len(y), device=x.device).repeat_interleave(k),
                            near.flatten()])

    ops = type("Pyg", (), {"knn": staticmethod(knn)})
    monkeypatch.setattr(edge_conv_module.torch_geometric.typing, "WITH_KNN", True)
    monkeypatch.setattr(torch.ops, "pyg", ops, raising=False)  # all else of torch.ops stays
    layer = DynamicEdgeConv(NETWORKS["map, function"](), 4, aggr=reduce)
    compare(kernels, layer, graphs.features(60))
    assert routes(layer) == {"cuda": 1}


def test_a_map_that_comes_last(kernels):
    """At both ends, where the extremum is not that of its inputs; with a sum after it."""
    compare(kernels, MapLast(), *arguments(MapLast))


class Shifted(Message):
    """A form that sums are known of without generated kernels."""

    edge = None

    def message(self, x_i, x_j, edge_attr):
        return edge_attr.view(-1, 1) * (x_j - x_i)


@pytest.mark.parametrize("aggr", ["max", "min", ["add", "min"]])
def test_differences(kernels, aggr):
    compare(kernels, Shifted(aggr), *arguments(Shifted))


@pytest.mark.parametrize("form", [Shifted, Gate])
def test_in_a_checkpoint(kernels, form):
    """Each call saves the same tensors as the one that repeats it."""
    layer = by("max", form).to(kernels.device)
    x, ei, edge = to(kernels.device, *arguments(form))
    x.requires_grad_()
    edge.requires_grad_(form is Shifted)
    expected = torch.autograd.grad(layer(x, ei, edge).square().sum(), x)[0]
    with kernels.on():
        for _ in range(3):
            out = checkpoint(layer, x, ei, edge, use_reentrant=False)
            assert close(torch.autograd.grad(out.square().sum(), x)[0], expected)


def test_several_aggregations(kernels):
    class Several(Message):
        def __init__(self):
            super().__init__(["mean", "max", "min"])

        def message(self, x_i, x_j):
            return (x_j - x_i).tanh()

    compare(kernels, Several(), *arguments(Message))


def test_an_aggregation_that_changes(kernels):
    """Sums and extrema of one message do not get each other's kernels."""
    layer, args = MapLast().to(kernels.device), to(kernels.device, *arguments(MapLast))
    with kernels.on():
        for reduce in ("add", "max", "min", "mean", "max"):
            layer.aggr_module = aggregation_resolver(reduce)
            with gnnaccel.disabled():
                expected = layer(*args)
            assert close(layer(*args), expected)


@pytest.mark.parametrize("reduce", BY)
def test_on_torch_operations(kernels, reduce):
    both(kernels, by(reduce, Gate), *arguments(Gate), backend="torch")


# --- decisions ------------------------------------------------------------------------------------

def test_a_map_of_what_no_end_has_alone(kernels):
    """Its rows are written for each edge before."""
    compare(kernels, Network("max"), *arguments(Network))


def test_what_stays_native(kernels):
    layer = Difference("powermean")
    both(kernels, layer, *arguments(Network), on_fallback="native")
    found = gnnaccel.stats()[type(layer).__name__]
    assert found["routes"] == {"native": 1} and set(found["reasons"]) == {"GA201"}


def test_what_is_recorded(kernels, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # of the table that is printed
    layer, args = by("max", Gate).to(kernels.device), to(kernels.device, *arguments(Gate))
    with kernels.on():
        layer(*args)
        text = str(gnnaccel.explain(layer, *args))
    assert "generated message kernel (max of " in text


def test_small_graphs_stay_native(kernels):
    layer = Difference("max")
    both(kernels, layer, *arguments(Difference), when="profitable", on_fallback="native")
    assert routes(layer) == {"native": 1}
