"""Linear maps in int8: the quantized GEMM forward and backward, what it reuses, and when it is
taken."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.quantized import cost, projection, reuse, rows
from gnnaccel.dispatch.quantized.guard import Guard, Watch
from gnnaccel.dispatch.quantized.rows import Storage
from gnnaccel.dispatch.quantized.settings import Entry
from gnnaccel.dispatch.quantized.use import Use
from tests.helpers import relative
from tests.routes import clean, one_thread, opened, route  # noqa: F401


def use(route, backward: str = "int8") -> Use:
    return Use(Storage("int8", backward), Entry("lin", "Linear", None, Watch(Guard(), "lin")),
               route.backend == "cuda")


def operands(route, count=37, inner=16, columns=24, seed=0) -> list[torch.Tensor]:
    """x, weight, bias and the result's gradient."""
    torch.manual_seed(seed)
    shapes = ((count, inner), (columns, inner), (columns,), (count, columns))
    return [torch.randn(shape).to(route.device) for shape in shapes]


def results(used: Use, x, weight, bias, grad) -> dict:
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    out = projection._Linear(used, used.entry.watch.flags(x.device)).apply(*leaves)
    out.backward(grad)
    return {"out": out.detach(),
            **{name: t.grad for name, t in zip(("x", "weight", "bias"), leaves) if t is not None}}


def near(x: torch.Tensor) -> torch.Tensor:
    return rows.by_torch(x.cpu()).dequantize().double()


@pytest.mark.parametrize("count, inner, columns, bias", [(37, 16, 24, True), (40, 24, 7, False)])
def test_formulas(route, nearest, count, inner, columns, bias):
    """Against fp64, of x, weight and gradient as they are stored; the weight's gradient of all as
    they are."""
    x, weight, added, grad = operands(route, count, inner, columns)
    got = results(use(route), x, weight, added if bias else None, grad)
    x, weight, added, grad = (t.cpu().double() for t in (x, weight, added, grad))
    exact = {"out": near(x.float()) @ near(weight.float()).t() + (added if bias else 0),
             "weight": grad.t() @ x, "bias": grad.sum(0),
             "x": near(grad.float()) @ near(weight.float().t().contiguous()).t()}
    for name, value in got.items():
        # a quotient near a tie may go either way
        assert relative(value.cpu(), exact[name]) < 3e-4, name


def test_gradients_against_fp64(route):
    """Rounded stochastically: near those of the map as it is, and in their direction."""
    given = operands(route, 64)
    got = results(use(route), *given)
    x, weight, _, grad = (t.cpu().double() for t in given)
    for name, exact in (("x", grad @ weight), ("weight", grad.t() @ x), ("bias", grad.sum(0))):
        assert relative(got[name].cpu(), exact) < (0.02 if name == "x" else 1e-6), name
        assert torch.cosine_similarity(got[name].cpu().double().flatten(), exact.flatten(),
                                       0) > 0.9998, name


def test_the_gradient_is_unbiased(route):
    x, weight, bias, grad = operands(route, 6)
    exact = grad.cpu().double() @ near(weight.t().contiguous()).t()
    found = torch.stack([results(use(route), x, weight, bias, grad)["x"].cpu()
                         for _ in range(200)]).double()
    error, spread = found.mean(0) - exact, found.std(0) / len(found)**0.5
    assert (error.abs() <= 6 * spread + 1e-5).all() and (spread > 0).any()
    fixed = results(use(route, "fp32"), x, weight, bias, grad)["x"].cpu()
    assert relative(fixed, grad.cpu().double() @ weight.cpu().double()) < 1e-6, "backward='fp32' rounds nothing"


def test_a_backward_that_is_recorded_is_that_of_fp32(route):
    x, weight, bias, grad = operands(route, 5)
    found = []
    for run in (lambda *of: projection._Linear(use(route), None).apply(*of),
                torch.nn.functional.linear):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        first = torch.autograd.grad((run(*leaves) * grad).sum(), leaves, create_graph=True)
        found.append([*first,
                      *torch.autograd.grad(sum(g.square().sum() for g in first), leaves[:2])])
    for got, exact in zip(*found):
        assert relative(got.detach(), exact.detach()) < 1e-6


def test_zero_rows_constant_rows_and_an_outlier(route, nearest):
    x, weight, _, grad = operands(route)
    x[0], x[1], x[2, 5], x[3, 1] = 0, 1.75, 1e5, float("nan")
    used = use(route)
    out = results(used, x, weight, None, grad)["out"].cpu()
    assert not out[0].any() and out[3].isnan().all() and out[4:].isfinite().all()
    rounded = near(weight)
    for row, exact in ((1, 1.75 * rounded.sum(1)), (2, 1e5 * rounded[:, 5])):
        assert relative(out[row], exact) < 1e-5
    assert used.entry.watch.flags(route.device).tolist() == [1, 0]


def test_rows_are_taken_once_and_only_of_the_same_numbers(device):
    x = torch.randn(4, 8).to(device)
    stored = rows.by_torch(x)
    reuse.forget()
    reuse.offer(x, stored)
    assert reuse.take(x.clone()) is None and reuse.take(x) is stored and reuse.take(x) is None
    reuse.offer(x, stored)
    x.add_(1)
    assert reuse.take(x) is None, "changed in place"
    reuse.offer(x, stored)
    del x
    assert not reuse._local.offers, "nothing outlives its tensor"


def test_it_pays_where_it_is_wide_and_tall():
    """A number is moved or multiplied; only the latter is what int8 saves."""
    def pays(*sizes, tf32=False, training=(True, True)):
        return cost.map_reason_against(*sizes, training, tf32) is None

    assert pays(2_400_000, 256, 256) and pays(232_965, 602,
                                              128) and pays(2_400_000, 256, 256,
                                                            training=(False, False))
    assert not pays(2708, 1433, 64) and not pays(232_965, 16, 16) and not pays(2_400_000, 32, 32)
    assert not pays(2_400_000, 128, 128, tf32=True)
    assert "below 1.2" in str(cost.map_reason_against(2708, 64, 64, (True, True), False))
    gains = [cost.map_gain(1_000_000, width, width, (True, True), False)
             for width in (32, 64, 128, 256, 512)]
    assert gains == sorted(gains) and gains[-1] > 1.5
