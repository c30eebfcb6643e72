"""Inner products with several relations' vectors: values and gradients against fp64, some gradients
only, second derivatives."""
from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from gnnaccel.dispatch.relational.inner_products import inner_products
from tests.helpers import relative


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def each(x, vectors):
    """One relation after the other, as PyG has it."""
    return torch.stack([(x * one).sum(-1) for one in vectors])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("nodes,relations,heads,c",
                         [(0, 1, 2, 4), (1, 3, 1, 1), (50, 3, 4, 5), (300, 1, 1, 16)])
def test_values_and_gradients(device, nodes, relations, heads, c, needs):
    given, cotangent = (rand(nodes, heads, c),
                        rand(relations, heads, c)), rand(relations, nodes, heads)
    found = {}
    for dtype, function in ((torch.float32, inner_products), (torch.float64, each)):
        leaves = [t.to(device, dtype).requires_grad_(need) for t, need in zip(given, needs)]
        out = function(*leaves)
        out.backward(cotangent.to(device, dtype))
        found[dtype] = out.detach(), *(t.grad for t in leaves)
    for ours, exact, wanted in zip(found[torch.float32], found[torch.float64], (True, *needs)):
        assert (ours is not None) is wanted
        assert not wanted or (ours.shape == exact.shape and relative(ours, exact) < 1e-6)


def test_no_gradient_is_asked_for():
    assert not inner_products(torch.ones(3, 2, 4), torch.ones(1, 2, 4)).requires_grad


def test_first_and_second_derivatives():
    inputs = tuple(t.requires_grad_() for t in (rand(6, 2, 3), rand(2, 2, 3)))
    assert gradcheck(inner_products, inputs) and gradgradcheck(inner_products, inputs)
