"""Several reduces, and their gradients, whose calls are remembered by the form of their tensors."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnaccel.cuda.runtime.launch import dense
from gnnaccel.cuda.traverse import multi_reduce, multi_reduce_backward
from gnnaccel.cuda.traverse.multi_reduce import Reduced, reduced, variant_of
from gnnaccel.cuda.traverse.multi_reduce_backward import gradient
from tests.attention_cases import graph
from tests.helpers import same_bits

pytestmark = pytest.mark.usefixtures("poison")

CASES = [(("max",), None, (24,)), (("min",), None, (3, 8)),
         (("std", "mean", "min", "max"), None, (24,)), (("max", "sum"), "edge", (4, 6)),
         (("var",), "head", (3, 8)), (("min", "max"), "head", (3, 2, 4))]


def settled(view) -> None:
    """Until the device has reported exact sizes, nothing is remembered."""
    for rows in (view.csc(), view.csr(), view.csr_by_id()):
        rows.launch()
    if view.device.type == "cuda":
        torch.cuda.synchronize()
    for rows in (view.csc(), view.csr(), view.csr_by_id()):
        rows.launch()


def operands(device, weight: str | None, features: tuple[int, ...],
             row=torch.float32) -> tuple[Tensor, Tensor | None]:
    shape = {None: None, "edge": (400,), "head": (400, 3)}[weight]
    return (torch.randn(40, *features).to(device, row),
            None if shape is None else torch.randn(shape).to(device))


def by_parts(x: Tensor, reduces, weight, view, grad: Tensor | None):
    """The same by the launchers that check every call."""
    form = variant_of(x, reduces, weight)
    rows, by_src = (dense(x).view(-1, form.heads, form.width),
                    view.csr() if weight is None else view.csr_by_id())
    found = multi_reduce.forward(form, view.csc(), rows, weight, grad is not None)
    if grad is None:
        return found.out, None
    terms = multi_reduce_backward.spread(form, view.csc(), found, dense(grad).view(found.out.shape))
    return found.out, multi_reduce_backward.rows_grad(form, by_src, rows, weight, found.out, terms)


@pytest.mark.parametrize("reduces, weight, features", CASES, ids=str)
@pytest.mark.parametrize("chunk", [1024, 16])
@pytest.mark.parametrize("row", [torch.float32, torch.bfloat16], ids=str)
def test_by_form(device, chunk_edges, monkeypatch, reduces, weight, features, chunk, row):
    """The first call checks; those like it give the same bits without."""
    chunk_edges(chunk)
    view = graph(device, 40, 33, 400)
    settled(view)
    x, w = operands(device, weight, features, row)
    shape = 33, *((len(reduces),) if len(reduces) > 1 else ()), *features
    grad = torch.randn(shape).to(device, row)
    out, back = by_parts(x, reduces, w, view, grad)
    by_src, seen = view.csr() if w is None else view.csr_by_id(), []

    def call(x: Tensor) -> tuple[Reduced, Tensor]:
        found = reduced(view.csc(), x, reduces, w, train=True)
        return found, gradient(view.csc(), by_src, reduces, x, w, found, grad)

    first = call(x)
    for module in (multi_reduce, multi_reduce_backward):
        monkeypatch.setattr(module, "check", lambda *args: seen.append(args))
    for found, d_x in (first, call(x), call(x.clone())):
        assert found.out.shape == shape and d_x.shape == x.shape and d_x.dtype is row and not found.out._is_view()
        assert same_bits(found.out, out.view(shape)) and same_bits(d_x, back.view(x.shape))
    assert not seen and (view.csc().launch().heavy > 0) is (chunk == 16)
    alone = reduced(view.csc(), x, reduces, w)
    assert seen and alone.counts is alone.mean is None and same_bits(alone.out, out.view(shape))
    seen.clear()
    assert same_bits(reduced(view.csc(), x, reduces, w).out, alone.out) and not seen


def test_rows_in_any_form(device):
    view = graph(device, 40, 33, 200)
    settled(view)
    x, _ = operands(device, None, (24,))
    grad = torch.randn(33, 24).to(device)
    out, back = by_parts(x, ("max",), None, view, grad)
    wide, memory = torch.randn(40, 48).to(device), torch.empty(40 * 24 + 1, device=device)
    wide[:, ::2], memory[1:] = x, x.flatten()
    for like in (wide[:, ::2], memory[1:].view(40, 24), x.t().contiguous().t()):
        for sent in (grad, grad.t().contiguous().t()):
            for _ in range(2):
                found = reduced(view.csc(), like, ("max",), train=True)
                assert same_bits(found.out, out.view(33, 24))
                assert same_bits(gradient(view.csc(), view.csr(), ("max",), like, None, found,
                                          sent), back.view(40, 24))
    with pytest.raises(ValueError, match="weight"):
        reduced(view.csc(), x, ("max",), torch.ones(200, device=device, dtype=torch.float64))


def test_graphs_that_share_arrays_remember_for_themselves(device):
    """The transposed graph has its edges' places in two ways: what is remembered of one is not for
    the other."""
    view = graph(device, 40, 33, 200)
    settled(view)
    assert view.csr().other is view.csr_by_id().other and view.csr().made is not view.csr_by_id().made


def test_what_is_remembered_is_bounded(device):
    view = graph(device, 4, 4, 9)
    settled(view)
    for nodes in range(4, 80):
        reduced(view.csc(), torch.ones(nodes, 24, device=device), ("max",))
    assert 0 < len(view.csc().made) <= 32
