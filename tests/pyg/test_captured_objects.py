"""``enable(capture=True)``: models that hold what cannot be compared are run as they are, and the
layers in them are captured."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import gnnaccel
from tests.pyg.recorded import recorded  # noqa: F401
from tests.pyg.test_captured import Net, given, on, refused, replays, same, step  # noqa: F401


class Settings(dict):
    """Asked for an attribute that it does not have, it raises no AttributeError."""

    def __getattr__(self, name):
        return self[name]


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def __getattr__(self, name):
        raise ValueError(name)


def cyclic(kind):
    found = kind()
    found.append(found) if kind is list else found.update(self=found)
    return found


def weighted(model, x):
    return model.held @ x


def sparse(device):
    return torch.eye(20, device=device).to_sparse()


def scaled(model, x):
    return x * model.held.scale


def counted(model, x):
    return x * len(model.held)


HELD = {  # what is held, what the model makes of it, why the model is not captured
    "a sparse matrix": (sparse, weighted, "layout"),
    "a sparse matrix in rows": (lambda d: sparse(d).to_sparse_csr(), weighted, "layout"),
    "a sparse buffer": (sparse, weighted, "layout"),
    "a dictionary that raises": (lambda d: Settings(scale=2.0), scaled, "Settings"),
    "slots that raise": (lambda d: Slots(2.0), scaled, "Slots"),
    "a list in itself": (lambda d: cyclic(list), counted, "holds itself"),
    "a dictionary in itself": (lambda d: cyclic(dict), counted, "holds itself"),
    "a scripted module": (lambda d: torch.jit.script(nn.PReLU()).to(d),
                          lambda m, x: m.held(x), "jit")}


def strided(tensors):
    return [t for t in tensors if t.layout is torch.strided]


class Holding(Net):
    def __init__(self, held, use, buffer):
        super().__init__()
        self.use = use
        self.register_buffer("held", held) if buffer else setattr(self, "held", held)

    def forward(self, x, edge_index):
        return self.use(self, super().forward(x, edge_index))


@pytest.mark.parametrize("what", HELD)
def test_held(on, what):
    make, use, why = HELD[what]
    args = given()
    model, twin = (Holding(make(args[0].device), use, "buffer" in what) for _ in range(2))
    for _ in range(9):
        found = step(model, *args)
        with gnnaccel.disabled():
            assert same(strided(found), strided(step(twin, *args))), what
    assert [reason for reason in refused("Holding") if why in reason] and not replays("Holding")
    assert replays("GCNConv") and replays("GATConv")
