"""RGATConv: dropout as a distribution like the host's, with one mask for every pass, and second
derivatives."""
from __future__ import annotations

import pytest
import torch

import gnnaccel
from tests.pyg.graphs import E, N
from tests.pyg.judge import close, took
from tests.pyg.rgat import KINDS, MODS, PRODUCT, WITHIN, build, check, inputs

# ---- dropout ----

COPIES = 100
DROPPING = [{}, WITHIN, {**PRODUCT, "dim": 3}, {**PRODUCT, **WITHIN}]


def many_draws(layer, x, ei, et) -> torch.Tensor:
    """[COPIES, N, out]: one call on copies of the graph side by side, each with its own draw."""
    shifts = torch.arange(COPIES, device=x.device).repeat_interleave(E) * N
    with torch.no_grad():
        return layer(x.repeat(COPIES, 1), ei.repeat(1, COPIES) + shifts,
                     et.repeat(COPIES)).view(COPIES, N, -1).double()


@pytest.mark.parametrize("options", DROPPING, ids=str)
def test_dropout_as_a_distribution(route, options):
    layer, args = build(4, 1, dropout=0.4, **options).to(route.device), inputs(route)
    with route.on():
        got = many_draws(layer, *args)
    took(route, 1)
    native = many_draws(layer, *args)
    with torch.no_grad():
        expected = layer.eval()(*args).double()
    spread_of = native.std(0)
    fixed = spread_of < 1e-6  # nodes without edges
    assert (got.mean(0) - expected)[fixed].abs().max() < 1e-5
    z = ((got.mean(0) - expected) / (spread_of / COPIES**0.5))[~fixed]
    assert z.abs().max() < 6 and 0.7 < z.pow(2).mean().sqrt() < 1.4
    assert 0.9 < (got.std(0) / spread_of)[~fixed].mean() < 1.1


@pytest.mark.parametrize("options", DROPPING, ids=str)
def test_everything_dropped(route, options):
    check(route, build(dropout=1.0, **options))


@pytest.mark.parametrize("options", DROPPING, ids=str)
def test_no_dropout_in_eval_mode(route, options):
    check(route, build(dropout=0.7, **options), train=False)


@pytest.mark.parametrize("mod", MODS)
def test_no_dropout_next_to_a_mod(route, mod):
    layer = build(mod=mod)
    layer.dropout = 0.7  # the constructor refuses it, the forward pass does not look at it
    check(route, layer)


@pytest.mark.parametrize("options", DROPPING, ids=str)
def test_the_seed_repeats_dropout(route, options):
    layer, args = build(dropout=0.5, **options).to(route.device), inputs(route)

    def outputs(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        with route.on():
            return [layer(*args).detach() for _ in range(2)]

    first, again, other = outputs(3), outputs(3), outputs(4)
    assert close(first[0], again[0], 1e-6) and close(first[1], again[1], 1e-6)
    assert not close(first[0], first[1], 0.01) and not close(first[0], other[0], 0.01)


@pytest.mark.parametrize("options", DROPPING, ids=str)
def test_backward_uses_the_mask_of_forward(route, options):
    layer, (x, ei, et) = build(dropout=0.5, **options).to(route.device), inputs(route)
    direction = torch.randn_like(x) * 1e-3

    def value(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return layer(x, ei,
                     et).tanh().mul(torch.linspace(-1, 1, N, device=x.device).unsqueeze(-1)).sum()

    with route.on():
        x = (x * 0.5).requires_grad_()
        above = value(x + direction)
        below = value(x - direction)
        grad, = torch.autograd.grad(value(x), x)
    torch.testing.assert_close(above - below, 2 * (grad * direction).sum(), rtol=0.03, atol=5e-5)


# ---- second derivatives ----

DERIVED = [*KINDS[:5], *(dict(mod=mod) for mod in MODS), dict(mod="additive", **PRODUCT),
           dict(num_bases=2, **WITHIN), dict(num_blocks=2)]


@pytest.mark.parametrize("options", DERIVED, ids=str)
def test_derivatives_by_finite_differences(options):
    layer = build(2, 2, 4, 3, edge_dim=2, negative_slope=1.0, **options).double()
    x = torch.randn(5, 4).double().requires_grad_()
    ei = torch.randint(0, 4, (2, 12))
    et = torch.randint(0, 3, (12,))
    attr = torch.randn(12, 2).double().requires_grad_()
    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise"):
        assert torch.autograd.gradcheck(lambda x, attr: layer(x, ei, et, attr), (x, attr),
                                        fast_mode=True)
        assert torch.autograd.gradgradcheck(lambda x, attr: layer(x, ei, et, attr), (x, attr),
                                            fast_mode=True)


@pytest.mark.parametrize("options",
                         [*KINDS[:5], dict(mod="additive"), dict(mod="scaled", num_bases=2)],
                         ids=str)
def test_gradient_penalty(route, options):
    layer, (x, ei, et) = build(**options).to(route.device), inputs(route)

    def penalty(layer, x) -> list[torch.Tensor | None]:
        x = x.detach().requires_grad_()
        grad, = torch.autograd.grad(layer(x, ei, et).tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), [x, *layer.parameters()], allow_unused=True)

    with route.on():
        got = penalty(layer, x)
    exact = penalty(layer.double(), x.double())
    for mine, truth in zip(got, exact):
        assert (mine is None) == (truth is None) and (mine is None
                                                      or (mine - truth).norm() <= 1e-4
                                                      * truth.norm() + 1e-4)
