"""Results of kernels whose threads take turns in other orders."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import driver
from tests.emulation.emulator import EmulatedDriver
from tests.helpers import same_bits


def in_any_order(make: Callable[[], Callable[[], Any]]) -> None:
    """``make()``, under the emulation, gives a function. Whatever its kernels' order, it gives the
    same bits: a tensor, several, or tensors by name."""
    torch.manual_seed(0)
    with driver.using(EmulatedDriver()):
        run = make()
        expected = run()
    in_other_orders(run, expected)


def in_other_orders(run: Callable[[], Any], expected: Any) -> None:
    """``run()`` gives the bits of ``expected``, in other orders."""
    for order in ("reversed", "uneven"):
        with driver.using(EmulatedDriver(order, seed=5)):
            assert _same(run(), expected), order


def again(device: torch.device, run: Callable[[], Any], expected: Any) -> None:
    """The same, or on a GPU in five runs."""
    if device.type == "cuda":
        assert all(_same(run(), expected) for _ in range(5))
    else:
        in_other_orders(run, expected)


def _same(got: Any, expected: Any) -> bool:
    return all([same_bits(a, b) for a, b in zip(_all(got), _all(expected), strict=True)])


def _all(found: Any) -> list[Tensor]:
    return ([found] if isinstance(found, Tensor) else [*found.values()]
            if isinstance(found, dict) else [*found])
