"""TypedLinear against DGL's own code."""
from __future__ import annotations

import pytest
import torch
from dgl.nn import TypedLinear
from torch.autograd import gradcheck, gradgradcheck

import gnnaccel
from gnnaccel.errors import GraphError
from tests.dgl.judge import close, compare, native_because, on_routes, took
from tests.dgl.typed_graphs import R, types

ROWS = 50
WEIGHTS = [(), ("basis", 3), ("bdd", 4)]
weights = pytest.mark.parametrize("weights", WEIGHTS, ids=["plain", "basis", "bdd"])


def rows(width: int = 8) -> torch.Tensor:
    return torch.randn(ROWS, width)


@on_routes("shape", [(8, 16), (1, 1), (5, 3)], [(64, 64), (7, 40), (130, 12)])
@pytest.mark.parametrize("weights", [(), ("basis", 2), ("bdd", 1)], ids=["plain", "basis", "bdd"])
def test_shapes(route, shape, weights):
    got = compare(route, TypedLinear(*shape, R, *weights), rows(shape[0]), types(ROWS))
    assert weights == ("basis", 2) or not got["W"][1].any()


@weights
def test_sorted_types(route, weights):
    ordered = types(ROWS).sort().values
    compare(route, TypedLinear(8, 16, R, *weights), rows(), ordered, sorted_by_type=True)
    made, x, kinds = route.put(TypedLinear(8, 16, R, *weights), rows(), ordered)
    expected = made(x, kinds, True)
    with route.on():
        assert close(made(x, kinds, True), expected) and close(made(x_type=kinds, x=x), expected)


def test_types_that_are_not_sorted_as_promised(route):
    """DGL gives another type's result there; ours does not rely on the promise."""
    made, x, kinds = route.put(TypedLinear(8, 16, R), rows(), types(ROWS))
    expected = made(x, kinds)
    with route.on():
        assert close(made(x, kinds, True), expected)


@weights
def test_one_type_and_one_row(route, weights):
    compare(route, TypedLinear(8, 16, 1, *weights), rows(), torch.zeros(ROWS, dtype=torch.long))
    compare(route, TypedLinear(8, 16, R, *weights), torch.randn(1, 8), torch.tensor([3]))


@weights
def test_odd_strides_and_int32_types(route, weights):
    x = rows() if "bdd" in weights else rows(16)[:, ::2]  # which DGL's blocks refuse
    compare(route, TypedLinear(8, 16, R, *weights), x, types(2 * ROWS)[::2])
    compare(route, TypedLinear(8, 16, R, *weights), rows(), types(ROWS).int())


@pytest.mark.parametrize("frozen", ["x", "W", "coeff"])
def test_gradients_of_some(route, frozen):
    made, x = TypedLinear(8, 16, R, "basis", 3), rows().requires_grad_()
    {"x": x, **dict(made.named_parameters())}[frozen].requires_grad_(False)
    compare(route, made, x, types(ROWS), require=False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(route, mode):
    made, x, kinds = route.put(TypedLinear(8, 16, R), rows(), types(ROWS))
    with mode():
        expected = made(x, kinds)
        with route.on():
            assert close(made(x, kinds), expected)
    took(route, 1)


@pytest.mark.parametrize("autocast", [False, True])
@weights
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16],
                         ids=str)
def test_dtypes_are_the_hosts(route, dtype, weights, autocast):
    made = TypedLinear(8, 16, R, *weights).to(route.device, dtype)
    x = rows().to(route.device, dtype)
    kinds = types(ROWS)
    kinds, exact = kinds.to(route.device), made.double()(x.double(), kinds.to(route.device))
    made, native = made.to(dtype), dtype is torch.float64 and route.backend == "cuda"
    with torch.autocast(route.device.type, torch.bfloat16, enabled=autocast):
        expected = made(x, kinds)
        with route.on(on_fallback="native"):
            got = made(x, kinds)
    assert gnnaccel.stats()["TypedLinear"]["routes"] == {"native" if native else route.backend: 1}
    assert got.dtype is expected.dtype
    assert (got - exact).norm() <= 1.5 * (expected - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.long
def test_what_is_left_to_dgl(route):
    class Loud(TypedLinear):
        def get_weight(self):
            return 2 * super().get_weight()

    x, kinds = rows().to(route.device), types(ROWS).to(route.device)
    made, loud, bare = (cls(8, 16, R).to(route.device) for cls in (TypedLinear, Loud, TypedLinear))
    native_because(route, "GA205", lambda: loud(x, kinds), loud)
    bare.get_weight = lambda: 3 * bare.W
    native_because(route, "GA205", lambda: bare(x, kinds), bare)
    native_because(route, "GA303", lambda: made(x[:0], kinds[:0]), made)
    native_because(route, "GA204", lambda: made(x, kinds.to(torch.uint8)), made)
    native_because(route, "GA203", lambda: made(x.double(), kinds), made)
    native_because(route, "GA206", lambda: made(x.view(ROWS, 1, 8), kinds), made)
    native_because(route, "GA206", lambda: made(x, kinds, False, None), made)


def test_types_beyond_the_layers(route):
    with route.on(), pytest.raises(GraphError, match="edge types from 0 to 5"):
        TypedLinear(8, 16, 3).to(route.device)(rows().to(route.device),
                                               types(ROWS).to(route.device))


@pytest.mark.parametrize("weights", [(), ("basis", 2), ("bdd", 2)], ids=["plain", "basis", "bdd"])
def test_first_and_second_derivatives(weights):
    made, kinds = TypedLinear(4, 2, 3, *weights).double(), torch.tensor([2, 0, 2])
    inputs = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), *made.parameters()
    names = [n for n, _ in made.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(made, dict(zip(names, parameters)), (x, kinds))

    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise"):
        assert gradcheck(call, inputs) and gradgradcheck(call, inputs)
