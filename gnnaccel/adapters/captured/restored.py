"""A capture runs a module's code several times more than the script does. Afterwards tensors and
random numbers are as they were before.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gnnaccel.adapters.captured import host

Before = list[tuple[Tensor, Tensor, int]]


@contextlib.contextmanager
def as_before(tensors: Iterable[Tensor], device: torch.device) -> Iterator[Before]:
    """A block after which these tensors and random numbers are as before it. Gives the tensors,
    copies of them, and their versions."""
    every = {id(t): t for t in tensors if not t.is_inference()}
    before = [(t, t.detach().clone(), t._version) for t in every.values()]
    numbers, drawn = host.Numbers(device), random_numbers(device)
    try:
        yield before
    finally:
        put_back([t for t, *_ in before], [held for _, held, _ in before])
        set_random_numbers(device, drawn)
        numbers.restore()


@torch.no_grad()
def put_back(buffers: list[Tensor], before: list[Tensor]) -> None:
    """Restore buffers, by writes that autograd does not count: an earlier forward may have kept the
    buffer, as that of a batch norm does, for a backward that is still to come."""
    for b, held in zip(buffers, before):
        if not torch.equal(b, held):
            b.data.copy_(held)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether both hold the same numbers, NaN among them."""
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(
        a, b, rtol=0.0, atol=0.0, equal_nan=True))


def random_numbers(device: torch.device) -> Tensor:
    """The state of the device's generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_numbers(device: torch.device, drawn: Tensor) -> None:
    """Give the device's generator a state that it had."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(drawn, device)
    else:
        torch.set_rng_state(drawn)
