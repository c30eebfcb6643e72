"""Networks of two linear maps over many rows."""
from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from gnnaccel.dispatch.run import mlp, skinny_matmul
from tests.cuda.test_activation import OF
from tests.dispatch.test_tall import always, result_and_gradients  # noqa: F401
from tests.helpers import assert_accurate
from tests.routes import emulated, gpu, one_thread  # noqa: F401

NAMES = ("x", "w1", "b1", "w2", "b2")


def _host(by_torch, x, w1, b1, w2, b2):
    return F.linear(by_torch(F.linear(x, w1, b1)), w2, b2)


def _given(device, rows=77, first=16, k=64, n=32, without=(), wanted=NAMES):
    shapes = dict(x=(rows, first), w1=(k, first), b1=(k,), w2=(n, k), b2=(n,))
    return [None if name in without else torch.randn(shape).to(device).requires_grad_(
        name in wanted) for name, shape in shapes.items()]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("name", OF)
@pytest.mark.parametrize("without,wanted", [
    ((), NAMES), ((), ("w1", "b1", "w2", "b2")), (("b1", "b2"), ("w1", "w2")),
    (("b1",), ("x", "w1", "w2", "b2")), ((), ("x", "w1", "w2")), ((), ("w1", "w2")),
    ((), ("x",)), ((), ("w2", "b2")), ((), ("x", "w1", "b1")), ((), ("b1", "b2"))],
    ids=lambda names: "".join(names) or "-")
def test_gradients(device, always, name, without, wanted, twice):
    function, by_torch = OF[name]
    given = _given(device, without=without, wanted=wanted)
    grad = torch.randn(77, 32).to(device)
    wide = [None if t is None else t.detach().double().requires_grad_(t.requires_grad)
            for t in given]
    exact = result_and_gradients(lambda *g: _host(by_torch, *g), wide, grad.double(), twice)
    host = result_and_gradients(lambda *g: _host(by_torch, *g), given, grad, twice)
    ours = result_and_gradients(
        lambda x, w1, b1, w2, b2: mlp.two(x, w1, b1, function, w2, b2), given, grad, twice)
    assert len(ours) == len(host) == len(exact)
    for at, (a, h, e) in enumerate(zip(ours, host, exact)):
        assert_accurate(f"{name} {at}", a, h, e)
    assert ((77, 16, 64) in always) is ({"w1", "w2"} <= {*wanted})


def test_without_gradients_nothing_is_kept(device, always):
    function, by_torch = OF["silu"]
    given = _given(device)
    with torch.no_grad():
        ours = mlp.two(given[0], given[1], given[2], function, *given[3:])
    assert ours.grad_fn is None and always == [(77, 16, 64)]
    exact = _host(by_torch, *[t.double() for t in given])
    assert_accurate("silu", ours, _host(by_torch, *given), exact)


@pytest.mark.parametrize("what", ["rows", "autocast", "double", "apart", "address", "bias", "wide"])
def test_what_is_left_to_single_maps(device, always, what):
    function, by_torch = OF["silu"]
    given = _given(device, k=128 if what == "wide" else 64)
    if what == "rows":
        given[0] = torch.randn(3, 5, 16).to(device)
    elif what == "double":
        given = [t.double() for t in given]
    elif what == "apart":
        given[1] = torch.randn(16, 64).to(device).t()
    elif what == "address":
        given[0] = torch.randn(77 * 16 + 1).to(device)[1:].view(77, 16)
    elif what == "bias":
        given[2] = torch.randn(77, 64).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=what == "autocast"):
        ours = mlp.two(given[0], given[1], given[2], function, *given[3:])
        host = _host(by_torch, *given)
    assert ours.dtype is host.dtype and not any(len(one) == 3 for one in always)
    torch.testing.assert_close(ours, host, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changed", NAMES)
def test_parameters_written_to_before_backward(device, always, changed):
    """What torch allows between forward and backward is allowed, and changes nothing; second
    derivatives are those at the numbers of forward."""
    function, by_torch = OF["silu"]
    found = []
    for run in (lambda *g: _host(by_torch, *g),
                lambda x, w1, b1, w2, b2: mlp.two(x, w1, b1, function, w2, b2)):
        torch.manual_seed(1)
        given = _given(device, wanted=NAMES[1:])
        out = run(*given)
        with torch.no_grad():
            given[NAMES.index(changed)].add_(1.0)
        try:
            found.append([*torch.autograd.grad(out.square().sum(), given[1:], create_graph=True)])
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            found.append(None)
    host, ours = found
    assert (host is None) is (ours is None)
    for a, b in itertools.zip_longest(host or (), ours or ()):
        torch.testing.assert_close(b, a, atol=1e-3, rtol=1e-4)


def test_weights_of_single_maps_written_to_before_backward(device, always):
    """Where nothing needs the weight's numbers any more, it may be written to."""
    w, b = torch.randn(64, 16).to(device).requires_grad_(), torch.randn(64).to(device)
    x = torch.randn(77, 16).to(device)
    out = skinny_matmul.mapped(x, w, b)
    with torch.no_grad():
        w.add_(1.0)
    (found,) = torch.autograd.grad(out.sum(), [w])
    torch.testing.assert_close(found, x.sum(0).expand(64, 16), atol=1e-4, rtol=1e-4)
    assert always
