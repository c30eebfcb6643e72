"""Parts of rows whose gradients are one."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.dispatch.generated.operations import Pieces

PLACES = {"all": ((0, 3), (3, 4), (4, 9)), "in another order": ((3, 9), (0, 3)),
          "not all": ((0, 3), (5, 9)), "overlapping": ((0, 5), (3, 9)), "one": ((2, 4),)}


def rows() -> torch.Tensor:
    return torch.randn(7, 9, dtype=torch.float64).requires_grad_()


def by_torch(x, places):
    return tuple(x[:, begin:end] for begin, end in places)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_values_and_gradients(places):
    x = rows()
    found, expected = Pieces(places).apply(x), by_torch(x, places)
    assert all(map(torch.equal, found, expected))
    for used in range(1, 2 ** len(places)):  # which of them have a gradient
        total, wanted = (sum((t ** 3).sum() for at, t in enumerate(ts) if used >> at & 1)
                         for ts in (found, expected))
        got, exact = (torch.autograd.grad(t, x, retain_graph=True)[0] for t in (total, wanted))
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_second_derivatives(places):
    def function(x):
        return tuple((t * t.sum()).sin() for t in Pieces(places).apply(x))

    assert torch.autograd.gradcheck(function, (rows(),))
    assert torch.autograd.gradgradcheck(function, (rows(),))


def test_gradients_side_by_side_are_not_copied():
    places, x, whole = PLACES["all"], rows(), torch.randn(7, 9, dtype=torch.float64)
    found = Pieces(places).apply(x)

    def gradient(grads):
        return torch.autograd.grad(found, x, grads, retain_graph=True)[0]

    got = gradient(by_torch(whole, places))
    assert torch.equal(got, whole) and got.data_ptr() == whole.data_ptr()
    # each of these looks like parts of one tensor, and is none
    others = [t.clone() for t in by_torch(whole, places)]
    shifted = torch.randn(64, dtype=torch.float64)
    for grads in (others, by_torch(whole, ((0, 3), (2, 3), (4, 9))),
                  [whole[:, :3], whole[:, 3:4], others[2]],
                  [torch.as_strided(shifted, (7, end - begin), (8, 1), begin)
                   for begin, end in places],
                  [whole[:, :3], whole[:, 3:4], whole[:1, 4:].expand(7, 5)]):
        got = gradient(list(grads))
        assert torch.equal(got, torch.cat(list(grads), 1)) and got.data_ptr() != whole.data_ptr()
