"""DGL's sparse embeddings, their optimizers with gradients on the device, ids split by process."""
from __future__ import annotations

import dgl
import pytest
import torch

from tests.dgl.bridged import place  # noqa: F401  (a fixture)

IDS = [[3, 1, 3], [0, 1], [9, 3, 0]]


def trained(optimizer, where, out, name):
    """[10, 4] rows after a few steps.

    ``where``: the device of the embedding; ``out``: the device of the rows that are looked up.
    """
    torch.manual_seed(0)
    start = torch.randn(10, 4)
    embedding = dgl.nn.NodeEmbedding(10, 4, name, init_func=lambda t: t.copy_(start.to(where)),
                                     device=torch.device(where))
    step = getattr(dgl.optim, optimizer)([embedding], lr=0.1)
    for number, rows in enumerate(IDS):
        found = embedding(torch.tensor(rows, device=where), torch.device(out))
        assert found.device.type == torch.device(out).type
        step.zero_grad()
        (found * (number + 1)).pow(2).sum().backward()
        step.step()
    return embedding


@pytest.mark.parametrize("optimizer", ["SparseAdam", "SparseAdagrad"])
@pytest.mark.parametrize("on_device", [False, True], ids=["on the host", "on the device"])
def test_as_on_the_host(optimizer, on_device, place):
    name = f"{optimizer} {on_device} {place.type}"
    got = trained(optimizer, place if on_device else "cpu", place, name)
    want = trained(optimizer, "cpu", "cpu", f"{name} natively")
    torch.testing.assert_close(got.weight.cpu(), want.weight, rtol=1e-5, atol=1e-6)
    for ours, native in zip(got.optm_state, want.optm_state):
        torch.testing.assert_close(ours.cpu(), native, rtol=1e-5, atol=1e-6)


def test_rows_set_and_read(place):
    embedding = dgl.nn.NodeEmbedding(10, 4, f"set {place.type}", init_func=lambda t: t.zero_(),
                                     device=place)
    values = torch.arange(40.0).reshape(10, 4)
    embedding.all_set_embedding(values)
    assert torch.equal(embedding.all_get_embedding().cpu(), values)


def test_nothing_waits_in_vain(place, monkeypatch):
    """The optimizer's state on the host is not computed from a copy that is still under way.

    All that it depends on is on the host.
    """
    devices = []
    native = torch.unique
    monkeypatch.setattr(
        torch, "unique", lambda x, **options: devices.append(x.device.type) or native(x, **options))
    trained("SparseAdam", "cpu", place, f"waits {place.type}")
    assert devices == ["cpu"] * len(IDS)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ranges", [None, [0, 4, 4, 11]], ids=["remainder", "range"])
def test_ids_divided(ranges, dtype, place):
    of = [i % 3 for i in range(11)] if ranges is None else [0] * 4 + [2] * 7
    local = [of[:i].count(of[i]) for i in range(11)]
    given = None if ranges is None else torch.tensor(ranges, dtype=dtype, device=place)
    partition = dgl.partition.NDArrayPartition(11, 3, "remainder" if ranges is None else "range",
                                               given)
    ids = torch.tensor([6, 0, 10, 7, 2], dtype=dtype, device=place)
    assert partition.map_to_local(ids).tolist() == [local[i] for i in ids.tolist()]
    order, counts = partition.generate_permutation(ids)
    assert order.tolist() == sorted(range(5), key=lambda at: of[ids.tolist()[at]])
    assert counts.tolist() == [sum(of[i] == part for i in ids.tolist()) for part in range(3)]
    for part in range(3):
        assert partition.local_size(part) == of.count(part)
        assert (partition.get_local_indices(part, place).tolist()
                == [i for i in range(11) if of[i] == part])
    assert order.device == counts.device == place and partition.map_to_local(ids).dtype == dtype
