"""Attention dropout: as a distribution like the host's, and one mask through forward, backward and
second derivatives."""
from __future__ import annotations

import pytest
import torch

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import F, N
from tests.pyg.judge import close, compare, took
from tests.pyg.layers import WITH_DROPOUT, build

COPIES = 250


def many_draws(layer, x, edge_index) -> torch.Tensor:
    """[COPIES, N, out]: one call on copies of the graph side by side, each with its own draw."""
    shifts = torch.arange(COPIES, device=x.device).repeat_interleave(edge_index.shape[1]) * N
    with torch.no_grad():
        out = layer(x.repeat(COPIES, 1), edge_index.repeat(1, COPIES) + shifts)
    return out.view(COPIES, N, -1).double()


@pytest.mark.parametrize("p", [0.2, 0.6])
@pytest.mark.parametrize("name", WITH_DROPOUT)
@pytest.mark.long
def test_distribution(route, name, p):
    layer = build(name, heads=1, width=8, dropout=p, device=route.device)
    layer.get_attention_loss = None  # of SuperGATConv; nobody asks for it here
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    with route.on():
        got = many_draws(layer, x, ei)
    took(route, 1)
    native = many_draws(layer, x, ei)
    with torch.no_grad():
        expected = layer.eval()(x, ei).double()
    spread_of = native.std(0)
    fixed = spread_of < 1e-6  # nodes without edges
    assert (got.mean(0) - expected)[fixed].abs().max() < 1e-5 if fixed.any() else True
    z = ((got.mean(0) - expected) / (spread_of / COPIES**0.5))[~fixed]
    assert z.abs().max() < 6 and 0.7 < z.pow(2).mean().sqrt() < 1.4
    ratio = (got.std(0) / spread_of)[~fixed]
    assert 0.9 < ratio.mean() < 1.1 and ratio.min() > 0.5 and ratio.max() < 2.0


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_everything_dropped(route, name):
    compare(route, build(name, dropout=1.0), graphs.features(), graphs.square())


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_off_in_eval_mode(route, name):
    compare(route, build(name, dropout=0.7), graphs.features(), graphs.square(), train=False)


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_the_seed_repeats_it(route, name):
    layer = build(name, dropout=0.5, device=route.device)
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)

    def outputs(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        with route.on():
            return [layer(x, ei).detach() for _ in range(2)]

    first, again, other = outputs(3), outputs(3), outputs(4)
    assert close(first[0], again[0], 1e-6) and close(first[1], again[1], 1e-6)
    assert not close(first[0], first[1], 0.01) and not close(first[0], other[0], 0.01)


def gradient_at(layer, x, ei, direction=None, create_graph=False):
    """The gradient of a smooth function of the output, always with the same draw; and its product
    with ``direction``."""
    torch.manual_seed(5)
    x = x.detach().requires_grad_()
    weight = torch.linspace(-1, 1, N, device=x.device).unsqueeze(-1)
    value = (layer(x, ei).tanh() * weight).sum()
    grad, = torch.autograd.grad(value, x, create_graph=create_graph)
    if direction is None:
        return value.detach(), grad.detach()
    return torch.autograd.grad((grad * direction).sum(), x)[0]


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_backward_uses_the_mask_of_forward(route, name):
    # no kinks between the two sides
    smooth = {} if name == "TransformerConv" else dict(negative_slope=1.0)
    layer = build(name, dropout=0.5, device=route.device, **smooth)
    x, ei = graphs.features().to(route.device) * 0.5, graphs.square().to(route.device)
    direction = torch.randn_like(x) * 1e-3
    with route.on():
        (above, _), (below,
                     _) = (gradient_at(layer, x + step, ei) for step in (direction, -direction))
        _, grad = gradient_at(layer, x, ei)
    torch.testing.assert_close(above - below, 2 * (grad * direction).sum(), rtol=0.03, atol=2e-5)


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_second_derivatives_use_the_mask_of_forward(route, name):
    layer = build(name, dropout=0.5, device=route.device,
                  **({} if name == "TransformerConv" else dict(negative_slope=1.0)))
    x, ei = graphs.features().to(route.device) * 0.5, graphs.square().to(route.device)
    direction = torch.randn_like(x) * 1e-3
    with route.on():
        (_, above), (_,
                     below) = (gradient_at(layer, x + step, ei) for step in (direction, -direction))
        product = gradient_at(layer, x, ei, direction, create_graph=True)
    assert (above - below - 2 * product).norm() < 0.03 * (above - below).norm()


def test_counted_as_accelerated(route):
    layer = build("GATConv", dropout=0.5, device=route.device)
    with route.on():
        layer(graphs.features(N, F).to(route.device),
              graphs.square().to(route.device)).sum().backward()
    assert gnnaccel.stats()["GATConv"]["reasons"] == {}
