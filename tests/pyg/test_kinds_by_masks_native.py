"""Messages with masks that stay native: where rows of other kinds, or how many there are, would
leave a trace."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gnnaccel
from tests.pyg.generated_calls import both, routes
from tests.pyg.generated_layers import WIDTH
from tests.pyg.graphs import E
from tests.pyg.test_kinds_by_masks import Kinds, given


class Guarded(Kinds):
    """Masks that keep a division by 0 away; likewise what follows, whose gradients differ."""

    def message(self, x_j, kind):
        out = self.begun(x_j)
        mask = kind == 1
        out[mask] = 1 / x_j[mask]
        return out


class GuardedRoot(Kinds):
    def message(self, x_j, kind):
        out = self.begun(x_j)
        mask = kind == 1
        out[mask] = torch.sqrt(x_j[mask])
        return out


class GuardedBefore(Kinds):
    def message(self, x_i, x_j, kind):
        out, mask = self.begun(x_j), kind == 1
        out[mask] = self.lins[0]((x_i / x_j)[mask])
        return out


class GuardedSum(Kinds):
    def message(self, x_i, x_j, kind):
        out, mask = (x_i / x_j).sum(-1), kind == 1
        out[mask] = out[mask] * 2.0
        return x_j * out.unsqueeze(-1)


class MaskedDropout(Kinds):
    def message(self, x_j, kind):
        out, mask = self.begun(x_j), kind == 1
        out[mask] = nn.functional.dropout(x_j[mask], 0.5, self.training)
        return out


class MaskedNorm(Kinds):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def message(self, x_j, kind):
        out, mask = self.begun(x_j), kind == 1
        out[mask] = self.norm(x_j[mask])
        return out


class MaskedOverEdges(Kinds):
    def message(self, x_j, kind):
        out, mask = self.begun(x_j), kind == 1
        out[mask] = torch.softmax(x_j[mask], 0)
        return out


class MaskedMean(Kinds):
    def message(self, x_j, kind):
        mask = kind == 1
        return x_j - x_j[mask].mean(0)


class MaskedView(Kinds):
    """What lies in the memory of rows changes with them."""

    def message(self, x_j, kind):
        out = x_j * 2
        view, mask = out.view(-1, 3, 4), kind == 1
        out[mask] = 1.0
        return view.flatten(1)


class MaskedArgument(Kinds):
    def message(self, x_j, kind, weight):
        weight[kind == 1] = 0.0
        return x_j * weight.view(-1, 1)


class MaskedWithout(Kinds):
    def message(self, x_j, kind):
        out, mask = x_j * 2, kind == 1
        with torch.no_grad():
            out[mask] = self.lins[0](x_j[mask])
        return out


class MaskedCount(Kinds):
    """More is asked than whether there are any."""

    def message(self, x_j, kind):
        out, mask = self.begun(x_j), kind == 1
        if mask.sum() > 5:
            out[mask] = self.lins[0](x_j[mask])
        return out


class MaskedTwice(Kinds):
    """Chosen rows that others are made of change in place."""

    def message(self, x_j, kind):
        out, mask = self.begun(x_j), kind == 1
        rows = x_j[mask]
        halves = rows.view(-1, 3, 4)
        rows += 1
        out[mask] = halves.flatten(1)
        return out


class MaskedTable(Kinds):
    """Numbers of the other edges may name no row."""

    def message(self, x_j, kind):
        out, mask = self.begun(x_j), kind < 2
        out[mask] = self.lins[0].weight[:2][kind[mask]]
        return out * x_j


@pytest.mark.parametrize("cls", [Guarded, GuardedRoot, GuardedBefore, GuardedSum, MaskedDropout,
                                 MaskedNorm, MaskedOverEdges, MaskedMean, MaskedView,
                                 MaskedArgument, MaskedWithout, MaskedCount, MaskedTwice,
                                 MaskedTable])
def test_what_stays_native(emulated, cls):
    layer, (x, ei, kind, weight) = cls(), given()
    x, index = x.abs(), torch.arange(E) % 4
    x[ei[0][kind != 1]] = x[ei[0][kind != 1]] * (index[kind != 1] > 1).view(-1, 1)
    gnnaccel.reset_stats()
    for seed in range(2):
        other = copy.deepcopy(layer)
        torch.manual_seed(seed)
        expected = other(x, ei, kind, weight.clone())
        torch.manual_seed(seed)
        with emulated.on(on_fallback="native"):
            got = layer(x, ei, kind, weight.clone())
        assert torch.allclose(got, expected, 1e-5, 1e-6, equal_nan=True)
    assert routes(layer) == {"native": 2}


@pytest.mark.long
def test_dropout_of_chosen_rows_in_evaluation(emulated):
    layer = MaskedDropout().eval()
    both(emulated, layer, *given())
    layer.train()
    with emulated.on(on_fallback="native"):
        layer(*given())
