"""Pinned memory of exactly so many bytes, and the blocks that results take one after the other."""
from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from gnnaccel.cuda.runtime import pinned


class Host:
    """Gives memory of the host, and knows how many bytes of it are held."""

    def __init__(self):
        self.held: list[int] = []

    def __call__(self, size: int):
        host = self

        class Memory:
            def __init__(self):
                self.bytes = ctypes.create_string_buffer(size)
                self.ptr = ctypes.addressof(self.bytes)
                host.held.append(size)

            def __del__(self):
                host.held.remove(size)

        return Memory()


@pytest.fixture
def host():
    return Host()


def test_memory_goes_with_the_last_view(host):
    t = pinned.lasting((3, 4), torch.float64, host).fill_(2)
    assert t.shape == (3, 4) and t.dtype == torch.float64 and host.held == [96]
    row = t[1]
    del t
    assert host.held == [96] and row.tolist() == [2] * 4
    del row
    gc.collect()
    assert host.held == []


def test_a_result_of_the_same_size_takes_the_block(host):
    blocks = pinned.Blocks(host)
    first = blocks.empty((10,), torch.float32)
    address = first.data_ptr()
    other = blocks.empty((10,), torch.float32)
    assert other.data_ptr() != address
    del first
    again = blocks.empty((2, 5), torch.int32)
    assert again.data_ptr() == address and host.held == [40, 40]


def test_no_block_is_given_twice(host):
    blocks = pinned.Blocks(host)
    held = [blocks.empty((8,), torch.float32).fill_(at) for at in range(4)]
    del held[1:3]
    held += [blocks.empty((8,), torch.float32).fill_(at) for at in range(4, 8)]
    assert len({t.data_ptr() for t in held}) == 6
    assert [t[0].item() for t in held] == [0, 3, 4, 5, 6, 7]


def test_results_of_many_sizes_are_not_all_kept(host):
    blocks = pinned.Blocks(host)
    for size in range(100, 200):
        t = blocks.empty((size,), torch.uint8)
        assert sum(host.held) - size <= 200  # as many as tensors had at once, and one to come back
        del t


def test_what_two_tensors_had_at_once_is_kept_for_two(host):
    blocks = pinned.Blocks(host)
    addresses = set()
    for _ in range(3):
        small, large = blocks.empty((100,), torch.uint8), blocks.empty((300,), torch.uint8)
        addresses |= {small.data_ptr(), large.data_ptr()}
        del small, large
    assert len(addresses) == 2 and sorted(host.held) == [100, 300]


@pytest.mark.gpu
def test_on_a_gpu():
    torch.cuda.init()  # before that torch takes no memory for pinned
    t = pinned.lasting((1000, 3), torch.float32)
    assert t.is_pinned()
    t.copy_(torch.arange(3000.0).view(1000, 3))
    assert torch.equal(t.to("cuda", non_blocking=True).cpu(), t)
    blocks = pinned.Blocks()
    first = blocks.empty((3 << 20,), torch.float32).fill_(1)
    close, address = first.to("cuda", non_blocking=True), first.data_ptr()
    del first
    second = blocks.empty((3 << 20,), torch.float32).fill_(2)  # waits for the copy
    assert second.data_ptr() == address and second.is_pinned()
    assert close.min().item() == close.max().item() == 1
