"""Users' GATs that repeat are bound to kernels and parameters; the general way must give the same,
bit for bit."""
from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import softmax

import gnnaccel
from gnnaccel.adapters.pyg.propagate import attention_repeated
from gnnaccel.dispatch.memory.layer_memory import memories
from gnnaccel.dispatch.run import attention_slices
from tests.pyg import graphs
from tests.pyg.graphs import E, N
from tests.pyg.judge import close
from tests.pyg.own_gats import (Apart, Beside, ByMap, C, Dropped, DroppedWithEdges, H,
                                OfEdgesAndSources, Paired, Shared, SourceFirst, WithEdges)


@pytest.fixture
def bound_calls(monkeypatch):
    """How many calls were bound ones."""
    calls = []
    native = attention_slices.BoundRows.run
    monkeypatch.setattr(attention_slices.BoundRows, "run",
                        lambda *args: calls.append(args) or native(*args))
    return calls


FORMS = [Beside, SourceFirst, Dropped, WithEdges, DroppedWithEdges, OfEdgesAndSources, Apart,
         Shared]
each = pytest.mark.parametrize("cls", FORMS)


def made(cls, device, heads=H, width=C) -> tuple:
    """A layer and its arguments."""
    layer = cls(heads, width).to(device)
    e = torch.randn(E, heads).requires_grad_() if "Edges" in cls.__name__ else None
    given = torch.randn(N, heads, width).requires_grad_(), graphs.square(), e
    return layer, [t if t is None else t.detach().to(device).requires_grad_(t.requires_grad)
                   for t in given]


def step(layer, args, up=None) -> list:
    """The result and all gradients."""
    torch.manual_seed(3)
    out = layer(*args)
    wanted = [t for t in (*args, *layer.parameters()) if t is not None and t.requires_grad]
    up = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out) if up is None else up
    return [out.detach(), *(torch.autograd.grad(out, wanted, up, allow_unused=True) if wanted
                            else ())]


def general(layer, args) -> list:
    """`step` of a repeated call that is not bound."""
    memories.clear()
    with mock.patch.object(attention_slices, "bind", lambda *given: None):
        step(layer, args)
        found = step(layer, args)
    memories.clear()
    return found


def bound(layer, args) -> list:
    """`step` of a call that is."""
    step(layer, args)
    return step(layer, args)


def same(a, b) -> bool:
    return (a is None) is (b is None) and (a is None or torch.equal(a, b))


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)  # structures are in the same order
    yield
    torch.use_deterministic_algorithms(False)


@each
@pytest.mark.parametrize("heads, width", [(H, C), (3, 4), (1, 16), (2, 1), (1, 1), (4, 66)])
def test_the_same_bit_for_bit(kernels, bound_calls, cls, heads, width):
    layer, args = made(cls, kernels.device, heads, width)
    with kernels.on():
        expected = general(layer, args)
        assert not bound_calls
        got = bound(layer, args)
    assert len(bound_calls) == 1 and all(same(a, b) for a, b in zip(got, expected))


def test_a_linear_map_in_the_place_of_a_parameter(kernels, bound_calls):
    layer, args = made(ByMap, kernels.device, 1)
    with kernels.on():
        expected, got = general(layer, args), bound(layer, args)
    assert len(bound_calls) == 1 and all(same(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("cls", [cls for cls in FORMS if not cls.p])
def test_as_native(kernels, bound_calls, cls):
    layer, args = made(cls, kernels.device)
    expected = step(layer, args)
    with kernels.on():
        got = bound(layer, args)
        with torch.no_grad():
            layer(*args)
            assert close(layer(*args), expected[0], 1e-5)
    assert len(bound_calls) == 2 and all(close(a, b, 1e-4) for a, b in zip(got, expected))


@each
@pytest.mark.parametrize("name", ["x", "e", "parameters"])
def test_each_gradient_alone(kernels, bound_calls, cls, name):
    layer, args = made(cls, kernels.device)
    layer.requires_grad_(name == "parameters")
    for given, t in zip(("x", "edge_index", "e"), args):
        if t is not None and t.is_floating_point():
            t.requires_grad_(name == given)
    with kernels.on():
        expected, got = general(layer, args), bound(layer, args)
    assert all(same(a, b) for a, b in zip(got, expected)) and len(got) == len(expected)
    assert len(bound_calls) == 1


@each
def test_second_derivatives(kernels, bound_calls, cls):
    layer, args = made(cls, kernels.device)

    def second():
        torch.manual_seed(3)
        inputs = [t for t in (*args, *layer.parameters()) if t is not None and t.requires_grad]
        first = torch.autograd.grad(layer(*args).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    with kernels.on():
        memories.clear()
        with mock.patch.object(attention_slices, "bind", lambda *given: None):
            expected = second(), second()
        memories.clear()
        second()
        got = second()
    assert bound_calls and all(close(a, b, 1e-5) for a, b in zip(got, expected[1]))


def test_a_part_of_a_parameter(kernels, bound_calls):
    """The rest of it gets zeros."""

    class Part(Beside):
        shape = (3, H, 2 * C)

        def message(self, x_i, x_j, index, ptr, size_i):
            alpha = (torch.cat([x_i, x_j], dim=-1) * self.att[1]).sum(-1)
            return x_j * softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i).unsqueeze(-1)

    layer, args = made(Part, kernels.device)
    with kernels.on(on_fallback="native"):
        expected, got = general(layer, args), bound(layer, args)
    assert bound_calls and all(same(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("change", ["data", "strides", "written", "frozen", "replaced", "freed"])
@pytest.mark.parametrize("cls", [Beside, Apart])
def test_changes_are_seen(kernels, cls, change):
    """Also between the calls and their backward, where the host allows it."""
    layer, args = made(cls, kernels.device, 8, 8)
    with kernels.on(on_fallback="native"):
        for _ in range(2):
            bound(layer, args)
        before, old = layer(*args), layer.att.data
        if change == "data":
            layer.att.data = torch.randn_like(layer.att)
        elif change == "strides":
            layer.att.data = torch.randn(layer.att.shape[::-1], device=args[0].device).permute(
                2, 1, 0)
        elif change == "written":
            with torch.no_grad():
                layer.att.mul_(3)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                before.sum().backward()
        elif change == "frozen":
            layer.att.requires_grad_(False)
        elif change == "replaced":
            layer.att = nn.Parameter(torch.randn_like(layer.att))
        else:  # as sharded training exchanges memory
            layer.att.data = old.clone()
            old.fill_(float("nan"))
            [got] = torch.autograd.grad(before, args[0], torch.ones_like(before))
        with gnnaccel.disabled():
            expected = step(layer, args)
            if change == "freed":
                assert close(got, step(layer, args, torch.ones_like(before))[1], 1e-4)
        for _ in range(2):
            assert all(close(a, b, 1e-4) for a, b in zip(step(layer, args), expected))


@pytest.mark.long
@pytest.mark.parametrize("cls", [Beside, Paired])
def test_rows_of_any_layout(kernels, bound_calls, cls):
    layer, (_, edge_index, _) = made(cls, kernels.device)
    wide = torch.randn(N, H, 2 * C, device=kernels.device)
    for given in (wide[:, :, ::2], wide[:, :, 1:C + 1], wide[:, :, :C].transpose(0, 1).contiguous()
                  .transpose(0, 1)):
        args = [given.requires_grad_(), edge_index]
        with kernels.on():
            expected, got = general(layer, args), bound(layer, args)
        assert all(same(a, b) for a, b in zip(got, expected))
    assert len(bound_calls) == 3


@pytest.mark.parametrize("cls", [Beside, WithEdges, OfEdgesAndSources])
def test_nodes_that_no_edge_reads(kernels, bound_calls, cls):
    """What is infinite there reaches no gradient."""
    layer, (x, edge_index, e) = made(cls, kernels.device)
    x = x.detach().clone()
    x[-1] = float("inf")
    args = [x.requires_grad_(), edge_index % (N - 1), e]
    expected = step(layer, args)
    with kernels.on():
        got = bound(layer, args)
    assert bound_calls and torch.isfinite(got[-1]).all()
    assert all(close(a, b, 1e-4) for a, b in zip(got[2:], expected[2:]))


def test_rows_that_are_written_to(kernels):
    """As the host allows it before backward, with copies."""

    class Written(Beside):
        def forward(self, x, edge_index):  # of its own: what functions do is known by their code
            return self.propagate(edge_index, x=x)

    layer, (x, edge_index, _) = made(Written, kernels.device)

    def run():
        rows = x * 1.0
        out = layer(rows, edge_index)
        rows.zero_()
        return torch.autograd.grad(out.square().sum(), [x, layer.att])

    expected = run()
    with kernels.on():
        for _ in range(4):
            assert all(close(a, b, 1e-4) for a, b in zip(run(), expected))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(kernels, reentrant):
    """The repetition saves what the call saved."""
    layer, args = made(Beside, kernels.device)

    def run():
        layer.zero_grad()
        checkpoint(layer, *args, use_reentrant=reentrant).square().sum().backward()
        return layer.att.grad.clone()

    expected = run()
    with kernels.on():
        for _ in range(3):
            bound(layer, args)
            assert close(run(), expected, 1e-4)


def test_what_cannot_be_bound(kernels, bound_calls):
    class Scaled(Beside):
        """Vectors that are computed."""

        def message(self, x_i, x_j, index, ptr, size_i):
            alpha = (torch.cat([x_i, x_j], dim=-1) * (2 * self.att)).sum(-1)
            return x_j * softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i).unsqueeze(-1)

    class Wide(Beside):
        """One number for all channels."""

        shape = (1, H, 1)

        def message(self, x_i, x_j, index, ptr, size_i):
            alpha = (x_i * self.att).sum(-1) + (x_j * self.att).sum(-1)
            return x_j * softmax(F.leaky_relu(alpha, 0.2), index, ptr, size_i).unsqueeze(-1)

    for cls in (Scaled, Wide):
        layer, args = made(cls, kernels.device)
        expected = step(layer, args)
        with kernels.on(on_fallback="native"):
            assert all(close(a, b, 1e-4) for a, b in zip(bound(layer, args), expected))
    assert not bound_calls


def test_it_is_bound_once(kernels, monkeypatch):
    found, native = [], attention_repeated.bind
    monkeypatch.setattr(attention_repeated, "bind", lambda *args: found.append(1) or native(*args))
    layer, args = made(Beside, kernels.device)
    with kernels.on():
        layer(*args)
        assert not found  # calls over graphs that are new each time are not
        for _ in range(3):
            layer(*args)
    assert found == [1]


@each
def test_it_is_one_node_of_autograd(kernels, cls):
    layer, args = made(cls, kernels.device)
    with kernels.on():
        bound(layer, args)
        out = layer(*args)
    inputs = [type(one).__name__ for one, _ in out.grad_fn.next_functions if one is not None]
    assert set(inputs) == {"AccumulateGrad"}
