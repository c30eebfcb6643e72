"""Seeing the steps of a script from outside, in its own process: when each begins and ends, and the
loss. The script's code and its modules are left as they are.

A training step reaches from the first ``zero_grad()`` after the last step to the end of
``optimizer.step()``. A script that calls no optimizer's ``step()`` is measured by the calls of its
outermost module. On a GPU, times lie between CUDA events on the current stream, so nothing waits.
"""
from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.profile.undisturbed import capturing

_PREFIX = 10  # losses of so many first steps are kept, then of 20, 50, 100, 200, 500, ...


def mark() -> Any:
    """This moment, on the device where there is one."""
    if not torch.cuda.is_initialized():
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def waited() -> int:
    """This moment of the host, at which the device has done all that was asked of it before."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter_ns()


def between(start: Any, end: Any) -> float | None:
    """Milliseconds between marks; None where the GPU was first used in between. The device has to
    be waited for before."""
    if type(start) is not type(end):
        return None
    return (end - start) / 1e6 if isinstance(start, int) else start.elapsed_time(end)


class Steps:
    """Watches this process from `install` on. ``done()`` is called after each step, ``begun()``
    where the first ``zero_grad()`` begins one; ``mark``: takes a moment."""

    def __init__(self, done: Callable[[], None], mark: Callable[[], Any] = mark,
                 begun: Callable[[], None] | None = None):
        self._mark, self._on_begin = mark, begun
        self.count = 0  # of training steps, or of outermost calls while no optimizer steps
        self.trains = False
        self._done = done
        self._main: weakref.ref[Any] | None = None  # the optimizer whose steps are counted
        self._others = 0
        self._begun: Any = None
        self._steps: list[tuple[Any, Any]] = []  # of zero_grad, or None, and of the end
        self._calls: dict[tuple[int, str], list[tuple[Any, Any]]] = {}
        self._depth = 0
        self._loss: Tensor | None = None
        self._losses: dict[int, Tensor] = {}

    def install(self) -> None:
        from torch.optim import optimizer

        self._hook = optimizer.register_optimizer_step_post_hook(self._stepped)
        self._zero_grad = torch.optim.Optimizer.zero_grad
        self._backward = torch.autograd.backward
        self._call = torch.nn.Module.__call__
        cleared = self._wrapped(self._zero_grad, self._cleared)
        torch.optim.Optimizer.zero_grad = cleared  # type: ignore[method-assign]
        torch.autograd.backward = self._wrapped(self._backward, self._differentiated)
        torch.nn.Module.__call__ = self._outermost()  # type: ignore[method-assign]

    def uninstall(self) -> None:
        self._hook.remove()
        torch.optim.Optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        torch.autograd.backward = self._backward
        torch.nn.Module.__call__ = self._call  # type: ignore[method-assign]

    @staticmethod
    def _wrapped(function: Callable, before: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            before(*args[:1])
            return function(*args, **kwargs)

        return wrapper

    # --- training ---

    def _cleared(self, *_: Any) -> None:
        if self._begun is None and not capturing():
            if self._on_begin is not None:
                self._on_begin()
            self._begun = self._mark()

    def _differentiated(self, tensors: Any = None, *_: Any) -> None:
        loss = tensors[0] if isinstance(tensors, (tuple, list)) and tensors else tensors
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._loss = loss.detach()

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if capturing():
            return
        if not self.trains:
            self.trains, self.count = True, 0
            torch.nn.Module.__call__ = self._call  # type: ignore[method-assign]
        main = None if self._main is None else self._main()  # gone where each step makes its own
        if optimizer is not main:
            self._others += 1
            if main is not None and self._others < 3:
                return  # a second optimizer of the same step
            self._main = weakref.ref(optimizer)
        self._others = 0
        self._steps.append((self._begun, self._mark()))
        self._begun = None
        self.count += 1
        if _noted(self.count) and self._loss is not None:
            self._losses[self.count] = self._loss
        self._done()

    # --- without an optimizer ---

    def _outermost(self) -> Callable:
        call = self._call

        @functools.wraps(call)
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth or capturing():
                return call(module, *args, **kwargs)
            self._depth, start = 1, self._mark()
            try:
                out = call(module, *args, **kwargs)
            finally:
                self._depth = 0
            if not self.trains:
                kept = self._calls.setdefault((id(module), type(module).__name__), [])
                kept.append((start, self._mark()))
                self.count += 1
                self._done()
            return out

        return wrapper

    # --- reading ---

    def as_dict(self) -> dict[str, Any]:
        """``what`` was timed, ``ms`` of each step, ``loop_ms`` from the end of a step to the end of
        the next, ``losses`` by the number of the step."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        what, marks = ("training step", self._steps) if self.trains else self._longest()
        loop = [between(one[1], other[1]) for one, other in zip(marks, marks[1:])]
        ms = [between(*one) if one[0] is not None else None for one in marks]
        if sum(one is not None for one in ms) < len(ms) // 2:
            ms = loop  # no zero_grad between steps
        return {"what": what, "ms": ms, "loop_ms": loop,
                "losses": {number: float(loss) for number, loss in self._losses.items()}}

    def _longest(self) -> tuple[str, list[tuple[Any, Any]]]:
        """The module whose calls took longest, which is not the loss function."""
        def taken(marks: list[tuple[Any, Any]]) -> float:
            return sum(between(*one) or 0.0 for one in marks)

        if not self._calls:
            return "call", []
        (_, name), marks = max(self._calls.items(), key=lambda item: taken(item[1]))
        return f"call of {name}", marks


def _noted(number: int) -> bool:
    while number > _PREFIX and number % 10 == 0:
        number //= 10
    return number <= _PREFIX if number != _PREFIX else True
