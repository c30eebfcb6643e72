"""Each operation of generated kernels, and its derivatives, against torch's in fp64."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.messages import generated, message_text
from gnnaccel.cuda.messages.expression import OPERATIONS, Expression, Input, Operation, Step
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


def both(name: str, device: torch.device, reduce: str = "sum",
         hub: bool = False) -> tuple[list, list]:
    """Value and gradients by kernels, and on torch operations in fp64. ``hub``: two nodes have so
    many edges that several warps share them, one of those that enter it, one of those that
    leave."""
    of, edge_index = expression(name), torch.randint(0, 9, (2, 60), device=device)
    if hub:
        edge_index = torch.randint(0, 9, (2, 1500), device=device)
        edge_index[1, :600], edge_index[0, 600:1200] = 3, 4
        edge_index[:, 1200:] %= 7  # two nodes have hardly any
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


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("name", ["mul", "tanh", "maximum", "where"])
def test_means(device, name, hub):
    """Each message has its share of the gradient, also of rows that several warps go over."""
    got, exact = both(name, device, "mean", hub)
    assert not differ(got, exact), (name, got, exact)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("kind, copies", [("columns", 0), ("one row for all", 0),
                                          ("columns that begin anywhere", 2),
                                          ("rows at odd distances", 2), ("transposed", 2)])
def test_rows_that_are_not_side_by_side(device, kind, copies, reduce):
    """They are read as they lie, where loads of several numbers can be."""
    whole = torch.randn(9, 16, device=device)
    if kind == "columns that begin anywhere":
        whole = torch.randn(9, 18, device=device)[:, 1:17]
    elif kind == "rows at odd distances":
        whole = torch.randn(9, 17, device=device)[:, :16]
    elif kind == "transposed":
        whole = torch.randn(16, 9, device=device).t()
    elif kind == "one row for all":
        whole = torch.randn(1, 16, device=device).expand(9, 16)
    of, graph = expression("mul"), OpGraph(torch.randint(0, 9, (2, 700), device=device), 9, 9)
    told, copied = generated.arguments(graph.view().csc(), of, (1, 8), whole.split(8, -1), ())
    assert len(copied) == copies and len(told) == 4
    found = []
    for rows in (whole, whole.double()):
        rows = rows.detach().requires_grad_()
        parts = rows.split(8, -1)
        more = Generated(of, tuple(parts), (), (8,), (1, 8))
        made = rows.dtype == torch.float64 and messages.made(graph, more)
        out = messages.run(graph, reduce, more) if made is False else made.new_zeros(
            9, 8).scatter_reduce(0, graph.index("v").view(-1, 1).expand(-1, 8), made,
                                 "amax" if reduce == "max" else reduce, include_self=False)
        weights = torch.linspace(-1, 1, out.numel(), device=device).to(out).view(out.shape)
        found.append([out.detach(), *torch.autograd.grad(out, [rows], weights)])
    assert not differ(*found)


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
    generated.kernels.cache_clear()


def test_every_operation_has_a_torch_function():
    assert set(tree.BY_TORCH) == set(OPERATIONS)


@pytest.mark.long
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
