"""Rows of the edges that a module gives back besides sums that are made of them: a gradient that
goes through the sums goes through these rows, as scripts see by `retain_grad`, hooks and
`torch.autograd.grad`."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import gnnaccel
from tests.pyg.judge import close
from tests.routes import opened

N, E, C = 30, 140, 8


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.att = nn.Linear(C, C), nn.Linear(2 * C, 1)
        self.mlp = nn.Sequential(nn.Linear(2 * C, C), nn.SiLU(), nn.Linear(C, C))

    def forward(self, x, edge_index, e):
        row, col = edge_index
        return self.of(x, row, col, e)


def summed(x, m, row):
    return torch.zeros(x.shape[0], m.shape[-1]).index_add_(0, row, m)


class Product(Module):
    def of(self, x, row, col, e):
        m = torch.tanh(x[row] * x[col]) * e
        return summed(x, m, row), m


class Goes(Module):
    """More is made of the rows before the sum."""

    def of(self, x, row, col, e):
        m = x[row] * x[col]
        return summed(x, torch.sin(m) * e + m, row), m


class Network(Module):
    def of(self, x, row, col, e):
        m = self.mlp(torch.cat([x[row], x[col]], -1))
        return summed(x, m, row), m


class Residual(Module):
    def of(self, x, row, col, e):
        m = self.mlp(torch.cat([x[row], x[col]], -1))
        return x + summed(x, m, row), e + m


class Weights(Module):
    """A softmax by hand."""

    def of(self, x, row, col, e):
        h = self.lin(x)
        score = torch.nn.functional.leaky_relu(self.att(torch.cat([h[row], h[col]], -1)))
        weight = torch.exp(score)
        weight = weight / summed(x, weight, row)[row]
        return summed(x, weight * h[col], row), weight


class Gate(Module):
    """Two sums, of coordinates as well."""

    def of(self, x, row, col, e):
        away = x[row][:, :3] - x[col][:, :3]
        m = self.mlp(torch.cat([x[row], x[col]], -1))
        gate = torch.sigmoid(self.lin(m))
        return summed(x, away * torch.tanh(m[:, :1]), row), summed(x, m * gate, row), m, gate


class Pieces(Module):
    """A gate is a piece of the rows that are given back, and a map is made of them."""

    def of(self, x, row, col, e):
        m = torch.sin(x[row] * x[col]) * e
        h = torch.nn.functional.silu(m)
        gate, rest = m[:, :1], h.chunk(2, -1)[0]
        score = torch.sigmoid(self.lin(h)) * gate
        return summed(x, score * x[col], row), m, h, summed(x, rest, row)


class Views(Module):
    def of(self, x, row, col, e):
        m = x[row] - x[col]
        heads = m.view(-1, 2, 4)
        weight = heads.pow(2).sum(-1)
        return summed(x, (heads * weight.unsqueeze(-1)).flatten(1), row), weight, m


@pytest.mark.parametrize("cls", [Product, Goes, Network, Residual, Weights, Gate, Pieces, Views])
def test_gradients_go_through_them(cls):
    torch.manual_seed(0)
    module, x, e = cls(), torch.randn(N, C), torch.randn(E, C)
    edge_index = torch.randint(N, (2, E))

    def run():
        leaf, edges = x.clone().requires_grad_(), e.clone().requires_grad_()
        results = module(leaf, edge_index, edges)
        rows = [t for t in results if t.shape[0] == E]
        doubled = rows[0] * 1.0  # as a copy that is changed would be
        for t in rows:
            t.retain_grad()
        (sum(t.square().sum() for t in results) + doubled.sum()).backward()
        return [*results, *(t.grad for t in rows), leaf.grad, edges.grad]

    expected = run()
    gnnaccel.reset_stats()
    with opened("emulated"), gnnaccel.enabled(backend="cuda", when="supported"):
        for _ in range(4):
            for one, two in zip(run(), expected):
                assert (one is None) == (two is None) and (two is None or close(one, two, 1e-5))
    assert gnnaccel.stats()[cls.__name__]["routes"] == {"cuda": 4}


class Scattered(Module):
    """Torch's own keeps no hold of the rows."""

    def of(self, x, row, col, e):
        m = self.mlp(torch.cat([x[row], x[col]], -1))
        return torch.zeros_like(x).scatter_add_(0, row[:, None].expand_as(m), m), m


def test_they_may_be_changed():
    """In place, before and after backward, where natively they may."""
    torch.manual_seed(0)
    module, x, e = Scattered(), torch.randn(N, C), torch.randn(E, C)
    edge_index = torch.randint(N, (2, E))

    def run():
        leaf = x.clone().requires_grad_()
        out, m = module(leaf, edge_index, e)
        m += 1.0
        (out.square().sum() + m.sum()).backward()
        m.detach().zero_()
        return [out.detach(), leaf.grad]

    expected = run()
    with opened("emulated"), gnnaccel.enabled(backend="cuda", when="supported"):
        for _ in range(8):
            for one, two in zip(run(), expected):
                assert close(one, two, 1e-5)
