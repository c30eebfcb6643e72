"""Plain modules that do more than is followed, and where none are followed: they run as they are
written."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import gnnaccel
from tests.plain import layers
from tests.plain.held import codes, same
from tests.plain.test_layers import tensors

FLAG = True
LOG: list = []


class Base(nn.Module):
    """Sums messages of the sources."""

    def __init__(self):
        super().__init__()
        self.lin, self.calls, self.seen = nn.Linear(8, 8), 0, []
        self.register_buffer("kept", torch.zeros(8))

    def forward(self, x, edge_index):
        return self.summed(x, edge_index, self.lin(x)[edge_index[0]])

    def summed(self, x, edge_index, messages):
        return torch.zeros_like(x).index_add_(0, edge_index[1], messages)


class Counts(Base):
    def forward(self, x, edge_index):
        self.calls += 1
        return super().forward(x, edge_index)


class Keeps(Base):
    def forward(self, x, edge_index):
        self.last = x[edge_index[0]]
        return self.summed(x, edge_index, self.last)


class Logs(Base):
    def forward(self, x, edge_index):
        self.seen.append(x.shape)
        LOG.append(1)
        return super().forward(x, edge_index)


class Prints(Base):
    def forward(self, x, edge_index):
        print("rows", len(x))
        return super().forward(x, edge_index)


class WritesInput(Base):
    def forward(self, x, edge_index):
        x = x * 1
        messages = x[edge_index[0]]
        x += 1
        return self.summed(x, edge_index, messages) + x


class WritesBuffer(Base):
    def forward(self, x, edge_index):
        self.kept += x.detach().mean(0)
        return super().forward(x, edge_index) + self.kept


class Branches(Base):
    def forward(self, x, edge_index):
        out = super().forward(x, edge_index)
        return out if x.sum() > 0 else -out


class Catches(Base):
    def forward(self, x, edge_index):
        try:
            return super().forward(x, edge_index)
        except Exception:
            return x * 0


class Slices(Base):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index)[:7]


class EdgeViews(Base):
    def forward(self, x, edge_index, w):
        return self.summed(x, edge_index, x[edge_index[0]] * w[:, None]), w.view(-1, 1)


class WritesEdges(Base):
    def forward(self, x, edge_index, w):
        w.mul_(2)
        return self.summed(x, edge_index, x[edge_index[0]] * w[:, None])


class Overwrites(Base):
    def forward(self, x, edge_index):
        out = torch.zeros_like(x)
        out[edge_index[1]] += x[edge_index[0]]
        return out + 0 * torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])


NATIVE = [Counts, Keeps, Logs, Prints, WritesBuffer, Branches, Catches, Slices,
          Overwrites]


@pytest.fixture
def on(emulated):
    with gnnaccel.enabled(backend="cuda", when="supported"):
        yield


@pytest.mark.parametrize("cls", NATIVE)
def test_what_is_not_followed(on, cls):
    x, edges = tensors("x edge_index")
    x.requires_grad_()
    layer = cls()
    for _ in range(2):
        state = {k: v.clone() for k, v in layer.state_dict().items()}
        calls, seen = layer.calls, len(layer.seen)
        with gnnaccel.disabled():
            torch.manual_seed(0)
            layer(x, edges)
        counts = layer.calls - calls, len(layer.seen) - seen
        expected = {k: v.clone() for k, v in layer.state_dict().items()}
        layer.load_state_dict(state)
        calls, seen = layer.calls, len(layer.seen)
        torch.manual_seed(0)
        layer(x, edges)
        assert counts == (layer.calls - calls, len(layer.seen) - seen)
        for name, value in layer.state_dict().items():
            torch.testing.assert_close(value, expected[name])
        if cls is not WritesBuffer:
            assert not same(layer, x, edges)
    assert codes(layer) <= {"GA211", "GA206"}


def test_inputs_that_are_written(on):
    x, edges, w = tensors("x edge_index w")
    layer = WritesInput()
    same(layer, x.clone(), edges)
    for cls in (WritesEdges, EdgeViews):
        given = w.clone()
        expected = w.clone()
        layer = cls()
        with gnnaccel.disabled():
            first = layer(x, edges, expected)
        second = layer(x, edges, given)
        torch.testing.assert_close(first, second)
        torch.testing.assert_close(given, expected)
    second[1].mul_(0)
    assert not given.any()


class Flagged(Base):
    def forward(self, x, edge_index):
        messages = x[edge_index[0]]
        if FLAG:
            messages = messages * 2
        return torch.zeros_like(x).index_add_(0, edge_index[1], messages)


def test_global_values(on, monkeypatch):
    x, edges = tensors("x edge_index")
    layer = Flagged()
    assert same(layer, x, edges) and same(layer, x, edges)
    monkeypatch.setitem(globals(), "FLAG", False)
    assert same(layer, x, edges)
    monkeypatch.setattr(torch, "zeros_like", lambda x: torch.ones(x.shape))
    same(layer, x, edges)


def test_what_changes_in_each_call_is_left_alone(on):
    x, edges = tensors("x edge_index")

    class Annealed(nn.Module):
        temperature = 1.0

        def forward(self, x, edge_index):
            messages = x[edge_index[0]] / self.temperature
            return torch.zeros_like(x).index_add_(0, edge_index[1], messages)

    layer, routes = Annealed(), []
    for k in range(40):
        layer.temperature = 1.0 + k
        routes.append(same(layer, x, edges))
    assert all(routes[:20]) and not any(routes[-5:])


# --- subclasses, and modules around others ---------------------------------------------------------

class Scaled(layers.WeightedSum):
    def forward(self, x, edge_index, w):
        return 2 * super().forward(x, edge_index, w)


class Same(layers.WeightedSum):
    pass


class Frame(nn.Module):
    """What others give its methods to."""

    def forward(self, x, edge_index, w):
        return self.reduced(x, edge_index[1], x[edge_index[0]] * w[:, None])


class Filled(Frame):
    def reduced(self, x, index, messages):
        return torch.zeros_like(x).index_add(0, index, messages)


class Model(nn.Module):
    """Sums by itself, over layers that do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.WeightedSum(), Scaled()

    def forward(self, x, edge_index, w):
        x = self.second(self.first(x, edge_index, w).relu(), edge_index, w)
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])


def test_subclasses(on):
    given = tensors("x edge_index w")
    for cls in (Scaled, Same, Filled, layers.WeightedSum):
        layer = cls()
        assert same(layer, *given) and same(layer, *given)
    assert not same(Model(), *given)
    stats = gnnaccel.stats()
    assert stats["Scaled"]["routes"] == stats["WeightedSum"]["routes"] == {"cuda": 1}


class OfEdges(nn.Module):
    """Adds up what edges have, by one end: the ids of the other may be of other nodes."""

    def forward(self, x, edge_index, w):
        return x + torch.zeros_like(x).index_add_(0, edge_index[0], w.tanh())


def test_ids_of_other_nodes(on):
    layer = OfEdges()
    x, edges, w = tensors("x edge_index latents")
    for more in (0, 3, 1000):
        far = edges + torch.tensor([[0], [more]])
        for _ in range(2):
            assert same(layer, x, far, w)


def test_negative_ids_count_from_behind(on):
    layer = layers.WeightedSum()
    x, edges, w = tensors("x edge_index w")
    assert same(layer, x, edges, w)
    behind = edges - torch.tensor([[len(x)], [0]])
    for _ in range(3):
        assert not same(layer, x, behind, w)
        torch.testing.assert_close(layer(x, behind, w), layer(x, edges, w))


def outcome(layer, given):
    try:
        return layer(*given)
    except Exception as error:
        return error


def test_forms_of_graphs(on):
    layer = layers.WeightedSum()
    x, edges, w = tensors("x edge_index w")
    assert same(layer, x, edges, w)
    for count in (0, 1, len(x)):
        assert not same(layer, x, edges[:, :count].contiguous(), w[:count])
    assert not same(layer, x[:1], edges * 0, w)
    assert not same(layer, x, edges.t().contiguous().t()[:, :0], w[:0])
    assert same(layer, x, edges.t().contiguous().t(), w)
    for strange in (torch.nested.nested_tensor([x, x]), x.to_sparse(), x.to("meta"), "x", {"x": x},
                    torch.nested.nested_tensor([edges[0], edges[1]]), edges.to_sparse()):
        for given in ((strange, edges, w), (x, strange, w), (x, edges, strange)):
            with gnnaccel.disabled():
                expected = outcome(layer, given)
            found = outcome(layer, given)
            assert type(found) is type(expected)
            if isinstance(found, torch.Tensor) and not found.is_meta:
                torch.testing.assert_close(found, expected)
    with pytest.raises((IndexError, RuntimeError)):
        with gnnaccel.disabled():
            layer(x, edges + 100, w)
    with pytest.raises((IndexError, RuntimeError)):
        layer(x, edges + 100, w)
