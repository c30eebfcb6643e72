"""Where the tiles of segments begin."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.segment import segment_plan
from gnnaccel.cuda.segment.segment_plan import Segments
from gnnaccel.cuda.structures.tile_ptr import _MOST, HEIGHTS, tile_ptr

pytestmark = pytest.mark.usefixtures("poison")

LENGTHS = {"none": [], "one": [5], "empty": [0, 0, 0], "exact": [16, 32, 64, 128, 256],
           "one more": [17, 33, 65, 129, 1, 0], "many": [(7 * i) % 300 for i in range(1000)],
           "as many as threads": [1] * 256, "odd": [3] * 257}


def of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.long).cumsum(0).tolist()],
                        dtype=torch.int32)


@pytest.mark.parametrize("name", LENGTHS)
def test_every_height(device, name):
    lengths = LENGTHS[name]
    found = tile_ptr(of(lengths).to(device))
    assert tuple(found) == HEIGHTS
    for height, got in found.items():
        expected = of([-(-length // height) for length in lengths])
        assert got.dtype == torch.int32 and got.is_contiguous() and torch.equal(got.cpu(), expected)


def test_more_segments_than_a_block_walks(device):
    lengths = [i % 40 for i in range(_MOST + 1)]
    found = tile_ptr(of(lengths).to(device))
    assert torch.equal(found[16].cpu(), of([-(-length // 16) for length in lengths]))


def test_on_a_cpu_without_a_driver():
    ptr = of([5, 0, 40])
    found = tile_ptr(ptr)
    assert {height: tiles.tolist() for height, tiles in found.items()} == {
        16: [0, 1, 1, 4], 32: [0, 1, 1, 3], 64: [0, 1, 1, 2], 128: [0, 1, 1, 2]}


def test_two_threads_at_once_get_the_same_memory(monkeypatch):
    """Prepared calls hold its address, so what one of them got may not be freed for the other's."""
    segments, given = Segments(of([5, 0, 40]), 45), []

    def slowly(ptr):
        if not given:  # another thread comes first
            given.append(None)
            given.append(segments.tiled(32))
        return tile_ptr(ptr)

    monkeypatch.setattr(segment_plan, "tile_ptr", slowly)
    assert segments.tiled(32) == given[1] == segments.tiled(32)
