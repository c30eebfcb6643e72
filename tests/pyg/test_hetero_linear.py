"""HeteroLinear against the host's own code."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import HeteroLinear

import gnnaccel
from gnnaccel.errors import FallbackError, GraphError
from tests.helpers import relative
from tests.pyg.judge import compare, on_routes, runs_natively, took

ROWS, TYPES = 50, 5


def types(rows=ROWS, count=TYPES, ordered=False):
    """Types at random, of which the last but one does not occur."""
    found = torch.randint(0, count, (rows,))
    found[found == count - 2] = 0
    return found.sort().values if ordered else found


@on_routes("shape", [(8, 16), (1, 1), (5, 3)], [(64, 64), (7, 40), (130, 12)])
@pytest.mark.parametrize("bias", [True, False])
def test_shapes(route, shape, bias):
    got = compare(route, HeteroLinear(*shape, TYPES, bias=bias), torch.randn(ROWS, shape[0]),
                  types())
    assert not got["weight"][TYPES - 2].any()


def test_sorted_types(route):
    compare(route, HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types(ordered=True))


@pytest.mark.parametrize("before", [0, 2])
def test_types_that_are_told_to_be_sorted(before):
    """Where they are not, the host's result is another, and HGTConv relies on it. ``before``: so
    many calls of a layer that was told nothing are remembered."""
    made, x, kinds = HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types(ordered=True)
    with gnnaccel.enabled(when="supported", backend="torch"):
        for _ in range(before):
            made(x, kinds)
        made.is_sorted = True
        gnnaccel.reset_stats()
        got = [made(x, kinds) for _ in range(2)]
    assert gnnaccel.stats()["HeteroLinear"]["reasons"] == {"GA208": 2}
    assert all(torch.equal(one, made(x, kinds)) for one in got)


def test_one_type_and_one_row(route):
    compare(route, HeteroLinear(8, 16, 1), torch.randn(ROWS, 8),
            torch.zeros(ROWS, dtype=torch.long))
    compare(route, HeteroLinear(8, 16, TYPES), torch.randn(1, 8), torch.tensor([3]))


def test_odd_strides_and_int32_types(route):
    x = torch.randn(ROWS, 16)[:, ::2]
    compare(route, HeteroLinear(8, 16, TYPES), x, types(2 * ROWS)[::2])
    compare(route, HeteroLinear(8, 16, TYPES, bias=False), x.contiguous(), types().int())


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_gradients_of_some(route, frozen):
    made, x = HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8, requires_grad=True)
    {"x": x, **dict(made.named_parameters())}[frozen].requires_grad_(False)
    compare(route, made, x, types(), require=False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(route, mode):
    made, x, kinds = route.put(HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types())
    with mode():
        expected = made(x, kinds)
        with route.on():
            assert relative(made(x, kinds), expected) < 1e-6
    took(route, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(route, dtype, autocast):
    made, x, kinds = route.put(HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types())
    exact = made.double()(x.double(), kinds)
    made = made.to(torch.float32 if autocast else dtype)
    x = x.to(made.weight.dtype).requires_grad_()
    with torch.autocast(route.device.type, dtype, enabled=autocast):
        native = made(x, kinds)
        with route.on():
            got = made(x, kinds)
    got.sum().backward()
    assert got.dtype == native.dtype and relative(got, exact) < 2 * relative(native, exact) + 1e-4
    assert x.grad.dtype == x.dtype and made.weight.grad.isfinite().all() and made.bias.grad.dtype == made.bias.dtype


def test_half_rows_with_a_wider_bias(route):
    """The host adds the bias in place, so the rows' dtype stays."""
    made, x, kinds = route.put(HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types())
    made.weight.data = made.weight.data.bfloat16()
    expected = made(x.bfloat16(), kinds)
    with route.on():
        got = made(x.bfloat16(), kinds)
    assert got.dtype == expected.dtype == torch.bfloat16 and relative(got, expected) < 1e-2


@pytest.mark.long
def test_derivatives():
    made, kinds = HeteroLinear(3, 4, TYPES).double(), types(12)
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)

    def call(x, weight, bias):
        return torch.func.functional_call(made, dict(weight=weight, bias=bias), (x, kinds)).pow(2)

    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise"):
        assert torch.autograd.gradcheck(call, (x, made.weight, made.bias))
        assert torch.autograd.gradgradcheck(call, (x, made.weight, made.bias))


@pytest.mark.parametrize("passes", [("compaction",), ("reordering",), ()], ids=str)
def test_without_passes(route, passes):
    made, x, kinds = route.put(HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types())
    expected = made(x, kinds)
    with route.on(passes=passes):
        assert relative(made(x, kinds), expected) < 1e-6


def test_lazy_channels(route):
    made = HeteroLinear(-1, 16, TYPES)
    x, kinds = torch.randn(ROWS, 8).to(route.device), types().to(route.device)
    with route.on():
        made.to(route.device)(x, kinds)  # its own hook has filled it in by then
    took(route, 1)
    assert tuple(made.weight.shape) == (TYPES, 8, 16)


def test_the_structure_belongs_to_the_types(route):
    made, x, kinds = route.put(HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types())
    with route.on(records=10):
        for _ in range(2):
            made(x, kinds)
        kinds[3] = (kinds[3] + 1) % TYPES
        changed = made(x, kinds)
        assert [r["cache"] for r in gnnaccel.records()] == ["miss", "hit", "miss"]
    assert relative(changed, made(x, kinds)) < 1e-6


# ---- what stays native ----

class Other(HeteroLinear):
    def forward_naive(self, x, type_ptr):
        return 2 * super().forward_naive(x, type_ptr)


@pytest.mark.long
def test_causes(route):
    x, kinds = torch.randn(ROWS, 8).to(route.device), types().to(route.device)
    runs_natively(route, "GA205", Other(8, 16, TYPES).to(route.device), x, kinds)
    runs_natively(route, "GA303", HeteroLinear(8, 16, TYPES).to(route.device), x[:0], kinds[:0])
    own = HeteroLinear(8, 16, TYPES).to(route.device)
    original = own.forward_naive
    own.forward_naive = lambda x, ptr: 2 * original(x, ptr)
    runs_natively(route, "GA205", own, x, kinds)
    if route.backend == "cuda":
        runs_natively(route, "GA203", HeteroLinear(8, 16, TYPES).double().to(route.device),
                      x.double(), kinds)


def test_types_out_of_range(route):
    made, x, kinds = route.put(HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types())
    kinds[7] = TYPES
    with route.on(), pytest.raises(GraphError, match="edge types from 0 to 5"):
        made(x, kinds)


BAD_CALLS = {
    "no argument": lambda l, x, t: l(), "no types": lambda l, x, t: l(x), "list": lambda l, x,
    t: l(x, t.tolist()),
    "float types": lambda l, x, t: l(x, t.float()),
    "width": lambda l, x, t: l(x[:, 1:], t), "dtype": lambda l, x, t: l(x.double(), t),
    "int x": lambda l, x, t: l(x.long(), t), "3d": lambda l, x,
    t: l(x.unsqueeze(1), t.sort().values),
    "rows": lambda l, x, t: l(x, t[:5]),
}


@pytest.mark.parametrize("what", list(BAD_CALLS))
def test_wrong_calls_raise_what_the_host_raises(route, what):
    made, x, kinds = route.put(HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types())
    found = []
    for block in (gnnaccel.disabled(), route.on(on_fallback="native")):
        try:
            with block:
                BAD_CALLS[what](made, x, kinds)
            found.append(None)
        except Exception as error:
            found.append((type(error), str(error)))
    assert found[0] == found[1]


def test_functorch(route):
    made, x, kinds = route.put(HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types())
    with route.on(on_fallback="native"):
        torch.func.grad(lambda x: made(x, kinds).sum())(x)
    assert gnnaccel.stats()["HeteroLinear"]["reasons"] == {"GA405": 1}


def test_script(route):
    made, x, kinds = route.put(HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types())
    expected = made(x, kinds)
    with route.on():
        torch.testing.assert_close(torch.jit.script(made)(x, kinds), expected)
    assert "HeteroLinear" not in gnnaccel.stats()


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("attribute, value", [("num_types", TYPES - 1), ("out_channels", 8),
                                              ("out_channels", 1), ("bias", None)])
def test_weights_that_do_not_fit_the_sizes(route, attribute, value, called):
    """After an assignment to one of these, or to the bias: the host takes them at their word, and
    raises."""
    made, x, kinds = route.put(HeteroLinear(8, 16, TYPES), torch.randn(ROWS, 8), types())
    with route.on():
        for _ in range(3 * called):
            made(x, kinds)
    if attribute == "bias":
        value = torch.nn.Parameter(torch.randn(TYPES, 1, device=route.device))
    setattr(made, attribute, value)
    with route.on(), pytest.raises(FallbackError, match="GA206"):
        made(x, kinds)
