"""The layout of heads x width over a warp, with layout.cuh's arithmetic done again in Python."""
from __future__ import annotations

import pytest

from gnnaccel.cuda.runtime.launch import MAX_WIDTH, WARPS, grid, layout_for

SHARED = 48 * 1024
WIDTHS = [*range(1, 66), *range(66, 512, 13), 72, 80, 96, 100, 112, 128, 160, 192, 200, 256, 300,
          320, 384, 448, 500, 508, 510, 511, 512]
HEADS = [*range(1, 41)]


def owned(layout) -> list:
    """Every (slot, first element) of all lanes, packs and tiles that `owns`, by `offset`."""
    found = []
    for tile in range(0, layout.tiles * layout.tile_heads, layout.tile_heads):
        for lane in range(32):
            slot, rest = divmod(lane, layout.lh * layout.hl)
            hl, lh = divmod(rest, layout.lh)
            for kh in range(layout.kh):
                for kv in range(layout.kv):
                    head, vec = tile + kh * layout.hl + hl, kv * layout.lh + lh
                    if head < layout.heads and vec < layout.width // layout.vec:
                        found.append((slot, head * layout.width + vec * layout.vec))
    return found


@pytest.mark.parametrize("heads", HEADS)
def test_every_element_has_one_owner_in_each_slot(heads):
    for width in WIDTHS if heads in (1, 3, 8, 40) else WIDTHS[heads % 5::5]:
        layout = layout_for(heads, width)
        packs = range(0, heads * width, layout.vec)
        assert sorted(owned(layout)) == [(slot, at) for slot in range(layout.slots)
                                         for at in packs], (heads, width)


@pytest.mark.parametrize("heads", HEADS)
def test_limits(heads):
    for width in range(1, MAX_WIDTH + 1):
        layout = layout_for(heads, width)
        sizes = (layout.vec, layout.lh, layout.hl, layout.kh, layout.tile_heads, layout.slots)
        assert all(n >= 1 and n & (n - 1) == 0 for n in sizes), layout
        assert width % layout.vec == 0 and layout.vec <= 4
        assert layout.lh * layout.hl * layout.slots == 32 and layout.tile_heads <= 32
        assert layout.packs * layout.vec <= 16, "registers of one row"
        assert (layout.tiles - 1) * layout.tile_heads < heads <= layout.tiles * layout.tile_heads
        assert 1 <= layout.unroll <= 4
        assert layout.scratch <= SHARED and WARPS * 2 * layout.tile_heads * width * 4 <= SHARED


def test_the_known_good_cases_stay():
    """Layouts whose speed was measured; a change here is a change of performance."""
    assert (layout_for(8, 8).lh, layout_for(8, 8).hl, layout_for(8, 8).slots) == (2, 8, 2)
    assert (layout_for(1, 64).lh, layout_for(1, 64).slots, layout_for(1, 64).vec) == (16, 2, 4)
    assert layout_for(1, 128).slots == 1 and layout_for(1, 512).kv == 4


@pytest.mark.parametrize("heads, width", [(0, 8), (-1, 8), (8, 0), (8, MAX_WIDTH + 1)])
def test_sizes_that_kernels_do_not_cover(heads, width):
    with pytest.raises(ValueError, match="heads"):
        layout_for(heads, width)


def test_grid():
    layout = layout_for(40, 2)
    assert grid(0, layout) == (0, layout.tiles) and grid(1, layout)[0] == 1
    assert grid(9, layout)[0] == 3 and grid(9, layout, per_warp=2)[0] == 2
