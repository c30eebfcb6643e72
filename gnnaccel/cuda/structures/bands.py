"""Rows gathered one band of channels after another.

Rows that many edges share, but that are too large for the L2 all together, come from memory once
per edge. A band of their channels may fit: kernels whose grid's y walks over bands (its blocks
start in that order) then read each band from memory once and serve the edges from the L2, at the
price of reading the graph anew for each band. Measured: docs/notes/aggregate.md.
"""
from __future__ import annotations

import functools

import torch

__all__ = ["LEAST", "LINE", "LONG", "channels", "heads", "pay"]

LINE = 128  # bytes that the L2 holds together
LEAST = 32 * 2**20  # bytes of all rows, below which the device is not asked: bands never `pay`
LONG = 16  # edges of a row, on average, beside which one more pass over the graph costs little


@functools.cache
def l2_bytes(device: torch.device) -> int:
    """Bytes of the device's L2; 0 where there is none to speak of."""
    return (getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
            if device.type == "cuda" else 0)


def pay(nodes: int, row: int, rows: int, edges: int, device: torch.device, *, size: int,
        least: int = 0, share: float = 1.0) -> bool:
    """Whether rows of ``row`` bytes had better be read in bands.

    nodes: number of rows to gather; rows, edges: of the graph; size: bytes of an element; least:
    bytes that cannot be cut; share: of the L2 that a band may take.
    """
    total = nodes * row
    if total < LEAST:
        return False
    # lanes of half types load half as many bytes each, so what the L2 saves them shows later
    l2, band = l2_bytes(device), max(LINE, least)
    gains = total > (0.75 if size > 2 else 1.0) * l2 and edges >= LONG * max(nodes, rows)
    return gains and row >= 2 * band and nodes * band <= share * l2


@functools.cache
def channels(total: int, size: int) -> int:
    """Channels of a band, of rows of ``total`` channels of ``size`` bytes: a line of them or a
    little less; 0 where no such number divides a row."""
    most = LINE // size
    return next((count for count in range(most, most // 2, -4) if total % count == 0), 0)


def heads(width: int, size: int) -> int:
    """Heads of ``width`` channels of ``size`` bytes that make a band: a power of two, at least
    one."""
    return 1 << max(1, LINE // (width * size)).bit_length() - 1
