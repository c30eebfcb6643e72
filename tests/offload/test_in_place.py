"""Bands that gather from all rows, where these are on the device, and copy none for themselves."""
from __future__ import annotations

import contextlib
import shutil
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import nn

from gnnaccel import enabled, offload
from gnnaccel.adapters.pyg.distributed import layers
from gnnaccel.adapters.pyg.offload.banding import plans
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.distributed.building import EDGE
from gnnaccel.dispatch.offload import plan
from gnnaccel.dispatch.offload.calls import Call
from gnnaccel.dispatch.offload.memory import Memory
from gnnaccel.dispatch.offload.near import Near
from gnnaccel.dispatch.offload.session import BandSession
from gnnaccel.dispatch.offload.sizes import Widths
from tests.distributed import graphs, layer_cases
from tests.emulation.emulator import EmulatedDriver
from tests.offload import checks

NODES, EDGES = 400, 1200
#: bytes that leave room for all rows
LIMIT = 10**6


#: layers that gather rows of each of several hops, for which there is no room
HOPS = ("APPNP", "ARMAConv", "SGConv", "SSGConv", "TAGConv")


@pytest.fixture(autouse=True)
def small_bands(monkeypatch):
    monkeypatch.setattr(Widths, "parts", lambda self, sizes, edges, room: 12)
    with checks.small_bands():
        yield


@pytest.fixture
def numbered(monkeypatch):
    """Of each band that ran, whether its halo were all rows."""
    ran, begin = [], BandSession.__init__

    def noted(self, bands, band, edges, halo, in_place=False):
        ran.append(in_place)
        begin(self, bands, band, edges, halo, in_place)

    monkeypatch.setattr(BandSession, "__init__", noted)
    return ran


@pytest.fixture
def data():
    found, g = layer_cases.data(), graphs.generator(1)
    edge_index = torch.randint(0, NODES, (2, EDGES), generator=g)
    edge_index[:, :40] = torch.stack([torch.arange(40)] * 2)  # self-loops
    values = {"edge_index": edge_index}
    for key in ("x", "x0", "edge_weight", "edge_attr"):
        rows = EDGES if key.startswith("edge") else NODES
        values[key] = torch.rand((rows, *found[key].shape[1:]), generator=g)
    return values


def case(name, data):
    """A layer and its arguments."""
    torch.manual_seed(0)
    make, given = layer_cases.CASES[name]
    return make(nn).eval(), given(data)


class Large(TorchDispatchMode):
    """Counts operations that make as many rows as the graph has, in new memory."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (isinstance(out, torch.Tensor) and out.dim() > 1 and len(out) >= NODES
                and not func.is_view and not func.name().startswith("aten::empty")
                and all(out is not t for t in (*args, *(kwargs or {}).values()))):
            self.made.append(func.name())
        return out


@pytest.mark.parametrize("name", sorted(layers.GATHERING))
@pytest.mark.parametrize("kernels", [False, True])
def test_layers(name, kernels, data, numbered, monkeypatch):
    """Also: nothing is computed of all rows in a band."""
    if kernels and shutil.which("g++") is None:
        pytest.skip("the CPU emulation of kernels needs g++")
    warnings.simplefilter("ignore")
    layer, given = case(name, data)
    right = layer(*given)
    counted, run = Large(), Call.run

    def watched(self, *args):
        with counted:
            return run(self, *args)

    monkeypatch.setattr(Call, "run", watched)
    with contextlib.ExitStack() as stack:
        if kernels:
            stack.enter_context(driver.using(EmulatedDriver()))
            stack.enter_context(enabled(when="supported", backend="cuda"))
        with offload(LIMIT, device="cpu") as ran, torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(layer(*given), right, rtol=1e-5, atol=1e-5)
    assert sum(count for _, count in ran.ran) == 12
    assert any(numbered) if name in HOPS else all(numbered[-11:])
    assert not counted.made


def test_layers_that_compute_of_sources_copy_their_rows(data, numbered):
    for name in ("GATConv", "EdgeConv", "PNAConv"):
        layer, given = case(name, data)
        with offload(LIMIT, device="cpu"), torch.no_grad():
            layer(*given)
    assert numbered and not any(numbered)


def test_training_and_inference_take_turns(data, numbered):
    """Bands number their edges otherwise in training; edges that stay are those of the call."""
    layer, (x, edges, _) = case("GCNConv", data)
    x = torch.cat([x] * 12, 1)
    layer = nn.GCNConv(x.shape[1], 8).eval()
    edges = edges[:, :200].clone()
    right = layer(x, edges)
    gradient = torch.autograd.grad(right.square().sum(), layer.lin.weight)[0]
    with offload(LIMIT, device="cpu"):
        for _ in range(3):
            with torch.no_grad():
                for _ in range(2):
                    torch.testing.assert_close(layer(x, edges), right, rtol=1e-5, atol=1e-5)
            assert any(numbered)
            assert all(len(bands.resident) == len(bands.bands) > 1 for known in plans.get(
                edges).values() for bands in known.values())
            numbered.clear()
            out = layer(x, edges)
            found = torch.autograd.grad(out.square().sum(), layer.lin.weight)[0]
            torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-4)
            assert not any(numbered)
            numbered.clear()


@pytest.mark.parametrize("kind", [nn.LEConv, nn.SAGEConv, nn.GCNConv])
@pytest.mark.parametrize("before", [(), (torch.no_grad,)])
def test_training_after_inference_mode(kind, before, data):
    """Edges that stay are no tensors of inference mode."""
    torch.manual_seed(0)
    layer, x, edges = kind(6, 4), data["x"][:, :6].clone().requires_grad_(), data["edge_index"]
    right = layer(x, edges)
    gradient, = torch.autograd.grad(right.square().sum(), x)
    with offload(LIMIT, device="cpu"):
        for mode in (*before, torch.inference_mode):
            with mode():
                torch.testing.assert_close(layer(x, edges), right, rtol=1e-5, atol=1e-5)
        found, = torch.autograd.grad(layer(x, edges).square().sum(), x)
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows_first", [False, True])
def test_models(rows_first, data, numbered):
    """Results stay for the next layer, which gathers from them; also those of an operation on rows
    that ran before any layer, in front of which there is no room."""
    x, edges = data["x"], data["edge_index"]
    torch.manual_seed(0)
    first, second = nn.SAGEConv(x.shape[1], 16), nn.GINConv(torch.nn.Linear(16, 8))

    def model():
        rows = first((x * 2 if rows_first else x), edges).relu()
        return second(rows, edges)

    right = model()
    with offload(LIMIT, device="cpu") as ran, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(), right, rtol=1e-5, atol=1e-5)
        assert ran.memory.stayed
    assert sum(numbered) > len(numbered) // 2


MEMORY = Memory(torch.device("cpu"))


def called(function, edges, *inputs, times=2, kind="node", spare=10**6):
    """The results of ``function``, the second time with what the first one found out."""
    bands, known = plan.cut(edges, (NODES, NODES), EDGE, 6, MEMORY), {}
    for _ in range(times):
        call = Call(function, bands, [kind] * len(inputs), MEMORY, "a function",
                    contextlib.nullcontext, known=known, spare=spare, gathers=True)
        out = call(list(inputs), [])
    return call, out


def total(session, x, name="x"):
    rows = session.extend("node", x, name, "a function")
    source, target = session.part.edges[EDGE]
    own = len(session.part.rows["node"].own)
    return torch.zeros(own, *x.shape[1:]).index_add(0, target, rows[source])


def sums(edges, x):
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


def test_a_result_that_is_what_was_gathered(data, numbered):
    """Rows that the next band writes over before they have gone."""
    x, edges = data["x"], data["edge_index"]

    def function(session, inputs, whole):
        rows = session.extend("node", inputs[0], "x", "a function")
        return rows[:len(inputs[0])]

    held, put = [], Memory.put

    def late(self, close, where, far, also=None):
        """Results go once the next band has run."""
        held.append((close, where, far, also))
        if len(held) > 1:
            put(self, *held.pop(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "put", late)
        _, out = called(function, edges, x)
    put(MEMORY, *held.pop())
    assert any(numbered) and torch.equal(out, x)


def test_what_is_collected_and_what_is_asked_for_twice(data, numbered):
    x, edges = data["x"], data["edge_index"]

    def function(session, inputs, whole):
        once = total(session, inputs[0])
        return total(session, once, "y") + total(session, inputs[0], "z") + once

    call, out = called(function, edges, x)
    once = sums(edges, x)
    assert call.answers["x", 0] == call.answers["z", 0] == 0  # no stage for what was not written to
    torch.testing.assert_close(out, sums(edges, once) + once + once)
    assert sum(numbered) > len(numbered) // 2


def test_gradients_of_what_may_be_gathered_in_place(data, numbered):
    x, edges = data["x"].clone().requires_grad_(), data["edge_index"]
    _, out = called(lambda session, inputs, whole: total(session, inputs[0]), edges, x)
    weights = torch.randn_like(out)
    found = torch.autograd.grad(out, x, weights)[0]
    torch.testing.assert_close(found, torch.autograd.grad(sums(edges, x), x, weights)[0])
    assert not any(numbered)


def test_halos_that_are_ranges(numbered):
    """Nearly all rows of a range, which begins behind some that are not needed."""
    g = graphs.generator(2)
    edges = torch.stack([torch.randint(200, NODES, (9000,), generator=g),
                         torch.randint(0, NODES, (9000,), generator=g)])
    bands = plan.cut(edges, (NODES, NODES), EDGE, 6, MEMORY).bands
    assert any(isinstance(band.halo, slice) and band.halo.start for band in bands)
    x = torch.randn(NODES, 3, generator=g)
    _, out = called(lambda session, inputs, whole: total(session, inputs[0]), edges, x)
    torch.testing.assert_close(out, sums(edges, x), rtol=1e-4, atol=1e-4)
    assert any(numbered)


def test_rows_that_one_band_alone_asks_for(data, numbered):
    """All rows come for a band that gathers what no band before it did, and that are not there."""
    x, edges = data["x"], data["edge_index"]

    def function(session, inputs, whole):
        out = total(session, inputs[0])
        if session.part.rank == 3:
            total(session, inputs[1], "y")
        return out

    y = torch.randn(NODES, 40)
    _, out = called(function, edges, x, y, spare=x.numel() * 4 + 5000)
    assert any(numbered)
    torch.testing.assert_close(out, sums(edges, x))


def test_without_room_for_all_rows_bands_copy_their_own(data, numbered):
    x, edges = data["x"], data["edge_index"]
    for spare in (0, x.numel() * 4 - 1, x.numel() * 4):  # the last: none for a band's own rows
        _, out = called(lambda session, inputs, whole: total(session, inputs[0]), edges, x,
                        spare=spare)
        torch.testing.assert_close(out, sums(edges, x))
    assert numbered and not any(numbered)


def test_room_in_front_of_rows():
    memory = Memory(torch.device("cpu"))
    memory.ahead = 3
    near = Near(memory, plan.ranges(0, 1), 0)
    near._room = near._left = 8 * 4 * 4
    far = torch.randn(5, 4)
    rows = near.behind(far, 2)
    assert rows.shape == (7, 4) and torch.equal(rows[2:], far)
    assert near.behind(far, 3).shape == (8, 4) and near.behind(far, 4) is None
    rows[:2] = 7
    assert torch.equal(near.of(far), far)
    assert near.behind(torch.randn(1, 4), 1) is None  # no room is left
