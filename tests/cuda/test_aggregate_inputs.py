"""Widths, variants and tensors that the sums over edges take, and those that they refuse."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gnnaccel.cuda.runtime.launch import MAX_WIDTH
from gnnaccel.cuda.traverse.aggregate import edge_dot, factored, variant
from tests.attention_cases import graph
from tests.cuda.test_aggregate import make, run

pytestmark = pytest.mark.usefixtures("poison")


def test_wide_rows_are_factored():
    for width in [*range(1, 600), 1000, 1024, 1536, 2048, 1433, 3703, 521 * 512, 997 * 3]:
        heads, channels = factored(width)
        assert heads * channels == width and 1 <= channels <= MAX_WIDTH, width
    assert factored(64) == (1, 64) and factored(512) == (1, 512) and factored(1) == (1, 1)
    assert factored(1024) == (2, 512) and factored(3703) == (529, 7) and factored(521) == (521, 1)
    with pytest.raises(ValueError, match="width=0.*at least one"):
        factored(0)


@pytest.mark.parametrize("change, message", [
    (dict(heads=0), "heads=0"), (dict(width=513), "width=513"),
    (dict(row=torch.float64), "row=torch.float64"),
    (dict(out=torch.int32), "out=torch.int32"),
    (dict(weight="edges"), "weight='edges'.*none, edge, head"),
    (dict(weight_at="id"), "weight_at='id'.*position, place")])
def test_variants_that_no_kernel_covers(change, message):
    with pytest.raises(ValueError, match=message):
        replace(variant(3, 5, torch.float32, torch.float32), **change)


WRONG = [
    ("x is .40, 3, 4..*3, 5.", lambda p: dict(x=p.x[..., :4])),
    ("x is.*float64.*float32", lambda p: dict(x=p.x.double())),
    ("x is.*strides .1, .*contiguous",
     lambda p: dict(x=p.x.permute(2, 1, 0).contiguous().permute(2, 1, 0))),
    ("x is .199, 3, 5..*at least 200",
     lambda p: dict(x=p.x.new_zeros(199, 3, 5), variant=replace(p.variant, identity=True))),
    ("weight is .200..*200, 3", lambda p: dict(weight=p.weight[:, 0].contiguous())),
    ("weight is .199, 3..*at least 200", lambda p: dict(weight=p.weight[:199])),
    ("weight is missing.*weight='head'", lambda p: dict(weight=None)),
    ("weight is given.*weight='none'", lambda p: dict(variant=replace(p.variant, weight="none"))),
    ("scale is .29..*.30.", lambda p: dict(scale=p.scale[:29])),
    ("bias is .3, 5..*.15.", lambda p: dict(bias=p.bias.view(3, 5))),
    ("offsets are torch.int32.*wide=True", lambda p: dict(variant=replace(p.variant, wide=True))),
    ("0 places for 200 edges.*places=True",
     lambda p: dict(rows=replace(p.rows, place=p.rows.place[:0]))),
]


@pytest.mark.parametrize("message, change", WRONG, ids=[message for message, _ in WRONG])
def test_inputs_that_do_not_fit(device, message, change):
    view = graph(device)
    problem = make(view.csc(), view.num_src, 3, 5, "head", "place", scale=True, bias=True)
    with pytest.raises(ValueError, match=message):
        run(replace(problem, **change(problem)))


def test_misaligned_rows(device):
    view = graph(device)
    problem = make(view.csc(), view.num_src, 8, 8)
    moved = torch.cat([problem.x.new_zeros(1), problem.x.flatten()])[1:].view(problem.x.shape)
    with pytest.raises(ValueError, match="x is.*multiple of 16 bytes"):
        run(replace(problem, x=moved))
    with pytest.raises(ValueError, match="left is.*30, 8, 8"):
        edge_dot(problem.variant, problem.rows, problem.x, problem.x)


def test_one_variant_per_description():
    one, again = (variant(3, 5, torch.float32, torch.float32) for _ in range(2))
    assert one is again and one.kernels is again.kernels and one is not variant(3, 5, torch.float32,
                                                                                torch.float16)
