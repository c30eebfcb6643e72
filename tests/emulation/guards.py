"""Tensors with guard zones around them, to see writes (and reads) outside."""
from __future__ import annotations

import torch

# bytes on each side; a multiple of every vector width, so alignment is as of a tensor of its own
_ZONE = 1024
# NaN in float16, bfloat16, float32 and float64, and an unlikely integer: reads from outside show in
# the result, and
# a kernel is not likely to write just these bytes.
_PATTERN = (0xfb, 0xff, 0xfd, 0xff)


class Guarded:
    """``tensor``: a contiguous copy with guard zones in front and behind; ``check()`` tells whether
    they are intact."""

    def __init__(self, tensor: torch.Tensor):
        size = tensor.numel() * tensor.element_size()
        self._size = size
        # up to a multiple of the pattern, so that the zone behind the tensor begins right after its
        # last byte
        self._buffer = torch.tensor(_PATTERN, dtype=torch.uint8).repeat((2 * _ZONE + size + 3) // 4)
        self._before = self._buffer.clone()
        inner = self._buffer[_ZONE:_ZONE + size].view(tensor.dtype).view(tensor.shape)
        self.tensor = inner.copy_(tensor)

    def check(self) -> None:
        """Raises AssertionError when a byte outside the tensor has changed."""
        changed = self._buffer != self._before
        changed[_ZONE:_ZONE + self._size] = False
        places = changed.nonzero().flatten()
        if places.numel():
            offset = int(places[0]) - _ZONE
            raise AssertionError(
                f"{places.numel()} bytes outside the tensor were written; the first is at byte "
                                 f"{offset} of {self._size}")


def guarded(tensor: torch.Tensor) -> Guarded:
    """``tensor`` (any CPU tensor) copied between guard zones: see `Guarded`."""
    return Guarded(tensor)
