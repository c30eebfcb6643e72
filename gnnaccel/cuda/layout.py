"""Layout of a warp over the features of one node; the numbers behind ``src/layout.cuh``."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

WARPS = 4  # per block, as in layout.cuh
MAX_WIDTH = 512  # channels per head that fit a warp's registers
_REGISTERS = 16  # fp32 values of one row that a lane may hold

TYPES = {torch.float32: "float", torch.float16: "f16", torch.bfloat16: "bf16"}
#: types of rows that are gathered: int8 with a scale per row (`quantize.Int8Rows`) as well
ROW_TYPES = {**TYPES, torch.int8: "q8"}


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Layout:
    """Heads x width over the lanes; see ``layout.cuh`` for the meaning of the short names."""

    heads: int
    width: int
    vec: int
    lh: int
    kv: int
    hl: int
    kh: int
    int8: bool = False

    @functools.cached_property
    def tile_heads(self) -> int:
        return self.hl * self.kh

    @functools.cached_property
    def tiles(self) -> int:
        """Number of tiles of heads of a row: the grid's y size."""
        return -(-self.heads // self.tile_heads)

    @functools.cached_property
    def slots(self) -> int:
        """Rows that a warp treats side by side."""
        return 32 // (self.lh * self.hl)

    @functools.cached_property
    def packs(self) -> int:
        return self.kh * self.kv

    @functools.cached_property
    def unroll(self) -> int:
        """Rows in flight per slot: as many as keep the kernel below about 64 registers. Four int8
        take one register; for int8 the number is a power of two (layout.cuh)."""
        if self.int8:
            return max(1, min(4, 1 << (16 // (self.packs * -(-self.vec // 4))).bit_length() - 1))
        return max(1, min(4, 16 // (self.packs * self.vec)))

    @functools.cached_property
    def direct(self) -> bool:
        """Whether so few lanes share a head that each may as well score for itself
        (additive_direct.cuh)."""
        return self.lh <= (2 if self.int8 else 4)

    @functools.cached_property
    def scratch(self) -> int:
        """Bytes of shared memory for ``Scratch`` (merge.cuh), per block; a warp's begins at 8."""
        heads = self.tile_heads
        return WARPS * (2 * 32 * heads + heads + heads % 2) * 4

    def defines(self, unroll: int | None = None) -> tuple:
        values = dict(H=self.heads, D=self.width, VEC=self.vec, LH=self.lh, KV=self.kv, HL=self.hl,
                      KH=self.kh, UNROLL=unroll or self.unroll)
        return tuple((k, str(v)) for k, v in values.items())


@functools.cache
def layout_for(heads: int, width: int, int8: bool = False, most_heads: int = 512) -> Layout:
    """The layout for ``heads`` x ``width`` features, of which a lane loads up to 16 int8 at once,
    or else up to 4; a tile has at most ``most_heads`` heads, a power of two. ValueError for sizes
    the kernels do not cover."""
    if heads < 1 or not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"heads={heads}, width={width}: the kernels take heads >= 1 and 1 <= "
                         f"width <= {MAX_WIDTH}")
    vec = next(v for v in ((16, 8) if int8 else ()) + (4, 2, 1) if width % v == 0)
    packs = width // vec
    lh = min(32, _power_of_two(packs))
    kv = -(-packs // lh)
    hl = min(32 // lh, _power_of_two(heads), most_heads)
    room = max(1, _REGISTERS // (kv * vec))
    kh = min(_power_of_two(-(-heads // hl)), 1 << (room.bit_length() - 1), 32 // hl,
             most_heads // hl)
    return Layout(heads, width, vec, lh, kv, hl, kh, int8)


@functools.cache
def factored(width: int, int8: bool = False) -> tuple[int, int]:
    """(heads, D) with heads * D = ``width`` and D at most 512, for rows that have no weights per
    head. `aggregate.Variant` does it itself for int8.

    The split whose lanes load least, one more load counted per tile of heads since each tile reads
    the graph anew; among equals the fewest heads. A prime above 512 becomes that many heads of one
    channel. ValueError below 1.
    """
    if width < 1:
        raise ValueError(f"width={width}: a row has at least one channel")

    def cost(channels: int) -> tuple[int, int]:
        layout = layout_for(width // channels, channels, int8)
        return layout.tiles * (layout.packs + 1) * layout.lh * layout.hl, width // channels

    best = min((d for d in range(1, min(width, MAX_WIDTH) + 1) if width % d == 0), key=cost)
    return width // best, best


@functools.cache
def layout_of(width: int) -> Layout:
    """The layout of rows of ``width`` numbers that have no weights per head."""
    return layout_for(*factored(width))
