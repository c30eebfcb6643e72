"""Sums and means of the stand-in for torch_scatter go by gnnaccel's kernels where it is enabled."""
from __future__ import annotations

import pytest
import torch

import gnnaccel
from gnnaccel.adapters.standins.scatter import reduce as scatters


@pytest.fixture
def given(device):
    gnnaccel.reset_stats()
    yield torch.randn(60, 8, device=device), torch.randint(0, 9, (60,), device=device)
    gnnaccel.reset_stats()


def routes():
    return gnnaccel.stats().get("torch_scatter.scatter", {}).get("routes", {})


@pytest.mark.parametrize("reduce", ["sum", "add", "mean"])
@pytest.mark.parametrize("size", [None, 12])
def test_kernels(given, reduce, size):
    src, index = given
    outs = []
    for enabled in (False, True):
        x = src.clone().requires_grad_()
        with gnnaccel.enabled(when="supported") if enabled else gnnaccel.disabled():
            for _ in range(3):
                out = scatters.scatter(x, index, 0, dim_size=size, reduce=reduce)
            out.square().sum().backward()
        outs.append((out, x.grad))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    assert routes() == {"cuda": 3}


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_out_is_added_to(given, reduce):
    src, index = given
    start, outs = torch.randn(12, 8, device=src.device), []
    for enabled in (False, True):
        x, base = src.clone().requires_grad_(), start.clone().requires_grad_()
        with gnnaccel.enabled(when="supported") if enabled else gnnaccel.disabled():
            held = base * 2.0
            out = scatters.scatter(x, index, 0, out=held, reduce=reduce)
            assert out is held
            out.square().sum().backward()
        outs.append((out, x.grad, base.grad))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    assert routes() == {"cuda": 1}


@pytest.mark.long
def test_out_is_added_to_once(given):
    """Also where somebody compares routes; and where the host's own way is taken."""
    src, index = given
    for options in (dict(records=9), dict(backend="torch")):
        start = torch.ones(9, 8, device=src.device)
        expected = scatters.scatter(src, index, 0, out=start.clone())
        with gnnaccel.enabled(when="supported", **options):
            torch.testing.assert_close(scatters.scatter(src, index, 0, out=start), expected)
    with gnnaccel.enabled(when="supported"), pytest.raises(RuntimeError, match="leaf Variable"):
        scatters.scatter(src, index, 0, out=torch.zeros(9, 8, device=src.device,
                                                        requires_grad=True))


@pytest.mark.long
def test_what_stays_native(given):
    src, index = given
    with gnnaccel.enabled(when="supported"):
        scatters.scatter(src.t(), index, 1)
        scatters.scatter(src, index, 0, out=torch.zeros(9, 8, device=src.device), reduce="mul")
        scatters.scatter(src, index, 0, reduce="max")
        scatters.scatter(src, index[:, None].expand_as(src), 0)
        scatters.scatter(src[:0], index[:0], 0)
        scatters.scatter(src.long(), index, 0)
        assert routes() == {}
        double = scatters.scatter(src.double(), index, 0)
        assert routes() == {"torch": 1} and double.dtype == torch.float64
    with gnnaccel.enabled():  # too few numbers to gain
        scatters.scatter(src, index, 0)
    assert routes() == {"torch": 1}
    gnnaccel.reset_stats()
    with gnnaccel.enabled(when="supported"):
        each = torch.vmap(lambda src: scatters.scatter(src, index, 0, dim_size=9))(src[None])
    assert routes() == {"native": 1}
    torch.testing.assert_close(each[0], scatters.scatter(src, index, 0, dim_size=9))
