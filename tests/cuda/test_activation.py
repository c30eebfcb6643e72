"""Activations of rows as kernels for products read them, and networks of two maps."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gnnaccel.cuda.messages import mlp
from gnnaccel.cuda.messages.expression import Expression, Input, Step
from gnnaccel.cuda.runtime import nvrtc, sources
from gnnaccel.cuda.segment import segment_backward, segment_direct
from gnnaccel.cuda.segment.segment_backward import gradients
from gnnaccel.cuda.segment.segment_gemm import multiply
from gnnaccel.cuda.segment.segment_plan import Segments
from gnnaccel.cuda.traverse.activation import Activation, family
from gnnaccel.dispatch.generated.tree import Call, Leaf, Number, expression
from gnnaccel.dispatch.run.skinny_matmul import Pointwise
from tests.helpers import assert_accurate, needs_nvrtc

pytestmark = pytest.mark.usefixtures("poison")


def _pointwise(tree, by_torch):
    expr, _, numbers = expression(tree, lambda leaf: "row")
    return Pointwise(Activation(expr, numbers), by_torch), by_torch


_X = Leaf("e", lambda given: given, (), frozenset(), ())
#: functions by name, for kernels and by torch
OF = {"silu": _pointwise(Call("silu", (_X,)), F.silu),
      "relu": _pointwise(Call("relu", (_X,)), torch.relu),
      "shifted": _pointwise(Call("sub", (Call("softplus", (_X, Number(1.0), Number(20.0))),
                                         Number(0.25))), lambda x: F.softplus(x) - 0.25),
      "cos": _pointwise(Call("cos", (_X,)), torch.cos)}
ROWS = 203


def _all(device, rows=ROWS) -> Segments:
    return Segments(torch.tensor([0, rows], dtype=torch.int32, device=device), rows)


def _judge(name, got, host, exact, precision):
    if precision == "fp32":
        assert_accurate(name, got, host, exact)
    else:
        error = (got - exact).abs().max() / exact.abs().max()
        assert 1e-5 < error < 5e-3, (name, error)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("k,n", [(64, 64), (16, 32), (40, 24)])
@pytest.mark.parametrize("name", OF)
def test_products_of_functions(device, name, k, n, precision):
    (function, by_torch), form = OF[name], dict(transposed=True, precision=precision)
    x, w, b, dy = (torch.randn(shape).to(device) for shape in ((ROWS, k), (n, k), (n,), (ROWS, n)))
    rows, of_x = _all(device), function.activation
    wide = [t.double().requires_grad_() for t in (x, w, b)]
    host = [t.clone().requires_grad_() for t in (x, w, b)]
    exact, plain = (F.linear(by_torch(one[0]), *one[1:]) for one in (wide, host))
    got = multiply(rows, x, w.unsqueeze(0), bias=b, of_x=of_x, **form)
    _judge("y", got, plain, exact, precision)
    exact.backward(dy.double())
    plain.backward(dy)
    dx, dw, sums = gradients(rows, x, dy, w.unsqueeze(0), sums=True, of_x=of_x, **form)
    for at, (one, h, e) in enumerate(zip((dx, dw[0, 0], sums[0]), host, wide)):
        if at < 2 or precision == "fp32":
            _judge(at, one, h.grad, e.grad, precision)


def test_segments_of_functions(device):
    """Rows of several segments, some empty, whose last tiles are not full: rows behind these are
    not added, though the function of zeros is infinite."""
    lengths = [5, 0, 64, 70, 1]
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    segments = Segments(ends, sum(lengths))
    function, by_torch = _pointwise(Call("reciprocal", (_X,)), torch.reciprocal)
    x, w, dy = (torch.randn(shape).to(device) for shape in ((140, 32), (5, 32, 16), (140, 16)))
    x += x.sign()
    of_x = function.activation
    y = multiply(segments, x, w, of_x=of_x)
    dx, dw, _ = gradients(segments, x, dy, w, of_x=of_x)
    for s, (begin, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:])):
        here = slice(begin, end)
        exact = [t.double().requires_grad_() for t in (x[here], w[s])]
        of = by_torch(exact[0]) @ exact[1]
        of.backward(dy[here].double())
        for got, wanted in ((y[here], of), (dx[here], exact[0].grad), (dw[s, 0], exact[1].grad)):
            torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("first,k,n", [(16, 64, 64), (32, 32, 64), (48, 64, 16), (64, 64, 64),
                                       (16, 16, 16)])
def test_two_maps(device, first, k, n, keep, precision):
    function, by_torch = OF["silu"]
    given = [torch.randn(shape).to(device) for shape in ((ROWS, first), (k, first), (k,), (n, k),
                                                         (n,))]
    x, w1, b1, w2, b2 = given
    got, hidden = mlp.forward(_all(device), x, w1, b1, w2, b2, function.activation, keep, precision)

    def both(x, w1, b1, w2, b2):
        z = F.linear(x, w1, b1)
        return z, F.linear(by_torch(z), w2, b2)

    exact, plain = both(*[t.double() for t in given]), both(*given)
    _judge("y", got, plain[1], exact[1], precision)
    assert (hidden is not None) is keep
    if keep:
        _judge("z", hidden, plain[0], exact[0], precision)


@pytest.mark.parametrize("where", ["x", "w1", "w2", "hidden"])
def test_numbers_that_cannot_be_split(device, where):
    """Infinite and NaN ones, and those that are infinite as tf32, come out as by torch, in their
    own rows."""
    function, by_torch = OF["relu"]
    if where == "w1":  # of a NaN it makes a number
        function, by_torch = _pointwise(Call("float", (Call("gt", (_X, Number(0.0))),)),
                                        lambda x: (x > 0).float())
    x, w1, w2 = (torch.randn(shape).to(device) for shape in ((ROWS, 16), (32, 16), (16, 32)))
    b1, huge = torch.zeros(32).to(device), 3.4028e38
    if where == "x":
        x[3, 2], x[7, 1], x[70, 5] = float("inf"), float("nan"), huge
        w1[:, 5] = 1e-3
    elif where == "hidden":
        x[5] = 1e38 * w1[4].sign()
    else:
        dict(w1=w1, w2=w2)[where][2, 3] = huge
        x *= 1e-3
    for bias in (b1, None):
        got, hidden = mlp.forward(_all(device), x, w1, bias, w2, None, function.activation, True,
                                  "fp32")
        z = F.linear(x.double(), w1.double()).float()
        wanted = F.linear(by_torch(F.linear(x, w1)), w2)
        finite = torch.isfinite(wanted)
        assert torch.equal(torch.isnan(got), torch.isnan(wanted))
        assert torch.equal(torch.isfinite(got), finite)
        torch.testing.assert_close(got[finite], wanted[finite], atol=1e-4, rtol=1e-4)
        small = z.abs() < 1e36  # partial sums of larger ones may be infinite
        torch.testing.assert_close(hidden[small], z[small], atol=1e-4, rtol=1e-4)


def test_no_rows(device):
    function, _ = OF["silu"]
    w1, w2 = torch.randn(16, 16).to(device), torch.randn(16, 16).to(device)
    got, hidden = mlp.forward(_all(device, 0), torch.randn(0, 16).to(device), w1, None, w2, None,
                              function.activation, True, "fp32")
    assert got.shape == hidden.shape == (0, 16)


def test_errors(device):
    function, _ = OF["silu"]
    act, rows = function.activation, _all(device, 8)
    x, w1, w2 = (torch.randn(shape).to(device) for shape in ((8, 16), (16, 16), (16, 16)))
    with pytest.raises(ValueError, match=r"w1 is \[16, 16\], torch.float64"):
        mlp.forward(rows, x, w1.double(), None, w2, None, act, True, "fp32")
    with pytest.raises(ValueError, match="multiples of 16 up to 64"):
        mlp.forward(rows, x[:, :8].contiguous(), w1[:, :8].contiguous(), None, w2, None, act, True,
                    "fp32")
    with pytest.raises(ValueError, match="of_x: an activation is of fp32 rows"):
        multiply(rows, x.half(), w1.half().unsqueeze(0), of_x=act)
    wide = torch.randn(8, 128).to(device), torch.randn(1, 128, 128).to(device)
    with pytest.raises(ValueError, match="of_x: the gradients of an activation"):
        gradients(rows, wide[0], wide[0], wide[1], of_x=act)


def _product(inputs: int, number: float | None = None) -> Activation:
    numbers = () if number is None else (number,)
    values = (Input("e", "row"),) * inputs
    return Activation(Expression(values, len(numbers), (Step("mul", (0, 1)),), 2), numbers)


@pytest.mark.parametrize("act,serves", [
    (_product(1, 2.0), True), (_product(1, float("inf")), False), (_product(2), False),
    (Activation(Expression((Input("e", "row"),), 0, (Step("channel_sum", (0,)),), 1), ()), False)])
def test_what_kernels_can_have(act, serves):
    assert act.serves is serves


def test_kernels_are_told_apart_by_their_functions():
    found = {family("segment_direct", function.activation) for function, _ in OF.values()}
    assert len(found) == len(OF) and all(map(sources.is_written, found))
    assert family("segment_direct", None) == "segment_direct"
    assert segment_direct.plan_of_two(16, 64, 64, "FMA", 227 * 1024) is None


@pytest.mark.long
@needs_nvrtc
@pytest.mark.parametrize("arch,name", zip(nvrtc.ARCHITECTURES, [*OF, *OF]))
def test_they_compile(arch, name):
    limit, fp32, act = 227 * 1024, torch.float32, OF[name][0].activation
    precision = "FP32" if arch % 20 else "TF32"
    products = [segment_direct.kernels(plan, 64, 64, 1, fp32, fp32, precision, True, 16, 16, 4,
                                       "PLAIN", None, act, first) for plan, first in (
        (segment_direct.direct_plan(64, 64, fp32, precision, False, limit), 0),
        (segment_direct.plan_of_two(32, 64, 64, precision, limit), 32))]
    plan = segment_backward.plans(64, 64, fp32, precision, limit)[0]
    both = segment_backward.kernels(plan, 1, fp32, fp32, precision, False, 16, 16, 16, 4, "PLAIN",
                                    True, act)
    for found in (*products, both):
        text = sources.source(found.family)
        assert nvrtc.compile_text(text, found.defines, arch)[:4] == b"\x7fELF"
