"""Steps of Adam and AdamW in one kernel.

torch's own way, ``foreach``, launches a dozen kernels and takes the host 0.4 ms and more, as much
as a small model. The kernel rounds where torch's do. The optimizer keeps its options and its state,
the counts of steps on the host among it.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gnnaccel.adapters.guards import context_reason
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.cuda import adam as kernel
from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.dispatch.graph.tensor_ref import Places
from gnnaccel.dispatch.ops import route
from gnnaccel.dispatch.ops.call import Kernel, OpCall
from gnnaccel.dispatch.policy.config import current
from gnnaccel.dispatch.policy.names import IdentityMap

_NAME = "torch.adam"
_LISTS = 6  # parameters, gradients, and the optimizer's state of each
_TENSORS = {Tensor, nn.Parameter}
#: options of `torch.optim.adam.adam`, and the value of each that allows the kernel
_OPEN = {"foreach": None, "fused": None, "capturable": False, "differentiable": False,
         "grad_scale": None, "found_inf": None, "has_complex": False}
_NUMBERS = ("lr", "beta1", "beta2", "weight_decay", "eps")

Lists = tuple[list[Tensor], ...]


def install(patches: PatchSet) -> None:
    """Wrap Adam's arithmetic. Does nothing where this torch has none by that name."""
    from torch.optim import adam

    native = vars(adam).get("adam")
    if native is not None:
        patches.set(
            adam, "adam", _wrapped(native),
            "Updates all parameters of an `Adam`, or `AdamW` where torch computes it by the same "
            "function, in one kernel, which rounds as torch's own. What the optimizer keeps, and "
            "its `state_dict`, stay as they are.",
            active="While gnnaccel is enabled, for parameters in float32 on a GPU with as many "
                   "steps behind them, of an optimizer that was made without `foreach`, `fused`, "
                   "`capturable` and `differentiable`; `foreach=True` keeps torch's way.",
            cost="Some 4 microseconds of the host's time for each parameter, where torch's own way "
                 "takes 8 (a slow host of a GPU); on a CPU 1 microsecond in all.")


def _wrapped(native: Callable[..., None]) -> Callable[..., None]:
    from torch.compiler import is_compiling

    @functools.wraps(native)
    def adam(*lists: Any, **options: Any) -> None:
        if is_compiling() or not _may(lists) or not _allowed(options):
            return native(*lists, **options)
        group = _group(lists, options["amsgrad"])
        if group is None:
            return native(*lists, **options)
        call = OpCall(lists[0][0].device, torch.float32,
                      plain=lambda: native(*lists, **options),
                      kernel=Kernel("Adam in one kernel", (_NAME,), kernel.prepare,
                                    lambda: _step(group, lists, options)))
        route.run(_NAME, call, call.plain, current())

    return adam


def _may(lists: tuple) -> bool:
    if len(lists) != _LISTS or not lists[0] or current() is None:
        return False
    return ((lists[0][0].is_cuda or driver.placed()) and not capture.capturing()
            and context_reason() is None)


def _allowed(options: dict[str, Any]) -> bool:
    """Whether the kernel computes by such options what torch's own way does."""
    if not all(options.get(name) is value for name, value in _OPEN.items() if name in options):
        return False
    return all(type(options[name]) in (float, int) for name in _NUMBERS)


def _group(lists: Lists, amsgrad: bool) -> Group | None:
    """The tensors of a step, if the kernel computes what torch's own way does: those of an earlier
    step, of which less is asked, or as they are found now."""
    parameters, gradients, means, squares, largest, steps = lists
    written = (parameters, means, squares, largest) if amsgrad else (parameters, means, squares)
    count, device = len(parameters), parameters[0].get_device()
    for each in (gradients, steps, *written):
        if len(each) != count:
            return None
    shapes = [t.shape for t in parameters]
    if not (_ordinary(gradients, device, shapes) and _ordinary(parameters, device, shapes)):
        return None
    if any(map(Tensor.is_inference, parameters)):
        return None
    group = _groups.get(steps[0])
    if group is None or not group.kept(written, shapes, steps):
        if not (all([_ordinary(each, device, shapes) for each in written])
                and _are_counts(steps) and _apart(written)):
            return None
        group = Group(written, shapes, steps)
        _groups.set(steps[0], group)
    return group if group.in_step() and group.apart(gradients) else None


def _ordinary(tensors: list[Tensor], device: int, shapes: list[torch.Size]) -> bool:
    """Whether all are plain tensors of fp32 and such shapes, contiguous, on the device, that hold
    their numbers as they are (no views that negate). A step asks this of each: no Python functions
    are called for them."""
    return (set(map(type, tensors)) <= _TENSORS
            and {t.dtype for t in tensors} == {torch.float32}
            and {t.layout for t in tensors} == {torch.strided}
            and set(map(Tensor.get_device, tensors)) == {device}
            and all(map(Tensor.is_contiguous, tensors)) and not any(map(Tensor.is_neg, tensors))
            and [t.shape for t in tensors] == shapes)


def _are_counts(steps: list[Tensor]) -> bool:
    """Whether ``steps`` are counts on the host, in fp32, each its own, that nobody differentiates.
    """
    return all([type(step) is Tensor and step.is_cpu and not step.dim()
                and step.dtype is torch.float32 and step.layout is torch.strided
                and not step.requires_grad and not step.is_neg() and not step.is_inference()
                for step in steps]) and _apart((steps,))


def _apart(written: Lists) -> bool:
    """Whether no ``written`` tensor begins where another does, as one that is given twice: torch
    writes list after list. Empty tensors begin nowhere."""
    places = list(map(Tensor.data_ptr, chain(*written)))
    distinct = set(places)
    distinct.discard(0)
    return len(distinct) == len(places) - places.count(0)


class Group:
    """Lists of tensors that steps write, as they were found fit for the kernel. Parameters are
    known by where they are."""

    def __init__(self, written: Lists, shapes: list[torch.Size], steps: list[Tensor]) -> None:
        # no weak references to parameters: torch exchanges no tensors that have some
        self._parameters, self._shapes = list(map(Tensor.data_ptr, written[0])), shapes
        self._places = Places([*chain(*written[1:]), *steps])
        # the numbers of the counts, without torch's functions for each
        self._steps = [step.numpy() for step in steps]
        self._distinct = {*self._parameters, *self._places.pointers} - {0}
        self.tensors = kernel.Tensors(*written)

    def kept(self, written: Lists, shapes: list[torch.Size], steps: list[Tensor]) -> bool:
        """Whether these are the lists, as they were. ``shapes``: of the parameters."""
        state = [*chain(*written[1:])]
        return (shapes == self._shapes
                and list(map(Tensor.data_ptr, written[0])) == self._parameters
                and self._places.kept([*state, *steps]) and all(map(Tensor.is_contiguous, state))
                and [t.shape for t in state] == shapes * len(written[1:]))

    def in_step(self) -> bool:
        """Whether as many steps are behind each."""
        return len({step.item() for step in self._steps}) == 1

    def apart(self, gradients: list[Tensor]) -> bool:
        """Whether no written tensor begins where a gradient does, which torch reads in between."""
        return self._distinct.isdisjoint(map(Tensor.data_ptr, gradients))

    def count(self) -> float:
        """Count one more step, and return how many there are now."""
        count = self._steps[0] + np.float32(1)  # as torch does: in fp32
        for step in self._steps:
            step.fill(count)
        return float(count)


#: by the first count
_groups: IdentityMap[Group] = IdentityMap()


def _step(group: Group, lists: Lists, options: dict[str, Any]) -> None:
    parameters, gradients, means, squares, largest, steps = lists
    count, (lr, beta1, beta2, decay, eps) = group.count(), (options[name] for name in _NUMBERS)
    apart = options.get("decoupled_weight_decay", False)
    numbers = kernel.Numbers(
        lr / (1 - beta1 ** count) * -1, (1 - beta2 ** count) ** 0.5, 1 - beta1, beta2, 1 - beta2,
        eps, 0.0 if apart else decay, 1 - lr * decay if apart else 1.0, bool(options["maximize"]))
    group.tensors.step(list(map(Tensor.data_ptr, gradients)), numbers)
    torch.autograd.graph.increment_version([*parameters, *means, *squares, *largest, *steps])
