"""`enable(capture=True)`: tensors made in inference mode, and many gradients at once."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg

import gnnaccel
from gnnaccel.adapters.captured import backend
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import Net, given, on, refused, replays, same  # noqa: F401


def expected(model, *args) -> list:
    with gnnaccel.disabled():
        return [copy.deepcopy(model)(*args)]


def test_arguments_made_in_inference_mode_run_as_ever(on):
    """And leave calls with others captured."""
    model, (x, edge_index) = Net().eval(), given()
    with torch.inference_mode():
        made = x.clone(), edge_index.clone()
    with torch.no_grad():
        for args in (made, (x, edge_index)) * 6:
            assert same([model(*args)], expected(model, *args))
        for _ in range(8):
            model(x, edge_index)
    assert replays() and not refused()


class Holding(nn.Module):
    """Its edges are its own, in a list, a buffer or an attribute."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.conv, self.where = pyg.SAGEConv(6, 3), where
        with torch.inference_mode():
            edge_index = given()[1].clone()
        if where == "buffer":
            self.register_buffer("edges", edge_index)
        else:
            self.edges = [edge_index] if where == "list" else edge_index
        self.conv.to(edge_index.device)

    def forward(self, x):
        return self.conv(x, self.edges[0] if self.where == "list" else self.edges)


@pytest.mark.parametrize("where", ["list", "buffer", "attribute"])
def test_what_a_module_holds_was_made_in_inference_mode(on, where):
    model, x = Holding(where), given()[0]
    with gnnaccel.disabled():
        found = model(x)
    for _ in range(8):
        assert same([model(x).detach()], [found.detach()])
    assert not replays("Holding")


def test_many_gradients_at_once(on):
    model, args = Net().eval(), given()
    many = torch.randn(3, 20, 6, device=args[0].device)

    def gradients() -> list:
        return list(torch.autograd.grad(model(*args), list(model.parameters()), many,
                                        is_grads_batched=True, allow_unused=True))

    with gnnaccel.disabled():
        native = [g for g in gradients() if g is not None]
    for _ in range(12):
        assert same([g for g in gradients() if g is not None], native)
    assert replays()


def test_a_piece_of_a_compiled_model(on):
    region = backend.backend(torch.fx.symbolic_trace(nn.Linear(6, 2).to(given()[0].device)), [])
    x = given()[0]
    with torch.inference_mode():
        made = x.clone()
    with torch.no_grad():
        assert all(same([region(made)], [region(x)]) for _ in range(8))


class Reading(nn.Module):
    """Has a tensor that is no parameter, and asks whether gradients are recorded."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.kind = pyg.GCNConv(6, 3), kind
        self.scale = torch.tensor(0.5, requires_grad=kind != "none", device=given()[0].device)
        self.hidden = self.scale * 2 if kind == "made" else self.scale

    def forward(self, x, edge_index):
        out = self.conv(x, edge_index) * self.hidden
        return out if torch.is_grad_enabled() else out * 3


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", ["leaf", "made", "none"])
def test_gradients_of_what_is_no_parameter(on, kind, trained):
    model, args = Reading(kind).to(given()[0].device).requires_grad_(trained), given()

    def found() -> list:
        out = model(*args)
        if not out.requires_grad:
            return [out]
        wanted = [t for t in (model.scale, *model.parameters()) if t.requires_grad]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted, retain_graph=True)]

    with gnnaccel.disabled():
        native = found()
    assert all(same(found(), native) for _ in range(12))
    assert bool(replays("Reading")) is (kind == "none")
