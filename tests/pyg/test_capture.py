"""CUDA graphs: what is captured reads the caller's tensors anew at each replay.

Here gnnaccel is told that a capture is under way, but nothing is captured; test_capture_gpu.py
captures and replays.
"""
from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.nn.conv import gcn_conv

import gnnaccel
from gnnaccel.adapters.pyg.propagate import weighted_norm
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.graph import cache
from gnnaccel.errors import GraphError
from tests import probes
from tests.pyg import graphs
from tests.pyg.every import CALLS, leaves, made
from tests.pyg.graphs import E, F
from tests.pyg.judge import close, spread

OF_RELATIONS = ["RGCNConv", "RGCNConv, blocks", "HGTConv", "FiLMConv"]
WAITS = ["ChebConv", "pool"]  # natively too: the host asks how many loops, or groups, there are
NAMES = [name for name in CALLS if name not in OF_RELATIONS + WAITS]


@pytest.fixture
def capturing(monkeypatch):
    """``capturing(number)``: from here on the capture with that number is under way, 0 for none.

    During a capture, whatever waits for the device fails.
    """
    weighted_norm._improves_alone(inspect.unwrap(gcn_conv.gcn_norm))
    now = [0]
    monkeypatch.setattr(capture, "capturing", lambda: now[0] != 0)
    monkeypatch.setattr(capture, "_number", lambda: now[0])

    def refuse(owner, name, when=lambda *args: True):
        native = getattr(owner, name)

        def waiting(*args, **kwargs):
            assert not (now[0] and when(*args)), f"{name} waits for the device"
            return native(*args, **kwargs)

        monkeypatch.setattr(owner, name, waiting)

    numbers = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
    for name in (*numbers, "nonzero", "masked_select", "unique"):
        refuse(Tensor, name)
    for name in ("nonzero", "unique", "masked_select", "bincount"):
        refuse(torch, name)
    refuse(Tensor, "__getitem__",
           lambda t, at: t.numel() > 4 and any(isinstance(i, Tensor) and i.dtype is torch.bool
                                               for i in (at if isinstance(at, tuple) else (at,))))
    return lambda number: now.__setitem__(0, number)


def edges_of(inputs) -> list[Tensor]:
    return list(inputs[1].values() if isinstance(inputs[1], dict) else [inputs[1]])


def refill(inputs) -> None:
    """Write other edges into the same memory, as users of CUDA graphs do; nothing can see it."""
    for t in edges_of(inputs):
        t.data.copy_(graphs.square())
        t.data[:, :5] = torch.arange(5)


def native(layer, inputs) -> list[Tensor]:
    with gnnaccel.disabled():
        return leaves(layer(*inputs))


@pytest.mark.parametrize("name", NAMES)
def test_edges_that_are_filled_anew(emulated, capturing, name):
    layer, inputs = made(name)
    wanted = [p for p in layer.parameters() if p.requires_grad]
    with emulated.on(on_fallback="native"):
        for _ in range(3):
            sum(t.sum() for t in leaves(layer(*inputs))).backward() if wanted else layer(*inputs)
        for number in (7, 8):
            refill(inputs)
            with torch.no_grad():
                expected = native(layer, inputs)
            capturing(number)
            outs = leaves(layer(*inputs))
            grads = (torch.autograd.grad(sum(t.pow(2).sum() for t in outs), wanted,
                                         allow_unused=True) if wanted else ())
            capturing(0)
            assert all(close(a.detach(), b) for a, b in zip(outs, expected)), name
            with gnnaccel.disabled():
                exact = (torch.autograd.grad(sum(t.pow(2).sum() for t in leaves(layer(*inputs))),
                                             wanted, allow_unused=True) if wanted else ())
            whole = [torch.cat([torch.ones(1),
                                *(torch.zeros(p.numel()) if t is None else t.flatten()
                                  for p, t in zip(wanted, found))])
                     for found in (grads, exact)]
            assert close(*whole), name


@pytest.mark.parametrize("name", OF_RELATIONS)
def test_relations_that_stand_still(emulated, capturing, name):
    """Layers of relations use what was built before, and hold the edges against it."""
    layer, inputs = made(name)
    with emulated.on(on_fallback="native"), torch.no_grad():
        expected = leaves(layer(*inputs))
        layer(*inputs)
        capturing(7)
        got = leaves(layer(*inputs))
        capturing(0)
        assert all(map(close, got, expected))
        refill(inputs)
        capturing(8)
        with pytest.raises(RuntimeError, match="changed since the CUDA graph was captured"):
            layer(*inputs)
        capturing(0)


def test_relations_whose_structure_is_not_built(emulated, capturing):
    layer, inputs = made("RGCNConv")
    with emulated.on(on_fallback="native"), torch.no_grad():
        capturing(7)
        with pytest.raises(AssertionError, match="waits for the device"):
            # the host's own code runs, which cannot be captured
            layer(*inputs)
        capturing(0)
    assert gnnaccel.stats()["RGCNConv"]["reasons"] == {"GA407": 1}


def test_backward_that_was_never_run_before(emulated, capturing):
    """What it needs would be made within the capture and kept for calls outside."""
    layer, inputs = made("RGCNConv")
    with emulated.on():
        with torch.no_grad():
            layer(*inputs)
        capturing(7)
        with pytest.raises(GraphError, match="once before the capture"):
            leaves(layer(*inputs))[0].sum().backward()
        capturing(0)
        leaves(layer(*inputs))[0].sum().backward()


def test_layers_of_one_capture_share_their_structure(emulated, capturing):
    layers, (x, ei) = ([spread(SAGEConv(F, F)) for _ in range(3)],
                       (graphs.features(), graphs.square()))
    with emulated.on():
        for layer in layers:
            layer(x, ei)
        entries = cache.info()["entries"]
        capturing(7)
        probes.count_structures_anew()
        for layer in layers:
            layer(x, ei)
        assert cache.info()["misses"] == 1 and cache.info()["entries"] == entries + 1
        capturing(8)
        layers[0](x, ei)
        assert cache.info()["entries"] == entries + 1, "of the earlier capture nothing is left"
        capturing(0)
        layers[0](x, ei.clone())
        assert not probes.structures_of_captures()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [dict(), dict(improved=True), dict(aggr="max"),
                                     dict(aggr="mean"), dict(add_self_loops=False),
                                     dict(flow="target_to_source")])
def test_gcn(emulated, capturing, options, weighted):
    """Nothing waits to know which edges are loops. Loops that are replaced count for nothing, in a
    maximum too."""
    layer, x, ei = spread(GCNConv(F, 8, **options)), graphs.features(), graphs.square()
    x[:] = -x.abs()
    w = (torch.rand(E, requires_grad=True),) if weighted else ()
    with emulated.on(on_fallback="native"):
        capturing(7)
        out = layer(x, ei, *w)
        got = [out, *torch.autograd.grad(out.pow(2).sum(), [*layer.parameters(), *w])]
        capturing(0)
        assert "native" not in gnnaccel.stats()["GCNConv"]["routes"]
    out = layer(x, ei, *w)
    assert all(map(close, got,
                   [out, *torch.autograd.grad(out.pow(2).sum(), [*layer.parameters(), *w])]))


def test_gcn_that_runs_natively(capturing):
    """A sum needs no more than weights of zero; anything else is refused."""
    x, ei = graphs.features(), graphs.square()
    with gnnaccel.enabled(backend="cuda"):
        for aggr in ("max", "sum"):
            layer = spread(GCNConv(F, 8, aggr=aggr))
            capturing(7)
            if aggr == "sum":
                got = layer(x, ei)
            else:
                with pytest.raises(GraphError, match="add_self_loops=False"):
                    layer(x, ei)
            capturing(0)
        assert close(got, native(layer, (x, ei))[0])


def test_reports_of_replays_reach_nobody(emulated, capturing):
    """The slot to which a captured kernel writes at every replay is never lent."""
    from gnnaccel.cuda.structures.structure import reports

    owner = reports(torch.device("cpu"))
    lent = owner.take()
    capturing(7)
    captured = [owner.take() for _ in range(3)]
    capturing(0)
    assert len({c.address for c in captured}) == 1 and captured[0].words is None
    address = captured[0].address
    del captured, lent
    assert address not in {at for at, _ in owner.free} and address != owner.take().address


def test_nothing_is_captured_here():
    assert capture.current() == 0
    with capture.loading():
        pass
