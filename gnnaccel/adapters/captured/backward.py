"""Backward through some of the results of a call, as one CUDA graph."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gnnaccel.adapters.captured.results import Refused

_ALIGN = 16  # numbers from one gradient to the next begin at multiples of these


class Backward:
    """Gradients of ``leaves`` through those of the results that ``numbers`` has. ``replay`` is set
    by whoever captures `run`.

    The gradients of each dtype lie side by side, so that a replay copies them by one operation.
    """

    def __init__(self, numbers: Sequence[int], leaves: list[Tensor]) -> None:
        self._numbers, self._leaves = numbers, leaves
        self._places: list[tuple[int, tuple, tuple, int] | None] = []
        self._flat: list[Tensor] = []
        self.replay: Callable[[], None]

    @staticmethod
    def all_of(results: int, leaves: list[Tensor]) -> list[Backward]:
        """One through all results and, where there are several, one through each. A gradient of
        zeros in the place of a missing one would not do: a derivative may be infinite."""
        each = [[n] for n in range(results)] if results > 1 else []
        return [Backward(numbers, leaves) for numbers in (range(results), *each)]

    def expected(self, outs: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        """The gradient of each leaf, None where no result depends on it. The record of autograd is
        kept, for the other ones."""
        return list(torch.autograd.grad(
            [outs[n] for n in self._numbers], self._leaves, [grads[n] for n in self._numbers],
            retain_graph=True, allow_unused=True))

    def run(self, outs: list[Tensor], grads: list[Tensor], device: torch.device) -> None:
        """What is captured. Raises Refused."""
        found = self.expected(outs, grads)
        groups: dict[torch.dtype, list[Tensor]] = {}
        sizes: dict[torch.dtype, int] = {}
        for g in found:
            if g is None:
                self._places.append(None)
                continue
            if g.layout is not torch.strided:
                raise Refused("a gradient is sparse")
            offset = sizes.get(g.dtype, 0)
            sizes[g.dtype] = offset + -(-g.numel() // _ALIGN) * _ALIGN
            groups.setdefault(g.dtype, []).append(g)
            stride = torch.empty(g.shape, dtype=g.dtype, device="meta").stride()
            self._places.append((list(groups).index(g.dtype), tuple(g.shape), stride, offset))
        self._flat = [torch.empty(sizes[dtype], dtype=dtype, device=device) for dtype in groups]
        for (dtype, members), one in zip(groups.items(), self._flat):
            at = [p for g, p in zip(found, self._places) if g is not None and g.dtype is dtype]
            torch._foreach_copy_([one.as_strided(*p[1:]) for p in at if p is not None], members)

    def again(self) -> list[Tensor | None]:
        """Copies of the gradients, after a replay."""
        self.replay()
        flat = [one.clone() for one in self._flat]
        return [None if at is None else flat[at[0]].as_strided(*at[1:]) for at in self._places]

    def let_go(self) -> None:
        """Forget the tensors that only a capture needs."""
        self._leaves = []


def through(ways: list[Backward], used: list[int], leaves: int) -> list[Tensor | None]:
    """The gradients of so many leaves through the results that are ``used``, of ``ways`` that
    `Backward.all_of` gave."""
    whole, *each = ways
    if not each or len(used) == len(each):
        return whole.again() if used else [None] * leaves
    total: list[Tensor | None] = [None] * leaves
    for n in used:
        total = [b if a is None else a if b is None else a + b
                 for a, b in zip(total, each[n].again())]
    return total
