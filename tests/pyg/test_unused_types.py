"""Losses that read the results of some node types only: what has no gradient natively must have
none here.

An optimizer passes over a parameter without a gradient; with weight decay or momentum it changes
one whose gradient is zero.
"""
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import (GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, HANConv, SAGEConv,
                                to_hetero)

import gnnaccel
from gnnaccel.dispatch.relational import pair_maps
from tests.helpers import relative
from tests.pyg import hgt_graphs
from tests.pyg.hetero_graphs import (ABOUT, CITES, KNOWS, METADATA, OUT, WRITES, WRITTEN, edges,
                                     features, hetero, on)

# of which types the results are read
ALL = [("paper", "author", "field"), ("paper",), ("field",), ("author", "field"), ()]


def gradients(made: torch.nn.Module, x: dict, ei: dict, used: tuple[str, ...],
              read=lambda t: t.tanh().pow(2).sum()) -> dict:
    """By name those of every parameter and of the features, after a training step's backward."""
    made.zero_grad(set_to_none=True)
    x = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
    out = made(x, ei)
    read_types = [out[name] for name in used]
    if read_types:
        sum(read(t) for t in read_types).backward()
    return {**{name: p.grad for name, p in made.named_parameters()},
            **{f"x[{name}]": t.grad for name, t in x.items()}}


def same(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert {k for k, g in got.items() if g is None} == {k for k, g in expected.items() if g is None}
    largest = max((g.abs().max().item() for g in expected.values() if g is not None and g.numel()),
                  default=0.0)
    for name, grad in expected.items():
        # what cancels leaves the rounding of larger terms
        assert grad is None or relative(got[name],
                                        grad) < 2e-5 or (got[name] - grad).abs().max() < 1e-6 * max(
                                            largest, 1.0), name


def check(route, made: torch.nn.Module, x: dict, ei: dict, used: tuple[str, ...],
          **options) -> dict:
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
        assert (got[f"out_lin.lins.{name}.weight"] is None) == (
            got[f"out_lin.lins.{name}.bias"] is None) == (name not in used)
        assert (got[f"skip.{name}"] is None) == (name not in used or channels != OUT)
        assert (got[f"kqv_lin.lins.{name}.weight"] is None) == (not used)


def test_hgt_with_a_type_that_only_sends(route):
    """`author` receives nothing, so that its maps are the host's."""
    relations = [WRITES, CITES, ABOUT]
    check(route, hgt(metadata=(METADATA[0], relations)), features(OUT), edges(relations),
          ("field",))


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


@pytest.mark.parametrize("frozen",
                         ["out_lin.lins.paper", "out_lin", "skip", "kqv_lin", "rel", "bias"])
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


@pytest.mark.long
def test_hgt_second_derivatives(emulated):
    made, x, ei = hgt(4, 4), {k: t.requires_grad_() for k, t in features(4).items()}, edges(count=8)

    def penalty() -> tuple:
        first = torch.autograd.grad(made(x, ei)["paper"].pow(3).sum(),
                                    [x["paper"], made.out_lin.lins["paper"].weight,
                                     made.skip["paper"]], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first),
                                   [*made.parameters(), *x.values()], allow_unused=True)

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
                for g in torch.autograd.grad(out[name].pow(2).sum(), wanted, retain_graph=True,
                                             allow_unused=True)]

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


# ---- HeteroConv and HANConv ----

def gin(channels: int, out: int) -> GINConv:
    return GINConv(torch.nn.Linear(channels, out), train_eps=True)


KINDS = {"SAGEConv": (SAGEConv, {}), "GraphConv": (GraphConv, {}),
         "GATConv": (GATConv, dict(add_self_loops=False)),
         "GATv2Conv": (GATv2Conv, dict(add_self_loops=False)), "GINConv": (gin, {})}
GROUPS = ("sum", "mean", "max", None)


def convs(kind: str, group: str | None = "sum", channels: int = OUT,
          relations=METADATA[1]) -> torch.nn.Module:
    cls, options = KINDS[kind]
    return hetero(cls, group, relations, channels=channels, **options)


@pytest.mark.parametrize("used", ALL, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_hetero_conv(route, kind, used):
    got = check(route, convs(kind), features(OUT), edges(), used)
    for name in METADATA[1]:
        of_relation = [g for k, g in got.items() if k.startswith(f"convs.<{'___'.join(name)}>")]
        assert of_relation and all((g is None) == (name[-1] not in used) for g in of_relation)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_hetero_conv_with_other_groups(route, kind, group):
    check(route, convs(kind, group), features(OUT), edges(), ("author",))


@pytest.mark.parametrize("used", [("field",), ("author",)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_hetero_conv_twice(route, kind, used):
    relations = [WRITES, WRITTEN, ABOUT, KNOWS]
    check(route, Twice(convs(kind, relations=relations), convs(kind, relations=relations)),
          features(OUT), edges(relations), used)


@pytest.mark.parametrize("kind", KINDS)
def test_hetero_conv_of_empty_relations(route, kind):
    check(route, convs(kind), features(OUT), edges(empty=[WRITES, ABOUT]), ("field",))
    check(route, convs(kind), features(OUT), edges(empty=[WRITES, ABOUT]), ("paper",))


@pytest.mark.long
def test_hetero_conv_of_gcn(route):
    relations = [CITES, KNOWS]
    for group in GROUPS:
        check(route, hetero(GCNConv, group, relations, channels=OUT), features(OUT),
              edges(relations), ("author",))


def test_hetero_conv_where_types_differ_in_width(route):
    widths = {"paper": 12, "author": 12, "field": 5}
    made = hetero(SAGEConv, "sum", channels=(12, 12))
    made.convs[ABOUT] = SAGEConv((12, 5), OUT)
    for used in (("field",), ("paper",)):
        check(route, made, features(widths), edges(), used)


def test_hetero_conv_in_groups(route):
    made = hetero(SAGEConv, "sum", channels=OUT)
    for name in (CITES, KNOWS):
        made.convs[name] = GraphConv(OUT, OUT)
    for used in (("field",), ("author",)):
        check(route, made, features(OUT), edges(), used, on_fallback="native")


@pytest.mark.parametrize("kind", KINDS)
def test_hetero_conv_one_result_after_the_other(route, kind):
    """Losses of their own over one graph of autograd, the second of them recorded; then second
    derivatives."""
    made = convs(kind, channels=4).to(route.device)
    x, ei = on(route.device, features(4), edges(count=8))
    wanted = list(made.parameters())

    def each() -> list:
        out = made(x, ei)
        found = list(torch.autograd.grad(out["field"].pow(2).sum(), wanted, retain_graph=True,
                                         allow_unused=True))
        first = torch.autograd.grad(out["paper"].pow(2).sum(), wanted, create_graph=True,
                                    allow_unused=True)
        found += torch.autograd.grad(out["author"].pow(2).sum(), wanted, retain_graph=True,
                                     allow_unused=True)
        return found + list(torch.autograd.grad(sum(g.pow(2).sum() for g in first if g is not None),
                                                wanted, allow_unused=True))

    expected = each()
    with route.on():
        got = each()
    for a, b in zip(got, expected):
        a, b = (torch.zeros(()) if g is None else g for g in (a, b))
        assert relative(a, b) < 1e-4 or (a - b).abs().max() < 1e-4


def han(channels: int = OUT) -> HANConv:
    return HANConv(channels, OUT, METADATA, heads=2)


@pytest.mark.parametrize("used", ALL, ids=str)
def test_han(route, used):
    got = check(route, han(), features(OUT), edges(), used)
    for name in METADATA[1]:
        assert (got["lin_src." + "__".join(name)] is None) == (name[-1] not in used)


def test_han_twice_and_with_types_that_have_no_edges(route):
    relations = [WRITES, WRITTEN, ABOUT, KNOWS]
    check(route, Twice(han(), han()), features(OUT), edges(relations), ("field",))
    check(route, han(), features(OUT), edges([CITES]), ("paper",))


@pytest.mark.parametrize("kind", KINDS)
def test_hetero_conv_where_some_are_frozen(route, kind):
    made = convs(kind)
    for at, p in enumerate(made.parameters()):
        p.requires_grad_(at % 3 != 0)
    check(route, made, features(OUT), edges(), ("field",))
    made.requires_grad_(False)
    check(route, made, features(OUT), edges(), ("field",))


@pytest.mark.parametrize("made", [lambda: convs("SAGEConv"), lambda: convs("GATConv"), han],
                         ids=["sage", "gat", "han"])
def test_retained_passes_over_one_graph(route, made):
    """Each pass counts by itself."""
    made = made().to(route.device)
    x, ei = on(route.device, features(OUT), edges())
    wanted = list(made.parameters())

    def each() -> list:
        out = made(x, ei)
        return [g
                for names in (("field",), ("paper", "author", "field"), ("author",),
                              ("field", "paper"))
                for g in torch.autograd.grad(sum(out[name].pow(2).sum() for name in names), wanted,
                                             retain_graph=True, allow_unused=True)]

    expected = each()
    with route.on():
        got = each()
    same(dict(enumerate(got)), dict(enumerate(expected)))


@pytest.mark.parametrize("used", [("field",), ("paper", "author")], ids=str)
@pytest.mark.parametrize("made",
                         [*(lambda kind=kind: convs(kind, channels=4) for kind in KINDS),
                          lambda: han(4)], ids=[*KINDS, "han"])
def test_a_pass_that_is_recorded_and_one_over_its_gradients(route, made, used):
    """As with a penalty on gradients: what no used result was made of has none, the first time and
    the second."""
    made, (x, ei) = made().to(route.device), on(route.device, features(4), edges(count=8))
    wanted = list(made.parameters())

    def both() -> list:
        out = made(x, ei)
        loss = sum(out[name].sin().sum() for name in used)
        first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        penalty = loss + sum(g.pow(2).sum() for g in first if g is not None)
        return [*first, *torch.autograd.grad(penalty, wanted, allow_unused=True)]

    expected = both()
    with route.on():
        got = both()
    assert [g is None for g in got] == [g is None for g in expected] and any(g is None for g in got)
    for a, b in zip(got, expected):
        assert a is None or relative(a, b) < 1e-3 or (a - b).abs().max() < 1e-4


class _Stopped(torch.autograd.Function):
    """Says in backward that there is no gradient."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("made", [hgt, *(lambda kind=kind: convs(kind) for kind in KINDS), han],
                         ids=["hgt", *KINDS, "han"])
def test_backward_without_any_gradient(route, made):
    made, (x, ei) = made().to(route.device), on(route.device, features(OUT), edges())
    with route.on():
        got = gradients(made, x, ei, METADATA[0], lambda t: _Stopped.apply(t).sum())
    assert all(grad is None or not grad.any() for grad in got.values())


class _Net(torch.nn.Module):
    """Two layers as `to_hetero` takes them."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


_LAYERS = {"sage": lambda: SAGEConv((-1, -1), OUT),
           "sum": lambda: SAGEConv((-1, -1), OUT, aggr="add"),
           "max": lambda: SAGEConv((-1, -1), OUT, aggr="max"),
           "gat": lambda: GATConv((-1, -1), OUT, add_self_loops=False),
           "gatv2": lambda: GATv2Conv((-1, -1), OUT, add_self_loops=False)}


@pytest.mark.long
@pytest.mark.parametrize("widths", [(8, 8, 8), (8, 5, 3), (8, 5, 8)])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("kind", _LAYERS)
def test_two_layers_over_types_that_do_not_meet(route, kind, empty, widths):
    """What reads no used result has no gradient, whether layers run as one, in groups or alone."""
    relations = {("z", "to", "z"): (2, 2, 40), ("a", "to", "a"): (3, 3, 8),
                 ("b", "to", "b"): (4, 4, 9), ("z", "by", "b"): (2, 4, 0 if empty else 7)}
    ei = {name: torch.stack([torch.randint(n, (e,)), torch.randint(m, (e,))])
          for name, (n, m, e) in relations.items()}
    x = {t: torch.randn(n, width) for (t, n), width in zip(dict(z=2, a=3, b=4).items(), widths)}
    made = to_hetero(_Net(_LAYERS[kind](), _LAYERS[kind]()), (list(x), list(ei)))
    with torch.no_grad():
        made(x, ei)
    made, (x, ei) = made.to(route.device), on(route.device, x, ei)
    for used in (("z",), ("a",), ("b",), ("a", "b")):
        expected = gradients(made, x, ei, used, lambda t: t.pow(2).mean())
        with route.on():
            got = gradients(made, x, ei, used, lambda t: t.pow(2).mean())
        same(got, expected)
