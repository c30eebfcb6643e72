"""The guard: what it measures, when it fires, and that it says so."""
from __future__ import annotations

import logging

import pytest
import torch

from gnnaccel.cuda.int8.quantize import Int8Rows
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.quantized import guard, measure, rows
from gnnaccel.dispatch.quantized.guard import Guard, Watch
from tests.routes import clean, emulated, one_thread, opened, route  # noqa: F401

CPU = torch.device("cpu")


def measured(error: float = 0.0, zero: float = 0.0, outliers: float = 0.0):
    return lambda count, turn: torch.tensor([error, zero, outliers])


def after(watch: Watch, **numbers) -> Watch:
    """A checked call with these numbers, and the next, which reads them."""
    assert watch.begin(CPU, False)
    watch.check(measured(**numbers))
    watch.begin(CPU, False)
    return watch


def test_it_checks_every_so_many_calls():
    watch = Watch(Guard(every=3), "layer")
    due = []
    for _ in range(7):
        due.append(watch.begin(CPU, False))
        if due[-1]:
            watch.check(measured(0.01))
    assert due == [True, False, False, True, False, False, True]
    assert watch.state() == "passed" and watch.worst == pytest.approx(0.01)


@pytest.mark.parametrize("numbers, text", [
    (dict(error=0.06), "off by 0.06"), (dict(error=float("nan")), "off by nan"),
    (dict(error=float("inf")), "off by inf"),
    (dict(outliers=0.5), "50% of the sampled rows")])
def test_it_fires_and_says_so(numbers, text, caplog):
    with caplog.at_level(logging.WARNING, "gnnaccel"):
        watch = after(Watch(Guard(every=1), "convs.1"), **numbers)
    assert watch.state() == "failed" and text in watch.failure
    assert "convs.1 goes back to fp32" in caplog.text and text in caplog.text
    assert not watch.begin(CPU, False), "a layer in fp32 is not checked"


def test_it_does_not_fire_below_its_limits():
    watch = after(Watch(Guard(every=1), "layer"), error=0.0499, zero=1.0, outliers=0.25)
    assert watch.state() == "passed" and watch.failure is None


def test_a_number_that_is_not_finite_fires():
    watch = Watch(Guard(every=1), "layer")
    watch.flags(CPU)[0] = 1
    after(watch)
    assert "not finite" in watch.failure


def test_gradients_that_are_not_finite_only_show():
    """Loss scaling makes them by design."""
    watch = Watch(Guard(every=1), "layer")
    watch.flags(CPU)[1] = 1
    after(watch)
    assert watch.failure is None and watch.last["gradients_not_finite"] == 1


def test_nothing_happens_while_calls_may_be_repeated_or_captured():
    watch = Watch(Guard(every=1), "layer")
    assert not watch.begin(CPU, True)
    assert watch.begin(CPU, False)
    watch.check(measured(1.0))
    assert not watch.begin(CPU, True) and watch.failure is None, "a checkpoint must find the same route again"
    watch.begin(CPU, False)
    assert watch.failure is not None


def test_without_a_guard():
    watch = Watch(None, "layer")
    assert not watch.begin(CPU, False) and watch.flags(CPU) is None and watch.state() == "off"


@pytest.mark.parametrize("given, expected",
                         [(True, Guard()), (False, None), (None, None),
                          ({"every": 5}, Guard(every=5))])
def test_options(given, expected):
    assert guard.options(given) == expected


@pytest.mark.parametrize("given, text", [
    ({"evry": 5}, "Did you mean 'every'"), ({"every": 0}, "every=0"), ({"rows": 1.5}, "rows=1.5"),
    ({"error": -1}, "error=-1"),
    ({"outliers": True}, "outliers=True"), ("on", "guard='on'")])
def test_wrong_options(given, text):
    with pytest.raises(ValueError, match=text):
        guard.options(given)


# ---- what is measured ----

def sampled(route, ei, x, near=None, weights=None, count=64, turn=0):
    x = x.to(route.device)
    stored = (rows.store(x, "int8", False, route.backend == "cuda")
              if near is None else near.to(route.device))
    view = GraphView(ei.to(route.device), x.shape[0], int(ei[1].max()) + 1, own=True)
    return measure.error(view, weights is not None, x, stored, weights, count, turn).tolist()


def test_the_error_is_that_of_the_sums(route):
    """Every destination sampled: the median of all rows' errors."""
    torch.manual_seed(0)
    ei, x, w = torch.randint(0, 50, (2, 600)), torch.randn(50, 3, 8), torch.rand(600, 3, 1)
    ei[1, :50] = torch.arange(50)
    device_w = w.to(route.device)
    error, zero, outliers = sampled(route, ei, x, weights=lambda src, dst, edge,
                                    real: device_w[edge], count=50)
    near = rows.by_torch(x).dequantize().view(x.shape)
    full, off = (torch.zeros(50, 3, 8).index_add(0, ei[1], w * m[ei[0]]) for m in (x, near - x))
    relative = off.flatten(1).norm(dim=1) / full.flatten(1).norm(dim=1)
    assert error == pytest.approx(float(relative.median()), rel=1e-3) and zero == outliers == 0


def test_wrong_rows_show(route):
    ei, x = torch.stack([torch.arange(30), torch.arange(30)]), torch.randn(30, 8)
    assert sampled(route, ei, x, near=torch.zeros_like(x))[0] == pytest.approx(1.0)
    assert sampled(route, ei, x, near=2 * x)[0] == pytest.approx(1.0)
    assert sampled(route, ei, x, near=x)[0] == 0


def test_shares_of_zero_and_outlier_rows(route):
    ei, x = torch.stack([torch.arange(40), torch.arange(40)]), torch.randn(40, 16)
    x[:10], x[10:30, 0] = 0, 1e6
    error, zero, outliers = sampled(route, ei, x)
    assert zero == pytest.approx(0.25) and outliers == pytest.approx(0.5)
    assert error < 1e-3, "in L2 a row with an outlier is fine: hence the share"


def test_channels_that_sleep_are_no_outliers(route):
    ei, x = torch.stack([torch.arange(40), torch.arange(40)]), torch.randn(40, 16)
    x[:, :12] *= 1e-9
    assert sampled(route, ei, x)[2] == 0


def test_rows_of_zeros_and_nodes_without_edges_are_no_error(route):
    ei = torch.tensor([[0, 1], [0, 9]])
    assert sampled(route, ei, torch.zeros(10, 4)) == [0.0, 1.0, 0.0]


def test_samples_move_on_and_draw_nothing(route):
    ei, x = torch.stack([torch.arange(1000), torch.arange(1000)]), torch.randn(1000, 4)
    bad = x.clone()
    bad[7919 % 1000] += 1
    state = torch.get_rng_state()
    found = [sampled(route, ei, x, near=bad, count=1, turn=turn)[0] for turn in range(3)]
    assert [error > 0 for error in found] == [False, True, False]
    assert torch.equal(torch.get_rng_state(), state)


def test_it_takes_stored_rows_of_any_width(route):
    for width in (1, 3, 17):
        x = torch.randn(9, width)
        assert type(rows.store(x, "int8", False, False)) is Int8Rows
        assert sampled(route, torch.stack([torch.arange(9), torch.arange(9)]), x)[0] < 0.02
