"""Losses that read the results of some node types only: what has no gradient natively must have none here.

An optimizer passes over a parameter without a gradient; with weight decay or momentum it changes one whose gradient is zero.
"""
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, HANConv, SAGEConv

import gnnaccel
from gnnaccel.dispatch.relational import pair_maps
from tests.helpers import relative
from tests.pyg import hgt_graphs
from tests.pyg.hetero_graphs import ABOUT, CITES, KNOWS, METADATA, OUT, WRITES, WRITTEN, edges, features, hetero, on

ALL = [("paper", "author", "field"), ("paper",), ("field",), ("author", "field"), ()]  # of which types the results are read


def gradients(made: torch.nn.Module, x: dict, ei: dict, used: tuple[str, ...], read=lambda t: t.tanh().pow(2).sum()) -> dict:
    """By name those of every parameter and of the features, after a training step's backward."""
    made.zero_grad(set_to_none=True)
    x = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
    out = made(x, ei)
    read_types = [out[name] for name in used]
    if read_types:
        sum(read(t) for t in read_types).backward()
    return {**{name: p.grad for name, p in made.named_parameters()}, **{f"x[{name}]": t.grad for name, t in x.items()}}


def same(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert {k for k, g in got.items() if g is None} == {k for k, g in expected.items() if g is None}
    for name, grad in expected.items():
        # against the largest gradients, not only its own: what cancels natively leaves rounding
        assert grad is None or relative(got[name], grad) < 2e-5 or (got[name] - grad).abs().max() < 1e-6, name


def check(route, made: torch.nn.Module, x: dict, ei: dict, used: tuple[str, ...], **options) -> dict:
    """The gradients, which are the host's."""
    made, (x, ei) = made.to(route.device), on(route.device, x, ei)
    expected = gradients(made, x, ei, used)
    gnnaccel.reset_stats()
    with route.on(**options):
        got = gradients(made, x, ei, used)
    assert any(route.backend in entry["routes"] for entry in gnnaccel.stats().values())
    same(got, expected)
    return got


class Twice(torch.nn.Module):
    """Two layers, the second without what the first gives to other types."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: dict, ei: dict) -> dict:
        for at, made in enumerate(self.layers):
            x = made({k: t.relu() for k, t in x.items()} if at else x, ei)
        return x


# ---- HGTConv ----

def hgt(channels: int = OUT, out: int = OUT, metadata=METADATA):
    return hgt_graphs.layer(channels, out, metadata=metadata)


@pytest.fixture(params=["by type", "of pairs"])
def maps(request, monkeypatch):
    if request.param == "of pairs":
        monkeypatch.setattr(pair_maps, "WORTH_FROM", 0)


@pytest.mark.parametrize("used", ALL, ids=str)
@pytest.mark.parametrize("channels", [OUT, 5])
def test_hgt(route, maps, channels, used):
    got = check(route, hgt(channels), features(channels), edges(), used)
    for name in METADATA[0]:
        assert (got[f"out_lin.lins.{name}.weight"] is None) == (got[f"out_lin.lins.{name}.bias"] is None) == (name not in used)
        assert (got[f"skip.{name}"] is None) == (name not in used or channels != OUT)
        assert (got[f"kqv_lin.lins.{name}.weight"] is None) == (not used)


def test_hgt_with_a_type_that_only_sends(route):
    """`author` receives nothing, so that its maps are the host's."""
    relations = [WRITES, CITES, ABOUT]
    check(route, hgt(metadata=(METADATA[0], relations)), features(OUT), edges(relations), ("field",))


@pytest.mark.parametrize("relations", [[CITES, ABOUT], [KNOWS]], ids=len)
def test_hgt_with_types_that_have_no_edges(route, maps, relations):
    check(route, hgt(), features(OUT), edges(relations), ("paper",))
    check(route, hgt(), features(OUT), edges(empty=[CITES, WRITES]), ("paper",))


def test_hgt_with_types_without_nodes(route):
    x, ei = features(OUT, field=0), edges(empty=[ABOUT])
    for used in (("field",), ("paper",)):
        check(route, hgt(), x, ei, used)


@pytest.mark.parametrize("used", ALL, ids=str)
def test_hgt_twice(route, used):
    check(route, Twice(hgt(), hgt()), features(OUT), edges(), used)


@pytest.mark.parametrize("frozen", ["out_lin.lins.paper", "out_lin", "skip", "kqv_lin", "rel", "bias"])
def test_hgt_where_some_are_frozen(route, frozen):
    made = hgt()
    for name, p in made.named_parameters():
        p.requires_grad_(frozen not in name)
    check(route, made, features(OUT), edges(), ("paper", "field"))


def test_hgt_parameters_changed_between_the_passes(route):
    """What the host doesn't keep for backward may be changed before it."""
    made, (x, ei) = hgt().to(route.device), on(route.device, features(OUT), edges())

    def changed(out: Tensor) -> Tensor:
        with torch.no_grad():
            made.skip["paper"].add_(1.0)
            made.out_lin.lins["paper"].bias.mul_(2.0)
        return out.tanh().pow(2).sum()

    state = {k: t.clone() for k, t in made.state_dict().items()}
    expected = gradients(made, x, ei, ("paper",), changed)
    made.load_state_dict(state)
    with route.on():
        same(gradients(made, x, ei, ("paper",), changed), expected)


def test_hgt_second_derivatives(emulated):
    made, x, ei = hgt(4, 4), {k: t.requires_grad_() for k, t in features(4).items()}, edges(count=8)

    def penalty() -> tuple:
        first = torch.autograd.grad(made(x, ei)["paper"].pow(3).sum(), [x["paper"], made.out_lin.lins["paper"].weight,
                                                                        made.skip["paper"]], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*made.parameters(), *x.values()], allow_unused=True)

    expected = penalty()
    with emulated.on():
        got = penalty()
    for (name, _), a, b in zip([*made.named_parameters(), *x.items()], got, expected):
        if name.startswith(("out_lin", "skip")):
            assert (a is None) == (b is None), name
        a, b = (torch.zeros(()) if g is None else g for g in (a, b))
        assert relative(a, b) < 1e-4 or (a - b).abs().max() < 1e-5, name


def test_hgt_results_one_after_the_other(route):
    """Losses of their own over one graph of autograd, each of other types."""
    made, (x, ei) = hgt().to(route.device), on(route.device, features(OUT), edges())
    wanted = [p for name, p in made.named_parameters()]

    def each() -> list:
        out = made(x, ei)
        return [g for name in out
                for g in torch.autograd.grad(out[name].pow(2).sum(), wanted, retain_graph=True, allow_unused=True)]

    expected = each()
    with route.on():
        got = each()
    same(dict(enumerate(got)), dict(enumerate(expected)))


def test_weight_decay_leaves_unused_parameters_alone(route):
    made, (x, ei) = hgt().to(route.device), on(route.device, features(OUT), edges())
    before = made.out_lin.lins["field"].weight.detach().clone()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, weight_decay=0.5)
    with route.on():
        made(x, ei)["paper"].sum().backward()
    optimizer.step()
    assert torch.equal(made.out_lin.lins["field"].weight, before)
