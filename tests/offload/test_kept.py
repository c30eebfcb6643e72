"""The last result stays on the device for the next call, unless it may have been written to."""
from __future__ import annotations

import threading
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv

from gnnaccel import enabled, offload
from gnnaccel.dispatch.offload import plan, rowwise
from gnnaccel.dispatch.offload.memory import Memory
from gnnaccel.dispatch.offload.near import Near
from gnnaccel.dispatch.offload.sizes import NEAR
from gnnaccel.errors import OffloadError
from tests.distributed import graphs
from tests.helpers import same_bits
from tests.offload import checks

NODES, WIDTH = 60, 6
BYTES = NODES * WIDTH * 4  # of the rows of one result


@pytest.fixture(autouse=True)
def small_bands():
    with checks.small_bands():
        yield


@pytest.fixture
def fetched(monkeypatch):
    """The tensors that rows were fetched of, or that came as a whole."""
    found = []
    fetch, near = Memory.fetch, Memory.near

    def counted(self, far, *wheres, free=0):
        found.append(far)
        return fetch(self, far, *wheres, free=free)

    def whole(self, far, ahead=0):
        found.append(far)
        return near(self, far, ahead)

    monkeypatch.setattr(Memory, "fetch", counted)
    monkeypatch.setattr(Memory, "near", whole)
    return found


@pytest.fixture
def data():
    g = graphs.generator(0)
    return torch.randn(NODES, WIDTH, generator=g), torch.randint(0, NODES, (2, 300), generator=g)


def layer(kind=SAGEConv):
    torch.manual_seed(0)
    return kind(WIDTH, WIDTH).eval()


@pytest.mark.parametrize("kind", [SAGEConv, GCNConv])
def test_results_do_not_come_again(kind, data, fetched):
    x, edges = data
    first, second = layer(kind), layer(kind)
    with torch.no_grad():
        right = [first(x, edges)]
        right += [right[0].relu()]
        right += [second(right[1], edges)]
        with offload(100_000, device="cpu") as ran:
            a = first(x, edges)
            assert a.shape == (NODES, WIDTH) and a.device.type == "cpu" and len(a) == NODES
            b = a.relu()
            c = nn.Dropout().eval()(b)
            out = second(c, edges)
        assert c is b
    assert not {a.data_ptr(), b.data_ptr()} & {far.data_ptr() for far in fetched}
    assert ran.memory.stayed == 2 * BYTES and not ran.memory.kept
    for found, truth in zip((a, b, out), right):
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)


def in_another_thread(out):
    thread = threading.Thread(target=out.fill_, args=(3.0,))
    thread.start()
    thread.join()


def by_a_script(out):
    torch.jit.trace(lambda t: t.fill_(3.0), torch.zeros(2), check_trace=False)(out)


#: ways to write to a result, each of which fills it with threes
WRITES = {
    "fill_": lambda out: out.fill_(3.0),
    "an item": lambda out: out.__setitem__(slice(None), 3.0),
    "a view": lambda out: out.view(-1)[:].fill_(3.0),
    "a row after the other": lambda out: [row.fill_(3.0) for row in out],
    "out=": lambda out: torch.full(out.shape, 3.0, out=out),
    "data": lambda out: out.data.fill_(3.0),
    "detach": lambda out: out.detach().fill_(3.0),
    "numpy": lambda out: out.numpy().fill(3.0),
    "an array": lambda out: np.asarray(out).fill(3.0),
    "dlpack": lambda out: torch.from_dlpack(out).fill_(3.0),
    "storage": lambda out: torch.empty(0).set_(out.untyped_storage(), 0, out.shape).fill_(3.0),
    "set_": lambda out: out.set_(torch.full(out.shape, 3.0)),
    "new data": lambda out: setattr(out, "data", torch.full(out.shape, 3.0)),
    "another thread": in_another_thread,
    "a script": by_a_script,
    "a parameter": lambda out: nn.Parameter(out, requires_grad=False).data.fill_(3.0),
    "an activation": lambda out: F.threshold(out, torch.inf, 3.0, inplace=True),
    "dropout": lambda out: F.dropout(out, 1.0, training=True, inplace=True).add_(3.0),
    "unseen": lambda out: torch._C._disabled_torch_function_impl(torch.Tensor.fill_, (), (out, 3.0)),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("next_call", [torch.relu, SAGEConv])
def test_what_was_written_to_comes_again(way, next_call, data):
    x, edges = data
    one, other = layer(), layer()
    with torch.no_grad():
        right = (torch.full((NODES, WIDTH), 3.0) if next_call is torch.relu
                 else other(torch.full((NODES, WIDTH), 3.0), edges))
        with offload(100_000, device="cpu") as ran:
            out = one(x, edges)
            assert ran.memory.kept
            WRITES[way](out)
            found = next_call(out) if next_call is torch.relu else other(out, edges)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("way", ["sum", "a tensor of its own", "deleted", "not in bands", "left",
                                 "cut", "closed"])
def test_nothing_stays_where_something_else_may_need_the_memory(way, data):
    x, edges = data
    one, others = layer(), edges.flip(0)
    with torch.no_grad(), offload(100_000, device="cpu") as ran:
        out = one(x, edges)
        kept = ran.memory.kept
        assert kept
        if way == "sum":
            out.sum()
        elif way == "a tensor of its own":
            torch.zeros(3)
        elif way == "deleted":
            del out
        elif way == "not in bands":
            with enabled(offload=False):
                assert not kept
        elif way == "left":
            with ran.left():
                assert not kept
        elif way == "cut":
            ran._cut = lambda *args, cut=ran._cut: (cut(*args), pytest.fail("kept") if kept else 0)[0]
            one(out, others)
            kept.drop()
        if way != "closed":
            assert not kept
    assert not kept


def test_nothing_stays_of_a_call_that_fails(data, monkeypatch):
    x, edges = data
    one = layer()
    with torch.no_grad(), offload(100_000, device="cpu") as ran:
        out = one(x, edges)
        monkeypatch.setattr(Memory, "put", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.relu()
        assert not ran.memory.kept
        monkeypatch.undo()
        assert torch.equal(out.relu(), out.clamp(min=0))


def test_nothing_stays_where_there_is_no_room_or_no_count_of_writes(data):
    x, edges = data
    one = layer()
    with torch.no_grad(), offload(BYTES, device="cpu") as ran:
        out = one(x, edges)
        assert not ran.memory.kept
        out.relu()
        assert not ran.memory.kept and not ran.memory.stayed
    with torch.inference_mode(), offload(100_000, device="cpu") as ran:
        one(x, edges)
        assert not ran.memory.kept
    with offload(100_000, device="cpu") as ran:
        one(x, edges)  # which backward runs again
        assert not ran.memory.kept


def test_room_for_results(data):
    memory = Memory(torch.device("cpu"))
    rows = torch.zeros(3, 5)
    near = Near(memory, plan.ranges(3, 1), 0, 2 * 60 + 59)
    near.adopt(rows, rows + 1)
    assert torch.equal(near.known(rows), rows + 1) and memory.stayed == 60
    assert near.leaves((3, 5), torch.float).shape == (3, 5)
    assert near.leaves((3, 5), torch.float) is None
    near = Near(memory, plan.ranges(3, 1), 0, 2 * 60 - 1)  # of which the result is the one that stays
    near.adopt(rows, rows + 1)
    assert torch.equal(near.known(rows), rows) and memory.stayed == 60
    assert near.leaves((3, 5), torch.float) is not None


@pytest.mark.parametrize("limit", [2000, 2700])
def test_bands_of_rows_leave_no_more_than_layers_can_take(limit, data, monkeypatch):
    monkeypatch.setattr(rowwise, "_BAND", 50)
    with torch.no_grad(), offload(limit, device="cpu") as ran:
        out = data[0].relu()  # noqa: F841 - it stays while it is used
        assert bool(ran.memory.kept) is (NEAR * limit >= BYTES)


@pytest.mark.parametrize("limit", [4000 + BYTES - 100, 4000 + BYTES])
def test_room_beside_bands_of_rows(limit, data):
    with torch.no_grad(), offload(limit, device="cpu") as ran:
        out = data[0].relu()  # noqa: F841 - it stays while it is used; eight bands take 4000
        assert bool(ran.memory.kept) is (limit == 4000 + BYTES)


@pytest.mark.long
@pytest.mark.parametrize("limit, stays", [(2.36, True), (2.2, False)])
def test_bands_are_so_small_that_results_stay(limit, stays):
    """Where all rows come once, smaller bands fetch no more. ``limit``: in bytes of a result. With
    too little for bands they are large, and the result goes."""
    torch.manual_seed(0)
    nodes, width = 2000, 128
    x, edges = torch.randn(nodes, width), torch.randint(0, nodes, (2, 16 * nodes))
    one, other, size = SAGEConv(width, width), SAGEConv(width, width), nodes * width * 4
    with torch.no_grad():
        right = other(one(x, edges).relu(), edges)
        with offload(int(limit * size), device="cpu") as ran:
            found = other(one(x, edges).relu(), edges)
    assert ran.memory.stayed == (2 if stays else 1) * size
    assert (min(bands for _, bands in ran.ran) > 100) is stays
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_the_largest_result_that_stays():
    memory = Memory(torch.device("cpu"))
    near = Near(memory, plan.ranges(3, 1), 0, 1000, 59)
    near.adopt(torch.zeros(3, 5), torch.ones(3, 5))
    assert memory.stayed == 60
    assert near.leaves((3, 5), torch.float) is None and near.leaves((2, 7), torch.float) is not None


@pytest.mark.parametrize("free, after, blocks, has", [
    (100, 100, [], True), (99, 99, [("inactive", 100, 7, 0)], True),
    (99, 99, [("active_allocated", 200, 7, 0), ("inactive", 99, 7, 0), ("inactive", 100, 8, 0),
              ("inactive", 100, 7, 1)], False),
    (99, 100, [], True)])
def test_whether_the_device_has_memory_in_one_piece(free, after, blocks, has, monkeypatch):
    """A block is (state, size, stream, device). ``after``: free once the allocator returned what it
    does not use."""
    memory, now = Memory(torch.device("cpu")), [free]
    memory._on_gpu = True
    stream = types.SimpleNamespace(device=types.SimpleNamespace(index=0), cuda_stream=7)
    for name, value in dict(
            mem_get_info=lambda device: (now[0], 1000), current_stream=lambda device: stream,
            empty_cache=lambda: now.__setitem__(0, after),
            memory_snapshot=lambda: [
                {"device": device, "stream": of, "blocks": [{"state": state, "size": size}]}
                for state, size, of, device in blocks]).items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert memory.has(100) is has
    near = Near(memory, types.SimpleNamespace(again=lambda: True), 400)
    monkeypatch.setattr(Memory, "near", lambda self, far, ahead: far + 1)
    rows = torch.zeros(5, 5)
    now[0] = free
    assert torch.equal(near.of(rows), rows + 1 if has else rows)


def test_training_after_inference(data):
    x, edges = data

    def run():
        one, other = layer(), layer()
        with torch.no_grad():
            out = one(x, edges)
        other(out, edges).square().sum().backward()
        return [p.grad.clone() for p in other.parameters()]

    right = run()
    with offload(100_000, device="cpu") as ran:
        found = run()
    assert ran.memory.stayed == BYTES
    for got, truth in zip(found, right):
        torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)


def test_models_with_and_without_what_stays_are_alike(data, monkeypatch):
    x, edges = data
    torch.manual_seed(0)
    model = checks.Net(WIDTH).eval()
    found = []
    with torch.no_grad():
        for limit in (100_000, 100_000):
            with offload(limit, device="cpu") as ran:
                found.append(model(x, edges))
            assert bool(ran.memory.stayed) is (len(found) == 1)
            monkeypatch.setattr(Memory, "put", lambda self, close, where, far, also=None,
                                put=Memory.put: put(self, close, where, far))
            monkeypatch.setattr("gnnaccel.dispatch.offload.near.Near.leaves", lambda *args: None)
    assert same_bits(*found)


def test_errors_of_the_user_are_told_as_ever(data):
    x, edges = data
    with torch.no_grad(), offload(100_000, device="cpu"):
        out = layer()(x, edges)
        with pytest.raises(RuntimeError):
            torch.mv(out, torch.randn(3))
        with pytest.raises(OffloadError):
            layer()(out, edges.int())
