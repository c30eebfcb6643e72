"""Features that a script writes to between forward and backward (``x += conv(x)``), where PyG's code
does not need them any more."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric import nn as pyg
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import gnnaccel
from gnnaccel.dispatch.ops.aggregation_messages import _RectifiedSum
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.run import written
from gnnaccel.dispatch.run.autograd import Keeping
from tests.distributed import layer_cases
from tests.pyg import graphs
from tests.pyg.judge import close

WIDTH, EDGES = 8, 400


class Residual(MessagePassing):
    """Adds what was aggregated to its own features."""

    def __init__(self, aggr: str = "add"):
        super().__init__(aggr=aggr, node_dim=0)
        self.a = nn.Parameter(torch.randn(WIDTH))
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH + 1, 8), nn.SiLU(), nn.Linear(8, WIDTH))

    def forward(self, x, edge_index, pos):
        x += self.propagate(edge_index, x=x, pos=pos)
        return torch.cat([x, pos], -1)


class Mapped(Residual):
    """As EGNN's: a map of both ends, which moves to the nodes."""

    def message(self, x_i, x_j, pos_i, pos_j):
        apart = (pos_i - pos_j).square().sum(-1, keepdim=True)
        return self.mlp(torch.cat([x_i, x_j, apart], -1))


class Maximum(Residual):
    def __init__(self):
        super().__init__("max")

    def message(self, x_j):
        return x_j


class Scored(Residual):
    def message(self, x_i, x_j, index, ptr, size_i):
        score = (torch.tanh(x_i + x_j) * self.a).sum(-1)
        return softmax(score, index, ptr, size_i).view(-1, 1) * x_j


class Rectified(Residual):
    def message(self, x_j, pos_j):
        return (x_j * self.a + pos_j.sum(-1, keepdim=True)).relu()


class Moved(Residual):
    """Moves the positions, which come without gradients."""

    def forward(self, x, edge_index, pos):
        pos = pos.clone()
        pos += self.propagate(edge_index, pos=pos)
        return torch.cat([x, pos], -1)

    def message(self, pos_i, pos_j):
        apart = pos_i - pos_j
        return apart * torch.tanh(apart.square().sum(-1, keepdim=True) * self.a[0])


class Normed(Residual):
    """Rows that torch computes at the nodes, once for a node."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def message(self, x_i, x_j):
        return self.norm(x_j) * x_i.sigmoid()


class Multiplied(Residual):
    """By a function that no kernel has."""

    def message(self, x_j, pos_i):
        return x_j * torch.prod(x_j, -1, keepdim=True) + pos_i.cumprod(-1).sum(-1, keepdim=True)


class Activated(Residual):
    """A map of a function whose gradient needs what it is of."""

    def message(self, x_i, x_j):
        return self.mlp[2](F.silu(x_j)) * x_i.sigmoid()


class Composed(Residual):
    """By several functions that torch computes at the nodes, of several features."""

    def message(self, x_j, pos_j):
        return (x_j.sin() * pos_j.square().sum(-1, keepdim=True)).cumsum(-1)


USERS = (Mapped, Maximum, Scored, Rectified, Moved, Normed, Multiplied, Activated, Composed)
#: layers of PyG of which backward reads the features, and PyG's does not
LAYERS = ("FeaStConv", "GINEConv", "HEATConv", "PNAConv", "PointNetConv", "RGATConv")


@pytest.fixture(autouse=True)
def unknown():
    """Nothing is known of the functions of tests before."""
    for places in written.of_operations:
        places.clear()


def inputs(device):
    return on_device(device, torch.randn(50, WIDTH), torch.randint(0, 50, (2, EDGES)),
                     torch.randn(50, 3))


def on_device(device, *tensors):
    return [t.to(device) for t in tensors]


def users_gradients(layer, x, edge_index, pos):
    leaf = x.clone().requires_grad_()
    out = layer(leaf * 1.0, edge_index, pos)
    return torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()], allow_unused=True)


def alike(found, expected, tolerance=1e-5):
    return all((a is None) == (b is None) and (a is None or close(a, b, tolerance))
               for a, b in zip(found, expected))


@pytest.mark.long
@pytest.mark.parametrize("cls", USERS)
def test_users_messages(kernels, cls):
    torch.manual_seed(0)
    layer, args = cls().to(kernels.device), inputs(kernels.device)
    expected = users_gradients(layer, *args)
    gnnaccel.reset_stats()
    with kernels.on():
        for _ in range(12):  # more calls than it takes to know who writes
            assert alike(users_gradients(layer, *args), expected, 1e-4)
    assert "native" not in gnnaccel.stats()[cls.__name__]["routes"]


def laid_out(name, device):
    torch.manual_seed(0)
    make, given = layer_cases.CASES[name]
    data = layer_cases.data().to(device)
    return make(pyg).to(device).eval(), data, given


def written_gradients(name, layer, data, given):
    leaf = data.x.detach().clone().requires_grad_()
    data.x, held = leaf * 1.0, data.x
    try:
        x = data.x
        out = layer(*given(data))
        x.mul_(3.0)
        return torch.autograd.grad(out.square().sum() + x.sum(), [leaf, *layer.parameters()],
                                   allow_unused=True)
    finally:
        data.x = held


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_layers(kernels, name):
    layer, data, given = laid_out(name, kernels.device)
    expected = written_gradients(name, layer, data, given)
    gnnaccel.reset_stats()
    with kernels.on():
        for _ in range(8):
            assert alike(written_gradients(name, layer, data, given), expected, 1e-4)
    assert "native" not in gnnaccel.stats()[name]["routes"]




@pytest.mark.long
def test_nodes_that_are_known_to_be_read_late(kernels, monkeypatch):
    """A device says at some time that an edge reads every node. Until then rows of nodes are copies
    to which nobody writes, and that says nothing about later calls."""
    layer, data, given = laid_out("PointNetConv", kernels.device)
    expected = written_gradients("PointNetConv", layer, data, given)
    for known in (False,) * 8 + (True,) * 8:
        monkeypatch.setattr(OpGraph, "unread", lambda self, target, known=known: None if known else (
            torch.zeros(self.rows(target), dtype=torch.bool, device=kernels.device),
            self.index(target)[:1].long()))
        with kernels.on():
            assert alike(written_gradients("PointNetConv", layer, data, given), expected, 1e-4)


@pytest.fixture
def cloned(monkeypatch):
    """How many inputs were copied."""
    counts, native = [0], written.Place.copies

    def copies(self, given):
        out = native(self, given)
        counts[0] += len({id(t) for t, was in zip(out[0], given) if t is not was})
        return out

    monkeypatch.setattr(written.Place, "copies", copies)
    return counts


def gine_calls(layer, x, edge_index, edge_attr, write):
    """Two functions of one code each would be two places; this is one of them."""
    leaf = x.clone().requires_grad_()
    rows = leaf * 1.0
    out = layer(rows, edge_index, edge_attr)
    if write:
        rows += out.detach()
    return torch.autograd.grad(out.square().sum(), leaf)[0]


def other_calls(layer, x, edge_index, edge_attr):
    return gine_again(layer, x.clone().requires_grad_(), edge_index, edge_attr)


def gine_again(layer, leaf, edge_index, edge_attr):
    rows = leaf * 1.0
    out = layer(rows, edge_index, edge_attr)
    rows += out
    return torch.autograd.grad(out.square().sum(), leaf)[0]


def gine(device):
    torch.manual_seed(0)
    layer = pyg.GINEConv(nn.Sequential(nn.Linear(graphs.F, graphs.F), nn.ReLU())).to(device)
    return layer, on_device(device, graphs.features(), graphs.square(),
                           graphs.edge_features(width=graphs.F))


def test_copies_end_where_nobody_writes(kernels, cloned):
    layer, args = gine(kernels.device)
    expected = gine_calls(layer, *args, False)
    with kernels.on():
        for _ in range(written._AFTER + 2):
            assert close(gine_calls(layer, *args, False), expected, 1e-5)
        seen = cloned[0]
        assert seen
        for _ in range(3):
            assert close(gine_calls(layer, *args, False), expected, 1e-5)
        assert cloned[0] == seen
        # it is known not to write: then torch refuses, as it says itself
        with pytest.raises(RuntimeError, match="inplace operation"):
            gine_calls(layer, *args, True)
        # another function of the user's does, of the same layer
        for _ in range(8):
            assert close(other_calls(layer, *args), expected, 1e-5)
        before = cloned[0]
        other_calls(layer, *args)
        assert cloned[0] == before + 1  # the features alone, not those of edges


def test_gradients_of_gradients_reach_the_features(kernels):
    layer, (x, edge_index, edge_attr) = gine(kernels.device)

    def second():
        leaf = x.clone().requires_grad_()
        out = layer(leaf * 1.0, edge_index, edge_attr)
        grad, = torch.autograd.grad(out.pow(3).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    expected = second()
    with kernels.on():
        for _ in range(6):
            assert close(second(), expected, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("calls", [12, written._BEFORE + 10])
def test_a_loop_of_many_calls_before_the_first_backward(kernels, calls):
    layer, (x, edge_index, edge_attr) = gine(kernels.device)

    def steps():
        leaf = x.clone().requires_grad_()
        rows = leaf * 1.0
        for _ in range(calls):
            rows += layer(rows, edge_index, edge_attr) * 0.01
        return torch.autograd.grad(rows.square().sum(), leaf)[0]

    expected = steps()
    with kernels.on():
        for _ in range(3):
            assert close(steps(), expected, 1e-4)


@pytest.mark.parametrize("wanted", [True, False])
def test_evaluations_with_gradients_on_before_the_first_backward(kernels, cloned, wanted):
    """Many a script evaluates so; where no input wants gradients nothing is copied."""
    layer, (x, edge_index, edge_attr) = gine(kernels.device)

    def add(rows):
        rows += layer(rows, edge_index, edge_attr)
        return rows

    def gradient():
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(add(leaf * 1.0).square().sum(), leaf)[0]

    expected = gradient()
    with kernels.on():
        for _ in range(written._BEFORE + 2):
            add(x.clone().requires_grad_(wanted) * 1.0)
        assert bool(cloned[0]) is wanted
        assert close(gradient(), expected, 1e-4)


def test_what_is_written_to_after_backward_is_not_copied(cloned):
    """As a buffer that takes each step's features."""
    place = written.Place()
    rows = torch.randn(3, 2)
    for _ in range(5):
        watched = place.copies((rows,))[1]
        if watched is not None:
            watched.compare(None)
        rows.add_(1.0)
    assert place.copies((rows,))[1] is None and not place.written and cloned[0] == 5


def test_maps_forget_functions_that_are_gone():
    keeping, other = Keeping(torch.mul), Keeping(torch.mul)
    scope: dict = {}
    exec("def function(keeping, x):\n    return keeping(x, x)", {"__name__": "a user's"}, scope)
    for each in (keeping, other):
        scope["function"](each, torch.randn(3, requires_grad=True) * 1.0)
    code = id(scope["function"].__code__)
    assert [place.code for place in Keeping._places.values()].count(code) == 2
    scope.clear()
    gc.collect()
    assert code not in [place.code for place in Keeping._places.values()]


def test_both_ends_are_one_copy(cloned):
    place, x = written.Place(), torch.randn(3, 2)
    (a, b, c), watched = place.copies((x, x, None))
    assert a is b and a is not x and c is None and torch.equal(a, x) and watched is not None
    leaf = torch.randn(3, requires_grad=True)
    ids = torch.arange(3)
    assert place.copies((leaf, ids))[0] == [leaf, ids]  # torch lets nobody write to it; no rows


def test_nothing_is_kept_alive():
    """Neither features while a function is found out about, nor a function that is gone."""
    keeping, places, scope = Keeping(torch.neg), Keeping._places, {}
    exec("def function(keeping, x):\n    keeping(x)", {"__name__": "a user's"}, scope)
    x = torch.randn(1000, requires_grad=True) * 1.0
    memory = weakref.ref(x.untyped_storage())
    scope["function"](keeping, x)
    code = id(scope["function"].__code__)
    assert places[code + keeping.apart].last.counts and code in written.is_users
    for one in (places, _RectifiedSum._places):
        assert any(known is one for known in written.of_operations)
    del x
    gc.collect()
    assert memory() is None
    scope.clear()
    gc.collect()
    assert code + keeping.apart not in places and code not in written.is_users


def test_large_inputs_are_copied_where_memory_is_free(monkeypatch):
    class OnGpu:
        device, is_cuda = "cuda:0", True

        def numel(self):
            return 1 << 28

        def element_size(self):
            return 4

    for free, fits in ((2 << 30, False), (5 << 30, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 0))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
        assert written._fits(OnGpu()) is fits
