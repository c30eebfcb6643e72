"""What every node of autograd keeps to that runs by kernels: shown on one whose kernels are torch
operations that autograd does not see."""
from __future__ import annotations

import inspect
import sys
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gnnaccel.dispatch.run import autograd
from gnnaccel.dispatch.run.autograd import Operation


class _Product(Operation):
    """x * weight + power * bias, and x ** power; bias may be None."""

    def __init__(self, power: int = 2, ways: list | None = None):
        self.power, self.ways = power, [] if ways is None else ways

    def forward(self, needs, x, weight, bias):
        out = x * weight
        out = out if bias is None else out + self.power * bias
        return (out, x ** self.power), (x, weight, bias, x + 0, x * 2)

    def backward(self, needs, saved, d_product, d_power):
        self.ways.append("kernels")
        x, weight, bias = saved[:3]
        d_x, d_weight, d_bias = torch.zeros_like(x), None, None
        if d_product is not None:
            d_x, d_weight, d_bias = d_product * weight, d_product * x, self.power * d_product
        if d_power is not None:
            d_x = d_x + d_power * self.power * x ** (self.power - 1)
        return [d if need else None for d, need in zip((d_x, d_weight, d_bias), needs)]

    def reference(self, x, weight, bias):
        self.ways.append("reference")
        return x * weight if bias is None else x * weight + self.power * bias, x ** self.power


def _leaves(count: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def test_gradients_and_second_derivatives():
    given = _leaves()
    assert torch.autograd.gradcheck(lambda *t: _Product().apply(*t), given)
    assert torch.autograd.gradgradcheck(lambda *t: _Product().apply(*t), given)
    assert torch.autograd.gradgradcheck(lambda *t: _Product(3).apply(*t, None), given[:2])


def test_the_reference_runs_only_where_backward_is_recorded():
    ways = []
    given = _leaves()
    product, power = _Product(2, ways).apply(*given)
    torch.autograd.grad(product.sum() + power.sum(), given, retain_graph=True)
    assert ways == ["kernels"]
    found = torch.autograd.grad(product.sum() + power.sum(), given, create_graph=True)
    assert ways == ["kernels", "reference"] and found[0].requires_grad


@pytest.mark.parametrize("create_graph", [False, True])
def test_results_that_are_not_used_have_no_gradient(create_graph):
    x, weight, bias = _leaves()
    _, power = _Product().apply(x, weight, bias)
    found = torch.autograd.grad(power.sum(), (x, weight, bias), allow_unused=True,
                                create_graph=create_graph)
    assert torch.equal(found[0], 2 * x) and found[1] is found[2] is None


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        return sum(t.sum() for t in inputs)

    @staticmethod
    def backward(ctx, grad):
        return None, None


@pytest.mark.parametrize("create_graph", [False, True])
def test_where_no_gradient_arrives_none_goes_on(create_graph):
    ways, given = [], _leaves()
    out = _Nothing.apply(*_Product(2, ways).apply(*given))
    found = torch.autograd.grad(out, given, allow_unused=True, create_graph=create_graph)
    assert found == (None, None, None) and not ways


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("create_graph", [False, True])
def test_frozen_inputs_get_no_gradient(frozen, create_graph):
    given = [t.detach() if i in frozen else t for i, t in enumerate(_leaves())]
    asked = [t for t in given if t.requires_grad]

    def both(function):
        product, power = function(*given)
        out = product + power if power.requires_grad else product
        return torch.autograd.grad(out.sum(), asked, create_graph=create_graph)

    for got, expected in zip(both(_Product().apply), both(_Product().reference)):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_an_input_that_comes_twice_gets_each_gradient_once(create_graph):
    x, = _leaves(1)
    product, _ = _Product().apply(x, x, None)
    found, = torch.autograd.grad(product.sum(), x, create_graph=create_graph)
    assert torch.equal(found, 2 * x)
    if create_graph:
        assert torch.equal(torch.autograd.grad(found.sum(), x)[0], torch.full_like(x, 2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    def run(*given):
        product, power = _Product().apply(*given)
        return product * power

    given = _leaves()
    got = torch.autograd.grad(run(*given).sum(), given)
    leaves = _leaves()
    checkpoint(run, *leaves, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(t.grad, expected) for t, expected in zip(leaves, got))


@pytest.mark.parametrize("create_graph", [False, True])
def test_saved_tensors_are_read_once(create_graph):
    """A checkpoint that does not re-enter autograd hands each of them out a single time."""
    read, given = [], _leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: read.append(id(t)) or t):
        product, _ = _Product().apply(*given)
    torch.autograd.grad(product.sum(), given, create_graph=create_graph)
    assert len(read) == len(set(read)) == 5


class _Packed:
    def __init__(self, t: torch.Tensor):
        self.t = t


class _Frugal(_Product):
    """Looks in backward at who else holds what it has taken out of the saved tensors."""

    def backward(self, needs, saved, *grads):
        del saved[3:]
        self.ways.append([ref() is None for ref in self.held[3:]])
        return super().backward(needs, saved, *grads)


@pytest.mark.parametrize("kept", [False, True])
def test_what_backward_has_done_with_is_freed_within_it_unless_the_graph_is_kept(kept):
    operation, given = _Frugal(), _leaves()
    held = operation.held = []

    def pack(t):
        packed = _Packed(t)
        held.append(weakref.ref(packed))
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.t):
        product, _ = operation.apply(*given)
    torch.autograd.grad(product.sum(), given, retain_graph=kept)
    assert operation.ways[0] == [not kept] * 2


def test_a_changed_input_is_noticed():
    x, weight, bias = _leaves()
    product, _ = _Product().apply(x, weight, bias)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_transforms_are_refused_as_torch_refuses_them():
    x, weight, bias = (t.detach() for t in _leaves())
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: _Product().apply(x, weight, bias)[0].sum())(x)


def test_a_tensor_that_outlived_its_transform():
    x, weight, bias = _leaves()
    kept = []
    torch.func.grad(lambda t: kept.append(t) or t.sum())(x)
    product, _ = _Product().apply(kept[0], weight, bias)
    assert torch.equal(torch.autograd.grad(product.sum(), x)[0], weight)


class _Partly(_Product):
    def without_grad(self, needs, results):
        return results[1:]


def test_results_that_want_no_gradient():
    product, power = _Partly().apply(*_leaves())
    assert product.requires_grad and not power.requires_grad


def test_nodes_have_their_operations_names():
    assert _Product().apply(*_leaves())[0].grad_fn.name() == "ProductBackward"
    assert _Partly().apply(*_leaves())[0].grad_fn.name() == "PartlyBackward"


class _Function(torch.autograd.Function):
    """`_Product` as it would be written without `Operation`."""

    @staticmethod
    def forward(ctx, power, x, weight, bias):
        ctx.power = power
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias)
        return x * weight + power * bias, x ** power


def _calls(function) -> int:
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.skipif(inspect.isbuiltin(torch.autograd.Function.apply),
                    reason="Function.apply of torch 2.14 and later is written in C++")
def test_a_node_takes_no_more_calls_of_python_than_one_by_hand():
    given = _leaves()
    assert _calls(lambda: _Product().apply(*given)) < _calls(lambda: _Function.apply(2, *given))


# --- gradients by the reference ----------------------------------------------------------------

@pytest.mark.parametrize("create_graph", [True, False])
def test_gradients_are_recorded_where_that_is_asked(create_graph):
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    frozen = torch.randn(2)

    def function(x, none, weight, frozen):
        assert none is None
        return x.tanh() @ weight, frozen.exp(), frozen * weight  # the second has no gradients

    inputs, needs = (x, None, weight, frozen), (True, True, True, False)
    ones = tuple(torch.ones_like(t) for t in function(*inputs))
    with torch.set_grad_enabled(create_graph):
        got = autograd.gradients(function, inputs, needs, ones, create_graph=create_graph)
    expected = torch.autograd.grad(function(*inputs)[::2], (x, weight), ones[::2])
    assert got[1] is None and got[3] is None
    assert torch.equal(got[0], expected[0]) and torch.equal(got[2], expected[1])
    assert all(g.requires_grad is create_graph for g in (got[0], got[2]))


def test_no_gradients_of_what_is_frozen():
    weight, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    assert autograd.gradients(lambda weight, frozen: frozen.exp(), (weight, frozen), (True, False),
                              (torch.ones(2),)) == (None, None)


def test_no_gradients_where_none_is_wanted():
    weight = torch.ones(2, requires_grad=True)
    assert autograd.gradients(torch.exp, (weight,), (False,), (torch.ones(2),)) == (None,)
