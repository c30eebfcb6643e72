"""Rows by number between the host's memory and the device."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.traverse import host_rows
from tests.helpers import on_devices, same_bits

pytestmark = pytest.mark.usefixtures("poison")


def far_rows(device, *shape, dtype=torch.float32):
    """Rows in memory of the host, which is pinned where a GPU reads it."""
    found = torch.randint(0, 200, shape).to(dtype)
    return found.pin_memory() if device.type == "cuda" else found


@on_devices("width", [1, 3, 4, 12, 128], [2, 7, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_rows_come_and_go(device, width, dtype):
    far = far_rows(device, 70, width, dtype=dtype)
    ids = torch.randperm(70)[:41]
    close = torch.empty(41, width, dtype=dtype, device=device)
    host_rows.fetch(far, ids.int().to(device), close)
    assert same_bits(close.cpu(), far[ids])
    back = far_rows(device, 70, width, dtype=dtype)
    right = back.clone()
    right[ids] = close.cpu()
    host_rows.put(close, ids.int().to(device), back)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert same_bits(back, right)


def test_a_number_may_be_fetched_twice(device):
    far, ids = far_rows(device, 9, 2, 3), torch.tensor([8, 8, 0])
    close = torch.empty(3, 2, 3, device=device)
    host_rows.fetch(far, ids.int().to(device), close)
    assert same_bits(close.cpu(), far[ids])


def test_any_alignment(device):
    far = far_rows(device, 50 * 8 + 1)[1:].view(50, 8)
    ids = torch.arange(49, -1, -1)
    close = torch.empty(50, 8, device=device)
    host_rows.fetch(far, ids.int().to(device), close)
    assert same_bits(close.cpu(), far[ids])


@on_devices("rows,most", [(3000, 1 << 30), (300, 700)])
def test_more_words_than_threads_and_than_a_launch_takes(device, rows, most, monkeypatch):
    monkeypatch.setattr(host_rows, "_MOST", most)
    monkeypatch.setattr(host_rows, "_BLOCKS", 2)
    far, ids = far_rows(device, rows, 5), torch.randperm(rows)
    close, back = torch.empty(rows, 5, device=device), far_rows(device, rows, 5)
    host_rows.fetch(far, ids.int().to(device), close)
    assert same_bits(close.cpu(), far[ids])
    host_rows.put(close, ids.int().to(device), back)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert same_bits(back, far)


def test_no_rows_and_no_columns(device):
    none = torch.empty(0, dtype=torch.int32, device=device)
    host_rows.fetch(far_rows(device, 4, 3), none, torch.empty(0, 3, device=device))
    host_rows.fetch(far_rows(device, 4, 0), none.new_zeros(2), torch.empty(2, 0, device=device))


def test_what_does_not_fit_is_an_error(device):
    ids = torch.zeros(2, dtype=torch.int32, device=device)
    for far, close in [(torch.zeros(4, 3), torch.empty(2, 4, device=device)),
                       (torch.zeros(4, 3), torch.empty(3, 3, device=device)),
                       (torch.zeros(4, 3), torch.empty(2, 3, device=device).half()),
                       (torch.zeros(3, 4).t(), torch.empty(2, 3, device=device))]:
        with pytest.raises(ValueError, match="rows"):
            host_rows.fetch(far, ids, close)
