"""Messages that kernels are written for: what they do besides computing, and what reaches
gradients, is what the host's own code does."""
from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import degree, softmax

import gnnaccel
from gnnaccel.cuda.structures import structure
from tests.pyg import graphs
from tests.pyg.generated_calls import routes
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.graphs import E, N
from tests.pyg.judge import close


def seen(layer, args) -> list[torch.Tensor]:
    """All that a training step leaves behind: results, gradients, statistics, what the layer keeps,
    and the state of torch's generator."""
    torch.manual_seed(1)
    layer.zero_grad()
    args = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    out = layer(*args)
    (out * torch.linspace(0.5, 1.5, out.shape[-1], device=out.device)).sum().backward()
    state = torch.get_rng_state().float()
    kept = [v.detach() for v in vars(layer).values() if isinstance(v, torch.Tensor)]
    found = [out, *kept, *[t.clone() for t in layer.buffers()], state.to(out.device),
             *(t.grad for t in [*args, *layer.parameters()] if t.grad is not None)]
    return [t.detach() for t in found]


def agrees(kernels, layer, *args, taken: str = "cuda") -> None:
    """A step natively and one on the route leave the same, of layers that begin alike."""
    layer, args = layer.to(kernels.device), [a.to(kernels.device) for a in args]
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    expected = seen(layer, args)
    layer.load_state_dict(before)
    gnnaccel.reset_stats()
    with kernels.on(on_fallback="native"):
        got = seen(layer, args)
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert close(a, b)
    assert routes(layer) == {taken: 1}


def given(edge: int = WIDTH) -> list[torch.Tensor]:
    return [graphs.features(), graphs.square(), graphs.edge_features(width=edge)]


# --- what draws numbers or keeps statistics -------------------------------------------------------

class UsedInAnotherOrder(Message):
    def message(self, x_i, x_j):
        first, second = F.dropout(x_j, 0.5), F.dropout(x_i * x_j, 0.3)
        return second * 2 + first


class DrawsForNothing(Message):
    def message(self, x_i, x_j):
        F.dropout(x_j, 0.5)
        return F.dropout(x_j * x_i, 0.5)


class KeepsWhatItDrewLater(Message):
    def message(self, x_i, x_j):
        out = F.dropout(x_j * x_i, 0.5)
        self.alpha = F.dropout((x_j * x_i).sum(-1), 0.5)
        return out * x_j


class StatisticsForNothing(Message):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def message(self, x_i, x_j):
        self.norm(x_i * x_j)
        return torch.tanh(x_i - x_j)


class StatisticsWithoutGradients(StatisticsForNothing):
    def message(self, x_i, x_j):
        with torch.no_grad():
            share = self.norm(x_j)
        return x_j * share * torch.tanh(x_i)


@pytest.mark.parametrize("cls", [UsedInAnotherOrder, DrawsForNothing, KeepsWhatItDrewLater,
                                 StatisticsForNothing, StatisticsWithoutGradients])
def test_effects_are_in_the_order_of_the_message(kernels, cls):
    agrees(kernels, cls(), *given())


# --- modules that change their input --------------------------------------------------------------

class InPlace(Message):
    def __init__(self):
        super().__init__()
        self.act, self.lin = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5, inplace=True)


class InputUsedAgain(InPlace):
    def message(self, x_i, x_j):
        h = self.lin(x_j - x_i)
        return self.act(h) * x_j + h


class ViewUsedAgain(InPlace):
    def message(self, x_i, x_j):
        h = x_j - x_i
        half = h[:, :WIDTH // 2]
        self.act(h.view(-1, 2, WIDTH // 2))
        return torch.cat([half, half], -1) * x_j


class DroppedUsedAgain(InPlace):
    def message(self, x_i, x_j):
        h = x_j * x_i
        return self.drop(h) + h


class KeptAndChanged(InPlace):
    def message(self, x_i, x_j):
        self.kept = x_j * x_i
        return self.act(self.kept) + x_j


class InputForgotten(InPlace):
    def message(self, x_i, x_j):
        return self.act(self.lin(x_j - x_i)) * x_j


class DroppedInPlace(InPlace):
    """On a GPU torch draws another mask than for a dropout that leaves its input alone."""

    def message(self, x_i, x_j):
        return self.drop(x_i * x_j) * x_j


@pytest.mark.parametrize("cls, taken", [
    (InputUsedAgain, "cuda"), (ViewUsedAgain, "native"), (DroppedUsedAgain, "native"),
    (KeptAndChanged, "cuda"), (InputForgotten, "cuda"), (DroppedInPlace, "native")])
def test_modules_that_change_their_input(kernels, cls, taken):
    agrees(kernels, cls(), *given(), taken=taken)


class Function(InPlace):
    """PyG's own AttentiveFP."""

    def message(self, x_i, x_j, edge_attr):
        h = F.leaky_relu_(self.lin(x_j) + edge_attr)
        return F.elu(h * x_i, inplace=True)


class Methods(InPlace):
    def message(self, x_i, x_j):
        return (x_j - x_i).mul_(2).relu_() * x_i.clone().clamp_(max=0.5)


class Operators(InPlace):
    def message(self, x_i, x_j, edge_attr):
        out = self.lin(x_j)
        out += edge_attr
        out *= x_i
        out -= 0.5
        out /= 2 + x_j.abs()
        return out


class Gathered(InPlace):
    def message(self, x_i, x_j):
        x_j *= 2
        return torch.tanh(x_j - x_i)


class StatementAlone(InPlace):
    def message(self, x_i, x_j):
        h = x_j - x_i
        h.relu_()
        return h * x_j


class OperandUsedAgain(InPlace):
    def message(self, x_i, x_j):
        h = x_j - x_i
        first = h
        h *= x_j
        return h + first


class PieceOfIt(InPlace):
    def message(self, x_i, x_j):
        h = x_j * x_i
        h[:, :WIDTH // 2].mul_(0.5)
        return h + x_i


class WithoutHistory(InPlace):
    """What autograd has of it goes on as if nothing had happened."""

    def message(self, x_i, x_j):
        h = x_j - 2 * x_i
        with torch.no_grad():
            h = h.mul_(3)
        return h + x_i


class Detached(InPlace):
    def message(self, x_i, x_j):
        h = x_j - x_i
        h.detach().mul_(2)
        return h + x_i


class Truth(InPlace):
    """Ones and zeros, where ``h > 0`` has truth values."""

    def message(self, x_i, x_j):
        return (x_j.detach() * x_i.detach()).gt_(0) * 0.5 + x_j


@pytest.mark.parametrize("cls, taken", [
    (Function, "cuda"), (Methods, "cuda"), (Operators, "cuda"), (Gathered, "cuda"),
    (StatementAlone, "cuda"), (OperandUsedAgain, "cuda"), (PieceOfIt, "native"),
    (WithoutHistory, "native"), (Detached, "native"), (Truth, "native")])
def test_functions_that_change_their_input(kernels, cls, taken):
    agrees(kernels, cls(), *given(), taken=taken)


@pytest.mark.parametrize("change", [lambda t: F.relu_(t), lambda t: t.mul_(2),
                                    lambda t: F.silu(t, inplace=True)])
def test_a_parameter_that_a_message_changes(emulated, change):
    """Each call changes it once."""
    class ChangesIt(InPlace):
        def message(self, x_i, x_j):
            return x_j * self.change(self.scale) - x_i

    layer, (x, ei, _) = ChangesIt(), given()
    layer.register_buffer("scale", torch.linspace(-1, 2, WIDTH))
    layer.change = change
    other = copy.deepcopy(layer)
    for _ in range(2):
        with emulated.on(on_fallback="native"):
            got = layer(x, ei)
        assert close(got, other(x, ei)) and torch.equal(layer.scale, other.scale)


def test_a_module_that_changes_features_of_the_caller(emulated):
    class ChangesEdges(InPlace):
        def message(self, x_j, edge_attr):
            return self.act(edge_attr.view(-1, WIDTH)) * x_j

    layer, (x, ei, edge) = ChangesEdges(), given()
    mine = edge.clone()
    with torch.no_grad():
        expected = layer(x, ei, edge)
        with emulated.on(on_fallback="native"):
            got = layer(x, ei, mine)
    assert close(got, expected) and torch.equal(mine, edge) and (mine >= 0).all()


# --- rows of nodes that no edge reads -------------------------------------------------------------

class OverDegree(Message):
    """Divides by the number of edges that leave a node."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, leave=degree(edge_index[0], N).view(-1, 1))

    def message(self, x_i, x_j, leave_j):
        return torch.tanh(self.lin(x_j / leave_j) + x_i)


class OfRoots(Message):
    def message(self, x_i, x_j):
        return F.normalize(x_j.abs().sqrt(), dim=-1) * x_i


class AttentionOfLogarithms(Message):
    def __init__(self):
        super().__init__()
        self.att = nn.Parameter(torch.randn(WIDTH))

    def message(self, x_i, x_j, index, ptr, size_i):
        score = (torch.exp(-1 / x_j) * self.att).sum(-1) + x_i.sum(-1)
        alpha = softmax(F.leaky_relu(score, 0.2), index, ptr, size_i)
        return x_j * alpha.unsqueeze(-1)


@pytest.mark.parametrize("cls", [OverDegree, OfRoots, AttentionOfLogarithms])
@pytest.mark.parametrize("row", [0.0, float("nan"), float("inf")])
def test_rows_that_no_edge_reads_reach_no_gradient(route, cls, row):
    x, ei, edge = given()
    x = x.abs() + 0.5
    x[-1] = row  # no edge is there
    layer, args = cls().to(route.device), [t.to(route.device) for t in (x, ei, edge)]
    native = seen(layer, args)
    assert all(t[:-1].isfinite().all() for t in native[2:])
    with route.on(on_fallback="native"):
        for _ in range(2):  # the device has told of the degrees by the second
            for a, b in zip(seen(layer, args), native):
                assert close(a, b)


def test_rows_that_no_edge_reads_without_any_edge(kernels):
    x, ei, edge = given()
    agrees(kernels, OverDegree(), x, ei[:, :0], edge[:0], taken="native")


# --- what belongs to all edges --------------------------------------------------------------------

class Scored(Message):
    def message(self, x_i, x_j, edge_attr, index):
        self.score = (x_i * x_j * edge_attr).sum(-1)
        return x_j * softmax(self.score, index).unsqueeze(-1)


@pytest.mark.long
def test_one_row_for_all_edges(kernels):
    x, ei, _ = given()
    agrees(kernels, Scored(), x, ei, torch.randn(1, WIDTH))
    agrees(kernels, Scored(), x, ei, torch.randn(E, WIDTH))


# --- attributes that are code ---------------------------------------------------------------------

class Counts(Message):
    def __init__(self):
        super().__init__()
        self.reads, self.root = 0, 4.0

    @property
    def counted(self):
        self.reads += 1
        return 0.5

    @property
    def scale(self):
        return self.root ** 0.5

    @functools.cached_property
    def number(self):
        self.reads += 1
        return 2.0


class ReadsCounted(Counts):
    def message(self, x_i, x_j):
        return torch.tanh(x_i - x_j) * self.counted * self.number


class ReadsScale(Counts):
    def message(self, x_i, x_j):
        return torch.tanh(x_i - x_j) * self.scale


def test_properties_run_as_often_as_with_the_host(kernels):
    layer = ReadsCounted()
    agrees(kernels, layer, *given(), taken="native")
    assert layer.reads == 3  # two calls, and once to be cached


def test_properties_that_only_compute(kernels):
    layer = ReadsScale()
    agrees(kernels, layer, *given())
    layer.root = 9.0
    agrees(kernels, layer, *given())


class Mapped(Message):
    """A map of both ends, which moves to the nodes."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))

    def message(self, x_i, x_j):
        return self.net(torch.cat([x_i, x_j], -1))


@pytest.mark.parametrize("before", [False, True])
def test_a_checkpoint_saves_the_same_although_more_is_known_of_the_graph(emulated, monkeypatch,
                                                                          before):
    """A GPU may tell only meanwhile that all nodes have edges."""
    layer, x = Mapped(), graphs.features().requires_grad_()
    ring = torch.arange(N)
    ei = torch.cat([graphs.square(), torch.stack([ring, ring.roll(1)])], 1)
    known = [False]
    monkeypatch.setattr(structure.Split, "known", property(lambda split: known[0]))
    expected = torch.autograd.grad(layer(x, ei).square().sum(), [x, *layer.parameters()])
    with emulated.on():
        if before:  # what a call outside has kept must not matter either
            layer(x, ei)
        out = checkpoint(layer, x, ei, use_reentrant=False)
        known[0] = True
        if before:
            layer(x, ei)
        got = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    assert all(map(close, got, expected)) and routes(layer).keys() == {"cuda"}
