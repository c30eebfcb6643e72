"""Layers over node types of which only one thing is trained: a result wants a gradient where the
host's does, and gives it.

Whoever calls ``numpy()`` on a result of types whose layers are frozen cannot do so where it wants a
gradient.
"""
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import HANConv, HeteroDictLinear, HGTConv

from gnnaccel.dispatch.relational import pair_maps
from tests.helpers import relative
from tests.pyg import hgt_graphs
from tests.pyg.hetero_graphs import METADATA, OUT, edges, features, on
from tests.pyg.test_unused_types import KINDS, convs

def hgt() -> HGTConv:
    return hgt_graphs.layer(OUT, OUT, metadata=METADATA)


MADE = {**{kind: lambda kind=kind: convs(kind, channels=4) for kind in KINDS},
        "SAGEConv max": lambda: convs("SAGEConv", "max", channels=4),
        "GATConv stacked": lambda: convs("GATConv", None, 4),
        "HANConv": lambda: HANConv(4, OUT, METADATA, heads=2), "HGTConv": hgt,
        "HGTConv of pairs": hgt,
        "HeteroDictLinear": lambda: HeteroDictLinear(4, OUT, types=METADATA[0])}


def called(made: torch.nn.Module, args: list[dict],
           leaf: Tensor) -> tuple[list[bool], Tensor | None]:
    """Which results want a gradient, and that of ``leaf``."""
    parts = list(made(*args).values())
    wanting = [t for t in parts if t.requires_grad]
    grad, = (torch.autograd.grad(sum(t.sin().sum() for t in wanting), [leaf], allow_unused=True)
             if wanting else (None,))
    return [t.requires_grad for t in parts], grad


@pytest.mark.long
@pytest.mark.parametrize("name", MADE)
def test_one_thing_is_trained(route, monkeypatch, name):
    if name == "HGTConv of pairs":
        monkeypatch.setattr(pair_maps, "WORTH_FROM", 0)
    made = MADE[name]().to(route.device).requires_grad_(False)
    args = on(route.device, features(OUT if "HGT" in name else 4), edges(count=10))
    args = args[:1] if name == "HeteroDictLinear" else args
    with route.on():
        assert not any(t.requires_grad for t in made(*args).values())
    some = [p for key, p in made.named_parameters()
            if not any(relation in key for relation in ("written", "cites", "knows"))]
    for leaf in (*some, *args[0].values()):
        leaf.requires_grad_()
        wanted, exact = called(made, args, leaf)
        with route.on():
            found, grad = called(made, args, leaf)
        leaf.requires_grad_(False)
        assert found == wanted and (grad is None) == (exact is None)
        assert grad is None or relative(grad, exact) < 1e-4 or (grad - exact).abs().max() < 1e-5


def test_frozen_results_are_the_users_own(route):
    """No views of each other: one may be changed in place, also where another one waits for
    backward."""
    made = convs("SAGEConv", channels=4).to(route.device).requires_grad_(False)
    made.convs[METADATA[1][3]].requires_grad_()  # into `field`
    x, ei = on(route.device, features(4), edges())
    with route.on():
        out = made(x, ei)
        assert [name for name, t in out.items() if t.requires_grad] == ["field"]
        kept = out["field"].detach().clone()
        out["paper"].mul_(2.0)
        assert torch.equal(out["field"], kept)
        out["field"].pow(2).sum().backward()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("trained",
                         ["kqv_lin.lins.author.weight", "p_rel.author__writes__paper",
                          "skip.paper"])
def test_hgt_second_derivatives_of_one_thing(route, monkeypatch, pairs, trained):
    """Of what backward repeats, some results want no gradient."""
    monkeypatch.setattr(pair_maps, "WORTH_FROM", 0 if pairs else 1 << 40)
    made = hgt().to(route.device).requires_grad_(False)
    leaf = made.get_parameter(trained).requires_grad_()
    args = on(route.device, features(OUT), edges(count=10))

    def second() -> Tensor:
        loss = sum(t.sin().sum() for t in made(*args).values() if t.requires_grad)
        first, = torch.autograd.grad(loss, [leaf], create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), [leaf])[0]

    exact = second()
    with route.on():
        got = second()
    assert relative(got, exact) < 1e-3
