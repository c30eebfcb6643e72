"""What two operands have at each edge, added or multiplied."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.traverse import sddmm
from tests.helpers import on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")

EDGES, NODES = 300, 40
WIDTHS = [1, 2, 3, 4, 7, 8, 33, 64, 130]


def made(device, width, dtype=torch.float32, index=torch.int64):
    """(lhs, rhs, lhs_index, rhs_index)."""
    rows = (torch.randn(NODES, width).to(device, dtype) for _ in range(2))
    return (*rows, *(torch.randint(0, NODES, (EDGES,)).to(device, index) for _ in range(2)))


def plain(op, lhs, rhs, lhs_index, rhs_index):
    """In fp32, rounded once."""
    a, b = (t.float() if i is None else t.float()[i.long()]
            for t, i in ((lhs, lhs_index), (rhs, rhs_index)))
    return (a + b if op == "add" else a * b).to(lhs.dtype)


@on_devices("width", WIDTHS)
@pytest.mark.parametrize("op", sddmm.OPS)
def test_widths(device, op, width):
    given = made(device, width)
    assert same_bits(sddmm.elementwise(op, EDGES, *given), plain(op, *given))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 8, 16])
def test_dtypes(device, width, dtype, index):
    given = made(device, width, dtype, index)
    assert same_bits(sddmm.elementwise("mul", EDGES, *given), plain("mul", *given))


@pytest.mark.parametrize("side", ["lhs", "rhs", "both"])
def test_rows_of_edges(device, side):
    lhs, rhs, li, ri = made(device, 6, index=torch.int32)
    if side != "rhs":
        lhs, li = torch.randn(EDGES, 6).to(device), None
    if side != "lhs":
        rhs, ri = torch.randn(EDGES, 6).to(device), None
    assert same_bits(sddmm.elementwise("add", EDGES, lhs, rhs, li, ri),
                     plain("add", lhs, rhs, li, ri))


def test_no_edges(device):
    lhs, rhs, li, ri = made(device, 6)
    assert sddmm.elementwise("add", 0, lhs, rhs, li[:0], ri[:0]).shape == (0, 6)


def test_inputs_and_outputs_keep_their_bounds(device, poison):
    given = [poison.guard(t) for t in made(device, 7)]
    assert same_bits(sddmm.elementwise("add", EDGES, *given), plain("add", *given))
    poison.check()


@pytest.mark.parametrize("message, change", [
    ("rhs is .40, 5.", lambda g: g.update(rhs=g["rhs"][:, :5])),
    ("rhs is.*float64", lambda g: g.update(rhs=g["rhs"].double())),
    ("lhs_index is .299", lambda g: g.update(lhs_index=g["lhs_index"][:299])),
    ("rhs_index is.*int32", lambda g: g.update(rhs_index=g["rhs_index"].int())),
    ("lhs is .40, 6.*300, 6", lambda g: g.update(lhs_index=None)),
    ("op='div'", lambda g: g.update(op="div"))])
def test_inputs_that_do_not_fit(device, message, change):
    given = dict(zip(("lhs", "rhs", "lhs_index", "rhs_index"), made(device, 6)), op="add",
                 edges=EDGES)
    change(given)
    with pytest.raises(ValueError, match=message):
        sddmm.elementwise(**given)
