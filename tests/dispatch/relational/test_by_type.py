"""HGT's maps by node type on the CUDA kernels, against the same type by type in fp64."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gnnaccel.dispatch.relational import by_type
from gnnaccel.dispatch.relational.pairs import Blocks, Typed
from gnnaccel.errors import GraphError
from tests.helpers import assert_accurate, relative

SIZES = (7, 0, 20, 1)
K, C = 12, 8


def operands(bias: bool, gate: bool) -> dict[str, torch.Tensor | None]:
    width = C if gate else K

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64).requires_grad_()

    types = len(SIZES)
    return dict(kqv=rand(types, 3 * C, width), kqv_bias=rand(types, 3 * C) if bias else None,
                out=rand(types, C, C), out_bias=rand(types, C) if bias else None,
                alpha=rand(types) if gate else None,
                **{f"x{t}": rand(size, width) for t, size in enumerate(SIZES)})


def middle(keys, queries, values):
    """Something in the place of attention."""
    return torch.tanh(keys) * queries + values


def by_loop(t: dict) -> tuple[torch.Tensor, ...]:
    found = []
    for at in range(len(SIZES)):
        x, bias, out_bias = t[f"x{at}"], t["kqv_bias"], t["out_bias"]
        out = middle(*F.linear(x, t["kqv"][at], None if bias is None else bias[at]).chunk(3, 1))
        out = F.linear(F.gelu(out), t["out"][at], None if out_bias is None else out_bias[at])
        found.append(out if t["alpha"] is None else t["alpha"][at] * out + (1 - t["alpha"][at]) * x)
    return tuple(found)


def by_kernels(t: dict) -> tuple[torch.Tensor, ...]:
    x = [t[f"x{at}"] for at in range(len(SIZES))]
    blocks = Blocks(SIZES, x[0].device)
    weight, bias = (t["kqv"].unflatten(1, (3, -1)),
                    None if t["kqv_bias"] is None else t["kqv_bias"].unflatten(1, (3, -1)))
    rows, *mapped = by_type.project(blocks, weight, True, bias, x)
    return by_type.finish(blocks, SIZES, middle(*mapped), t["out"], True, t["out_bias"], t["alpha"],
                          rows)


def types_in_any_order() -> torch.Tensor:
    """Of the nodes of SIZES, shuffled; the last type does not lie last."""
    return torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))[
        torch.randperm(sum(SIZES))]


def by_typed_kernels(t: dict, types: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same with the rows of all types in any order and matrices [K, C], as a host with one
    tensor has them."""
    order = torch.argsort(types, stable=True).to(t["x0"].device)
    together = torch.cat([t[f"x{at}"] for at in range(len(SIZES))])
    x = together[torch.argsort(order)]
    blocks = Typed(types.to(x.device), len(SIZES))
    weight, bias = t["kqv"].unflatten(1, (3, -1)).transpose(2, 3), t["kqv_bias"]
    rows, *mapped = by_type.project(blocks, weight, False,
                                    None if bias is None else bias.unflatten(1, (3, -1)), [x])
    matrix = t["out"].transpose(1, 2)
    found, = by_type.finish(blocks, (sum(SIZES),), middle(*mapped), matrix, False, t["out_bias"],
                            t["alpha"], rows)
    return found[order].split(SIZES)


def results(outs: tuple, t: dict, create_graph: bool = False) -> dict[str, torch.Tensor]:
    wanted = {name: value for name, value in t.items() if value is not None}
    cotangents = [torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype,
                                 device=out.device).view(out.shape) for out in outs]
    grads = torch.autograd.grad(outs, list(wanted.values()), cotangents, create_graph=create_graph)
    return {**{f"out{at}": out for at, out in enumerate(outs)}, **dict(zip(wanted, grads))}


def leaves(t: dict, device, dtype=torch.float32) -> dict:
    return {k: None if v is None else v.detach().to(device, dtype).requires_grad_()
            for k, v in t.items()}


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(device, bias, gate):
    given = operands(bias, gate)
    exact, single, placed = results(by_loop(given),
                                    given), leaves(given, None), leaves(given, device)
    plain, got = results(by_loop(single), single), results(by_kernels(placed), placed)
    for name, value in got.items():
        assert_accurate(name, value.detach().cpu(), plain[name].detach(), exact[name].detach())
    with torch.no_grad():
        assert all(torch.equal(out, got[f"out{at}"]) for at, out in enumerate(by_kernels(placed)))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_types_in_any_order(device, bias, gate):
    given, types = operands(bias, gate), types_in_any_order()
    exact, single, placed = results(by_loop(given),
                                    given), leaves(given, None), leaves(given, device)
    plain, got = results(by_loop(single), single), results(by_typed_kernels(placed, types), placed)
    for name, value in got.items():
        assert_accurate(name, value.detach().cpu(), plain[name].detach(), exact[name].detach())


def test_what_is_known_of_types(device):
    ordered = Typed(torch.tensor([0, 0, 2], device=device), 4)
    assert ordered.order is None and ordered.ptr.tolist() == [0, 2, 2, 3,
                                                              3] and ordered.relation.tolist() == [
                                                                  0, 0, 2]
    mixed = Typed(torch.tensor([2, 0, 2, 1], device=device), 3)
    assert mixed.order.tolist() == [1, 3, 0,
                                    2] and mixed.relation.tolist() == [2, 0, 2,
                                                                       1] and mixed.nbytes() == 48
    assert Typed(torch.empty(0, dtype=torch.long, device=device), 2).count == 0
    for types in ([0, 3], [-1, 0]):
        with pytest.raises(GraphError, match="node types are from"):
            Typed(torch.tensor(types, device=device), 3)


@pytest.mark.parametrize("sizes, types",
                         [((2, 0, 3), [0, 0, 2, 2, 2]), ((0, 1), [1]), ((0, 0), []), ((), [])])
def test_types_of_blocks(device, sizes, types):
    blocks = Blocks(sizes, device)
    assert blocks.ptr.dtype is torch.int32 and blocks.nbytes() == 4 * (
        len(sizes) + 1), "they are made when they are read"
    assert blocks.relation.dtype is torch.int32 and blocks.relation.tolist() == types and blocks.relation is blocks.relation
    assert blocks.nbytes() == 4 * (len(sizes) + 1 + len(types))


@pytest.mark.parametrize("gelu", [False, True])
def test_some_maps_are_not_read(device, gelu):
    """Gradients of what has one and of what has none."""
    given = leaves(operands(True, True), device)
    x = [given[f"x{at}"] for at in range(len(SIZES))]
    blocks = Blocks(SIZES, device)
    weight = given["kqv"].unflatten(1, (3, -1))
    _, keys, _, _ = by_type.project(blocks, weight, True, given["kqv_bias"].unflatten(1, (3, -1)),
                                    x)
    out = by_type.finish(blocks, SIZES, keys, given["out"], True, None, None, None, gelu)[2]
    got = torch.autograd.grad(out.pow(2).sum(), [given["kqv"], given["kqv_bias"], given["x2"]])
    keys = F.linear(given["x2"], given["kqv"][2], given["kqv_bias"][2])[:, :C]
    expected = F.linear(F.gelu(keys) if gelu else keys, given["out"][2])
    wanted = torch.autograd.grad(expected.pow(2).sum(),
                                 [given["kqv"], given["kqv_bias"], given["x2"]])
    assert all(relative(a, b) < 1e-5 for a, b in zip(got, wanted))


@pytest.mark.parametrize("name", ["kqv", "kqv_bias", "out", "out_bias", "alpha", "x2"])
def test_some_gradients(device, name):
    given = leaves(operands(True, True), device)
    expected = results(by_kernels(given), given)[name]
    alone = {k: v.detach().requires_grad_(k == name) for k, v in given.items()}
    assert torch.equal(results(by_kernels(alone), {name: alone[name]})[name], expected)


@pytest.mark.parametrize("gate", [False, True])
def test_second_derivatives(device, gate):
    given = operands(True, gate)

    def second(outs, t):
        first = results(outs, t, create_graph=True)
        weighted = sum((i + 1) * g.pow(2).sum() for i, g in enumerate(first.values()))
        return torch.autograd.grad(weighted, [v for v in t.values() if v is not None])

    placed = leaves(given, device)
    for got, expected in zip(second(by_kernels(placed), placed), second(by_loop(given), given)):
        assert relative(got.cpu().double(), expected) < 1e-5
    for got, expected in zip(second(by_typed_kernels(placed, types_in_any_order()), placed),
                             second(by_loop(given), given)):
        assert relative(got.cpu().double(), expected) < 1e-5


def test_results_may_be_changed_in_place(device):
    given = leaves(operands(True, True), device)
    first, _, second, _ = by_kernels(given)
    kept = first.pow(2).sum()
    (kept + second.relu_().sum()).backward()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(device, dtype):
    given = operands(True, True)
    exact, placed = results(by_loop(given), given), leaves(given, device, dtype)
    for name, value in results(by_kernels(placed), placed).items():
        assert value.dtype is dtype and relative(value.cpu().double(),
                                                 exact[name]) < (1e-2
                                                                 if dtype is torch.float16
                                                                 else 6e-2)
