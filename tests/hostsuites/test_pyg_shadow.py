"""The comparison that stands around every layer call of PyG's tests: it finds what is wrong and
leaves no trace."""
from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import BatchNorm, GATConv, GCNConv, HeteroConv, SAGEConv

import gnnaccel
from gnnaccel.dispatch.ops import aggregation_cpu
from tests.hostsuites.pyg_shadow import Shadow

EDGES = torch.tensor([[0, 1, 1, 2, 3, 3, 4], [1, 0, 2, 1, 2, 4, 3]])


@pytest.fixture
def shadow():
    torch.manual_seed(0)
    with gnnaccel.enabled(backend="torch", when="supported"):
        yield Shadow()


def called(shadow, layer, *args):
    return shadow._around(torch.nn.Module.__call__, 0)(layer, *args)


@pytest.mark.parametrize("layer",
                         [SAGEConv(4, 3), GATConv(4, 3, heads=2, dropout=0.5),
                          GCNConv(4, 3, cached=True)])
def test_right_calls_leave_no_trace(shadow, layer):
    x, before = torch.randn(5, 4, requires_grad=True), dict(layer.__dict__)
    state = torch.get_rng_state()
    out = called(shadow, layer, x, EDGES)
    if isinstance(layer, GATConv):  # which drew its mask once
        torch.set_rng_state(state)
        assert torch.equal(out, layer(x, EDGES))
    else:
        assert torch.equal(torch.get_rng_state(), state)
    assert shadow.counts["same"] and not shadow.alarms
    assert x.grad is None and all(p.grad is None for p in layer.parameters())
    changed = {name for name in before if layer.__dict__[name] is not before[name]}
    assert changed <= {"_cached_edge_index"}
    if changed:
        assert not layer._cached_edge_index[1].requires_grad and layer._cached_edge_index[
            1].dtype == torch.float32


def test_a_wrong_value_is_found(shadow, monkeypatch):
    true = aggregation_cpu.run
    monkeypatch.setattr(aggregation_cpu, "run", lambda graph, given: 1.00001 * true(graph, given))
    called(shadow, SAGEConv(4, 3), torch.randn(5, 4), EDGES)
    assert "out" in shadow.taken()[0] and not shadow.taken()


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.01 * grad


def test_a_wrong_gradient_is_found_though_the_test_wants_none(shadow, monkeypatch):
    true = aggregation_cpu.run
    monkeypatch.setattr(aggregation_cpu, "run", lambda graph,
                        given: _WrongBackward.apply(true(graph, given)))
    with torch.no_grad():
        called(shadow, SAGEConv(4, 3), torch.randn(5, 4), EDGES)
    assert "grad" in shadow.taken()[0]


def test_a_result_that_is_wrong_only_when_repeated_is_found(shadow, monkeypatch):
    true, calls = aggregation_cpu.run, []
    monkeypatch.setattr(aggregation_cpu, "run", lambda graph,
                        given: true(graph, given) * (1.1 if calls else 1) + 0
                        * (calls.append(1) or 0))
    called(shadow, SAGEConv(4, 3), torch.randn(5, 4), EDGES)
    assert "the call itself" in shadow.taken()[-1]


def test_what_only_one_side_raises_is_found(shadow, monkeypatch):
    monkeypatch.setattr(aggregation_cpu, "run", lambda graph,
                        given: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError):
        called(shadow, SAGEConv(4, 3), torch.randn(5, 4), EDGES)
    assert "only gnnaccel raises" in shadow.taken()[0]


def test_both_may_raise(shadow):
    with pytest.raises(RuntimeError):
        called(shadow, SAGEConv(4, 3), torch.randn(5, 7), EDGES)
    assert not shadow.taken() and shadow.counts["both raise"] == 1


def test_layers_inside_are_compared_with_what_is_around_them(shadow):
    conv = HeteroConv({("a", "to", "b"): SAGEConv((4, 4), 3),
                       ("b", "to", "a"): SAGEConv((4, 4), 3)})
    called(shadow, conv, {"a": torch.randn(5, 4), "b": torch.randn(5, 4)},
           {("a", "to", "b"): EDGES, ("b", "to", "a"): EDGES.flip(0)})
    assert shadow.counts["same"] == 2 and not shadow.alarms  # before the call, and the call itself


def test_other_modules_and_watched_ones_are_left_alone(shadow):
    called(shadow, BatchNorm(4), torch.randn(5, 4))
    layer = SAGEConv(4, 3)
    layer.register_forward_hook(lambda *_: None)
    called(shadow, layer, torch.randn(5, 4), EDGES)
    assert dict(shadow.counts) == {"hooks": 1}
