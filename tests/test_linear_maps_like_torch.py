"""What scripts may rely on around torch's and PyG's `Linear`, and maps of many rows have to keep."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import Linear

import gnnaccel
from tests.helpers import assert_accurate
from tests.test_linear_maps import CLASSES, ROWS, device, gradients, rows, runs, used  # noqa: F401


def both(module, x, grad, function=None):
    """Results and gradients as `gradients` gives them: ours, the host's, the host's in fp64."""
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, x.detach().double().requires_grad_(x.requires_grad), grad.double())
    with gnnaccel.disabled():
        host = gradients(module, x, grad)
    return gradients(module, x, grad, function), host, exact


# --- gradients ------------------------------------------------------------------------------------

@pytest.mark.parametrize("columns", [32, 128])
@pytest.mark.parametrize("of_rows", [True, False])
def test_gradients_have_the_parameters_strides(device, columns, of_rows):
    """Scripts view them as one vector."""
    x, grad = rows(device, columns).requires_grad_(of_rows), rows(device, 40)
    module = used(nn.Linear(columns, 40).to(device), x)
    found = both(module, x, grad)
    for a, h, e in zip(*found):
        assert_accurate("gradient", a, h, e)
        assert a.stride() == h.stride()
    assert runs() == 1


@pytest.mark.parametrize("of_rows", [True, False])
def test_a_gradient_may_be_written_to_while_the_other_is_kept(device, of_rows):
    x = rows(device).requires_grad_(of_rows)
    module = used(nn.Linear(32, 40).to(device), x)
    module(x).square().sum().backward()
    for kept, written in (("weight", "bias"), ("bias", "weight")):
        kept, written = (module.get_parameter(name).grad for name in (kept, written))
        factor = torch.ones_like(kept, requires_grad=True)
        product = (kept * factor).sum()
        written.zero_()
        product.backward()
        assert torch.equal(factor.grad, kept)
    assert runs() == 1


@CLASSES
def test_memory_that_is_exchanged_before_backward(device, cls):
    """The host's gradient of rows is by the weight of forward, that of the weight by the rows that
    are there in backward, in any order of memory."""
    x, grad = rows(device).requires_grad_(), rows(device, 40)
    module = used(cls(32, 40).to(device), x)

    def exchanged(weight, given, module, x, grad):
        out = module(x)
        module.weight.data, x.data = weight, given
        return torch.autograd.grad(out, [x, module.weight, module.bias], grad)

    others = rows(device, 40, 32).t(), rows(device, ROWS, 32).t()
    wide = copy.deepcopy(module).double()
    exact = exchanged(*[t.double() for t in others], wide,
                      x.detach().double().requires_grad_(), grad.double())
    native, given = copy.deepcopy(module), x.detach().clone().requires_grad_()
    with gnnaccel.disabled():
        host = exchanged(*others, native, given, grad)
    for a, h, e in zip(exchanged(*others, module, x, grad), host, exact):
        assert_accurate("exchanged", a, h, e)
    assert runs() == 1


# --- what forward reads ---------------------------------------------------------------------------

@CLASSES
def test_biases_in_any_memory(device, cls):
    x, grad = rows(device).requires_grad_(), rows(device, 40)
    module = used(cls(32, 40).to(device), x)
    long, one = torch.randn(80, device=device), torch.randn(1, device=device)
    for bias in (long[::2], long[1:41], one.expand(40), one, one[0]):
        module.bias = nn.Parameter(bias)
        assert_accurate("result", module(x), F.linear(x, module.weight, bias),
                        F.linear(x.double(), module.weight.double(), bias.double()))
    module.bias = nn.Parameter(long[::2])
    for a, h, e in zip(*both(module, x, grad)):
        assert_accurate("gradient", a, h, e)
