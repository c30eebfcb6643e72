"""Each operation of generated kernels, and its derivatives, against torch's in fp64."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda import message_text
from gnnaccel.cuda.expression import OPERATIONS, Expression, Input, Operation, Step
from gnnaccel.dispatch.generated import messages, tree
from gnnaccel.dispatch.generated.messages import Generated
from gnnaccel.dispatch.ops.graph import OpGraph

WIDTH = 5
_POSITIVE = ("log", "sqrt", "rsqrt", "pow")
#: operations that take numbers after their first argument
_NUMBERS = {"leaky_relu": (0.2,), "elu": (1.5,), "softplus": (2.0, 4.0), "clamp_min": (-0.5,),
            "clamp_max": (0.5,), "pow": (1.7,)}
_TESTS = ("gt", "lt", "ge", "le", "eq", "ne")
_LOGIC = ("and", "or", "not", "float", "where")


def expression(name: str) -> Expression:
    """The operation on rows at the source and at the destination."""
    inputs, numbers = (Input("j", "row"), Input("i", "row")), _NUMBERS.get(name, ())
    first = 2 + len(numbers)
    if name in _TESTS:  # as what a choice is made by
        steps = [Step(name, (0, 1)), Step("where", (first, 0, 1))]
    elif name in _LOGIC:
        steps = [Step("gt", (0, 1)), Step("lt", (0, 1))]
        steps += {"not": [Step("not", (first,)), Step("float", (first + 2,))],
                  "float": [Step("float", (first,))],
                  "where": [Step("where", (first, 0, 1))]}.get(
            name, [Step(name, (first, first + 1)), Step("float", (first + 2,))])
        steps.append(Step("mul", (first + len(steps) - 1, 0)))
    else:
        args = tuple(range(len(OPERATIONS[name].slopes)))
        args = (0, *range(2, first)) if numbers else args
        steps = [Step(name, args)]
    return Expression(inputs, len(numbers), tuple(steps), first + len(steps) - 1)


def inputs(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    found = [torch.randn(9, WIDTH), torch.randn(9, WIDTH)]
    found[1][:, 0] = found[0][0, 0] = 0.5  # equal at both ends, and at a corner
    found[1][2:4, 1] = found[0][:, 1] = -0.5
    if name in _POSITIVE:
        found = [t.abs() + 0.1 for t in found]
    return tuple(t.to(device).requires_grad_() for t in found)  # type: ignore[return-value]


def both(name: str, device: torch.device, reduce: str = "sum") -> tuple[list, list]:
    """Value and gradients by kernels, and on torch operations in fp64."""
    of, edge_index = expression(name), torch.randint(0, 9, (2, 60), device=device)
    given = inputs(name, device)
    numbers = _NUMBERS.get(name, ())
    graph = OpGraph(edge_index, 9, 9)
    found = []
    for tensors in (given, [t.detach().double().requires_grad_() for t in given]):
        more = Generated(of, tuple(tensors), numbers, (WIDTH,), (1, WIDTH))
        if tensors is given:
            out = messages.run(graph, reduce, more)
        else:
            index = edge_index[1].view(-1, 1).expand(-1, WIDTH)
            out = tensors[0].new_zeros(9, WIDTH).scatter_reduce(
                0, index, messages.made(graph, more), "amax" if reduce == "max" else reduce,
                include_self=False)
        torch.manual_seed(1)
        grads = [None, None]
        if out.requires_grad:
            grads = torch.autograd.grad(out, tensors, torch.randn(9, WIDTH).to(out),
                                        allow_unused=True)
        found.append([out.detach(), *grads])
    return tuple(found)  # type: ignore[return-value]


def differ(got: list, exact: list) -> bool:
    for a, b in zip(got, exact):
        b = torch.zeros_like(a).double() if b is None and a is not None else b
        a = torch.zeros_like(b) if a is None and b is not None else a
        if a is not None and not torch.allclose(a.double(), b, rtol=1e-5, atol=2e-5,
                                                equal_nan=True):
            return True
    return False


@pytest.mark.parametrize("name", OPERATIONS)
def test_value_and_derivatives(device, name):
    got, exact = both(name, device)
    assert not differ(got, exact), (name, got, exact)


@pytest.mark.parametrize("name", OPERATIONS)
def test_extrema(device, name):
    """Backward finds the messages that forward found the largest: it computes the same bits."""
    got, exact = both(name, device, "max")
    assert not differ(got, exact), (name, got, exact)


@pytest.mark.parametrize("name", ["tanh", "mul", "softplus", "maximum"])
def test_a_wrong_derivative_shows(device, name, monkeypatch):
    """The test above fails where a derivative is wrong."""
    right = OPERATIONS[name]
    slopes = (f"0.9f * ({right.slopes[0]})", *right.slopes[1:])
    monkeypatch.setitem(OPERATIONS, name, Operation(right.value, slopes, right.type))
    message_text.backward.cache_clear()
    _forget()
    assert differ(*both(name, device))
    message_text.backward.cache_clear()
    _forget()


def _forget() -> None:
    from gnnaccel.cuda import generated

    generated.kernels.cache_clear()


def test_every_operation_has_a_torch_function():
    assert set(tree.BY_TORCH) == set(OPERATIONS)


def test_not_a_number(device):
    """NaN and infinities take the way that they take through torch's functions."""
    special = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.0, 1.0]] * 9)
    graph = OpGraph(torch.arange(9, device=device).expand(2, 9).contiguous(), 9, 9)
    for name in ("relu", "leaky_relu", "abs", "sigmoid", "tanh", "exp", "clamp_min", "clamp_max",
                 "maximum", "minimum", "elu", "softplus", "sign"):
        tensors = tuple(t.to(device) for t in (special, special.flip(1).contiguous()))
        more = Generated(expression(name), tensors, _NUMBERS.get(name, ()), (WIDTH,), (1, WIDTH))
        got, exact = messages.run(graph, "sum", more), messages.made(graph, more)
        assert torch.allclose(got, exact, equal_nan=True), (name, got, exact)
