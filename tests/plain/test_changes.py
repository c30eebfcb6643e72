"""Plain modules whose arguments, attributes and surroundings change between calls."""
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gnnaccel
from tests.plain import layers
from tests.plain.held import codes, results, same
from tests.plain.test_layers import tensors

NAMES = "h edge_index coord edge_attr node_attr"


def equivariant(**options):
    torch.manual_seed(3)
    return layers.Equivariant(of_edges=3, of_nodes=2, **options)


@pytest.fixture
def on(emulated):
    """Everything that can runs by kernels, and nothing else raises."""
    with gnnaccel.enabled(backend="cuda", when="supported"):
        yield


@pytest.fixture
def args(on):
    given = tensors(NAMES)
    for t in given:
        if t.is_floating_point():
            t.requires_grad_()
    return given


@pytest.mark.long
def test_attributes(args):
    layer = equivariant()
    for _ in range(3):
        assert same(layer, *args)
    layer.residual = False
    assert same(layer, *args) and same(layer, *args)
    layer.mean = False
    assert same(layer, *args)
    layer.epsilon = 0.5
    layer.normalize = True
    assert same(layer, *args)
    layer.epsilon = 2.0
    assert same(layer, *args)
    layer.edge_mlp[1] = nn.Tanh()
    assert same(layer, *args)
    layer.coord_mlp[0].weight = nn.Parameter(torch.randn(8, 8))
    assert same(layer, *args)
    with torch.no_grad():
        layer.coord_mlp[0].weight.mul_(2)
    assert same(layer, *args)
    layer.coord_mlp[0].weight.data = torch.randn(8, 8)
    assert same(layer, *args)
    layer.node_mlp.append(nn.Linear(8, 8))
    assert same(layer, *args)
    for one in layer.parameters():
        one.requires_grad_(False)
    assert same(layer, *args)


def test_edges(args):
    layer = equivariant()
    h, edges, *rest = args
    assert same(layer, h, edges, *rest) and same(layer, h, edges, *rest)
    edges[1, :50] = 3
    assert same(layer, h, edges, *rest)
    edges[0] = edges[0].roll(1)
    assert same(layer, h, edges, *rest)
    assert same(layer, h, edges.clone().flip(0), *rest)
    assert not same(layer, h, edges.int(), *rest, grad=False)
    edges.data = edges.data.flip(1).contiguous()
    assert same(layer, h, edges, *rest)
    small = tensors(NAMES, nodes=17, edges=90, seed=4)
    assert same(layer, *small) and same(layer, h, edges, *rest)


@pytest.mark.parametrize("kind", [list, tuple])
def test_edges_as_two_tensors(args, kind):
    layer = equivariant()
    h, edges, *rest = args
    row, col = edges[0].clone(), edges[1].clone()
    assert same(layer, h, kind((row, col)), *rest) and same(layer, h, kind((row, col)), *rest)
    col[:60] = 5
    assert same(layer, h, kind((row, col)), *rest)
    assert same(layer, h, kind((col, row)), *rest)
    assert same(layer, h, kind((edges[0], edges[1])), *rest)
    edges[1, 7:30] = 2
    assert same(layer, h, kind((edges[0], edges[1])), *rest)
    assert same(layer, h, kind((edges[1], edges[0])), *rest)


def test_ends_as_arguments(on):
    x, latents, edges = tensors("x latents edge_index")
    layer = layers.MeshBlock()
    for _ in range(2):
        assert same(layer, x, latents, edges[0], edges[1])
        assert same(layer, x, latents, edges[1], edges[0])
        assert same(layer, x, receivers=edges[0], senders=edges[1], edge_attr=latents)
    edges[0, 4:100] = 7
    assert same(layer, x, latents, edges[0], edges[1])


def test_arguments(args):
    layer = equivariant()
    h, edges, coord, edge_attr, node_attr = args
    plain = layers.Equivariant()
    assert same(plain, h, edges, coord) and same(layer, *args)
    assert same(plain, h, coord=coord, edge_index=edges)
    assert same(plain, h.detach(), edges, coord) and same(plain, h, edges, coord.detach())
    with torch.no_grad():
        assert same(layer, *args, grad=False) and same(layer, *args, grad=False)
    assert same(layer, *args)
    with torch.inference_mode():
        assert same(layer, *args, grad=False)
    assert same(layer, h.transpose(0, 1).contiguous().transpose(0, 1), edges, coord, edge_attr,
                node_attr)
    other = layers.Equivariant(of_edges=3)
    assert same(other, h, edges, coord, edge_attr) and not same(other.double(), h.double(), edges,
                                                              coord.double(), edge_attr.double())


def test_given_back_arguments_are_the_same_objects(args):
    layer = equivariant()
    for _ in range(3):
        assert layer(*args)[2] is args[3]
    assert gnnaccel.stats()["Equivariant"]["routes"] == {"cuda": 3}


def test_results_may_be_changed_in_place(on):
    x, latents, senders, receivers = tensors("x latents senders receivers")
    latents.requires_grad_()
    layer = layers.MeshBlock()

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, *args):
            x, edges = self.layer(*args)
            total = x.sum() + edges.square().sum()
            return total, edges.clone().mul_(2), x.clone().add_(1)

    assert same(Changing(), x, latents, senders, receivers) is False
    assert gnnaccel.stats()["MeshBlock"]["routes"] == {"cuda": 1}


def test_functions_that_it_calls(args, monkeypatch):
    layer = equivariant()
    assert same(layer, *args)
    natural = layers.segment_mean
    monkeypatch.setattr(layers, "segment_mean", layers.segment_sum)
    assert same(layer, *args)
    monkeypatch.setattr(layers, "segment_mean", lambda *a: natural(*a) * 2)
    same(layer, *args)
    monkeypatch.setattr(layers, "segment_mean", natural)
    assert same(layer, *args)
    monkeypatch.setattr(layers.Equivariant, "distances",
                        lambda self, e, c: (c[e[0]][:, :1], c[e[0]]))
    same(layer, *args)
    monkeypatch.undo()
    assert same(layer, *args)
    layer.distances = lambda e, c: (c[e[0]][:, :1], c[e[0]])
    same(layer, *args)


def test_hooks(args):
    layer = equivariant()
    assert same(layer, *args)
    seen = []
    outer = layer.register_forward_hook(lambda module, given, out: seen.append(1))
    assert same(layer, *args) and seen
    outer.remove()
    inner = layer.edge_mlp[0].register_forward_hook(lambda module, given, out: out * 2)
    assert not same(layer, *args) and codes(layer) == {"GA211"}
    inner.remove()
    assert same(layer, *args)


def test_copies_and_pickles(args):
    layer = equivariant()
    assert same(layer, *args)
    other = copy.deepcopy(layer)
    assert same(other, *args)
    with torch.no_grad():
        other.edge_mlp[0].weight.zero_()
    assert same(other, *args) and same(layer, *args)
    assert same(pickle.loads(pickle.dumps(layer)), *args)


def test_autocast_is_native(args):
    layer = equivariant()
    assert same(layer, *args)
    with torch.autocast("cpu", torch.bfloat16):
        assert not same(layer, *args)
    assert same(layer, *args)


def test_checkpoints(args):
    layer = equivariant()

    class Repeating(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, *args):
            return checkpoint(self.layer, *args, use_reentrant=False)

    for _ in range(3):
        same(Repeating(), *args)
        assert gnnaccel.stats()["Equivariant"]["routes"].keys() == {"cuda"}


def test_second_derivatives(args):
    layer = equivariant(act=nn.SiLU())
    h, coord = args[0], args[2]

    def second(layer):
        out, moved, _ = layer(*args)
        (first,) = torch.autograd.grad((out.sin().sum() + moved.square().sum()), coord,
                                       create_graph=True)
        return torch.autograd.grad(first.square().sum(), [h, coord, *layer.parameters()],
                                   allow_unused=True)

    with gnnaccel.disabled():
        expected = second(layer)
    for _ in range(2):
        for one, other in zip(second(layer), expected):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
    assert gnnaccel.stats()["Equivariant"]["routes"] == {"cuda": 2}


def test_rules(args):
    layer = equivariant()
    gnnaccel.exclude(layer)
    assert not same(layer, *args) and codes(layer) == {"GA101"}
    gnnaccel.include(layer)
    assert same(layer, *args)
    gnnaccel.exclude("Equivariant")
    assert same(layer, *args) and not same(equivariant(), *args)
    gnnaccel.reset_rules()
    gnnaccel.exclude(layers.Equivariant)
    assert not same(layer, *args)


def test_modules_are_let_go_of(args):
    import gc
    import weakref

    layer = equivariant()
    for _ in range(2):
        results(layer, args, {})
    held = weakref.ref(layer)
    del layer
    gc.collect()
    assert held() is None


class Backwards(layers.WeightedSum):
    """The same of the edges the other way round."""

    def forward(self, x, edge_index, w):
        x = self.lin(x)
        return torch.zeros_like(x).index_add_(0, edge_index[0], x[edge_index[1]] * w[:, None])


def test_the_class_of_a_module(on):
    layer, given = layers.WeightedSum(), tensors("x edge_index w")
    for cls in (layers.WeightedSum, Backwards, layers.WeightedSum):
        layer.__class__ = cls
        assert same(layer, *given) and same(layer, *given)
