"""Inner products with several relations' vectors, of rows and of rows that each relation maps:
values and gradients against fp64, some gradients only, second derivatives."""
from __future__ import annotations

import functools
from itertools import product

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from gnnaccel.dispatch.relational.inner_products import inner_products, mapped_products
from tests.helpers import relative


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def each(x, vectors):
    """One relation after the other, as PyG has it."""
    return torch.stack([(x * one).sum(-1) for one in vectors])


def compare(device, function, exactly, given, needs, cotangent, most):
    """Results and gradients of ``function``, where ``needs`` asks for one, against those of
    ``exactly`` in fp64."""
    found = []
    for dtype, one in ((torch.float32, function), (torch.float64, exactly)):
        leaves = [t.to(device, dtype).requires_grad_(need) for t, need in zip(given, needs)]
        out = one(*leaves)
        out.backward(cotangent.to(device, dtype))
        found.append([out.detach(), *(t.grad for t in leaves)])
    for ours, exact, wanted in zip(*found, (True, *needs)):
        assert (ours is not None) is wanted
        assert not wanted or (ours.shape == exact.shape and relative(ours, exact) < most)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("nodes,relations,heads,c",
                         [(0, 1, 2, 4), (1, 3, 1, 1), (50, 3, 4, 5), (300, 1, 1, 16)])
def test_values_and_gradients(device, nodes, relations, heads, c, needs):
    given = rand(nodes, heads, c), rand(relations, heads, c)
    compare(device, inner_products, each, given, needs, rand(relations, nodes, heads), 1e-6)


def test_no_gradient_is_asked_for():
    assert not inner_products(torch.ones(3, 2, 4), torch.ones(1, 2, 4)).requires_grad


def test_first_and_second_derivatives():
    inputs = tuple(t.requires_grad_() for t in (rand(6, 2, 3), rand(2, 2, 3)))
    assert gradcheck(inner_products, inputs) and gradgradcheck(inner_products, inputs)


# ---- of mapped rows ----

def each_mapped(x, weights, vectors):
    """The rows of one relation after the other, made."""
    return torch.cat([((rows @ w.t()).view(len(rows), *v.shape) * v).sum(-1)
                      for rows, *of_type in zip(x, weights, vectors) for w, v in zip(*of_type)])


def by_type(function, *leaves):
    """``function`` of the leaves of several types, kind by kind."""
    types = len(leaves) // 3
    return function(*(list(leaves[at:at + types]) for at in range(0, 3 * types, types)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("needs", list(product((True, False), repeat=3))[:-1])
@pytest.mark.parametrize("heads,c", [(2, 4), (1, 1), (4, 5)])
@pytest.mark.parametrize("types", [[(50, 3, 7)], [(0, 2, 3), (30, 1, 1), (4, 3, 7)]])
def test_mapped_values_and_gradients(device, types, heads, c, needs):
    """``types``: nodes, relations and channels of each."""
    given = [*(rand(nodes, k) for nodes, _, k in types),
             *(rand(relations, heads * c, k) for _, relations, k in types),
             *(rand(relations, heads, c) for _, relations, _ in types)]
    cotangent = rand(sum(nodes * relations for nodes, relations, _ in types), heads)
    compare(device, functools.partial(by_type, mapped_products),
            functools.partial(by_type, each_mapped), given, [n for n in needs for _ in types],
            cotangent, 1e-5)


def test_mapped_first_and_second_derivatives():
    inputs = tuple(t.requires_grad_() for t in (rand(5, 4), rand(3, 2), rand(2, 6, 4),
                                                rand(1, 6, 2), rand(2, 2, 3), rand(1, 2, 3)))
    assert gradcheck(functools.partial(by_type, mapped_products), inputs)
    assert gradgradcheck(functools.partial(by_type, mapped_products), inputs)
