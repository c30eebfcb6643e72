"""Messages that treat edges of each kind apart, by masks."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from tests.pyg import graphs
from tests.pyg.generated_calls import both
from tests.pyg.generated_layers import WIDTH
from tests.pyg.graphs import E
from tests.pyg.judge import compare

KINDS = 3


class Kinds(MessagePassing):
    """A linear map for each kind of edges; subclasses say how they are picked."""

    def __init__(self, aggr="add", **options):
        super().__init__(aggr=aggr, **options)
        self.lins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(KINDS))

    def forward(self, x, edge_index, kind, weight=None):
        return self.propagate(edge_index, x=x, kind=kind, weight=weight)

    def begun(self, x_j):
        return torch.zeros(x_j.size(0), WIDTH, device=x_j.device, dtype=x_j.dtype)


class ByMask(Kinds):
    def message(self, x_j, kind):
        out = self.begun(x_j)
        for k, lin in enumerate(self.lins):
            mask = kind == k
            out[mask] = lin(x_j[mask])
        return out


class Asked(Kinds):
    """Kinds of which there are none are left out."""

    def message(self, x_i, x_j, kind, weight):
        out = self.begun(x_j)
        for k in range(len(self.lins)):
            mask = kind == k
            if mask.sum() == 0:
                continue
            both = torch.cat([x_i[mask] - x_j[mask], x_j[mask]], -1)
            rows = torch.tanh(self.lins[k](both[:, WIDTH // 2:-WIDTH // 2]))
            out[mask] = weight[mask].unsqueeze(-1) * rows
        return out


class ByPlaces(Kinds):
    def message(self, x_j, kind):
        out = x_j * 2
        for k, lin in enumerate(self.lins):
            places = (kind == k).nonzero(as_tuple=True)[0]
            if places.numel() > 0:
                out[places] += lin(x_j[places])
        places = torch.nonzero(kind == 0).view(-1)
        out[places, :] = out[places] * 2
        return out


class AskedTwice(Kinds):
    """The mask is written again each time."""

    def message(self, x_j, kind):
        out = x_j.new_zeros(x_j.size(0), WIDTH)
        for k in range(KINDS):
            if (kind == k).any():
                out[kind == k] = self.lins[k](x_j[kind == k])
        return out


class Transformer(Kinds):
    """HGT as its authors wrote it: scores and messages by kind."""

    def message(self, x_i, x_j, kind, index):
        values = self.begun(x_j).view(-1, 2, 6)
        scores = torch.zeros(x_j.size(0), 2).to(x_j)
        for k in range(2):
            mask = kind == k
            if not mask.any():
                continue
            query = self.lins[k](x_i[mask]).view(-1, 2, 6)
            key = self.lins[k + 1](x_j[mask]).view(-1, 2, 6)
            scores[mask] = (query * key).sum(dim=-1) / 2.0
            values[mask] = key
        return (values * softmax(scores, index).unsqueeze(-1)).view(-1, WIDTH)


class Numbers(Kinds):
    """Numbers, and a parameter, by masks of kinds and of what the rows are."""

    def message(self, x_i, x_j, kind, weight):
        out = x_i * x_j
        out[kind == 1] = 0.5
        out[(kind == 2) & (weight > 0.5)] = self.lins[0].bias
        out[out > 1.0] = 1.0
        scale = weight * 2
        scale[weight > 0.7] = 0.0
        return out * scale.view(-1, 1)


class Networks(Kinds):
    """Networks of rows of both ends that were mapped before, and of the edge."""

    def message(self, x_i, x_j, kind, weight):
        rows = torch.cat([torch.relu(self.lins[0](x_j)), torch.tanh(x_i - x_j)[:, :2]], -1)
        scores, out = (x_i * x_j).sum(-1), torch.zeros_like(x_j)
        for k in (1, 2):
            mask = kind == k
            if mask.sum() > 0:
                out[mask] = self.lins[k](torch.relu(self.lins[0](rows[mask][:, 2:])))
        scores[kind == 1] -= 2.0
        return out * torch.sigmoid(scores).unsqueeze(-1) * weight.view(-1, 1)


TAKEN = [ByMask, Asked, ByPlaces, AskedTwice, Transformer, Numbers, Networks]


def given(edges: int = E):
    return (graphs.features(), graphs.square(edges=edges), torch.randint(0, KINDS, (edges,)),
            torch.rand(edges))


@pytest.mark.parametrize("aggr", ["add", "max"])
@pytest.mark.parametrize("cls", TAKEN)
def test_values_and_gradients(kernels, cls, aggr):
    compare(kernels, cls(aggr), *given())


@pytest.mark.parametrize("cls", TAKEN)
def test_whole_numbers_of_32_bits_and_the_other_flow(kernels, cls):
    x, ei, kind, weight = given()
    compare(kernels, cls(flow="target_to_source"), x, ei, kind.int(), weight)


@pytest.mark.parametrize("cls", TAKEN)
def test_without_gradients(kernels, cls):
    with torch.no_grad():
        both(kernels, cls(), *given())


def trained(layer, args) -> list[torch.Tensor | None]:
    """The result and all gradients, None where there is none."""
    layer.zero_grad(set_to_none=True)
    args = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    out = layer(*args)
    if out.requires_grad:
        (out * torch.linspace(0.5, 1.5, WIDTH)).sum().backward()
    return [out.detach(), *[a.grad for a in args], *[p.grad for p in layer.parameters()]]


def agrees(emulated, layer, *args, nan: bool = False) -> None:
    """A training step leaves the same as natively, also which gradients there are none of."""
    expected = trained(copy.deepcopy(layer), args)
    with emulated.on(on_fallback="native"):
        got = trained(layer, args)
    for a, b in zip(got, expected):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, 1e-4, 1e-5, equal_nan=nan)


@pytest.mark.long
@pytest.mark.parametrize("cls", TAKEN)
@pytest.mark.parametrize("kinds", [(0, 2), (1,), (-1, 5), (0, 1, 2, 7)])
def test_kinds_that_are_absent_or_unknown(emulated, cls, kinds):
    """A call with all kinds comes before, and another one after."""
    layer, (x, ei, kind, weight) = cls(), given()
    other = torch.tensor(kinds)[torch.randint(0, len(kinds), (E,))]
    for one in (kind, other, kind, other, kind % 2):
        agrees(emulated, layer, x, ei, one, weight)
    layer = cls()
    for one in (other, kind):
        agrees(emulated, layer, x, ei, one, weight)


@pytest.mark.long
@pytest.mark.parametrize("cls", TAKEN)
def test_kinds_that_change_in_place_or_with_the_graph(emulated, cls):
    layer, (x, ei, kind, weight) = cls(), given()
    for edges in (E, 2 * E, 7, 1, 0):
        ei = torch.randint(0, graphs.N, (2, edges))
        kind, weight = torch.randint(0, KINDS, (edges,)), torch.rand(edges)
        agrees(emulated, layer, x, ei, kind, weight)
        kind.fill_(1)
        agrees(emulated, layer, x, ei, kind, weight)


@pytest.mark.parametrize("cls", [ByMask, Asked, Transformer])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_numbers_in_rows_of_other_kinds(emulated, cls, value):
    """They would reach gradients of weights, as 0 times that is no number."""
    layer, (x, ei, kind, weight) = cls(), given()
    x[3], kind[ei[0] == 3], kind[ei[1] == 3] = value, KINDS + 4, KINDS + 4
    with_others = kind.clone()
    agrees(emulated, layer, x, ei, with_others, weight, nan=True)
    x = x.nan_to_num(0.0, 0.0)
    agrees(emulated, layer, x, ei, kind, weight)


class Chained(Kinds):
    """Numbers of other kinds could become infinite on the way."""

    def message(self, x_j, kind, weight):
        out, mask = self.begun(x_j), kind == 1
        rows = torch.relu(self.lins[0](x_j[mask] * x_j[mask]))
        out[mask] = self.lins[1](rows) * weight[mask].unsqueeze(-1)
        return out


def test_huge_numbers_in_rows_of_other_kinds(emulated):
    layer, (x, ei, kind, weight) = Chained(), given()
    kind[ei[0] == 3] = KINDS + 4
    agrees(emulated, layer, x, ei, kind, weight)
    x[3] = 1e30
    agrees(emulated, layer, x, ei, kind, weight)


@pytest.mark.parametrize("cls", [ByMask, Transformer])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_numbers_in_weights_of_absent_kinds(emulated, cls, value):
    """The weights of a kind of which there are no edges give no gradient to the rows."""
    layer, (x, ei, kind, weight) = cls(), given()
    agrees(emulated, layer, x, ei, kind, weight)
    with torch.no_grad():
        layer.lins[0].weight[0, 0] = value
    agrees(emulated, layer, x, ei, torch.full_like(kind, 5), weight)


class Scaled(Kinds):
    """Parameters in rows before some are chosen."""

    def message(self, x_j, kind):
        out, mask = self.begun(x_j), kind == 1
        out[mask] = self.lins[0]((x_j * self.lins[1].bias)[mask])
        return out


def test_no_numbers_in_a_parameter_before_rows_are_chosen(emulated):
    layer, (x, ei, kind, weight) = Scaled(), given()
    agrees(emulated, layer, x, ei, kind, weight)
    with torch.no_grad():
        layer.lins[1].bias[0] = float("inf")
    agrees(emulated, layer, x, ei, torch.full_like(kind, 5), weight, nan=True)


class OtherMask(Kinds):
    def message(self, x_j, kind):
        out = self.begun(x_j)
        out[kind == 1] = x_j[kind == 2]
        return out


def test_rows_of_another_mask_end_in_the_hosts_error(emulated):
    x, ei, kind, _ = given()
    kind[:5], kind[5:9] = 1, 2
    kind[9:] = 0
    with emulated.on(on_fallback="native"), pytest.raises((RuntimeError, IndexError)):
        OtherMask()(x, ei, kind)


def test_kinds_cost_their_rows(emulated):
    """Each kind's map of all nodes is priced: of many kinds over few edges none pays."""
    from gnnaccel.adapters.pyg.propagate import reading

    x, ei, kind, _ = given()
    with emulated.on():
        call = reading.read(ByMask(), ei, {"x": x, "kind": kind, "weight": None, "size": None})
    assert call.given.more.kinds == KINDS - 1
    assert call.given.more.rows_read == (KINDS, 1)


def test_kinds_of_rows_of_the_edges_cost_theirs(emulated):
    from gnnaccel.adapters.pyg.propagate import reading

    x, ei, kind, weight = given()
    with emulated.on():
        call = reading.read(Networks(), ei, {"x": x, "kind": kind, "weight": weight, "size": None})
    assert (call.given.more.kinds, call.given.more.edge_kinds) == (0, 1)
